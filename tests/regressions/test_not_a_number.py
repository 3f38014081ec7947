"""Known fault A18 in compiled kernels: a clamp, a maximum or the soft cap must not turn NaN into a number."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.backend import ops_for
from fastpath.engine import Engine, NotFiniteError
from fastpath.load import load_model
from tests import strategies, tiny

RNG = np.random.default_rng(18)


@pytest.mark.parametrize("n", [16, 37])
def test_softcap_and_geglu_pass_it_on(n):
    x = strategies.normal(RNG, n)
    x[[2, n - 1]] = np.nan
    for out in (fastpath.cpu.softcap(x, 30.0), fastpath.cpu.geglu(x, np.ones_like(x))):
        assert np.array_equal(np.isnan(out), np.isnan(x))


@pytest.mark.parametrize("of", ["query", "key"])
def test_attention_passes_it_on_to_those_who_see_it(of):
    q, keys, values = strategies.normal(RNG, 3, 2, 8), *(strategies.normal(RNG, 1, 40, 1, 8) for _ in "kv")
    if of == "query":
        q[1, :, 3] = np.nan
    else:
        keys[0, 35, 0, 3] = np.nan
    lanes, positions = np.zeros(3, np.int32), np.array([34, 36, 20], np.int32)
    out = fastpath.cpu.attention(q, keys, values, lanes, positions, None)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("expert", [0, 3, 6])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_route_passes_it_on_as_the_definition_does(expert, bad):
    """A NaN logit loses every comparison: the kernel would choose among the others."""
    logits = strategies.normal(RNG, 3, 7)
    logits[1, expert] = bad
    scale = np.linspace(0.5, 2, 7, dtype=np.float32)
    ids, weights = fastpath.cpu.route(logits, 2, scale)
    want_ids, want = refimpl.ops.route(logits, 2, scale)
    assert np.isnan(want[1]).all() == (bad != -np.inf)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(want))


@pytest.mark.parametrize(
    ("tensor", "place"),
    [("blk.1.attn_q_norm.weight", "layer 1, Qcur_normed"), ("output_norm.weight", "result_norm")],
)
def test_the_fast_engine_names_the_first_place(tmp_path, tensor, place):
    path = tiny.make(tmp_path / "broken.gguf", "e2b")
    data = bytearray(path.read_bytes())
    at = bytes(data).index(load_model(path).file.tensors[tensor].data.tobytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    engine = Engine(load_model(path), ops_for("cpu"))
    with pytest.raises(NotFiniteError, match=f"{place}: NaN or infinity at position 0"):
        engine.prefill(tiny.prompt("e2b")[:20])


def test_the_engine_looks_at_the_lane_that_broke(tmp_path):
    """Of two sequences in a call the second meets a damaged row: it is the one that is run once more."""
    path = tiny.make(tmp_path / "broken.gguf", "e2b")
    table = load_model(path).file.tensors["per_layer_token_embd.weight"]
    data = bytearray(path.read_bytes())
    at = bytes(data).index(table.data[100].tobytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    engine = Engine(load_model(path), ops_for("cpu"), n_seqs=2)
    with pytest.raises(NotFiniteError, match="inp_per_layer_selected: NaN or infinity at position 2"):
        engine.extend([(0, [2, 50, 51, 52, 53]), (1, [2, 60, 100, 61])])
