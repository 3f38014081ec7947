"""check_integrity: everything that is always true of a cache's pages.  For tests, soaks and suspicion."""

from collections import Counter
from typing import Protocol

import numpy as np

from fastpath.kv.cache import KVCache
from fastpath.kv.pages import PagePool
from fastpath.kv.tables import PageTable


class Owner(Protocol):
    def owners(self) -> dict[str, list[int]]:
        """kind -> pages that it owns, each as often as it does."""


def check_integrity(cache: KVCache, tree: Owner | None = None) -> None:
    """Every owner is counted, every page without one is free, and lanes hold what they need and no more.

    Args:
        tree: the prefix tree, if there is one: whoever owns pages besides the lanes
    Raises:
        AssertionError: names the kind, the page and its owners, or the lane
    """
    theirs = tree.owners() if tree is not None else {}
    unknown = set(theirs) - set(cache.pools)
    assert not unknown, f"the tree owns pages of {sorted(unknown)} layers, the cache has none"
    for name, table in cache.tables.items():
        owners: dict[int, list[str]] = {}
        for lane in range(cache.n_seqs):
            for page in check_lane(name, table, lane, cache.length(lane)):
                owners.setdefault(page, []).append(f"lane {lane}")
        for page in theirs.get(name, ()):
            owners.setdefault(page, []).append("tree")
        check_pool(name, cache.pools[name], owners)
    assert max(cache._lengths) <= cache.depth, f"lanes of {cache._lengths} positions, depth {cache.depth}"
    if cache._n_shares == cache._count_shares():
        for lane, ready in enumerate(cache._ready):
            _check_ready(cache, lane, *ready)


def check_pool(name: str, pool: PagePool, owners: dict[int, list[str]]) -> None:
    """owners: page -> who holds a reference, once for each."""
    outside = [page for page in owners if not 0 <= page < pool.n]
    assert not outside, f"{name} page {outside[0]}: owned by {owners[outside[0]]}, the pool has {pool.n}"
    assert len(pool.refs) == pool.n, f"{name}: {len(pool.refs)} counts for {pool.n} pages"
    free = Counter(pool.free)
    for page, count in enumerate(pool.refs):
        who = owners.get(page, [])
        assert count == len(who), f"{name} page {page}: {count} references, {len(who)} owners: {who}"
        times = free[page]
        assert times == (count == 0), f"{name} page {page}: {times} times in the free list, owners: {who}"
    assert sum(free.values()) == pool.n - len(owners), f"{name}: the free list has pages that are none"


def check_lane(name: str, table: PageTable, lane: int, length: int) -> list[int]:
    """The pages that a lane holds."""
    low, high, E = table.low[lane], table.high[lane], table.n_entries
    where = f"{name} lane {lane}, {length} positions"
    needed = -(-length // table.page)
    assert high == needed or (low == high > needed), f"{where}: pages up to number {high}, expected {needed}"
    assert 0 <= low <= high and high - low <= E, f"{where}: holds numbers {low} .. {high - 1} of {E} entries"
    seen = table.first_seen(length)
    assert low <= seen or low == high, f"{where}: holds numbers from {low} on, its next query sees {seen}"
    expected = np.zeros(E, bool)
    expected[[number % E for number in range(low, high)]] = True
    row = table.entries[lane]
    stale = np.flatnonzero((row >= 0) & ~expected)
    assert not len(stale), f"{where}: entry {stale[0]} has page {row[stale[0]]}, expected none: stale"
    missing = np.flatnonzero((row < 0) & expected)
    assert not len(missing), f"{where}: entry {missing[0]} has no page"
    pages = row[expected].tolist()
    twice = [page for page, n in Counter(pages).items() if n > 1]
    assert not twice, f"{where}: page {twice[0]} is there twice"
    return pages


def _check_ready(cache: KVCache, lane: int, first: int, stop: int) -> None:
    """Positions that are written without a look must be on pages of the lane's own."""
    for name, table in cache.tables.items():
        for position in range(first, stop):
            number = position // table.page
            page = int(table.entries[lane, number % table.n_entries])
            is_mine = table.low[lane] <= number < table.high[lane] and cache.pools[name].refs[page] == 1
            assert is_mine, f"{name} lane {lane}: writes at {position}, on page {page}, which is not its own"
