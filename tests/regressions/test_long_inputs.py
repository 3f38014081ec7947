"""Known faults that show once a sequence is longer than something: the window, a chunk, a block of keys."""

from itertools import pairwise

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.backend import ops_for
from fastpath.lanes import Lanes
from fastpath.load import load_model
from tests import strategies, tiny, tolerances


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """window 8, sharing layers, per-layer embeddings"""
    return load_model(tiny.make(tmp_path_factory.mktemp("regressions") / "e2b.gguf", "e2b"))


def engine_of(model, backend="ref", **options):
    return Lanes(model, ops_for(backend), activations="float", **options)


@pytest.mark.parametrize("backend", ["ref", "cpu"])
def test_a2_room_that_is_not_used_changes_nothing(model, backend):
    """The window counts positions, not slots: a cache for 500 of them or for the 20 of the prompt."""
    ids = tiny.prompt("e2b")[:20]
    rows = [
        engine_of(model, backend, context_len=n, chunk=20).extend([(0, ids)], "all").tobytes()
        for n in (20, 500)
    ]
    assert rows[0] == rows[1]


def test_a5_several_tokens_a_call_do_not_grow_a_ring(model):
    """6, then 5 at a time, as in speculation: at most two pages of 32, and the logits of one call."""
    ids = (tiny.prompt("e2b") * 3)[:96]
    engine = engine_of(model, chunk=6, page=32)
    got = [engine.extend([(0, ids[:6])], "all")]
    for start in range(6, len(ids), 5):
        got.append(engine.extend([(0, ids[start : start + 5])], "all"))
        assert len(engine.cache.held(0)["sliding"]) <= 2
    assert np.concatenate(got).tobytes() == engine_of(model).extend([(0, ids)], "all").tobytes()


def test_a16_heads_of_512_and_a_ragged_last_block():
    """As in global layers of the published models; 70 keys are two steps of 32 and six."""
    rng = np.random.default_rng(16)
    k_pages, v_pages, table = strategies.kv_caches(*(strategies.normal(rng, 1, 96, 2, 512) for _ in range(2)))
    case = {
        "q": strategies.normal(rng, 2, 8, 512, scale=512**-0.5),
        "k_pages": k_pages, "v_pages": v_pages, "table": table,
        "seq_ids": np.zeros(2, np.int32), "positions": np.array([69, 64], np.int32), "window": None,
    }  # fmt: skip
    want = refimpl.ops.attention(**{**case, "q": case["q"].astype(np.float64)})
    tolerances.check("attention", case, (fastpath.cpu.attention(**case),), (want,))


def test_b4_per_layer_inputs_of_a_chunk(model):
    """Chunks of 4, a prompt of 11, and one that continues after 5 tokens of another call."""
    ids = tiny.prompt("e2b")[:11]
    whole = engine_of(model).extend([(0, ids)], "all")
    for cuts in ((0, 4, 8, 11), (0, 5, 9, 11)):
        engine = engine_of(model, chunk=5)
        parts = [engine.extend([(0, ids[a:b])], "all") for a, b in pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_b10_sharing_layers_run_on_the_wanted_rows_only(model):
    """A trace needs all rows of all layers, a prefill does not: the same logits."""
    ids, rows = tiny.prompt("e2b"), []
    watched = engine_of(model).extend([(0, ids)], "last", trace=lambda name, array: None)

    class Counting:
        def __getattr__(self, name):
            return getattr(refimpl.ops, name)

        def attention(self, q, *rest):
            rows.append(len(q))
            return refimpl.ops.attention(q, *rest)

    quick = Lanes(model, Counting(), activations="float").extend([(0, ids)], "last")
    assert rows == [len(ids)] * 4 + [1] * 3  # LLLG own their keys, LLG read those
    assert quick.tobytes() == watched.tobytes()


def test_p1_only_wanted_rows_meet_the_vocabulary(model):
    ids, rows = tiny.prompt("e2b"), []

    class Counting:
        def __getattr__(self, name):
            return getattr(refimpl.ops, name)

        def linear(self, x, weight, activations):
            if weight is model.weights.output:
                rows.append(len(x))
            return refimpl.ops.linear(x, weight, activations)

    engine = Lanes(model, Counting(), activations="float", chunk=10)
    engine.prefill(ids)
    assert rows == [1]


def test_a_call_longer_than_the_chunk_is_refused(model):
    """Its last tokens would overwrite keys that its first ones see; so would a lane's that does not exist."""
    engine = engine_of(model, chunk=6)
    with pytest.raises(ValueError, match="7 tokens of one sequence, expected at most 6"):
        engine.extend([(0, tiny.prompt("e2b")[:7])])
    assert engine.length() == 0
    with pytest.raises(ValueError, match="no tokens"):
        engine.extend([(0, [])])
