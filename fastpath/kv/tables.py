"""PageTable: which pages the lanes hold of one kind of layers.  Bookkeeping: only `copy` touches memory."""

from collections.abc import Callable

import numpy as np

from fastpath.kv.pages import PagePool

Copy = Callable[[int, int], None]  # (from page, to page), in all layers of the kind
LaneState = tuple[np.ndarray, int, int]


class PageTable:
    """Position p of a lane is on the page of number p // P, which is entries[lane, p // P % E].

    A lane holds the numbers low[lane] .. high[lane] - 1 without gaps, at most E of them: those that its next
    query sees or its last call wrote.  All other entries are -1.

    entries  i32[R, E], read by kernels while they run: its memory never moves
    window   positions that a query sees, its own included; None: all
    """

    def __init__(self, pool: PagePool, n_lanes: int, n_entries: int, page: int, window: int | None):
        self.pool, self.page, self.window = pool, page, window
        self.n_entries = n_entries
        self.entries = np.full((n_lanes, n_entries), -1, np.int32)
        self.low, self.high = [0] * n_lanes, [0] * n_lanes

    def clear(self) -> None:
        """No lane holds anything; the pool is not told."""
        self.entries[:] = -1
        self.low, self.high = [0] * len(self.low), [0] * len(self.high)

    def first_seen(self, position: int) -> int:
        """The first page that a query at this position sees, or one behind it."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page

    def held(self, lane: int) -> list[tuple[int, int]]:
        """(number, page), ascending."""
        row, E = self.entries[lane], self.n_entries
        return [(number, int(row[number % E])) for number in range(self.low[lane], self.high[lane])]

    def wanted(self, lane: int, first: int, stop: int) -> int:
        """Pages that writing positions first .. stop-1 takes, less those that become free: maybe below 0."""
        low, high = self.low[lane], self.high[lane]
        seen = self.first_seen(first)
        freed = sum(self._refs(lane, number) == 1 for number in range(low, min(seen, high)))
        number = first // self.page
        is_copied = low <= number < high and self._refs(lane, number) > 1
        return max(0, self._stop(stop) - max(high, seen)) + is_copied - freed

    def give(self, lane: int, first: int) -> None:
        """Gives back what no query from position `first` on sees."""
        seen = self.first_seen(first)
        while self.low[lane] < min(seen, self.high[lane]):
            self._drop(lane, self.low[lane])
            self.low[lane] += 1
        if self.low[lane] < seen:  # the lane goes on behind a gap
            self.low[lane] = self.high[lane] = seen

    def take(self, lane: int, first: int, stop: int, copy: Copy) -> None:
        """Pages for positions first .. stop-1, which nobody else owns.

        A page that the lane shares and goes on writing in is copied.

        Raises:
            OutOfPages: some pages may have been taken
        """
        number = first // self.page
        if number < self.high[lane] and self._refs(lane, number) > 1:
            entry = number % self.n_entries
            page, mine = int(self.entries[lane, entry]), self.pool.take()
            copy(page, mine)
            self.entries[lane, entry] = mine
            self.pool.drop(page)
        while self.high[lane] < self._stop(stop):
            self.entries[lane, self.high[lane] % self.n_entries] = self.pool.take()
            self.high[lane] += 1

    def cut(self, lane: int, n: int) -> None:
        """Forgets positions from n on.

        Raises:
            ValueError: what the query at position n sees is not all there any more
        """
        if n and self.low[lane] > self.first_seen(n):
            raise ValueError(
                f"lane {lane}: cannot go back to position {n}: the sliding window before it is gone, the "
                f"cache holds positions from {self.low[lane] * self.page} on. Begin the sequence again"
            )
        while self.high[lane] > max(self._stop(n), self.low[lane]):
            self.high[lane] -= 1
            self._drop(lane, self.high[lane])
        if n == 0:
            self.low[lane] = self.high[lane] = 0

    def adopt(self, lane: int, n: int, pages: dict[int, int]) -> None:
        """An empty lane starts with n positions in these pages: number -> page, each with one owner more."""
        low, high = min(self.first_seen(n), self._stop(n)), self._stop(n)
        missing = [number for number in range(low, high) if number not in pages]
        if self.high[lane] or missing:
            raise ValueError(
                f"lane {lane} adopts {n} positions of {self.pool.name or 'a cache'}: "
                + (f"no page of numbers {missing[:5]}" if missing else "it is not empty")
                + ". Release it first, and give every page that the next token sees"
            )
        self.low[lane] = self.high[lane] = low
        for number in range(low, high):
            self.pool.share(pages[number])
            self.entries[lane, number % self.n_entries] = pages[number]
            self.high[lane] += 1

    def state(self, lane: int) -> LaneState:
        return self.entries[lane].copy(), self.low[lane], self.high[lane]

    def restore(self, lane: int, state: LaneState) -> None:
        self.entries[lane], self.low[lane], self.high[lane] = state

    def _stop(self, n: int) -> int:
        """The number behind the last page of n positions."""
        return -(-n // self.page)

    def _refs(self, lane: int, number: int) -> int:
        return self.pool.refs[self.entries[lane, number % self.n_entries]]

    def _drop(self, lane: int, number: int) -> None:
        entry = number % self.n_entries
        self.pool.drop(int(self.entries[lane, entry]))
        self.entries[lane, entry] = -1
