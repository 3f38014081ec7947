"""Pages: the same bytes wherever keys and values lie, and only what is there is read."""

import numpy as np
import pytest

import fastpath.cpu as cpu
import refimpl.ops
from fastpath.cpu import program, threads
from refimpl.kv_types import own_pages
from tests import strategies, tolerances

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
SHAPES = {  # query heads, key heads, head size, window; the last position lies a little behind a page
    "8 share one": (8, 1, 512, None),
    "3 share one": (6, 2, 40, 97),
    "11 share one": (11, 1, 64, 33),
    "each its own": (2, 2, 33, None),
    "one component": (3, 3, 1, 7),
    "of 256": (4, 1, 256, 64),
}
N_POSITIONS = 199


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


def written(table, k, v, kv_type, page, *, first=0):
    """Pages with k, v [n, K, H] at positions `first` .. of lane 1, written by calls of 1 to 40 tokens."""
    pages = strategies.poisoned(table.max() + 2, page, *k.shape[1:], kv_type)
    start, size = 0, 1
    while start < len(k):
        at = np.arange(start, min(len(k), start + size), dtype=np.int32)
        cpu.write_kv(k[at], v[at], *pages, table, np.ones(len(at), np.int32), at + np.int32(first))
        start, size = start + size, size % 40 + 13
    return *pages, table


