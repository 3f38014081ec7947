"""Products of many tokens: tiles of rows, tokens and entries of experts; the same bytes as with few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.cuda import device, limits, linear, ops, rehearsal, tiles
from quant import FORMATS, QTensor
from tests import strategies
from tests.cuda.executors import EXECUTORS, ONCE

ONE_OF_EACH = ("Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "MXFP4")  # of what kernels differ in


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_more_than_a_tile(name):
    """Two tiles of rows, three of tokens, both with a rest; steps of 1024 columns and what is left of one."""
    rng = np.random.default_rng(0)
    x, weight = strategies.normal(rng, 131, 1536), strategies.random_blocks(rng, FORMATS[name], 101, 1536)
    with np.errstate(all="ignore"), device.use(ONCE):
        got, want = (f.linear(x, weight, "int8") for f in (ops, refimpl.ops))
    np.testing.assert_array_equal(got, want)


def test_largest_integers():
    """32 times 127 * 128 is the most that a block can give, and has to come out as it is."""
    codes = np.full((3, 64), -128, np.int8)
    codes[1], codes[2, ::2] = 127, 127
    d = np.array([1.0, 3.0, 0.37, -2.0, 5.5, 1.0], np.float16).view(np.uint8).reshape(6, 2)
    blocks = np.concatenate([d, codes.reshape(6, 32).view(np.uint8)], axis=1).reshape(3, -1)
    weight = QTensor(FORMATS["Q8_0"], (3, 64), blocks, "largest")
    x = np.repeat(np.array([[1.0], [-1.0], [0.3]], np.float32), 64, axis=1)
    x = np.concatenate([x] * 6)
    with device.use(ONCE):
        got = ops.linear(x, weight, "int8")
    np.testing.assert_array_equal(got, refimpl.ops.linear(x, weight, "int8"))
    assert abs(got[0, 0]) > 32 * 128 and (np.sign(got[0]) == -np.sign(got[1])).all()


@pytest.mark.parametrize("name", ["Q5_1", "Q4_K"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_entries_of_experts(name, is_shared, monkeypatch):
    """One expert has more than a tile of entries, one has none; bytes as of few entries at a time."""
    rng, T, A, C = np.random.default_rng(1), 90, 2, 512
    weight = strategies.weights(rng, FORMATS[name], 5, 70, C)
    ids = rng.choice(5, (T, A), p=[0.6, 0.05, 0, 0.3, 0.05]).astype(np.int32)
    x = strategies.normal(rng, T, C) if is_shared else strategies.normal(rng, T, A, C)
    with device.use(ONCE):
        before = ONCE.launched.get(f"many_{name.lower()}", 0)
        many = ops.expert_linear(x, weight, ids, "int8")
        assert ONCE.launched.get(f"many_{name.lower()}", 0) == before + 1
        monkeypatch.setattr(linear, "MANY_OF_EXPERT", T)
        few = ops.expert_linear(x, weight, ids, "int8")
    assert many.tobytes() == few.tobytes()
    np.testing.assert_array_equal(many, refimpl.ops.expert_linear(x, weight, ids, "int8"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_tiles(executor):
    @settings(max_examples=12)
    @given(st.integers(1, 700), st.integers(1, 8), st.integers(1, tiles.MAX_EXPERTS), st.randoms())
    def check(T, A, E, random):
        rng = np.random.default_rng(random.getrandbits(32))
        ids = np.minimum(rng.geometric(min(1.0, 3 / E), (T, A)) - 1, E - 1).astype(np.int32)
        with device.use(EXECUTORS[executor]):
            made, entries = tiles.tiles_of(ids, E)
        np.testing.assert_array_equal(entries, np.argsort(ids.reshape(-1), kind="stable"))
        expected = []
        for e, n in enumerate(np.bincount(ids.reshape(-1), minlength=E)):
            before = np.count_nonzero(ids < e)
            expected += [(e, before + at, min(tiles.ENTRIES, n - at)) for at in range(0, n, tiles.ENTRIES)]
        np.testing.assert_array_equal(made[: len(expected)], expected)
        assert (made[len(expected) :] == -1).all()

    check()


def test_predicted_work_by_hand():
    """130 tokens are two whole tiles and the half of one; of experts, as many as chance gives each."""
    counts = {64: 100.0, 32: 60.0}
    with device.use(rehearsal.Rehearsal()) as noted:
        one = noted.matrix(_blank("Q8_0", 1024, 2048))
        four = noted.matrix(_blank("Q8_0", 4, 1024, 2048))
    dense = limits._of_many(one, 130, 0, lambda kernel, tokens: counts[tokens])
    assert dense.instructions == pytest.approx(1024 / 4 * 2 * (2 * 100 + 60))  # two steps of 1024 columns
    assert dense.tensor_ops == 2 * 1024 * 2048 * (2 * 64 + 32)
    assert dense.memory_bytes == one.read_bytes
    assert dense.cache_bytes == 2 * one.read_bytes + 1024 // 64 * (2 * 64 + 32) * 2048
    once = limits._of_many(four, 1, 2, lambda kernel, tokens: counts[tokens])  # two of four experts
    assert once.memory_bytes == pytest.approx(four.read_bytes / 2, abs=1)
    assert once.instructions == pytest.approx(2 * 1024 / 4 * 2 * 60)


def _blank(name, *shape):
    fmt = FORMATS[name]
    n_bytes = shape[-1] // fmt.block_size * fmt.block_bytes
    return QTensor(fmt, shape, np.broadcast_to(np.zeros(1, np.uint8), (*shape[:-1], n_bytes)), "blank")
