"""Known fault A18 in compiled kernels: a clamp, a maximum or the soft cap must not turn NaN into a number."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.backend import ops_for
from fastpath.lanes import Lanes, NotFiniteError
from fastpath.load import load_model
from tests import strategies, tiny

RNG = np.random.default_rng(18)
ZERO = np.zeros(1, np.int32)


@pytest.mark.parametrize("n", [16, 37])
def test_softcap_and_geglu_pass_it_on(n):
    x = strategies.normal(RNG, n)
    x[[2, n - 1]] = np.nan
    for out in (fastpath.cpu.softcap(x, 30.0), fastpath.cpu.geglu(x, np.ones_like(x))):
        assert np.array_equal(np.isnan(out), np.isnan(x))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n", [3, 30])
@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_attention_passes_it_on_to_those_who_see_it(of, n, kv_type):
    q, keys, values = strategies.normal(RNG, n, 2, 8), *(strategies.normal(RNG, 1, 64, 1, 8) for _ in "kv")
    positions = np.arange(37 - n, 37, dtype=np.int32)
    bad = positions == 36 if of == "query" else positions >= 35
    if of == "query":
        q[-1, :, 3] = np.nan
    else:
        {"key": keys, "value": values}[of][0, 35, 0, 3] = np.nan
    caches = strategies.kv_caches(keys, values, kv_type, kv_type)
    out = fastpath.cpu.attention(q, *caches, np.zeros(n, np.int32), positions, None)
    assert np.array_equal(np.isnan(out[..., 3]), np.broadcast_to(bad[:, None], (n, 2)))
    assert of == "value" or np.array_equal(np.isnan(out).all(axis=(1, 2)), bad)
    alone = [fastpath.cpu.attention(q[t:][:1], *caches, ZERO, positions[t:][:1], None) for t in range(n)]
    assert np.array_equal(np.concatenate(alone), out, equal_nan=True)


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
    engine = Lanes(load_model(path), ops_for("cpu"))
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
    engine = Lanes(load_model(path), ops_for("cpu"), n_seqs=2)
    with pytest.raises(NotFiniteError, match="inp_per_layer_selected: NaN or infinity at position 2"):
        engine.extend([(0, [2, 50, 51, 52, 53]), (1, [2, 60, 100, 61])])
