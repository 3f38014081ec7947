"""Memory is planned before anything is brought to a device: from the header, to the byte."""

import numpy as np
import pytest

from fastpath.bench.blank import blank
from fastpath.cuda import device, footprint, layout, rehearsal
from quant import FORMATS
from tests import strategies
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stack", [(), (3,)])
def test_bytes_of_a_matrix(name, stack):
    """Rows that fill no tile, columns that fill no step."""
    fmt = FORMATS[name]
    C = fmt.block_size * (3 if fmt.block_size > 1 else 300)
    weight = strategies.random_blocks(np.random.default_rng(0), fmt, *stack, 7, C)
    assert footprint.matrix_bytes(weight) == layout.device_matrix(weight).nbytes


def test_sizes_beyond_32_bits():
    shape = (128, 1 << 16, 1 << 14)
    low = footprint.plane_sizes(layout.CODINGS["Q8_0"], shape)[0]
    assert 4 * low == 128 << 30


def test_weights_of_a_published_size():
    """The file's bytes, but for the scales of Q4_K and padding: nothing forgotten, nothing counted twice."""
    for spec, share in (("E4B:Q8_0", 1.0), ("26B-A4B:Q4_K_M", 1.07)):
        model = blank(spec)
        found = {id(leaf): leaf for leaf in footprint._leaves(model.weights)}
        in_file = sum(leaf.nbytes for leaf in found.values())
        assert in_file <= footprint.weights_bytes(model.weights) <= share * in_file + (1 << 20)


def test_the_workspace_holds_what_a_call_takes():
    model = blank("E2B:Q4_0")
    few, many = (footprint.workspace_bytes(model, n) for n in (64, 512))
    assert 0 < few < many
    one = rehearsal.of(model, rehearsal.Call(512), keeps_launches=False)
    assert one.peak_bytes < one.made_bytes  # what nobody holds is given back
    assert one.peak_bytes >= 4 * 512 * 2 * 6144  # gate and up of all tokens


class Small:
    """A device that has so many bytes free."""

    name = "a small device"

    def __init__(self, free):
        self.free_bytes = lambda: free


def test_a_model_that_does_not_fit_is_refused():
    planned = footprint.Footprint(weights=5 << 32, cache=1 << 30, workspace=1 << 20)
    enough = planned.nbytes + footprint.SPARE_BYTES
    with device.use(Small(enough)):
        assert footprint.misfit(planned) is None
    with device.use(Small(enough - 1)):
        said = footprint.misfit(planned)
    assert "a small device" in said and "21.47 weights" in said and "--context" in said and "\n" not in said
    with device.use(ONCE):  # which does not say what it has
        assert footprint.misfit(planned) is None
