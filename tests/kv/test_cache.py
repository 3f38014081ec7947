"""KVCache: memory, what is given back, copied and shared, and what a call costs."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastpath.kv.cache import KVCache
from fastpath.kv.integrity import check_integrity
from fastpath.kv.pages import OutOfPages, PagePool
from tests.kv.geometries import config, layer, mixed


def batch(*parts):
    """(lane, first position, number of tokens) parts."""
    lanes = np.concatenate([np.full(n, lane, np.int32) for lane, _, n in parts])
    positions = np.concatenate([np.arange(first, first + n, dtype=np.int32) for _, first, n in parts])
    return SimpleNamespace(seq_ids=lanes, positions=positions, n_tokens=len(lanes))


def numbers(cache, lane, kind):
    return [number for number, _ in cache.held(lane)[kind]]


def test_types_of_keys_and_values():
    cache = KVCache(config(layer(0)), 1, 64, 8, kv_type=("f16", "bf16"))
    assert [array.dtype for array in cache.layer(0)[:2]] == [np.float16, np.uint16]
    assert cache.dtype == np.float32
    assert [array.dtype for array in KVCache(config(layer(0)), 1, 64, 8).layer(0)[:2]] == [np.float32] * 2
    for wrong in ("int8", ("f16",)):
        with pytest.raises(ValueError, match="kv_type: got"):
            KVCache(config(layer(0)), 1, 64, 8, kv_type=wrong)


def test_arrays_begin_at_a_cache_line_and_large_ones_at_a_huge_page():
    for n in (1, 3):
        for array in KVCache(config(layer(0, n_kv_heads=n)), n, 64, 8, kv_type="f16").layer(0)[:2]:
            assert array.ctypes.data % 64 == 0
    for array in KVCache(config(layer(0, head_dim=96)), 1, 1 << 15, 8, kv_type="f16").layer(0)[:2]:
        assert array.nbytes > 2 << 20 and array.ctypes.data % (2 << 20) == 0
        assert not array[::7].any()


def test_untouched_pages_cost_no_memory():
    """A hundred sequences of a long context: gigabytes of addresses, few of memory."""

    def resident():
        fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
        return int(fields["VmRSS"].split()[0]) * 1024

    pytest.importorskip("resource")
    try:
        before = resident()
    except OSError:
        pytest.skip("needs /proc")
    cache = KVCache(mixed(512), 100, 131072, 64, kv_type="f32")
    assert cache.nbytes > 1.8e9
    cache.reserve(batch((7, 0, 64)))
    k = cache.layer(1)[0]
    k[cache.held(7)["global"][0][1]] = 1
    assert resident() - before < 60e6  # lists of page numbers


def test_what_the_system_refuses_is_told_in_bytes():
    with pytest.raises(
        ValueError, match=r"the cache needs \d+ bytes for 1000 sequences of \d+ tokens.*--context"
    ):
        KVCache(config(layer(0, n_kv_heads=1024, head_dim=8192)), 1000, 1 << 17, 64)


def test_a_sliding_lane_gives_back_what_nobody_sees():
    """Window 40, pages of 32: position 71 sees 32 .. 71, position 72 sees 33 .. 72, 103 sees 64 .. 103."""
    cache = KVCache(mixed(40), 1, 1000, 50, page=32)
    cache.reserve(batch((0, 0, 50)))
    assert numbers(cache, 0, "sliding") == [0, 1]
    cache.reserve(batch((0, 50, 22)))
    assert numbers(cache, 0, "sliding") == [0, 1, 2]  # position 50 sees 11 .. 50
    for p in range(72, 300):
        cache.reserve(batch((0, p, 1)))
        check_integrity(cache)
        held = numbers(cache, 0, "sliding")
        assert held[0] * 32 <= p - 39 and held[-1] == p // 32 and len(held) <= 3
    assert numbers(cache, 0, "global") == list(range(10))
    assert len({page for page in cache.pools["sliding"].free}) == cache.pools["sliding"].n - len(held)


def test_pages_are_used_again_before_others_are_touched():
    cache = KVCache(config(layer(0, 8)), 4, 1000, 8, page=32)
    touched = set()
    for p in range(500):
        cache.reserve(batch((0, p, 1)))
        touched |= {page for _, page in cache.held(0)["sliding"]}
    assert len(touched) <= 3
    assert cache.used_bytes == len(touched) * cache.geometry.page_bytes["sliding"]


def test_going_on_in_a_shared_page_copies_it():
    cache = KVCache(mixed(40), 2, 200, 50, page=32)
    cache.reserve(batch((0, 0, 40)))
    held = cache.held(0)
    for index in cache.owners():
        for array in cache.layer(index)[:2]:
            array[:] = np.arange(array.size, dtype=np.float32).reshape(array.shape) + index
    cache.adopt(1, 35, held)
    check_integrity(cache)
    assert cache.held(1) == held and cache.length(1) == 35
    assert cache.pages_wanted(1, 1) == {"global": 1, "sliding": 1}
    cache.reserve(batch((1, 35, 1)))
    for kind, index in (("sliding", 0), ("global", 1), ("sliding", 2)):
        mine, its = cache.held(1)[kind], held[kind]
        assert mine[0] == its[0] and mine[1][1] != its[1][1]
        for array in cache.layer(index)[:2]:
            assert array[mine[1][1]].tobytes() == array[its[1][1]].tobytes()
    check_integrity(cache)
    assert cache.held(0) == held  # the other one is alone on its page again, and does not copy
    cache.reserve(batch((0, 40, 1)))
    assert cache.held(0) == held
    cache.reserve(batch((1, 36, 1)))
    check_integrity(cache)


def test_who_was_shared_with_since_copies_too():
    """The tree shares a page behind the cache's back, between two decoded tokens."""
    cache = KVCache(mixed(40), 1, 200, 50, page=32)
    for p in range(5):
        cache.reserve(batch((0, p, 1)))
    ((_, page),) = cache.held(0)["global"]
    cache.pools["global"].share(page)
    cache.reserve(batch((0, 5, 1)))
    assert cache.held(0)["global"] != [(0, page)] and cache.pools["global"].refs[page] == 1


