"""Nodes of the prefix tree: a run of tokens, the pages that hold it, and how runs are cut and joined.

A page covers positions number * P .. number * P + P - 1.  A run may begin and end inside a page: two
neighbours then hold the same page, and each knows it to be right up to its own end.  Where two children part
inside a page, each has a page of its own (who wrote on copied it first), which holds the positions before the
parting as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fastpath.kv.geometry import GLOBAL, SLIDING
from fastpath.kv.pages import PagePool
from fastpath.kv.prefix_key import MediaItem


class Holdings:
    """The pages of a tree.  However many nodes hold a page, the pool sees one owner: the tree."""

    def __init__(self, pools: Mapping[str, PagePool], page_bytes: Mapping[str, int]):
        self.pools, self.page_bytes = pools, page_bytes
        self.nbytes = 0
        self.count: dict[str, dict[int, int]] = {kind: {} for kind in pools}  # page -> nodes that hold it

    def hold(self, kind: str, page: int) -> None:
        count = self.count[kind]
        if page not in count:
            self.pools[kind].share(page)
            self.nbytes += self.page_bytes[kind]
        count[page] = count.get(page, 0) + 1

    def release(self, kind: str, page: int) -> None:
        count = self.count[kind]
        count[page] -= 1
        if not count[page]:
            del count[page]
            self.pools[kind].drop(page)
            self.nbytes -= self.page_bytes[kind]

    def others_hold(self, kind: str, page: int) -> bool:
        """Does a lane hold a page of this tree?"""
        return self.pools[kind].refs[page] > 1


@dataclass
class Window:
    """A sliding page on a node's run, and how many checkpoints at or below the node need it."""

    page: int
    n_users: int


@dataclass(eq=False)
class Node:
    """Positions start .. stop-1 of every sequence that passes here.

    Shapes:
        tokens    i32[stop - start]  as in PrefixKey
        media     the items that begin in the run
        pages     global pages of numbers start // P .. (stop - 1) // P
        windows   number -> sliding page, each right up to min(stop, end of the page)
        first     None: no checkpoint.  Else this node's stop is one: its window begins in the sliding page of
                  this number, and it counts among the users of all from there on, here and in nodes above
        used      the tree's clock when the checkpoint was last of use
    """

    parent: Node | None
    start: int
    tokens: np.ndarray
    media: tuple[MediaItem, ...] = ()
    pages: list[int] = field(default_factory=list)
    windows: dict[int, Window] = field(default_factory=dict)
    children: dict[int | bytes, Node] = field(default_factory=dict)
    first: int | None = None
    used: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def label(self) -> int | bytes:
        """What its parent knows it by (PrefixKey.label)."""
        if self.media and self.media[0].start == self.start:
            return self.media[0].digest
        return int(self.tokens[0])

    def numbers(self, page: int) -> range:
        """Of the pages that the run touches."""
        return range(self.start // page, (self.stop - 1) // page + 1) if len(self.tokens) else range(0)

    def up(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def split(self, at: int, page: int, holdings: Holdings) -> Node:
        """Cut the run at position `at`: the new node has its front, this one its end and its checkpoint."""
        assert self.parent is not None and self.start < at < self.stop
        cut, border = at - self.start, at // page
        front = Node(
            self.parent,
            self.start,
            self.tokens[:cut].copy(),
            tuple(item for item in self.media if item.start < at),
            self.pages[: (at - 1) // page - self.start // page + 1],
            {k: Window(w.page, w.n_users) for k, w in self.windows.items() if k * page < at},
            {},
        )
        if at % page:  # both have the page of the border
            if self.pages:
                holdings.hold(GLOBAL, front.pages[-1])
            if border in self.windows:
                holdings.hold(SLIDING, self.windows[border].page)
        self.parent.children[self.label] = front
        if self.pages:
            self.pages = self.pages[border - self.start // page :]
        self.start, self.tokens = at, self.tokens[cut:].copy()
        self.media = tuple(item for item in self.media if item.start >= at)
        self.windows = {k: w for k, w in self.windows.items() if k >= border}
        self.parent = front
        front.children[self.label] = self
        return front

    def join_parent(self, page: int, holdings: Holdings) -> None:
        """Take over the run of a parent that has no other child and no checkpoint."""
        front = self.parent
        assert front is not None and front.parent is not None
        assert front.first is None and len(front.children) == 1
        border, inside = self.start // page, self.start % page > 0
        if inside and self.pages:  # this node's page of the border holds more
            holdings.release(GLOBAL, front.pages[-1])
        if inside and border in front.windows:
            assert self.windows[border].n_users == front.windows[border].n_users
            holdings.release(SLIDING, front.windows.pop(border).page)
        self.pages = (front.pages[:-1] if inside else front.pages) + self.pages
        self.windows = {**front.windows, **self.windows}
        self.tokens = np.concatenate([front.tokens, self.tokens])
        self.media = front.media + self.media
        front.parent.children[front.label] = self
        self.parent, self.start = front.parent, front.start