def tables(rng, page, window):
    """A table of two lanes: pages in any order, those of lane 0 missing.

    Sliding layers have a ring for what a call of 40 tokens sees, and no more.
    """
    E = -(-N_POSITIONS // page)
    if window is not None:
        E = min(E, (window - 1 + 40 + page - 2) // page + 1)
    table = np.full((2, E), -1, np.int32)
    table[1] = rng.permutation(2 * E + 1)[:E]
    return table


@pytest.mark.parametrize("types", [*((t, t) for t in TYPES), ("q8_0", "q4_0"), ("f16", "q8_0")])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_page_size_gives_the_bytes_of_one_page(shape, types, n_threads):
    """One page a lane is judged by the reference in float64; all others, by few tokens and by many, by it."""
    N, K, H, window = SHAPES[shape]
    rng = np.random.default_rng(1)
    k, v = strategies.normal(rng, 2, N_POSITIONS, K, H)
    q = strategies.normal(rng, 25, N, H, scale=2 * H**-0.5)
    positions = np.arange(N_POSITIONS - 25, N_POSITIONS, dtype=np.int32)
    lanes = np.ones(25, np.int32)
    whole = written(own_pages(2), k, v, types, -(-N_POSITIONS // 32) * 32)
    case = dict(zip(("k_pages", "v_pages", "table"), whole), q=q, seq_ids=lanes, positions=positions)
    want = refimpl.ops.attention(**{**case, "q": q.astype(np.float64)}, window=window)
    alone = cpu.attention(**case, window=window)
    tolerances.check("attention", case, (alone,), (want,))
    for i, page in enumerate((32, 64, 96, 160, 256)):
        kv = written(tables(rng, page, window), k, v, types, page)
        n_threads(1 + i % 3)
        for T in (1, 3, 25):
            got = cpu.attention(q[-T:], *kv, lanes[-T:], positions[-T:], window)
            assert got.tobytes() == alone[-T:].tobytes(), (page, T)


@pytest.mark.parametrize("kv_type", TYPES)
def test_windows_at_the_borders_of_pages(kv_type):
    """Every window from 1 to 70, its last position around a border: the bytes of an unpaged line."""
    rng = np.random.default_rng(2)
    k, v = strategies.normal(rng, 2, N_POSITIONS, 1, 34)
    q = strategies.normal(rng, 1, 3, 34, scale=0.3)
    one = np.ones(1, np.int32)
    whole = written(own_pages(2), k, v, kv_type, 224)
    paged = written(tables(rng, 64, None), k, v, kv_type, 64)
    for window in range(1, 71):
        for p in (63, 64, 65, 127, 128, 95, 96, 190):
            results = {cpu.attention(q, *kv, one, one * p, window).tobytes() for kv in (whole, paged)}
            assert len(results) == 1, (window, p)


@pytest.mark.parametrize("kv_type", TYPES)
def test_lanes_share_pages(kv_type):
    """Three lanes with the same two first pages; each goes on in one of its own."""
    rng = np.random.default_rng(3)
    k, v = strategies.normal(rng, 2, 3, 96, 2, 48)
    k[:, :64], v[:, :64] = k[0, :64], v[0, :64]
    table = np.array([[4, 2, 0], [4, 2, 5], [4, 2, 1]], np.int32)
    pages = strategies.poisoned(6, 32, 2, 48, kv_type)
    cpu.write_kv(k[0, :64], v[0, :64], *pages, table, np.zeros(64, np.int32), np.arange(64))
    for lane in range(3):
        at = np.arange(64, 96)
        cpu.write_kv(k[lane, at], v[lane, at], *pages, table, np.full(32, lane), at)
    q = strategies.normal(rng, 30, 4, 48, scale=0.3)
    lanes, positions = np.arange(30) % 3, np.arange(66, 96)
    got = cpu.attention(q, *pages, table, lanes, positions, None)
    for lane in range(3):
        mine = lanes == lane
        own = strategies.kv_caches(k[lane : lane + 1], v[lane : lane + 1], kv_type, kv_type)
        alone = cpu.attention(q[mine], *own, 0 * lanes[mine], positions[mine], None)
        assert alone.tobytes() == got[mine].tobytes()


def test_first_columns_of_a_wider_table():
    """A table may be a view; its columns bound what a query sees, and the memory for scores with it."""
    rng = np.random.default_rng(4)
    k, v = strategies.normal(rng, 2, 100, 1, 16)
    wide = np.full((2, 4000), -1, np.int32)
    wide[:, :4] = rng.permutation(8).reshape(2, 4)
    kv = written(wide[:, :4], k, v, "f16", 32)
    q = strategies.normal(rng, 20, 2, 16)
    lanes, positions = np.ones(20, np.int32), np.arange(80, 100)
    want = cpu.attention(q, *kv, lanes, positions, None)
    assert want.tobytes() == cpu.attention(q, *kv[:2], wide, lanes, positions, None).tobytes()
    assert want.tobytes() == cpu.attention(q, *kv[:2], wide[:, :4].copy(), lanes, positions, None).tobytes()
    with pytest.raises(ValueError, match="128 slots"):
        cpu.attention(q[:1], *kv, lanes[:1], np.array([128]), None)


def test_pages_that_are_missing():
    """Only those that a query sees count; which one is missing is said."""
    rng = np.random.default_rng(5)
    k, v = strategies.normal(rng, 2, 128, 1, 16)
    kv = written(np.array([[-1] * 4, [3, 1, 0, 2]], np.int32), k, v, "f32", 32)
    q, lanes, positions = strategies.normal(rng, 6, 1, 16), np.ones(6, np.int32), np.arange(92, 98)
    want = cpu.attention(q, *kv, lanes, positions, 20)
    kv[2][1, 0] = -1  # positions 0 .. 31
    assert want.tobytes() == cpu.attention(q, *kv, lanes, positions, 20).tobytes()
    kv[2][1, 3] = 9  # positions 96 ..
    assert want[:4].tobytes() == cpu.attention(q[:4], *kv, lanes[:4], positions[:4], 20).tobytes()
    for at, window, message in (
        (positions, 20, "lane 1 has page 9 for its page number 3, expected 0 to 4"),
        (positions[:1], None, "lane 1 has page -1 for its page number 0"),
        (positions[[0, 1, 0]], 70, "page number 0"),
    ):
        n = len(at)
        with pytest.raises(ValueError, match=message):
            cpu.attention(q[:n], *kv, lanes[:n], at, window)
    with pytest.raises(ValueError, match="write_kv: lane 1 has page 9 for its page number 3"):
        cpu.write_kv(k[:3], v[:3], *kv, lanes[:3], np.array([94, 95, 96]))
    with pytest.raises(ValueError, match="lane 0 has page -1"):
        cpu.attention(q[:1], *kv, 0 * lanes[:1], np.array([5]), None)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("window", [None, 50])
def test_a_recorded_step_follows_the_table(window, kv_type):
    """Recorded once; then tokens go on over borders of pages, and pages are exchanged."""
    rng = np.random.default_rng(6)
    n = 150
    k, v = strategies.normal(rng, 2, n, 2, 36)
    q = strategies.normal(rng, n, 4, 36, scale=0.3)
    E = 5 if window is None else 3
    pages = strategies.poisoned(2 * E, 32, 2, 36, kv_type)
    table = np.full((2, E), -1, np.int32)
    table[1] = np.arange(E)
    lane, position = np.ones(1, np.int32), np.zeros(1, np.int32)
    one_k, one_v, one_q = k[:1].copy(), v[:1].copy(), q[:1].copy()
    with program.record() as recorded:
        cpu.write_kv(one_k, one_v, *pages, table, lane, position)
        out = cpu.attention(one_q, *pages, table, lane, position, window)
    want_kv = *strategies.poisoned(2, 160, 2, 36, kv_type), own_pages(2)
    for p in range(n):
        position[0] = p
        one_k[0], one_v[0], one_q[0] = k[p], v[p], q[p]
        if p % 40 == 39:  # the same pages elsewhere
            order = rng.permutation(2 * E)
            for array in pages:
                array[order] = array.copy()
            table[1] = order[table[1]]
        recorded.replay()
        cpu.write_kv(one_k, one_v, *want_kv, lane, position)
        assert out.tobytes() == cpu.attention(one_q, *want_kv, lane, position, window).tobytes(), p
