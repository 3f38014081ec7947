"""Store: what the scheduler asks of the cache, answered by lanes, pages and the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastpath.engine.request import Record
from fastpath.engine.scheduler import Parts, Task
from fastpath.kv.geometry import SLIDING
from fastpath.kv.integrity import check_integrity
from fastpath.kv.prefix_check import check_tree
from fastpath.kv.prefix_key import PrefixKey, prefix_key
from fastpath.kv.prefix_tree import Match, PrefixTree
from fastpath.lanes import Lanes


class Store:
    """Lanes with the prefixes that earlier sequences left.

    record_of  the request of a task
    """

    def __init__(self, lanes: Lanes, record_of: Callable[[Task], Record], *, prefix_cache: bool):
        self.lanes, self.cache, self._record_of = lanes, lanes.cache, record_of
        self._has_tree = prefix_cache
        self.clear()

    def clear(self) -> None:
        """Nothing is cached and all lanes are empty, whatever was true before."""
        self.cache.clear()
        self.tree = self._new_tree() if self._has_tree else None
        self._free = set(range(self.cache.n_seqs))
        self._placed: dict[Task, tuple[PrefixKey, Match]] = {}

    def _new_tree(self) -> PrefixTree:
        """It may hold on to every page: whoever computes takes what it needs from it."""
        geometry = self.cache.geometry
        sliding = geometry.kinds.get(SLIDING)
        return PrefixTree(
            self.cache.pools,
            sliding.window if sliding else None,
            geometry.page,
            geometry.nbytes,
            geometry.page_bytes,
        )

    # What the scheduler asks.

    def place(self, task: Task) -> None:
        task.lane, task.n_done, task.stops = min(self._free), 0, ()
        self._free.remove(task.lane)
        if self.tree is None:
            return
        record = self._record_of(task)
        key = self._key(record, len(record.ids))
        hit = self.tree.match(key[:-1])  # the last token is computed: its logits are wanted
        if hit.n:
            self.cache.adopt(task.lane, hit.n, hit.pages)
        task.n_done, task.stops = hit.n, self.tree.places(hit.n, key, hit.wanted)
        self._placed[task] = key, hit

    def admitted(self, task: Task) -> None:
        """Its place is for good. What it found is the tree's still, so that this shares no page anew."""
        if self.tree is not None:
            self.tree.used(self._placed[task][1])

    def take_back(self, task: Task) -> None:
        """What was computed stays in the tree until others need its pages."""
        _, hit = self._placed.pop(task, (None, None))
        record = self._record_of(task)
        if self.tree is not None and hit is not None and task.n_done > hit.n and record.is_sound:
            self.tree.insert(self._key(record, task.n_done), self.cache.held(task.lane))
        self.cache.release(task.lane)
        self._free.add(task.lane)

    def has_room(self, parts: Parts) -> bool:
        lacking = self._lacking(parts)
        if not lacking or self.tree is None:
            return not lacking
        owned = self.tree.owners()
        for kind, n in lacking.items():
            refs = self.cache.pools[kind].refs
            if sum(refs[page] == 1 for page in owned.get(kind, ())) < n:
                return False
        return True

    def make_room(self, parts: Parts) -> bool:
        if self.cache.are_ready([(task.lane, task.n_done + n - 1) for task, n in parts]):
            return True  # few tokens on pages that are there: most steps
        while lacking := self._lacking(parts):
            if self.tree is None or not self.tree.nbytes:
                return False
            if not sum(self.tree.evict(kind, n) for kind, n in lacking.items()):
                self.tree.clear()  # lanes have what is left: nobody has to copy a page that is his alone
        return True

    def _lacking(self, parts: Parts) -> dict[str, int]:
        """kind -> pages that are wanted and not free."""
        total = dict.fromkeys(self.cache.pools, 0)
        for task, n in parts:
            for kind, wanted in self.cache.pages_wanted(task.lane, n).items():
                total[kind] += min(wanted, self.cache.geometry.kinds[kind].n_entries)  # a ring needs no more
        lacking = {kind: n - self.cache.pools[kind].n_free for kind, n in total.items()}
        return {kind: n for kind, n in lacking.items() if n > 0}

    # What the engine tells.

    def advanced(self, task: Task) -> None:
        """It has computed up to `n_done`: where the tree wants a prefix, it gets it."""
        if self.tree is not None and task.n_done in task.stops:
            key, _ = self._placed[task]
            self.tree.insert(key[: task.n_done], self.cache.held(task.lane))

    def settle(self, tasks: Iterable[Task]) -> None:
        """Pages that were reserved for a call that did not end are given back."""
        for task in tasks:
            if self.cache.length(task.lane) != task.n_done:
                self.cache.truncate(task.lane, task.n_done)

    def forget_prefixes(self) -> None:
        if self.tree is not None:
            self.tree.clear()

    def check(self, running: Iterable[Task]) -> None:
        """AssertionError, if a page or a lane is owned wrongly."""
        check_integrity(self.cache, self.tree)
        if self.tree is not None:
            check_tree(self.tree)
        lanes = {task.lane for task in running}
        assert not lanes & self._free and len(lanes | self._free) == self.cache.n_seqs, (
            f"lanes {lanes} are taken, {self._free} free, of {self.cache.n_seqs}"
        )
        for lane in self._free:
            assert self.cache.length(lane) == 0, f"lane {lane} is free and holds {self.cache.length(lane)}"

    def _key(self, record: Record, n: int) -> PrefixKey:
        return prefix_key(record.ids[:n], record.soft, whole_images=self.lanes.whole_images)