def test_out_of_pages_changes_nothing():
    cache = KVCache(mixed(40), 3, 200, 50, page=32, n_pages={"global": 4, "sliding": 9})
    cache.reserve(batch((0, 0, 40), (1, 0, 33)))
    before = _books(cache)
    with pytest.raises(OutOfPages, match="all 4 pages of global layers are taken"):
        cache.reserve(batch((1, 33, 10), (2, 0, 3)))
    assert _books(cache) == before
    assert [cache.length(lane) for lane in range(3)] == [40, 33, 0]
    check_integrity(cache)
    cache.release(0)
    cache.reserve(batch((1, 33, 10), (2, 0, 3)))
    check_integrity(cache)


def _books(cache):
    lanes = [cache.held(lane) for lane in range(cache.n_seqs)]
    return lanes, [(pool.refs.copy(), pool.free) for pool in cache.pools.values()]


def test_a_lane_goes_back_as_far_as_its_window_reaches():
    cache = KVCache(mixed(40), 1, 1000, 50, page=32)
    for p in range(0, 500, 50):
        cache.reserve(batch((0, p, 50)))  # the last call began at 450, and sees from 411 on: page 12, 384
    cache.truncate(0, 480)
    cache.truncate(0, 423)  # sees 384
    check_integrity(cache)
    with pytest.raises(ValueError, match=r"cannot go back to position 422: .* holds positions from 384 on"):
        cache.truncate(0, 422)
    with pytest.raises(ValueError, match="cannot keep 424 of 423 positions"):
        cache.truncate(0, 424)
    assert cache.length(0) == 423
    check_integrity(cache)
    cache.truncate(0, 0)
    assert all(pool.n_free == pool.n for pool in cache.pools.values())


def test_depth_follows_the_longest_lane(monkeypatch):
    monkeypatch.setattr("fastpath.kv.cache.FIRST_DEPTH", 64)
    cache = KVCache(mixed(40), 2, 1000, 500, page=96)
    widths = []
    for n in (64, 1, 200, 300, 435):
        cache.reserve(batch((0, cache.length(0), n)))
        widths.append((cache.depth, cache.layer(1)[2].shape[1], cache.layer(0)[2].shape[1]))
        check_integrity(cache)
    assert [depth for depth, *_ in widths] == [64, 128, 512, 1024, 1024]
    assert [width for _, width, _ in widths] == [1, 2, 6, 11, 11]
    assert len({ring for *_, ring in widths}) == 1
    address = cache.layer(1)[2].ctypes.data
    cache.reserve(batch((1, 0, 100)))
    cache.release(0)
    assert cache.depth == 256  # twice what is there
    cache.release(1)
    assert cache.depth == 64 and cache.layer(1)[2].ctypes.data == address


# -- interrupts ---------------------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def interrupt_at(n, call):
    """Runs `call`; raises at its n-th line of fastpath/kv. Whether there was one."""
    import sys

    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if "fastpath/kv" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            lines += 1
            if lines == n:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


CALLS = {
    "reserve": lambda cache: cache.reserve(batch((0, 100, 33), (1, 64, 40), (2, 0, 70))),
    "go back": lambda cache: cache.reserve(batch((0, 80, 33))),
    "adopt": lambda cache: cache.adopt(2, 90, cache.held(0)),
    "truncate": lambda cache: cache.truncate(0, 70),
    "release": lambda cache: cache.release(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line(name):
    """All pages have their owners then, and the same call again does what it would have done."""

    def fresh():
        cache = KVCache(mixed(40), 3, 300, 100, page=32)
        cache.reserve(batch((0, 0, 100)))
        cache.adopt(1, 64, cache.held(0))
        return cache

    whole = fresh()
    CALLS[name](whole)
    n = 1
    while True:
        cache = fresh()
        if not interrupt_at(n, lambda cache=cache: CALLS[name](cache)):
            break
        check_integrity(cache)
        if name != "adopt" or cache.length(2) == 0:
            if name != "truncate" or cache.length(0) >= 70:
                CALLS[name](cache)
        check_integrity(cache)
        for lane in range(3):
            assert cache.length(lane) == whole.length(lane)
            for kind in whole.pools:
                assert numbers(cache, lane, kind) == numbers(whole, lane, kind)
        n += 1
    assert n > 10


# -- pools ---------------------------------------------------------------------------------------------


def test_a_pool_by_hand():
    pool = PagePool(3, "global layers")
    assert [pool.take(), pool.take(), pool.n_free] == [0, 1, 1]
    pool.share(0)
    pool.drop(0)
    assert pool.refs == [1, 1, 0] and pool.n_shares == 1
    pool.drop(0)
    assert pool.take() == 0  # the last one that was given back
    assert pool.take() == 2
    with pytest.raises(
        OutOfPages, match=r"all 3 pages of global layers are taken\. Give the cache more memory"
    ):
        pool.take()
    pool.drop(1)
    with pytest.raises(ValueError, match="page 1 of global layers is free: it was given back before"):
        pool.drop(1)
    with pytest.raises(ValueError, match="page 1 of global layers is free, so nobody can share it"):
        pool.share(1)
