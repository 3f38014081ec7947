"""Tiles of q8_0 and q4_0: the numbers of a weight's block; what is no number is not hidden."""

import numpy as np
import pytest

import fastpath.cpu as cpu
import refimpl.ops
from fastpath.cpu import threads
from quant import FORMATS
from refimpl import kv_tiles
from refimpl.kv_types import own_pages
from tests import strategies, tolerances

TILES = ("q8_0", "q4_0")


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


def rows_of_components():
    """f32[n, 1, 96]: sizes from tiny to huge, ties of the largest, halves between codes, zeros."""
    rng = np.random.default_rng(1)
    plain = strategies.normal(rng, 60, 96)
    plain *= 10.0 ** rng.integers(-12, 5, (60, 1)).astype(np.float32)
    rows = [
        np.zeros(96), np.full(96, -0.0), np.full(96, 3.0), np.full(96, -3.0),
        np.resize([2.0, -2.0, 1.0], 96), np.resize([-2.0, 2.0, 1.0], 96),
        np.resize(np.arange(-127, 128) / 2, 96), np.arange(96) / 8, -np.arange(96) / 8,
        np.r_[127.0, np.arange(31) + 0.5, -127.0, -np.arange(31) - 0.5, 8.0, np.arange(31) / 2 - 8],
        np.full(96, 2.0**-100), np.full(96, 2.0**-101), np.full(96, 1e-42), np.full(96, 8.3e6),
        np.full(96, 3e38),
        np.r_[np.zeros(40), 1e-7, np.zeros(55)], np.full(96, 65504.0 * 8), np.full(96, 65520.0 * 8),
    ]  # fmt: skip
    return np.concatenate([plain, np.array(rows)]).astype(np.float32)[:, None]


@pytest.mark.parametrize("kv_type", TILES)
def test_numbers_are_those_of_a_weight(kv_type):
    """Written by the kernel, read as scale * code: what quant/ makes of 32 weights."""
    x = rows_of_components()
    n = len(x)
    pages = *strategies.poisoned(3, 32, 1, 96, kv_type), np.array([[2, 0, 1]], np.int32)
    positions = np.arange(n, dtype=np.int32)
    cpu.write_kv(x, x, *pages, np.zeros(n, np.int32), positions)
    want = _of_a_weight(x, kv_type)
    found = pages[2][0, positions // 32], 0 * positions, positions % 32
    for array, of_keys in zip(pages, (True, False)):
        got = kv_tiles.load(array, found, of_keys)[:, 0]
        np.testing.assert_array_equal(got, want)
        assert (np.signbit(got) == np.signbit(want)).all()


def _of_a_weight(x, kv_type):
    fmt = FORMATS[kv_type.upper()]
    blocks = np.where(np.abs(x.reshape(-1, 32)).max(axis=1, keepdims=True) < 2.0**-100, 0, x.reshape(-1, 32))
    with np.errstate(all="ignore"):
        return fmt.dequantize_blocks(fmt.quantize_blocks(blocks.astype(np.float32))).reshape(len(x), -1)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 96, 200])
@pytest.mark.parametrize("kv_type", TILES)
def test_the_bytes_of_the_definition(kv_type, width, n_threads):
    """Every byte, also beside what is written; and again over what was there; on any number of threads."""
    rng = np.random.default_rng(2)
    table = np.array([[-1, -1, -1], [3, 0, 1]], np.int32)
    mine, its = (strategies.poisoned(5, 32, 2, width, kv_type) for _ in range(2))
    for n, first, n_workers in ((1, 0, 1), (45, 1, 3), (1, 46, 2), (20, 90, 2), (32, 100, 3), (7, 3, 1)):
        k, v = strategies.normal(rng, 2, n, 2, width)
        at, lanes = np.arange(first, first + n, dtype=np.int32), np.ones(n, np.int32)
        n_threads(n_workers)
        cpu.write_kv(k, v, *mine, table, lanes, at)
        refimpl.ops.write_kv(k, v, *its, table, lanes, at)
        for got, want in zip(mine, its):
            assert got.tobytes() == want.tobytes(), (n, first)


