"""Lanes over pages against a dict: every position that a next token sees is where it was written.

The memory is that of a real cache, and keys are numbers: the one at position p of a lane is what was last
written there, whoever shares the page.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastpath.kv.cache import KVCache
from fastpath.kv.integrity import check_integrity
from fastpath.kv.pages import OutOfPages
from tests.kv.geometries import mixed

N_LANES, CAPACITY, CHUNK = 3, 300, 70


def batch_of(parts):
    """(lane, first, n) parts as what KVCache reads of a Batch."""
    lanes = np.concatenate([np.full(n, lane, np.int32) for lane, _, n in parts])
    positions = np.concatenate([np.arange(first, first + n, dtype=np.int32) for _, first, n in parts])
    return SimpleNamespace(seq_ids=lanes, positions=positions, n_tokens=len(lanes))


class Lanes(RuleBasedStateMachine):
    """Sequences are lists of numbers, each used once; what a prefix tree would keep is one of them."""

    @initialize(
        page=st.sampled_from([32, 64, 96]),
        window=st.sampled_from([1, 31, 32, 33, 40, 100]),
        n_pages=st.one_of(st.none(), st.integers(4, 9)),
    )
    def start(self, page, window, n_pages):
        config = mixed(window)
        some = None if n_pages is None else {"global": n_pages, "sliding": n_pages}
        self.cache = KVCache(config, N_LANES, CAPACITY, CHUNK, page=page, n_pages=some)
        self.page, self.window, self.count = page, window, 0
        self.lanes = [[] for _ in range(N_LANES)]
        self.kept = []  # (sequence, kind -> [(number, page)])

    # What happens.

    @rule(
        parts=st.lists(
            st.tuples(st.integers(0, N_LANES - 1), st.sampled_from([1, 1, 1, 2, 5, 31, 32, 33, 64, CHUNK])),
            min_size=1, max_size=N_LANES, unique_by=lambda part: part[0],
        ),
        times=st.integers(1, 40),
    )  # fmt: skip
    def write(self, parts, times):
        """Tokens that were just decoded, a chunk of a prompt, or both in one call; and the same again."""
        for _ in range(times):
            now = [(r, len(self.lanes[r]), min(n, CAPACITY - len(self.lanes[r]))) for r, n in parts]
            now = [part for part in now if part[2]]
            if not now or not self._write(now):
                return

    @rule(lane=st.integers(0, N_LANES - 1), back=st.integers(0, CAPACITY), n=st.integers(1, 40))
    def write_again(self, lane, back, n):
        """A call that goes back: rejected drafts, or a call that did not end."""
        first = max(0, len(self.lanes[lane]) - back)
        n = min(n, CAPACITY - first)
        if n and self._can_go_back(lane, first):
            old = self.lanes[lane]
            self.lanes[lane] = old[:first]
            if not self._write([(lane, first, n)]):
                self.lanes[lane] = old
        elif n:
            with pytest.raises(ValueError, match="window before it is gone"):
                self.cache.reserve(batch_of([(lane, first, n)]))

    @rule(lane=st.integers(0, N_LANES - 1), back=st.integers(0, CAPACITY))
    def truncate(self, lane, back):
        n = max(0, len(self.lanes[lane]) - back)
        if self._can_go_back(lane, n):
            self.cache.truncate(lane, n)
            del self.lanes[lane][n:]
        else:
            with pytest.raises(ValueError, match="window before it is gone"):
                self.cache.truncate(lane, n)

    @rule(lane=st.integers(0, N_LANES - 1))
    def release(self, lane):
        self.cache.release(lane)
        self.lanes[lane] = []
        assert self.cache.held(lane) == {"global": [], "sliding": []}

    @precondition(lambda self: len(self.kept) < 4)
    @rule(lane=st.integers(0, N_LANES - 1))
    def keep(self, lane):
        """As the prefix tree does at the end of a turn."""
        if self.lanes[lane]:
            held = self.cache.held(lane)
            for kind, pages in held.items():
                for _, page in pages:
                    self.cache.pools[kind].share(page)
            self.kept.append((list(self.lanes[lane]), held))

    @precondition(lambda self: self.kept)
    @rule(lane=st.integers(0, N_LANES - 1), which=st.integers(0, 3), back=st.integers(0, 100))
    def adopt(self, lane, which, back):
        """As a request does that begins like an earlier one, up to somewhere where the window is there."""
        sequence, held = self.kept[which % len(self.kept)]
        n = max(1, len(sequence) - back)
        needed = range(max(0, n - self.window + 1) // self.page, -(-n // self.page))
        if self.lanes[lane]:
            with pytest.raises(ValueError, match="not empty"):
                self.cache.adopt(lane, n, held)
        elif set(needed) <= {number for number, _ in held["sliding"]}:
            self.cache.adopt(lane, n, held)
            self.lanes[lane] = sequence[:n]
        else:
            with pytest.raises(ValueError, match="no page of number"):
                self.cache.adopt(lane, n, held)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 3))
    def forget(self, which):
        _, held = self.kept.pop(which % len(self.kept))
        for kind, pages in held.items():
            for _, page in pages:
                self.cache.pools[kind].drop(page)

    # What must be true.

    @invariant()
    def is_whole(self):
        tree = SimpleNamespace(owners=self._kept_pages)
        check_integrity(self.cache, tree)

    @invariant()
    def next_tokens_see_what_was_written(self):
        for lane, sequence in enumerate(self.lanes):
            assert self.cache.length(lane) == len(sequence)
            self._check(lane, sequence, len(sequence))
        for sequence, held in self.kept:
            self._check_pages(sequence, held)

    def _kept_pages(self):
        return {
            kind: [page for _, held in self.kept for _, page in held[kind]] for kind in ("global", "sliding")
        }

    def _can_go_back(self, lane, n):
        held = self.cache.held(lane)["sliding"]
        return n == 0 or max(0, n - self.window + 1) // self.page >= (held[0][0] if held else n // self.page)

    def _write(self, parts):
        """True: it is done; False: there are no pages, and nothing has changed."""
        wanted = {
            kind: sum(self.cache.pages_wanted(lane, n)[kind] for lane, _, n in parts)
            for kind in self.cache.pools
        }
        is_plain = all(first == self.cache.length(lane) for lane, first, _ in parts)
        free = {kind: pool.n_free for kind, pool in self.cache.pools.items()}
        before = [self.cache.held(lane) for lane in range(N_LANES)], self._kept_pages()
        try:
            self.cache.reserve(batch_of(parts))
        except OutOfPages:
            assert ([self.cache.held(lane) for lane in range(N_LANES)], self._kept_pages()) == before
            assert not is_plain or any(wanted[kind] > free[kind] for kind in free)
            return False
        for kind, pool in self.cache.pools.items():
            assert not is_plain or free[kind] - pool.n_free <= max(wanted[kind], 0)
        for lane, first, _ in parts:  # what the first of the tokens sees, beside itself
            self._check(lane, self.lanes[lane][:first], first)
        for lane, first, n in parts:
            for position in range(first, first + n):
                self.count += 1
                for index in (0, 1, 2):
                    self._slot(index, lane, position)[:] = self.count
                self.lanes[lane].append(self.count)
        return True

    def _slot(self, index, lane, position):
        """The key of a position, where a kernel looks for it."""
        k, _, table = self.cache.layer(index)
        page = table[lane, position // self.page % table.shape[1]]
        assert page >= 0, f"lane {lane}, position {position}: no page"
        s = position % self.page
        return k[page, 0, s // 32, :, s % 32]

    def _check(self, lane, sequence, n):
        """The token at position n sees them."""
        for index, window in ((0, self.window), (1, None), (2, self.window)):
            for position in range(0 if window is None else max(0, n - window + 1), n):
                assert (self._slot(index, lane, position) == sequence[position]).all(), (
                    index,
                    lane,
                    position,
                )

    def _check_pages(self, sequence, held):
        for kind, index in (("global", 1), ("sliding", 0)):
            k = self.cache.layer(index)[0]
            low = 0 if kind == "global" else max(0, len(sequence) - self.window + 1)
            pages = dict(held[kind])
            for position in range(low, len(sequence)):
                s = position % self.page
                assert (k[pages[position // self.page], 0, s // 32, :, s % 32] == sequence[position]).all()


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=40, stateful_step_count=25)
