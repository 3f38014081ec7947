"""PrefixTree: which prefixes of earlier sequences are in the cache, and where.

    hit = tree.match(key[:-1])           # the last token of a prompt is computed: its logits are wanted
    cache.adopt(lane, hit.n, hit.pages)
    tree.used(hit)
    ... the engine computes key[hit.n:] ...
    tree.insert(key, cache.held(lane))   # key: everything that the lane has written

Global layers see every position, so a prefix of n tokens needs all of its global pages.  Sliding layers see
the last `window` positions, and a lane keeps no more; so the tree keeps the window before some places, the
checkpoints (`insert` makes one), and a prefix is of use where positions max(0, n - window + 1) .. n-1 are all
there: at checkpoints, between ones that are close, and anywhere in a sequence shorter than the window.

Pages are shared, never copied: the tree is one owner, lanes are others, and who wants to write on in a shared
page copies it first (KVCache.reserve).  What was used least lately goes first.  One thread at a time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastpath.kv.geometry import GLOBAL, SLIDING
from fastpath.kv.pages import PagePool
from fastpath.kv.prefix_key import PrefixKey
from fastpath.kv.prefix_node import Holdings, Node, Window

SHORTEST = 32  # tokens: a shorter sequence is not worth a page of each kind; of a kept one any part serves

Held = Mapping[str, Sequence[tuple[int, int]]]  # kind -> (page number, page), as KVCache.held gives it


@dataclass(frozen=True)
class Match:
    """What the tree has of a sequence.

    n       tokens that need not be computed
    pages   kind -> (page number, page) that hold them; still the tree's: adopt them before it is changed
    wanted  a longer prefix, in tokens, that the tree has the global pages of, but no window: who computes it
            should cut its prompt there and insert it, so that the next one finds it.  None: there is none
    """

    n: int
    pages: Mapping[str, list[tuple[int, int]]]
    wanted: int | None = None
    key: PrefixKey = field(default_factory=lambda: PrefixKey(np.empty(0, np.int32)), repr=False)


@dataclass
class Counters:
    """lookups, hits, tokens_reused: of `used`.  refused: sequences larger than the tree's bytes, not kept."""

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    inserted: int = 0
    refused: int = 0
    evicted: int = 0  # checkpoints


