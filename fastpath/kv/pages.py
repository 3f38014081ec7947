"""PagePool: which pages are free, and how many owners each of the others has.  Numbers only, no memory."""


class OutOfPages(RuntimeError):
    """All pages of a pool are taken."""


class PagePool:
    """Pages 0 .. n-1.

    refs      refs[page]: its owners; 0: it is free
    n_used    the most pages that were taken at a time: no others were ever touched
    n_shares  how often a page was shared so far: while it is the same, whoever wrote in a page still may
    name      for messages: of whose pages these are
    """

    def __init__(self, n: int, name: str = ""):
        self.n, self.name, self.n_shares, self.n_used = n, name, 0, 0
        self.clear()

    def clear(self) -> None:
        """All pages are free."""
        self.refs = [0] * self.n
        self._free = list(range(self.n - 1, -1, -1))
        self.end()

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
        page = self._free[-1]
        if self._is_open:
            self._counts.append((page, 0))
            if len(self._free) == self._n_before - len(self._popped):
                self._popped.append(page)
        self._free.pop()
        self.refs[page] = 1
        self.n_used = max(self.n_used, self.n - len(self._free))
        return page

    def share(self, page: int) -> None:
        """One owner more."""
        if self.refs[page] < 1:
            raise ValueError(f"page {page} of {self.name or 'the cache'} is free, so nobody can share it")
        if self._is_open:
            self._counts.append((page, self.refs[page]))
        self.refs[page] += 1
        self.n_shares += 1

    def drop(self, page: int) -> None:
        """One owner less; without owners the page is free."""
        if self.refs[page] < 1:
            raise ValueError(f"page {page} of {self.name or 'the cache'} is free: it was given back before")
        if self._is_open:
            self._counts.append((page, self.refs[page]))
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._free.append(page)

    # Changes that are made together: begin, then end, or undo.  Each is noted before it is made, and undoing
    # what was not made does nothing, so that an interrupt may come anywhere between.

    def begin(self) -> None:
        self._counts: list[tuple[int, int]] = []  # (page, its owners before)
        self._popped: list[int] = []  # of the free pages that there were, those taken
        self._n_before = len(self._free)
        self._is_open = True

    def end(self) -> None:
        self._is_open = False

    def undo(self) -> None:
        """All pages as they were at `begin`, if there was one."""
        if not self._is_open:
            return
        for page, count in reversed(self._counts):
            self.refs[page] = count
        self._free[self._n_before - len(self._popped) :] = reversed(self._popped)
        self._is_open = False
