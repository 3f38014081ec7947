"""PagePool: which pages are free, and how many owners each of the others has.  Numbers only, no memory."""

PoolState = tuple[list[int], list[int]]


class OutOfPages(RuntimeError):
    """All pages of a pool are taken."""


class PagePool:
    """Pages 0 .. n-1.

    refs      refs[page]: its owners; 0: it is free
    n_shares  how often a page was shared so far: while it is the same, whoever wrote in a page still may
    name      for messages: of whose pages these are
    """

    def __init__(self, n: int, name: str = ""):
        self.n, self.name, self.n_shares = n, name, 0
        self.clear()

    def clear(self) -> None:
        """All pages are free."""
        self.refs = [0] * self.n
        self._free = list(range(self.n - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        """The free pages, the next one to be taken last."""
        return tuple(self._free)

    def take(self) -> int:
        """A page with one owner; of the free ones the last to be given back, whose memory is there already.

        Raises:
            OutOfPages
        """
        if not self._free:
            raise OutOfPages(
                f"all {self.n} pages of {self.name or 'the cache'} are taken. "
                "Give the cache more memory, or wait until a sequence has ended"
            )
        page = self._free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One owner more."""
        if self.refs[page] < 1:
            raise ValueError(f"page {page} of {self.name or 'the cache'} is free, so nobody can share it")
        self.refs[page] += 1
        self.n_shares += 1

    def drop(self, page: int) -> None:
        """One owner less; without owners the page is free."""
        if self.refs[page] < 1:
            raise ValueError(f"page {page} of {self.name or 'the cache'} is free: it was given back before")
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._free.append(page)

    def state(self) -> PoolState:
        return self.refs.copy(), self._free.copy()

    def restore(self, state: PoolState) -> None:
        """All pages as they were at `state`."""
        self.refs, self._free = state
