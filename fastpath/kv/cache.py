"""KVCache: the keys and values of all tokens that later ones can still see, in pages that lanes may share."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastpath import arrays as host
from fastpath.kv.geometry import PAGE, Kind, KVType, PageCounts, arrays_of, plan
from fastpath.kv.pages import PagePool
from fastpath.kv.tables import PageTable
from refimpl.kv_types import dtypes_of

FIRST_DEPTH = 1024  # positions; a cache's `depth` is not less, so that short sequences never change it
FEW = 16  # tokens that are looked at one by one

Spans = Iterable[tuple[int, int, int]]  # (lane, first position, stop)


class KVCache:
    """Pages of keys and values for every layer that owns them; shared-KV layers read those of `kv_from`.

        position p of lane r is on page n = table[r, p // P % E], in slot s = p % P of

            k_pages[n, :, s // 32, :, s % 32]     k_pages: [N, K, P/32, H, 32]
            v_pages[n, :, s // 32, :, s % 32]     v_pages: [N, K, P/32, H/32, 32, 32]

    Page n of a kind ("global", "sliding") is page n in each of its layers: they have one table and one pool.
    Arrays are allocated once, at full size: nothing grows or moves, and what was not touched costs no memory.

    chunk    most tokens of one sequence in a call
    dtype    float32 or float64: the precision of every call on this cache
    kv_type  what keys and values are rounded to; None: the call's precision
    page     P
    n_pages  as in geometry.plan
    arrays   where the pages lie (fastpath/arrays.py); tables are the host's
    depth    a bound of all lanes' positions that changes seldom: recorded programs have room for so many

    Notes:
        A page needs no clearing before it is used again: a query reads positions that were written, only.
        Whatever changes pages does it all or not at all, also when an interrupt ends it half-way.
    """

    def __init__(
        self,
        config,
        n_seqs: int,
        capacity: int,
        chunk: int,
        *,
        dtype=np.float32,
        kv_type: KVType | None = None,
        page: int = PAGE,
        n_pages: PageCounts | None = None,
        arrays: Any = host,
    ):
        assert capacity >= 1 and chunk >= 1 and n_seqs >= 1
        self.n_seqs, self.capacity, self.chunk, self.page = n_seqs, capacity, chunk, page
        self._place = arrays
        self.dtype, self.kv_type = np.dtype(dtype), kv_type
        self.dtypes = (self.dtype, self.dtype) if kv_type is None else dtypes_of(kv_type)
        stored = self.dtype if kv_type is None else kv_type
        self.geometry = plan(config, n_seqs, capacity, chunk, stored, page, n_pages)
        self.pools, self.tables = {}, {}
        self._arrays: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        for name, kind in self.geometry.kinds.items():
            self._arrays[name] = self._allocate(kind, stored)
            self.pools[name] = pool = PagePool(kind.n_pages, f"{name} layers")
            self.tables[name] = PageTable(pool, n_seqs, kind.n_entries, page, kind.window)
        self._lengths = [0] * n_seqs
        self._ready = [(0, 0)] * n_seqs  # positions (first, stop) that may be written as things are
        self._n_shares = 0  # as they were
        self._use_depth(self._depth_of(0))

    def _allocate(self, kind: Kind, stored) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        try:
            shapes = {layer.index: arrays_of(layer, kind.n_pages, self.page, stored) for layer in kind.layers}
            new = self._place.pages
            return {index: (new(*keys), new(*values)) for index, (keys, values) in shapes.items()}
        except MemoryError as error:
            raise ValueError(
                f"the cache needs {self.geometry.nbytes} bytes for {self.n_seqs} sequences of "
                f"{self.capacity} tokens, and the system refuses them ({error}). Ask for a shorter context "
                "(--context), fewer sequences or a smaller type of keys and values (--kv-type)"
            ) from None

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, values and table of layer `index`, its own ones only; callers pass `kv_from`.

        A global layer's table ends at `depth`.
        """
        return self._layers[index]

    def owners(self) -> Iterator[int]:
        """Layers that own keys."""
        return iter(self._layers)

    @property
    def nbytes(self) -> int:
        """Of all pages, touched or not."""
        return sum(k.nbytes + v.nbytes for arrays in self._arrays.values() for k, v in arrays.values())

    @property
    def used_bytes(self) -> int:
        """Of the pages that were ever used: the memory that the cache takes."""
        bytes_of = self.geometry.page_bytes
        return sum(pool.n_used * bytes_of[name] for name, pool in self.pools.items())

    def check(self, batch) -> None:
        """Refuse a batch that this cache cannot hold, before anything of it is written."""
        lanes = batch.seq_ids
        if len(lanes) <= FEW:  # Python's own numbers take less time for few
            few = lanes.tolist()
            last, least, most = max(batch.positions.tolist()), min(few), max(few)
            longest = max(map(few.count, few))
        else:
            last, least, most = int(batch.positions.max()), int(lanes.min()), int(lanes.max())
            longest = int(np.bincount(lanes).max()) if least >= 0 else 0
        if last >= self.capacity:
            raise ValueError(
                f"batch: position {last}, expected at most {self.capacity - 1}. "
                "The context is full: shorten the prompt, or make the engine with a longer context"
            )
        if least < 0 or most >= self.n_seqs:
            raise ValueError(
                f"batch: lanes {least} to {most}, expected 0 to {self.n_seqs - 1}. "
                "Make the engine with more sequences (n_seqs)"
            )
        if longest > self.chunk:  # its last token would overwrite keys that its first one sees
            raise ValueError(
                f"batch: {longest} tokens of one sequence, expected at most {self.chunk}, the chunk. Cut it"
            )

    # What lanes hold.

    def reserve(self, batch) -> None:
        """Pages for the tokens of a batch that was checked.

        Most steps find all in place: every token is on a page that its lane has and shares with nobody.
        """
        if batch.n_tokens <= FEW:
            tokens = list(zip(batch.seq_ids.tolist(), batch.positions.tolist(), strict=True))
            if self.are_ready(tokens):
                for lane, position in tokens:
                    self._lengths[lane] = position + 1
                return
        self.reserve_spans(_spans(batch))

    def are_ready(self, places: Iterable[tuple[int, int]]) -> bool:
        """All of these (lane, position) can be written as things are: `reserve` takes and gives no page."""
        if self._n_shares != self._count_shares():
            return False
        for lane, position in places:
            first, stop = self._ready[lane]
            if not first <= position < stop:
                return False
        return True

    def reserve_spans(self, spans: Spans) -> None:
        """Pages for positions first .. stop-1 of lanes, each at most once; what a lane had from `first` on is
        forgotten.

        First all give back sliding pages that no query from `first` on sees; then a page that is shared and
        gone on in is copied; then new pages are taken.

        Raises:
            OutOfPages, ValueError (the window before `first` is gone): nothing has changed
        """
        spans = list(spans)
        with self._all_or_nothing(*(lane for lane, *_ in spans)):
            for lane, first, _ in spans:
                self._ready[lane] = (0, 0)
                for table in self.tables.values():
                    if first < self._lengths[lane]:
                        table.cut(lane, first)
                    table.give(lane, first)
            for lane, first, stop in spans:
                for name, table in self.tables.items():
                    table.take(lane, first, stop, self._copier(name))
                self._lengths[lane] = stop
        self._set_depth()
        if self._n_shares != self._count_shares():
            self._ready = [(0, 0)] * self.n_seqs
            self._n_shares = self._count_shares()
        for lane, first, stop in spans:  # of the last page only: going back over a border gives pages back
            end = -(-stop // self.page) * self.page
            self._ready[lane] = max(first, end - self.page), min(end, self.capacity, self.depth)

    def pages_wanted(self, lane: int, n_new: int) -> dict[str, int]:
        """Pages of each kind that n_new more tokens of a lane take; below 0: they give back more."""
        length = self._lengths[lane]
        return {name: t.wanted(lane, length, length + n_new) for name, t in self.tables.items()}

    def held(self, lane: int) -> dict[str, list[tuple[int, int]]]:
        """kind -> (page number, page) of a lane, ascending; number = position // P."""
        return {name: table.held(lane) for name, table in self.tables.items()}

    def adopt(self, lane: int, n: int, pages: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """An empty lane starts with n positions that are in these pages, as (page number, page)."""
        with self._all_or_nothing(lane):
            for name, table in self.tables.items():
                table.adopt(lane, n, dict(pages.get(name, ())))
            self._lengths[lane], self._ready[lane] = n, (0, 0)
        self._set_depth()

    def truncate(self, lane: int, n: int) -> None:
        """Forgets positions from n on.

        Raises:
            ValueError: there are fewer, or the sliding window before n is gone; nothing has changed
        """
        if not 0 <= n <= self._lengths[lane]:
            raise ValueError(
                f"lane {lane}: cannot keep {n} of {self._lengths[lane]} positions. Ask for fewer"
            )
        with self._all_or_nothing(lane):
            for table in self.tables.values():
                table.cut(lane, n)
            self._lengths[lane], self._ready[lane] = n, (0, 0)
        self._set_depth()

    def release(self, lane: int) -> None:
        """Gives all pages of a lane back."""
        if self._lengths[lane]:
            self.truncate(lane, 0)

    def clear(self) -> None:
        """All lanes are empty and all pages free, whatever was true before."""
        for pool in self.pools.values():
            pool.clear()
        for table in self.tables.values():
            table.clear()
        self._lengths, self._ready = [0] * self.n_seqs, [(0, 0)] * self.n_seqs
        self._set_depth()

    def length(self, lane: int) -> int:
        """Positions that have pages. They are written, unless the last call did not end."""
        return self._lengths[lane]

    # How it is done.

    @contextmanager
    def _all_or_nothing(self, *lanes: int):
        """Changes of these lanes."""
        tables = [(table, lane, table.state(lane)) for table in self.tables.values() for lane in lanes]
        before = [(lane, self._lengths[lane], self._ready[lane]) for lane in lanes]
        for pool in self.pools.values():
            pool.end()  # of changes whose end was interrupted
        try:
            for pool in self.pools.values():
                pool.begin()
            yield
        except BaseException:  # an interrupt as well
            for pool in self.pools.values():
                pool.undo()
            for table, lane, state in tables:
                table.restore(lane, state)
            for lane, length, ready in before:
                self._lengths[lane], self._ready[lane] = length, ready
            raise
        for pool in self.pools.values():
            pool.end()

    def _count_shares(self) -> int:
        return sum([pool.n_shares for pool in self.pools.values()])

    def _copier(self, name: str):
        def copy(source: int, target: int) -> None:
            for k, v in self._arrays[name].values():
                self._place.copy_page(k, source, target)
                self._place.copy_page(v, source, target)

        return copy

    def _set_depth(self) -> None:
        """Lets `depth` follow the longest lane: grow as soon as it must, shrink where a quarter would do."""
        deepest = max(self._lengths)
        if deepest > self.depth:
            self._use_depth(self._depth_of(deepest))
        elif 2 * self._depth_of(2 * deepest) <= self.depth:
            self._use_depth(self._depth_of(2 * deepest))

    def _depth_of(self, n: int) -> int:
        """A power of two times FIRST_DEPTH, at least n; or what whole pages for the capacity hold."""
        depth = FIRST_DEPTH
        while depth < n:
            depth *= 2
        return min(depth, -(-self.capacity // self.page) * self.page)

    def _use_depth(self, depth: int) -> None:
        layers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for name, table in self.tables.items():
            n_columns = -(-depth // self.page) if table.window is None else table.n_entries
            entries = table.entries[:, :n_columns]
            layers |= {i: (k, v, entries) for i, (k, v) in self._arrays[name].items()}
        self._layers, self.depth = layers, depth


def _spans(batch) -> list[tuple[int, int, int]]:
    """(lane, first position, stop) of each sequence of a batch: its tokens stand together."""
    lanes, positions = batch.seq_ids, batch.positions
    starts = [0, *(np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist()]
    stops = [*starts[1:], len(lanes)]
    return [
        (int(lanes[a]), int(positions[a]), int(positions[b - 1]) + 1)
        for a, b in zip(starts, stops, strict=True)
    ]
