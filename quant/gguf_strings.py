"""Where the strings of a GGUF array begin: a chain of lengths, followed many links at a time.

    u64 length | bytes | u64 length | bytes | ...

Each length says where the next one stands, so a plain loop takes one step per string: 0.13 s for the 777,058
strings of a vocabulary with its merges.  Here links are guessed from what short strings look like, a byte
that is not zero and seven that are, and a guess counts only as far as each link ends where the next one
begins, from the known start on.  What does not look like that is walked step by step.
"""

from __future__ import annotations

import struct

import numpy as np

_U64 = struct.Struct("<Q").unpack_from
_STEPS = 64  # strings walked one by one before the next guess
_SMALL, _LARGE = 1 << 12, 1 << 18  # bytes looked at per guess: more while guesses hold


class CutShort(Exception):
    """String `i`, whose length field is at byte `at`, does not end inside the bytes."""

    def __init__(self, i: int, at: int) -> None:
        self.i, self.at = i, at


def find_strings(view: memoryview, pos: int, count: int) -> tuple[np.ndarray, int]:
    """Follow `count` strings from byte `pos` on.

    Returns:
        i64[count], where the bytes of each begin, and where the last one ends
    Raises:
        CutShort
    """
    starts, raw = np.empty(count, np.int64), np.frombuffer(view, np.uint8)
    n, window = 0, _SMALL
    while n < count:
        links = _guess(raw[pos : pos + window])[: count - n + 1]
        held = len(links) - 1
        if held > 0:
            starts[n : n + held] = links[:-1] + (pos + 8)
            at, n, pos = pos + int(links[-2]), n + held, pos + int(links[-1])
            if pos > len(view):
                raise CutShort(n - 1, at)
        if held < _STEPS:
            n, pos = _walk(view, pos, starts, n, min(n + _STEPS, count))
        window = min(2 * window, _LARGE) if held >= window // 64 else max(window // 2, _SMALL)
    return starts, pos


def _guess(raw: np.ndarray) -> np.ndarray:
    """i64[k + 1]: where k strings that follow each other from byte 0 on begin; where the last one ends."""
    zero = raw == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[1:-3] & four[4:]  # bytes p + 1 to p + 7
    at = np.flatnonzero(seven & ~zero[: len(seven)])
    if len(at) == 0 or at[0] != 0:
        return np.zeros(1, np.int64)
    end = at + 8 + raw[at]
    broken = end[:-1] != at[1:]
    k = int(broken.argmax()) + 1 if broken.any() else len(at)
    return np.append(at[:k], end[k - 1])


def _walk(view: memoryview, pos: int, starts: np.ndarray, n: int, stop: int) -> tuple[int, int]:
    """The same for strings n to stop - 1, one by one; the new n and position."""
    for i in range(n, stop):
        try:
            (length,) = _U64(view, pos)
        except struct.error:
            raise CutShort(i, pos) from None
        if length > len(view) - pos - 8:
            raise CutShort(i, pos)
        starts[i] = pos + 8
        pos += 8 + length
    return stop, pos
