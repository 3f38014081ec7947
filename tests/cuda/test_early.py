"""Kernels that start before the one ahead has ended: what they do until then, and who may be launched so."""

from types import SimpleNamespace

import cuda.core
import numpy as np
import pytest
from numba import types
from numba.cuda import dispatcher

from fastpath.cuda import ahead, device, early, elementwise, layout, linear, norm
from fastpath.cuda.driver import Compiled, Driver
from quant import FORMATS
from tests import strategies
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu import offline

ENTRY = ".visible .entry k(\n.param .u64 k_param_0\n)\n{\n"
WAIT = "griddepcontrol.wait;\n"
PTX = {
    "ld.param.u64 %rd1, [k_param_0];\n" + WAIT + "ld.global.f32 %f1, [%rd1];\nret;\n": True,
    "cp.async.bulk.prefetch.L2.global [%rd1], %r1;\n" + WAIT + "ret;\n": True,
    "@%p1 bra $L1;\nadd.s32 %r1, %r1, 1;\n$L1:\n" + WAIT + "ret;\n": True,
    "ld.global.f32 %f1, [%rd1];\nret;\n": False,
    "ld.global.nc.f32 %f1, [%rd1];\n" + WAIT + "ret;\n": False,
    "@%p1 st.global.f32 [%rd1], %f1;\n" + WAIT + "ret;\n": False,
    "ld.shared.f32 %f1, [%r1];\n" + WAIT + "ret;\n": False,
    "cp.async.cg.shared.global [%r1], [%rd1], 16;\n" + WAIT + "ret;\n": False,
    "atom.global.add.u32 %r1, [%rd1], 1;\n" + WAIT + "ret;\n": False,
    "@%p1 ret;\n" + WAIT + "ret;\n": False,
    "call.uni other, ();\n" + WAIT + "ret;\n": False,
    "@%p1 bra $L1;\n" + WAIT + "$L1:\nld.global.f32 %f1, [%rd1];\nret;\n": False,
    "griddepcontrol.launch_dependents;\n" + WAIT + "ret;\n": False,
}


@pytest.mark.parametrize("body", PTX)
def test_who_waits_first(body):
    assert early.waits_first(ENTRY + body + "}\n") is PTX[body]


@pytest.mark.parametrize("kernel", [norm.RMS_NORM, linear.PRODUCTS["Q4_K"]], ids=lambda k: k.name)
def test_three_lines_in_front(kernel):
    """In PTX; without them a kernel is not launched early."""
    ptx = offline.to_ptx(early.function_of(kernel), kernel.signature, (9, 0), kernel.bounds)
    assert early.waits_first(ptx)
    assert ptx.index(early.WAIT) < ptx.index("griddepcontrol.launch_dependents;")
    assert ("prefetch" in ptx.partition(early.WAIT)[0]) == (kernel is not norm.RMS_NORM)
    assert not early.waits_first(offline.to_ptx(kernel.function, kernel.signature, (9, 0), kernel.bounds))


@pytest.mark.parametrize("name", layout.CODINGS)
def test_a_tile_lies_where_it_is_asked_for(name):
    """What a step has in each plane, times steps and tiles, is all of the plane."""
    rng, M, C = np.random.default_rng(3), 9, 3 * layout.COLUMNS
    made = layout.device_matrix(strategies.weights(rng, FORMATS[name], M, C))
    planes = zip((made.low, made.high, made.sub), ahead.of_step(made.coding), strict=True)
    for plane, of_step in planes:
        assert not of_step or plane.size == made.n_tiles * 3 * of_step


class Early:
    """An executor that runs what a GPU would."""

    def __init__(self, executor):
        self.executor = executor

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def launch(self, kernel, grid, threads, *arguments):
        self.executor.launch(early.kernel_of(kernel), grid, threads, *arguments)


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
@pytest.mark.parametrize("name, activations", [("Q8_0", "int8"), ("Q5_1", "int8"), ("Q6_K", "float")])
def test_same_bytes(name, activations, executor):
    """Weights end where readable memory does: whoever asks for too many is found."""
    rng = np.random.default_rng(4)
    for T, M, C in ((1, 5, 256), (6, 9, 17 * 256)):
        x, weight = strategies.normal(rng, T, C), strategies.weights(rng, FORMATS[name], M, C)
        got = []
        for one in (EXECUTORS[executor], Early(EXECUTORS[executor])):
            with device.use(one):
                got.append(linear.linear(x, layout.device_matrix(weight), activations))
        np.testing.assert_array_equal(*got)


def test_asking_for_too_much_is_found(monkeypatch):
    monkeypatch.setattr(ahead, "LANES", 64)
    step = ahead.ahead_of(layout.CODINGS["Q8_0"], False)
    kernel = linear.PRODUCTS["Q8_0"]
    early.function_of.cache_clear()
    monkeypatch.setitem(early.STEPS, kernel.name, SimpleNamespace(ahead=step))
    weight = layout.device_matrix(strategies.weights(np.random.default_rng(5), FORMATS["Q8_0"], 9, 512))
    with (
        device.use(Early(EXECUTORS["ir"])),
        pytest.raises(AssertionError, match=r"no part of an array|beside"),
    ):
        linear.linear(np.ones((1, 512), np.float32), weight, "int8")
    early.function_of.cache_clear()


# -- the driver, with all of numba-cuda and cuda.core but the GPU


def _compiled(kernel, waits):
    """As numba-cuda has it."""
    made = dispatcher._Kernel.__new__(dispatcher._Kernel)
    made.signature, made.extensions, made.cooperative, made.debug = (
        types.void(*kernel.signature),
        [],
        False,
        False,
    )
    cufunc = SimpleNamespace(kernel=f"{kernel.name} on the device")
    made._codelibrary = SimpleNamespace(get_cufunc=lambda: cufunc)

    class Function:
        overloads = {kernel.signature: made}  # noqa: RUF012

        def __getitem__(self, place):
            grid, threads, stream = place
            return lambda *arguments: made.launch(arguments, grid, threads, stream)

    return Compiled(Function(), waits)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_launch(waits, is_early, monkeypatch):
    """The same kernel, arguments and grid as numba launches; early only if asked for, and if it waits."""
    launched = []
    for module in (cuda.core, dispatcher):
        monkeypatch.setattr(module, "launch", lambda *call: launched.append(call))
    driver = Driver.__new__(Driver)
    driver._cuda = SimpleNamespace(current_context=lambda: None)
    x, y = (driver.array(None, 0x7F0000001000 + i * 4096, (3, 5), np.float32) for i in range(2))
    arguments = x.reshape(-1), np.float32(2.5), y.reshape(-1)
    compiled = _compiled(elementwise.SCALE, waits)
    driver.launch(compiled, (7, 2), 128, arguments, "a stream", is_early=is_early)
    driver.launch(compiled, (7, 2), 128, arguments, "a stream")
    (stream, config, *rest), (_, plain, *as_numba) = launched
    assert stream == "a stream" and list(map(str, rest)) == list(map(str, as_numba))
    assert 0x7F0000002000 in rest and rest[0] == "scale on the device"
    assert (config.grid, config.block) == (plain.grid, plain.block) == ((7, 2, 1), (128, 1, 1))
    assert config.programmatic_stream_serialization is (waits and is_early)
    assert plain.programmatic_stream_serialization is False
