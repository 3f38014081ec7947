"""From canvas and samples to logits through the fast engine: what transformers says of the same files."""

import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.lanes import Lanes
from fastpath.load import load_model
from fastpath.media import Encoders, load_projector
from fastpath.trace import Recorder, TraceFile, compare, record
from refimpl.batch import SoftTokens
from tests import tiny
from tests.media import files, tiny_mmproj, tiny_prompts
from tests.oracle import goldens
from tests.tolerances import ORACLE_F32_ABS

FAMILIES = list(tiny_mmproj.ENCODERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("tiny"), {}

    def make(family):
        if family not in known:
            known[family] = load_model(tiny.make(folder / f"{family}.gguf", family))
        return known[family]

    return make


def engine_of(model, ops):
    """Nothing is rounded: keys and values as they are, activations in float32."""
    return Lanes(model, ops, activations="float", kv_type="f32", largest_image=64)


def soft_of(encoders, case, trace=None):
    out = []
    for start, name in zip(case["starts"], case["media"]):
        if name in files.PICTURES:  # the whole way: decoded, resized, encoded
            opened = encoders.open("image", files.png(files.picture(name)), budget=case["budget"])
            out.append(SoftTokens(start, encoders.encode(opened, trace=trace).rows[0], True))
            continue
        is_image = name in tiny_mmproj.CANVASES
        piece = tiny_mmproj.canvas(name) if is_image else tiny_mmproj.clip(name)
        rows = encoders.run("image" if is_image else "audio", piece, trace)
        out.append(SoftTokens(start, rows, is_image))
    return out


@pytest.mark.parametrize("backend", ["ref", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, backend, model, media):
    """One image, two, an image and a sound, a video; text before and after; a PNG file of another size, which
    transformers' own processor resized for the golden."""
    golden = goldens.read(f"media/model-{family}.transformers-f64")
    ops = ops_for(backend)
    encoders = Encoders(media(family), ops, activations="float")
    for name, case in tiny_prompts.cases(family).items():
        engine, soft = engine_of(model(family), ops), soft_of(encoders, case)
        got = engine.extend([(0, case["tokens"])], "all", soft={0: soft})
        want = golden.arrays[f"{name}/result_output"]
        rows = np.unique(np.linspace(0, len(got) - 1, len(want)).astype(int))
        error = goldens.max_abs_in_deviations(got[rows], want)
        assert error <= ORACLE_F32_ABS, f"{name}: {error:.2g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_within_the_error_budget(family, model, media):
    """Definitions against kernels, encoders included."""
    for case in tiny_prompts.cases(family).values():
        traces = []
        for backend in ("ref", "cpu"):
            ops, recorder = ops_for(backend), Recorder()
            soft = soft_of(Encoders(media(family), ops, activations="float"), case, recorder)
            arrays = record(engine_of(model(family), ops), case["tokens"], soft, recorder)
            traces.append(TraceFile(arrays))
        found = compare(*traces, "float")
        assert len(found) == len(traces[0].arrays) == len(traces[1].arrays)
        assert [d.name for d in found if d.is_over] == []
        assert all(d.limit is not None for d in found), "every name has a budget"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_reported_in_the_order_of_computation(family, model, media):
    case = tiny_prompts.cases(family)["image-audio" if media(family).audio else "image"]
    ops, recorder = ops_for("ref"), Recorder()
    soft = soft_of(Encoders(media(family), ops, activations="float"), case, recorder)
    trace = TraceFile(record(engine_of(model(family), ops), case["tokens"], soft, recorder))
    assert [d.name for d in compare(trace, trace, "float")] == list(trace.arrays)


def test_a_png_of_any_size(model, tmp_path):
    """A generated file through decoding, resizing and both kinds of kernels: the same logits."""
    name = "v.position_embd.weight"
    for family in ("e2b", "26b"):
        table = tiny_mmproj.tensors_of(family)[name]
        path = tiny_mmproj.make(
            tmp_path / f"{family}.gguf", family, replace={name: np.resize(table, (2, 80, table.shape[2]))}
        )
        data = files.png(files.picture("checks"))
        found = []
        for backend in ("ref", "cpu"):
            ops = ops_for(backend)
            encoders = Encoders(load_projector(model(family), str(path)), ops, activations="float")
            encoded = encoders.encode(encoders.open("image", data, budget=70))
            soft = [SoftTokens(3, encoded.rows[0], True)]
            ids = [2, 300, 301, *[0] * len(encoded.rows[0]), 302, 303]
            found.append(engine_of(model(family), ops).extend([(0, ids)], "all", soft={0: soft}))
        assert goldens.max_abs_in_deviations(found[1], found[0]) <= ORACLE_F32_ABS
