"""Lanes and pages without a model: what is written at a position is the whole prefix that decides it there.

A page that holds anything else than a fresh computation would have written is seen by its contents.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from fastpath.kv.pages import PagePool
from fastpath.kv.prefix_check import check_tree
from fastpath.kv.prefix_key import PrefixKey, prefix_key
from fastpath.kv.prefix_tree import PrefixTree
from refimpl.batch import SoftTokens

PAGE_BYTES = {"global": 7, "sliding": 30}


def media(value, n_rows, vision=True):
    """The elements of an image or a sound; a word's element is its id."""
    return [(value, n_rows, vision, j) for j in range(n_rows)]


@dataclass
class Lane:
    elements: list
    length: int = 0  # of these, how many are written
    pages: dict = field(default_factory=lambda: {"global": {}, "sliding": {}})


class World:
    """A tree, its pools, lanes that write in its pages, and the memory of these."""

    def __init__(
        self,
        *,
        window=6,
        page=4,
        n_pages=200,
        max_bytes=10**9,
        whole=False,
        shortest=1,
        kinds=("global", "sliding"),
    ):
        self.window, self.page, self.whole, self.kinds = window, page, whole, kinds
        self.pools = {kind: PagePool(n_pages) for kind in kinds}
        self.memory = {kind: [[None] * page for _ in range(n_pages)] for kind in kinds}
        self.tree = PrefixTree(
            self.pools,
            window if "sliding" in kinds else None,
            page,
            max_bytes,
            {kind: PAGE_BYTES[kind] for kind in kinds},
            shortest=shortest,
        )
        self.lanes = []
        self.inserted = {}  # (kind, number) -> prefixes, as in `prefixes`: what insert was given
        self.evicted = 0  # the tree's counter when `inserted` was begun

    # Keys and contents.

    def key(self, elements, n=None) -> PrefixKey:
        ids = [1 if isinstance(e, tuple) else e for e in elements]
        soft = [
            SoftTokens(at, np.full((e[1], 3), e[0], np.float32), e[2])
            for at, e in enumerate(elements)
            if isinstance(e, tuple) and e[3] == 0
        ]
        return prefix_key(ids, soft, whole_images=self.whole)[: len(ids) if n is None else n]

    def block(self, elements, p):
        """(start, stop) of what position p sees both ways; (p, p + 1) for most."""
        e = elements[p]
        if isinstance(e, tuple) and e[2] and self.whole:
            return p - e[3], p - e[3] + e[1]
        return p, p + 1

    def content(self, elements, p):
        return tuple(elements[: self.block(elements, p)[1]])

    def may_end(self, elements, n):
        return n == len(elements) or self.block(elements, n)[0] == n

    # Lanes.

    def start(self, elements) -> Lane:
        """What an engine does with a new request, up to the first call."""
        lane = Lane(list(elements))
        hit = self.tree.match(self.key(elements)[:-1])
        self.check_hit(elements, hit)
        lane.length = hit.n
        for kind in self.kinds:
            for number, page in hit.pages[kind]:
                self.pools[kind].share(page)
                lane.pages[kind][number] = page
        self.lanes.append(lane)
        self.tree.used(hit)
        return lane

    def write(self, lane, stop) -> None:
        """Compute positions up to `stop` (one call, so all or nothing of an image)."""
        for p in range(lane.length, stop):
            self._make_room(lane, p)
            for kind in self.kinds:
                page = lane.pages[kind][p // self.page]
                self.memory[kind][page][p % self.page] = self.content(lane.elements, p)
        lane.length = stop

    def _make_room(self, lane, p) -> None:
        if "sliding" in self.kinds:
            for number in [k for k in lane.pages["sliding"] if (k + 1) * self.page <= p - self.window + 1]:
                self.pools["sliding"].drop(lane.pages["sliding"].pop(number))
        for kind in self.kinds:
            number, pages = p // self.page, lane.pages[kind]
            if number in pages and self.pools[kind].refs[pages[number]] == 1:
                continue
            fresh = self._take(kind)
            if number in pages:  # copy on write
                old = pages[number]
                self.memory[kind][fresh] = list(self.memory[kind][old])
                self.pools[kind].drop(old)
            else:
                self.memory[kind][fresh] = [None] * self.page
            pages[number] = fresh

    def _take(self, kind):
        if not self.pools[kind].n_free:
            self.evict(kind, 1)
        return self.pools[kind].take()

    def held(self, lane):
        return {kind: sorted(lane.pages[kind].items()) for kind in self.kinds}

    def insert(self, lane) -> bool:
        kept = self.tree.insert(self.key(lane.elements, lane.length), self.held(lane))
        if kept:
            seen = {"global": 0, "sliding": max(0, lane.length - self.window + 1)}
            for kind in self.kinds:
                for p in range(seen[kind] // self.page * self.page, lane.length):
                    prefix = tuple(lane.elements[: p + 1])
                    self.inserted.setdefault((kind, p // self.page), set()).add(prefix)
        return kept

    def clear(self) -> None:
        self.tree.clear()
        self.inserted, self.evicted = {}, self.tree.counters.evicted

    def release(self, lane) -> None:
        self.lanes.remove(lane)
        for kind in self.kinds:
            for page in lane.pages[kind].values():
                self.pools[kind].drop(page)

    def evict(self, kind, n) -> int:
        free = self.pools[kind].n_free
        freed = self.tree.evict(kind, n)
        assert freed == self.pools[kind].n_free - free
        if freed < n:  # what is left of a kind is in lanes, or lies before what is in lanes
            ours = {page for lane in self.lanes for page in lane.pages[kind].values()}
            assert not self.tree.owners()[kind] or ours & set(self.tree.owners()[kind])
        return freed

    def run(self, elements) -> int:
        """A whole request, cut and inserted where the tree says: tokens that came from the tree."""
        key = self.key(elements)
        wanted = self.tree.match(key[:-1]).wanted
        lane = self.start(elements)
        cached = lane.length
        for stop in self.tree.places(cached, key, wanted) or [len(elements)]:
            self.write(lane, stop)
            self.insert(lane)
            self.check()
        self.release(lane)
        self.check()
        return cached

    # The definition, by brute force.

    def prefixes(self):
        """(kind, number) -> prefixes up to which the tree has that page right."""
        known = {}
        todo = [(self.tree._root, [])]
        while todo:
            node, before = todo.pop()
            elements = before + self._elements(node, before)
            todo += [(child, elements) for child in node.children.values()]
            held = [("global", k, page) for k, page in zip(node.numbers(self.page), node.pages)]
            held += [("sliding", k, window.page) for k, window in node.windows.items()]
            for kind, k, page in held:
                for stop in range(k * self.page + 1, min(node.stop, (k + 1) * self.page) + 1):
                    known.setdefault((kind, k), set()).add(tuple(elements[:stop]))
                    got = self.memory[kind][page][(stop - 1) % self.page]
                    want = got[:stop] if got is not None else None  # of a block the content is longer
                    assert want == tuple(elements[:stop]), f"{kind} page {page}, position {stop - 1}: {got}"
        return known

    def _elements(self, node, before):
        """What stands on a node's run, from its tokens and the digests of its media."""
        by_digest = {item.start: item for item in node.media}
        out, item = [], None
        for p, token in enumerate(node.tokens.tolist(), node.start):
            if token >= 0:
                out.append(token)
                continue
            j = -1 - token
            if j == 0:
                item = by_digest[p]
                value, vision = DIGESTS[item.digest]
                out.append((value, item.stop - item.start, vision, 0))
            else:
                out.append((*(before + out)[-1][:3], j))
        return out

    def longest(self, elements, limit, known):
        """The largest n <= limit that can be gone on from with the pages that are `known`, by trying all."""

        def has(kind, first, n):
            return all(
                tuple(elements[: min(n, (k + 1) * self.page)]) in known.get((kind, k), ())
                for k in range(first // self.page, -(-n // self.page))
            )

        for n in range(limit, 0, -1):
            first = {"global": 0, "sliding": max(0, n - self.window + 1)}
            if self.may_end(elements, n) and all(has(kind, first[kind], n) for kind in self.kinds):
                return n
        return 0

    def check_hit(self, elements, hit) -> None:
        """A match of elements[:-1]: as long as can be, with pages of the right contents, and no others."""
        assert hit.n == self.longest(elements, len(elements) - 1, self.prefixes())
        if self.tree.counters.evicted == self.evicted:  # then nothing that was inserted is lost
            assert hit.n >= self.longest(elements, len(elements) - 1, self.inserted)
        assert self.may_end(elements, hit.n)
        for kind in self.kinds:
            first = max(0, hit.n - self.window + 1) if kind == "sliding" else 0
            numbers = list(range(first // self.page, -(-hit.n // self.page)))
            assert [number for number, _ in hit.pages[kind]] == numbers
            for number, page in hit.pages[kind]:
                for p in range(number * self.page, min(hit.n, (number + 1) * self.page)):
                    assert self.memory[kind][page][p % self.page] == self.content(elements, p), (
                        kind,
                        number,
                        p,
                    )
        if hit.wanted is not None:
            assert hit.n < hit.wanted < len(elements) and self.may_end(elements, hit.wanted)

    # What is true after everything.

    def check(self) -> None:
        check_tree(self.tree)
        owners = {kind: Counter(self.tree.owners()[kind]) for kind in self.kinds}
        for lane in self.lanes:
            for kind in self.kinds:
                owners[kind].update(lane.pages[kind].values())
        for kind, pool in self.pools.items():
            assert {page: n for page, n in enumerate(pool.refs) if n} == dict(owners[kind]), kind
        for lane in self.lanes:
            for kind in self.kinds:
                seen = max(0, lane.length - self.window + 1) if kind == "sliding" else 0
                for p in range(seen, lane.length):
                    page = lane.pages[kind][p // self.page]
                    assert self.memory[kind][page][p % self.page] == self.content(lane.elements, p)


def _digests():
    """Digests of the media that tests use, so that a tree can be read back."""
    return {
        SoftTokens(0, np.full((n, 3), value, np.float32), vision).digest: (value, vision)
        for value in range(1, 5)
        for n in range(1, 12)
        for vision in (False, True)
    }


DIGESTS = _digests()
