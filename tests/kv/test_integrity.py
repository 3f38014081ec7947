"""check_integrity finds what is broken: each fault is put into a sound cache by hand."""

from types import SimpleNamespace

import pytest

from fastpath.kv.cache import KVCache
from fastpath.kv.integrity import check_integrity
from tests.kv.geometries import mixed


@pytest.fixture
def cache():
    """Lane 0: 100 positions; lane 1: 70, of which 64 are shared with lane 0."""
    cache = KVCache(mixed(40), 3, 300, 100, page=32)
    cache.reserve_spans([(0, 0, 100)])
    cache.adopt(1, 64, cache.held(0))
    cache.reserve_spans([(1, 64, 70)])
    check_integrity(cache)
    return cache


def leak(cache):
    cache.pools["global"].take()


def lose_a_reference(cache):
    cache.pools["global"].drop(cache.held(0)["global"][0][1])


def count_too_many(cache):
    cache.pools["sliding"].share(cache.held(0)["sliding"][1][1])


def free_a_page_in_use(cache):
    cache.pools["global"]._free.append(cache.held(0)["global"][3][1])


def forget_a_free_page(cache):
    cache.pools["sliding"]._free.pop()


def free_twice(cache):
    pool = cache.pools["sliding"]
    pool._free.append(pool._free[0])


def stale_entry(cache):
    cache.tables["global"].entries[1, 5] = cache.held(0)["global"][0][1]


def missing_entry(cache):
    cache.tables["sliding"].entries[0, 3] = -1


def own_twice(cache):
    entries = cache.tables["global"].entries
    cache.pools["global"].drop(int(entries[0, 3]))
    entries[0, 3] = entries[0, 2]
    cache.pools["global"].share(int(entries[0, 2]))


def point_at_anothers(cache):
    entries = cache.tables["global"].entries
    entries[1, 2] = entries[0, 3]


def point_outside(cache):
    cache.tables["global"].entries[0, 3] = 1000


def too_few_pages(cache):
    cache._lengths[0] = 129


def window_gone(cache):
    table = cache.tables["sliding"]
    for _ in range(3):
        table._drop(0, table.low[0])
        table.low[0] += 1


def write_in_a_shared_page(cache):
    cache._ready[1] = (32, 64)


def too_shallow(cache):
    cache.depth = 64


FAULTS = {
    leak: r"global page \d+: 1 references, 0 owners",
    lose_a_reference: r"global page 0: 1 references, 2 owners: \['lane 0', 'lane 1'\]",
    count_too_many: r"sliding page \d+: 3 references, 2 owners",
    free_a_page_in_use: r"global page \d+: 1 times in the free list, owners: \['lane 0'\]",
    forget_a_free_page: r"sliding page \d+: 0 times in the free list",
    free_twice: r"sliding page \d+: 2 times in the free list",
    stale_entry: "global lane 1, 70 positions: entry 5 has page 0, expected none: stale",
    missing_entry: "sliding lane 0, 100 positions: entry 3 has no page",
    own_twice: r"global lane 0, 100 positions: page \d+ is there twice",
    point_at_anothers: r"global page 3: 1 references, 2 owners: \['lane 0', 'lane 1'\]",
    point_outside: r"global page 1000: owned by \['lane 0'\], the pool has 30",
    too_few_pages: "lane 0, 129 positions: pages up to number 4, expected 5",
    window_gone: "sliding lane 0, 100 positions: holds numbers from 3 on, its next query sees 1",
    write_in_a_shared_page: r"(global|sliding) lane 1: writes at 32, on page \d+, which is not its own",
    too_shallow: "depth 64",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(cache, fault):
    fault(cache)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_integrity(cache)


def test_the_tree_is_an_owner(cache):
    pages = [page for _, page in cache.held(0)["global"]]
    tree = SimpleNamespace(owners=lambda: {"global": pages})
    with pytest.raises(AssertionError, match=r"global page 0: 2 references, 3 owners: .*'tree'"):
        check_integrity(cache, tree)
    for page in pages:
        cache.pools["global"].share(page)
    check_integrity(cache, tree)
    with pytest.raises(AssertionError, match="3 references, 2 owners"):
        check_integrity(cache)
    cache.release(0)
    cache.release(1)
    check_integrity(cache, tree)
    with pytest.raises(AssertionError, match="the tree owns pages of"):
        check_integrity(cache, SimpleNamespace(owners=lambda: {"local": [1]}))