class PrefixTree:
    """
    pools       kind ("global", "sliding") -> its PagePool; a model without layers of a kind leaves it out
    window      positions that a query of a sliding layer sees, its own included; None: no sliding layers
    page        positions of a page
    max_bytes   most bytes of pages that the tree holds on to
    page_bytes  kind -> bytes of a page in all layers of the kind
    shortest    tokens of the shortest prefix that is kept
    """

    def __init__(
        self,
        pools: Mapping[str, PagePool],
        window: int | None,
        page: int,
        max_bytes: int,
        page_bytes: Mapping[str, int],
        *,
        shortest: int = SHORTEST,
    ):
        assert (window is None) == (SLIDING not in pools), f"window {window}, pools of {list(pools)}"
        assert shortest >= 1 and page >= 1
        self.window, self.page, self.max_bytes, self.shortest = window, page, max_bytes, shortest
        self.counters = Counters()
        self._pools, self._page_bytes = pools, page_bytes
        self._clock = 0
        self._start()

    def _start(self) -> None:
        self._holdings = Holdings(self._pools, self._page_bytes)
        self._root = Node(None, 0, np.empty(0, np.int32))
        self._by_age: OrderedDict[Node, None] = OrderedDict()  # nodes with a checkpoint, oldest use first
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, id, node); stale entries among them

    # What others ask.

    @property
    def nbytes(self) -> int:
        """Of the pages held: each counts once, however many prefixes it belongs to."""
        return self._holdings.nbytes

    def owners(self) -> dict[str, list[int]]:
        """kind -> pages that the tree holds one reference of."""
        return {kind: list(count) for kind, count in self._holdings.count.items()}

    @property
    def spacing(self) -> int:
        """Positions between the checkpoints that a long prompt leaves on its way.

        So many that their windows take at most the bytes of the global pages between them: keeping them at
        most doubles what a prompt costs, whatever the geometry.  Whole pages, so that none is copied for it.
        """
        if self.window is None or GLOBAL not in self._pools:
            return self.window or 0
        pages = (self.window - 1) // self.page + 2
        worth = -(-pages * self._page_bytes[SLIDING] // self._page_bytes[GLOBAL]) * self.page
        return max(worth, -(-self.window // self.page) * self.page)

    def places(self, start: int, key: PrefixKey, wanted: int | None = None) -> list[int]:
        """Where a prompt that is computed from `start` on should be cut and inserted, in order: at `wanted`,
        every `spacing` positions, and at its end (a chat comes back there when its answer is rewritten)."""
        stop = len(key)
        spaced = range(self.spacing, stop, self.spacing) if self.spacing else ()
        ends = {key.outside(n) for n in (*spaced, *([wanted] if wanted else ()), stop)}
        return sorted(n for n in ends if max(start, self.shortest - 1) < n <= stop)

    def match(self, key: PrefixKey) -> Match:
        """The longest prefix of `key` that can be gone on from.  Changes nothing.

        Callers give `prompt[:-1]`: the logits after the last token are wanted, so it is computed.
        """
        path, known = self._walk(key)
        known = key.outside(known)
        n, windows = self._longest_usable(key, path, known)
        pages: dict[str, list[tuple[int, int]]] = {kind: [] for kind in self._pools}
        if n and GLOBAL in pages:
            pages[GLOBAL] = list(enumerate(self._global_pages(path, n)))
        if n and SLIDING in pages:
            pages[SLIDING] = windows
        wanted = known if known >= n + self.shortest else None
        return Match(n, pages, wanted, key[:n])

    def used(self, match: Match) -> None:
        """A lane has adopted a match, or found nothing.  The place becomes a checkpoint, which costs no
        pages: what served stays, whatever becomes of the longer sequence that it was found in."""
        self.counters.lookups += 1
        if match.n:
            self.counters.hits += 1
            self.counters.tokens_reused += match.n
            self._keep(match.key, match.pages)

    def insert(self, key: PrefixKey, held: Held) -> bool:
        """Keep a sequence, and make its end a checkpoint; the pages of what is new are shared.

        Args:
            key: the positions that are written; with more of them in the pages, a prefix may be given
            held: the pages of the lane: all global ones, the sliding ones of the window before len(key)
        Returns:
            False: it is shorter than `shortest`, or larger than `max_bytes` and would be all that is kept
        """
        return self._keep(key[: key.outside(len(key))], held)

    def evict(self, kind: str, n: int) -> int:
        """Give up what was used least lately until n more pages of a kind are free; how many became so.

        What lanes hold at present is passed over, as nothing would become free.  So 0 means: give up a lane,
        then call this again.
        """
        pool = self._pools[kind]
        before = pool.n_free
        while pool.n_free - before < n:
            node = self._oldest_leaf() if kind == GLOBAL else self._oldest_window()
            if node is None:
                break
            self._forget(node)
        return pool.n_free - before

    def clear(self) -> None:
        """Give up everything.  Counters stay."""
        for kind, pages in self.owners().items():
            for page in pages:
                self._pools[kind].drop(page)
        self._start()

    # Walking and matching.

    def _walk(self, key: PrefixKey) -> tuple[list[Node], int]:
        """Nodes that hold the longest known prefix of a key, in order, and its length."""
        path: list[Node] = []
        node, at = self._root, 0
        while at < len(key):
            child = node.children.get(key.label(at))
            if child is None:
                break
            at = key.first_difference(child.tokens, child.media, at)
            path.append(child)
            if at < child.stop:
                break
            node = child
        return path, at

    def _longest_usable(
        self, key: PrefixKey, path: list[Node], known: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """(n, sliding pages): the largest n <= known whose window is there.

        Within one page and one node all n need the same last page, and the largest n needs the fewest others:
        so one n is tried for each.
        """
        if self.window is None:
            return known, []
        tried = known + 1
        for i in range(len(path) - 1, -1, -1):
            for number in sorted(path[i].windows, reverse=True):
                n = key.outside(min(known, path[i].stop, (number + 1) * self.page))
                if n < tried:
                    tried = n
                    windows = self._window_before(path[: i + 1], n)
                    if windows is not None:
                        return n, windows
        return 0, []

    def _window_before(self, path: list[Node], n: int) -> list[tuple[int, int]] | None:
        """The sliding pages of the window before n, which lies in the path; None: one is missing.

        Of the nodes on a page, that of the last position before n has the page that is right so far.
        """
        pages = []
        i = len(path) - 1
        for number in range((n - 1) // self.page, self._first_page(n) - 1, -1):
            last = min(n, (number + 1) * self.page) - 1
            while path[i].start > last:
                i -= 1
            window = path[i].windows.get(number)
            if window is None:
                return None
            pages.append((number, window.page))
        return pages[::-1]

    def _first_page(self, n: int) -> int:
        """Number of the first sliding page that a prefix of n tokens needs."""
        return max(0, n - self.window + 1) // self.page if self.window is not None else 0

    def _global_pages(self, path: list[Node], n: int) -> list[int]:
        pages: list[int] = []
        for node in path:
            if node.start >= n:
                break
            if node.start % self.page:
                pages.pop()  # this node's page holds more of the same
            pages += node.pages
        return pages[: -(-n // self.page)]

    # Keeping.

    def _keep(self, key: PrefixKey, held: Held) -> bool:
        n = len(key)
        if n < self.shortest:
            return False
        pages = {kind: dict(held[kind]) for kind in self._pools}
        first = {GLOBAL: 0, SLIDING: self._first_kept(n, pages.get(SLIDING, {}))}
        self._check_held(n, first, pages)
        last = (n - 1) // self.page
        alone = sum((last + 1 - first[kind]) * self._page_bytes[kind] for kind in self._pools)
        if alone > self.max_bytes:
            self.counters.refused += 1
            return False
        node = self._node_at(key, pages.get(GLOBAL, {}))
        if node.first is None:
            self._add_checkpoint(node, first[SLIDING], pages.get(SLIDING, {}))
            self.counters.inserted += 1
        self._touch(node)
        while self.nbytes > self.max_bytes:
            self._forget(next(iter(self._by_age)))
        return True

    def _first_kept(self, n: int, windows: Mapping[int, int]) -> int:
        """Number of the first sliding page of a checkpoint at n.  Where the lane has it, one position more
        than n needs, so that n - 1 is served as well: the same prompt again computes its last token only."""
        more = self._first_page(n - 1)
        return more if more in windows else self._first_page(n)

    def _check_held(self, n: int, first: Mapping[str, int], held: Mapping[str, Mapping[int, int]]) -> None:
        for kind, pages in held.items():
            for number in range(first[kind], (n - 1) // self.page + 1):
                if number not in pages:
                    raise ValueError(
                        f"prefix tree: {n} tokens without {kind} page {number}, expected pages {first[kind]} "
                        f"to {(n - 1) // self.page}. Insert a prefix while its window is in the lane"
                    )

    def _node_at(self, key: PrefixKey, pages: Mapping[int, int]) -> Node:
        """The node that ends where the key does; cut or added if there is none."""
        path, at = self._walk(key)
        node = path[-1] if path else self._root
        if at < node.stop:
            node = node.split(at, self.page, self._holdings)
        if at == len(key):
            return node
        media = tuple(item for item in key.media if item.start >= at)
        leaf = Node(node, at, key.tokens[at:].copy(), media)
        if GLOBAL in self._pools:
            leaf.pages = [pages[number] for number in leaf.numbers(self.page)]
            for page in leaf.pages:
                self._holdings.hold(GLOBAL, page)
        node.children[leaf.label] = leaf
        if leaf.pages and at % self.page:
            self._renew_last_page(node, leaf.pages[0])
        return leaf

    def _renew_last_page(self, node: Node, page: int) -> None:
        """A new child begins inside the last global page of `node`: its page is a copy of that, and more."""
        number = (node.stop - 1) // self.page
        for above in node.up():
            if above.stop <= number * self.page:
                break
            if above.pages[-1] != page:
                self._holdings.hold(GLOBAL, page)
                self._holdings.release(GLOBAL, above.pages[-1])
                above.pages[-1] = page

    def _add_checkpoint(self, node: Node, first: int, pages: Mapping[int, int]) -> None:
        """Hold sliding pages from number `first` to node.stop: those that are there, or else those given."""
        node.first = first
        if SLIDING not in self._pools:
            return
        chosen: dict[int, int] = {}  # of a page with several nodes, the version of the deepest holds the most
        for above in node.up():
            if above.stop <= first * self.page:
                break
            for number in above.numbers(self.page):
                if number < first:
                    continue
                window = above.windows.get(number)
                page = chosen.setdefault(number, window.page if window else pages[number])
                if window is None:
                    self._holdings.hold(SLIDING, page)
                    above.windows[number] = Window(page, 1)
                    continue
                window.n_users += 1
                if window.page != page:
                    self._holdings.hold(SLIDING, page)
                    self._holdings.release(SLIDING, window.page)
                    window.page = page

    # Giving up.

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._by_age[node] = None
        self._by_age.move_to_end(node)
        if not node.children:
            self._push_leaf(node)

    def _push_leaf(self, node: Node) -> None:
        if len(self._leaves) > 64 + 4 * len(self._by_age):
            self._leaves = [(leaf.used, id(leaf), leaf) for leaf in self._by_age if not leaf.children]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.used, id(node), node))

    def _forget(self, node: Node) -> None:
        """Give up a checkpoint, and with it every node that is of no use any more."""
        assert node.first is not None
        for above in node.up():
            if SLIDING not in self._pools or above.stop <= node.first * self.page:
                break
            for number in above.numbers(self.page):
                if number >= node.first:
                    window = above.windows[number]
                    window.n_users -= 1
                    if not window.n_users:
                        self._holdings.release(SLIDING, above.windows.pop(number).page)
        node.first = None
        del self._by_age[node]
        self.counters.evicted += 1
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and node.first is None and not node.children:
            assert not node.windows
            for page in node.pages:
                self._holdings.release(GLOBAL, page)
            parent = node.parent
            del parent.children[node.label]
            node.parent, node = None, parent
        if node.parent is None:
            return
        if not node.children:
            self._push_leaf(node)
        elif node.first is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.join_parent(self.page, self._holdings)

    def _oldest_window(self) -> Node | None:
        """The checkpoint used least lately, of those whose windows are not all in lanes' hands."""
        return next(
            (node for node in self._by_age if not self._is_in_lanes(self._windows_of(node), SLIDING)), None
        )

    def _oldest_leaf(self) -> Node | None:
        passed = []
        found = None
        while self._leaves and found is None:
            entry = heapq.heappop(self._leaves)
            used, _, node = entry
            if node.parent is None or node.children or node.first is None or node.used != used:
                continue  # it went, or was used since
            if self._is_in_lanes(node.pages, GLOBAL):
                passed.append(entry)
            else:
                found = node
        for entry in passed:
            heapq.heappush(self._leaves, entry)
        return found

    def _windows_of(self, node: Node) -> list[int]:
        first = node.first
        assert first is not None
        pages = []
        for above in node.up():
            if above.stop <= first * self.page:
                break
            pages += [w.page for number, w in above.windows.items() if number >= first]
        return pages

    def _is_in_lanes(self, pages: Sequence[int], kind: str) -> bool:
        return all(self._holdings.others_hold(kind, page) for page in pages)
