"""PrefixKey: what a sequence is made of, so that two of them can be compared exactly.

Equal keys mean equal keys and values in the cache.  Token ids alone do not: all soft tokens have the id PAD.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refimpl.batch import SoftTokens


@dataclass(frozen=True)
class MediaItem:
    """An image, a frame or a sound: positions start .. stop-1.

    digest  32 bytes of SHA-256 (SoftTokens.digest), always compared whole
    block   its rows see each other: a prefix that ends inside is no prefix of the computation
    """

    start: int
    stop: int
    digest: bytes
    block: bool


@dataclass(frozen=True)
class PrefixKey:
    """A sequence; `key[:n]` is its first n positions.

    Shapes:
        tokens  i32[n]  token ids; row j of a media item is -1 - j, which no word is
        media   the items that begin before n, in order; the last one may end later
    """

    tokens: np.ndarray
    media: tuple[MediaItem, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, which: slice) -> PrefixKey:
        if which.start is not None or which.step is not None:
            raise ValueError(
                f"prefix key: got {which}, expected key[:n]. A key begins where its sequence does"
            )
        tokens = self.tokens[which]
        return PrefixKey(tokens, tuple(item for item in self.media if item.start < len(tokens)))

    def outside(self, n: int) -> int:
        """The last place up to n that is not inside an item whose rows see each other."""
        item = self._item_over(n)
        return item.start if item is not None and item.block and n < item.stop else n

    def label(self, position: int) -> int | bytes:
        """What stands at a position.  Unique among sequences that are equal before it."""
        item = self._item_over(position + 1)
        if item is not None and item.start == position:
            return item.digest
        return int(self.tokens[position])

    def first_difference(self, tokens: np.ndarray, media: Sequence[MediaItem], start: int) -> int:
        """How far this key goes on as a stretch of another sequence does.

        Args:
            tokens, media: the stretch from `start` on, and the items that begin in it. Both are equal before
        Returns:
            the first position that differs, or where the shorter one ends
        """
        mine = self.tokens[start : start + len(tokens)]
        differs = mine != tokens[: len(mine)]
        stop = start + (int(differs.argmax()) if differs.any() else len(mine))
        for item in media:
            if item.start < stop and self._item_over(item.start + 1) != item:
                return item.start
        return stop

    def _item_over(self, n: int) -> MediaItem | None:
        """The last item that begins before place n."""
        if not self.media:
            return None
        i = bisect_right(self.media, n - 1, key=lambda item: item.start)
        return self.media[i - 1] if i else None


def prefix_key(
    ids: Sequence[int] | np.ndarray, soft: Sequence[SoftTokens] = (), *, whole_images: bool = False
) -> PrefixKey:
    """The key of a sequence.

    Args:
        ids: all of its token ids; those under soft tokens are not looked at
        soft: its images and sounds, in order
        whole_images: the model's media attention is "bidirectional": rows of an image see each other
    """
    tokens = np.array(ids, np.int32)
    media = []
    for item in soft:
        if item.start >= len(tokens) or not len(item.rows):
            continue
        stop = min(item.stop, len(tokens))
        tokens[item.start : stop] = -1 - np.arange(stop - item.start)
        media.append(MediaItem(item.start, item.stop, item.digest, whole_images and item.vision))
    return PrefixKey(tokens, tuple(media))
