"""One sentence, as properties: chunks, neighbours, threads, cache change no byte of a token's logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpath.backend import ops_for
from fastpath.cpu import threads
from fastpath.kv.integrity import check_integrity
from fastpath.lanes import Lanes
from tests import tiny

KINDS = [
    ("e2b", "block256"),
    ("e4b", "block32"),
    ("12b", "odd"),
    ("26b", "block32"),
    ("26b", "block256"),
    ("31b", "block256"),
]
EXAMPLES = settings.default.max_examples // 2  # each is several calls of a whole model


@pytest.fixture(scope="module")
def alone(tiny_model):
    """alone(family, size) -> (model, ids, f32[T, V]): each position's logits, decoded token by token."""
    known = {}

    def logits(family, size, activations="int8"):
        key = family, size, activations
        if key not in known:
            model, ids = tiny_model(family, size), tiny.prompt(family) + tiny.prompt(family, seed=2)
            engine = Lanes(model, ops_for("cpu"), context_len=len(ids), chunk=1, activations=activations)
            known[key] = model, ids, np.stack([engine.decode(token_id) for token_id in ids])
        return known[key]

    return logits


@st.composite
def cuts(draw, n: int):
    """A list of lengths that sum to n."""
    lengths = []
    while (left := n - sum(lengths)) > 0:
        lengths.append(draw(st.integers(1, min(left, 40))))
    return lengths


@pytest.mark.parametrize(("family", "size"), KINDS)
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_any_chunks_give_the_bytes_of_one_token_at_a_time(alone, family, size, data):
    model, ids, expected = alone(family, size)
    lengths = data.draw(cuts(len(ids)))
    engine = Lanes(model, ops_for("cpu"), chunk=max(lengths))
    start = 0
    for n in lengths:
        rows = data.draw(st.sampled_from(["all", "last", "none"]))
        got = engine.extend([(0, ids[start : start + n])], rows)
        want = {"all": slice(start, start + n), "last": slice(start + n - 1, start + n), "none": slice(0, 0)}[
            rows
        ]
        assert got.tobytes() == expected[want].tobytes(), (start, n, rows)
        start += n


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_the_whole_prompt_at_once_and_without_history(alone, family, activations):
    """No cache in use: all positions from one call on a fresh engine."""
    model, ids, expected = alone(family, "block32", activations)
    engine = Lanes(model, ops_for("cpu"), activations=activations)
    assert engine.extend([(0, ids)], "all").tobytes() == expected.tobytes()


@pytest.mark.parametrize("family", ["e2b", "12b", "26b"])
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_sequences_together_give_the_bytes_of_each_alone(alone, family, data):
    """Lanes start at different steps and advance by different lengths in one call; a lane is used again."""
    model, ids, expected = alone(family, "block32")
    engine = Lanes(model, ops_for("cpu"), n_seqs=3, chunk=16)
    offset = [0, 7, 3]  # lane r reads ids from offset[r]; only lane 0's logits are known from the fixture
    for _ in range(data.draw(st.integers(2, 5))):
        lanes = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True))
        pieces = []
        for lane in lanes:
            held = engine.length(lane)
            n = data.draw(st.integers(1, 16))
            pieces.append((lane, ids[offset[lane] + held : offset[lane] + held + n]))
        pieces = [(lane, piece) for lane, piece in pieces if piece]
        if not pieces:
            break
        before = {lane: engine.length(lane) for lane, _ in pieces}
        got = engine.extend(pieces, "all")
        row = 0
        for lane, piece in pieces:
            if lane == 0:
                want = expected[before[0] : before[0] + len(piece)]
                assert got[row : row + len(piece)].tobytes() == want.tobytes()
            row += len(piece)
    lone = Lanes(model, ops_for("cpu"), chunk=64)
    for lane in (1, 2):
        if engine.length(lane):
            again = lone.prefill(engine.tokens[lane] + [5])
            assert engine.decode(5, lane=lane).tobytes() == again.tobytes()
            lone.reset()


@pytest.mark.parametrize(("family", "size"), [("e2b", "block256"), ("26b", "block32")])
def test_any_number_of_threads_gives_the_same_bytes(alone, family, size):
    model, ids, expected = alone(family, size)
    ops = ops_for("cpu")
    default = threads.num_threads()
    try:
        for n_threads in (1, 2, 3):
            threads.set_num_threads(n_threads)
            engine = Lanes(model, ops, chunk=13)
            got = [engine.extend([(0, ids[i : i + 13])], "all") for i in range(0, len(ids), 13)]
            assert np.concatenate(got).tobytes() == expected.tobytes(), n_threads
    finally:
        threads.set_num_threads(default)


def test_pages_of_any_size_give_the_same_bytes(tiny_model):
    """330 tokens: six global pages and more; the rings wrap many times."""
    model = tiny_model("e2b", "block32")
    ids = [token_id for seed in range(10) for token_id in tiny.prompt("e2b", seed=seed)]
    results = []
    for chunk, page in ((330, 64), (64, 32), (7, 96), (50, 512)):
        engine = Lanes(model, ops_for("cpu"), chunk=chunk, page=page)
        rows = [engine.extend([(0, ids[i : i + chunk])], "all") for i in range(0, len(ids), chunk)]
        results.append(np.concatenate(rows).tobytes())
        check_integrity(engine.cache)
    assert len(set(results)) == 1


def test_a_lane_used_again_remembers_nothing(alone):
    model, ids, expected = alone("e2b", "block32")
    engine = Lanes(model, ops_for("cpu"), chunk=20)
    engine.prefill(ids[::-1])
    engine.reset()
    assert engine.prefill(ids[:30]).tobytes() == expected[29].tobytes()