def test_by_hand():
    """q8_0: 127 has code 127, scale 1, and halves go away from 0; q4_0: 8, the largest, code -8, scale -1."""
    x = np.zeros((1, 1, 32), np.float32)
    x[0, 0, :5] = 127, 2.5, -2.5, 0.49999997, -126.5
    k, v, table = *strategies.poisoned(1, 32, 1, 32, ("q8_0", "q4_0")), own_pages(1)
    y = np.zeros_like(x)
    y[0, 0, :6] = 8, -8, 1, 0.5, -3.5, 7.25
    cpu.write_kv(x, y, k, v, table, np.zeros(1, np.int32), np.array([20], np.int32))
    assert k[0, 0, 0, 0, 40:42].view(np.float16)[0] == 1 and v[0, 0, 0, 0, 40:42].view(np.float16)[0] == -1
    codes = k[0, 0, 0, 0, 64:].reshape(32, 32)[:, 20].view(np.int8)
    assert codes.tolist() == [127, 3, -3, 0, -127] + [0] * 27
    # x / -1 + 8.5, cut off: -8 + 8.5 = 0.5, 16.5 (at most 15), 7.5, 8.0, 12.0, 1.25, and 8.5 for zeros
    fours = v[0, 0, 0, 0, 64:].reshape(32, 16)[20]
    assert (fours & 15).tolist() == [0, 15, 7, 8, 12, 1] + [8] * 10 and (fours >> 4 == 8).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["key", "value"])
@pytest.mark.parametrize("kv_type", TILES)
def test_what_is_no_number_shows(kv_type, of, bad):
    """Position 35, component 40: who sees it gets NaN, from a value in its 32 components; nobody else."""
    rng = np.random.default_rng(3)
    k, v = strategies.normal(rng, 2, 64, 1, 72)
    {"key": k, "value": v}[of][35, 0, 40] = bad
    kv = *strategies.poisoned(2, 32, 1, 72, kv_type), np.array([[1, 0]], np.int32)
    cpu.write_kv(k, v, *kv, np.zeros(64, np.int32), np.arange(64))
    its = *strategies.poisoned(2, 32, 1, 72, kv_type), kv[2]
    refimpl.ops.write_kv(k, v, *its, np.zeros(64, np.int32), np.arange(64))
    assert kv[0].tobytes() == its[0].tobytes() and kv[1].tobytes() == its[1].tobytes()
    q, positions = strategies.normal(rng, 30, 3, 72), np.arange(20, 50)
    got = cpu.attention(q, *kv, 0 * positions, positions, None)
    alone = [cpu.attention(q[t:][:1], *kv, 0 * positions[:1], positions[t:][:1], None) for t in range(30)]
    sees, components = positions >= 35, np.arange(72)
    if of == "value":
        components = (components >= 32) & (components < 64)
    want = sees[:, None, None] & np.broadcast_to(components >= 0 if of == "key" else components, (30, 3, 72))
    assert np.array_equal(np.isnan(got), want) and not np.isinf(got).any()
    assert np.array_equal(np.concatenate(alone), got, equal_nan=True)


@pytest.mark.parametrize(
    "types",
    [("f16", "f16"), ("bf16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f32", "q4_0")],
)
def test_how_far_rounding_moves_attention(types):
    """Against the reference in float64 on the numbers themselves."""
    rng = np.random.default_rng(4)
    k, v = strategies.normal(rng, 2, 1, 160, 2, 64)
    q = strategies.normal(rng, 20, 4, 64, scale=0.003)  # or the bound says nothing
    lanes, positions = np.zeros(20, np.int32), np.arange(130, 150, dtype=np.int32)
    exact = strategies.kv_caches(k.astype(np.float64), v.astype(np.float64), "f64", "f64")
    want = refimpl.ops.attention(q.astype(np.float64), *exact, lanes, positions, 100)
    got = cpu.attention(q, *strategies.kv_caches(k, v, *types, page=32), lanes, positions, 100)
    error, bound = np.abs(got - want).max(), tolerances.rounded_kv(q, k, v, *types)
    assert error < bound
    assert bound < 0.5 * np.abs(v).max()
