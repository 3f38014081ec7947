"""Byte-pair encoding: neighbours are joined by rank, on tables made from a vocabulary.

    symbols   every character of the text is a token; one that the vocabulary lacks is its UTF-8 bytes, tokens
              like <0x0A>, or, in a vocabulary without all of these, the unknown token, one for a run of them
    joining   of all pairs of neighbours that are in the list of merges the one that stands earliest is
              joined, of equal ones the leftmost, until there is none

`Tables` are what this looks up; they are made once (`make_tables`) and may be kept in a file (bpe_kept.py).
`Bpe.join` is the definition. Who encodes much text goes on with the `tokenizers` library, which does the same
several times as fast, but takes 0.9 s and 150 MB to set up for a vocabulary of 262,144 tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

CHARACTERS_BEFORE_LIBRARY = 500_000  # joining so many takes as long as setting up the library
MUCH = 4000  # characters that the library encodes without the interpreter lock, which it does for lists only
_NONE = -1  # no token, or no rank
_ADVICE = "vocabulary and merges must come from one file: convert the model again"


class Tables(NamedTuple):
    """What joining looks up, as arrays in ascending order.

    pairs         i64[n]  left id << 32 | right id, of the pairs that may be joined
    ranks, joined i32[n]  where the pair stands in the list of merges, and the id that it becomes
    characters    i32[c]  code points of the characters that are tokens
    character_ids i32[c]  their ids
    byte_ids      i32[256], or i32[0] where the vocabulary does not have all of <0x00> to <0xFF>
    unknown       i32[1]  the unknown token, or -1
    """

    pairs: np.ndarray
    ranks: np.ndarray
    joined: np.ndarray
    characters: np.ndarray
    character_ids: np.ndarray
    byte_ids: np.ndarray
    unknown: np.ndarray


def vocabulary(tokens: Sequence[str], markers: set[str]) -> dict[str, int]:
    """Ids by spelling; of equal tokens the last one counts. Markers are left out, so that no merge and no
    typed text can make one.
    """
    ids = dict(zip(tokens, range(len(tokens))))
    for text in markers:
        ids.pop(text, None)
    return ids


def make_tables(ids: Mapping[str, int], merges: Sequence[str], unk: str | None) -> Tables:
    """The tables of a vocabulary. A fault of it is a ValueError of one line."""
    byte_names = [f"<0x{b:02X}>" for b in range(256)]
    byte_ids = [ids[name] for name in byte_names] if all(name in ids for name in byte_names) else []
    if unk is None and not byte_ids:
        raise ValueError(
            "tokenizer.ggml.tokens: neither all of <0x00> to <0xFF> nor an unknown token "
            "(tokenizer.ggml.unknown_token_id), so some text would have no tokens; convert the model again"
        )
    triples = chain.from_iterable(_triples(ids, merges))
    found = np.fromiter(triples, np.int64, 3 * len(merges)).reshape(-1, 3)
    pairs = found[:, 0] << 32 | found[:, 1]
    order = np.argsort(pairs, kind="stable")
    counts = np.ones(len(order), bool)  # of equal pairs the last one
    counts[:-1] = pairs[order[1:]] != pairs[order[:-1]]
    order = order[counts]
    characters = sorted((ord(text), i) for text, i in ids.items() if len(text) == 1)
    codes, code_ids = np.array(characters, np.int32).reshape(-1, 2).T
    unknown = _NONE if unk is None else ids[unk]
    return Tables(
        pairs[order],
        order.astype(np.int32),
        found[order, 2].astype(np.int32),
        np.ascontiguousarray(codes),
        np.ascontiguousarray(code_ids),
        np.array(byte_ids, np.int32),
        np.array([unknown], np.int32),
    )


def _triples(ids: Mapping[str, int], merges: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Left, right and joined id of each merge, written "left right"; a space in a piece is U+2581."""
    for rank, merge in enumerate(merges):
        try:
            left, right = merge.split(" ")
            yield ids[left], ids[right], ids[left + right]
        except KeyError as missing:
            raise ValueError(
                f"tokenizer.ggml.merges[{rank}]: {merge!r}: {missing} is no token, or a marker; {_ADVICE}"
            ) from None
        except ValueError:
            raise ValueError(
                f"tokenizer.ggml.merges[{rank}]: {merge!r}, expected two pieces with one space between; "
                f"{_ADVICE}"
            ) from None


class Bpe:
    """A vocabulary's way from characters to tokens.

    make_library  makes the `tokenizers` object (bpe_library.py)
    """

    def __init__(self, tables: Tables, make_library: Callable[[], Any]):
        self._tables = tables
        self._make_library, self._library = make_library, cast(Any, None)
        self._n_characters = 0
        pairs, ranks, joined = (array.data for array in tables[:3])
        self._look_up = lru_cache(1 << 16)(
            lambda left, right: _find(pairs, ranks, joined, left << 32 | right)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text: by `join` at first, by the library once it is worth it."""
        self._n_characters += len(text)
        if self._n_characters <= CHARACTERS_BEFORE_LIBRARY:
            return self.join(text)
        self.set_up()
        if len(text) < MUCH:
            return self._library.encode(text, add_special_tokens=False).ids
        return self._library.encode_batch([text], add_special_tokens=False)[0].ids

    def set_up(self) -> None:
        """Makes the library's object now: 1 s for 262,144 tokens, in which other threads hardly run."""
        if self._library is None:
            self._library = self._make_library()
            self._n_characters = max(self._n_characters, CHARACTERS_BEFORE_LIBRARY)

    def join(self, text: str) -> list[int]:
        """Ids of a text. Cost: n log n for n characters, 1 to 2 us each."""
        symbols = self.symbols(text)
        n = len(symbols)
        if n < 2:
            return symbols.tolist()
        ranks, made = self._ranks_of(symbols)
        at = np.flatnonzero(ranks != _NONE)
        heap = np.sort(ranks[at] << 32 | at).tolist()  # rank, then place; a sorted list is a heap
        ids, ranks, made = symbols.tolist(), ranks.tolist(), made.tolist()
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))

        def meet(left: int, right: int) -> None:
            """The symbols at these places are neighbours now."""
            ranks[left], made[left] = self._look_up(ids[left], ids[right])
            if ranks[left] != _NONE:
                heappush(heap, ranks[left] << 32 | left)

        while heap:
            rank, left = divmod(heappop(heap), 1 << 32)
            if ranks[left] != rank:
                continue  # one of the two has been joined with another since
            right = after[left]
            ids[left], ids[right] = made[left], _NONE
            ranks[left] = ranks[right] = _NONE
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
                meet(left, after[left])
            if before[left] >= 0:
                meet(before[left], left)
        return [i for i in ids if i != _NONE]

    def symbols(self, text: str) -> np.ndarray:
        """i64[n]: the tokens of single characters and bytes, before any is joined."""
        tables = self._tables
        codes = np.frombuffer(text.encode("utf-32-le"), np.int32)
        found, ids = _positions(tables.characters, codes), np.full(len(codes), _NONE, np.int64)
        ids[found >= 0] = tables.character_ids[found[found >= 0]]
        if (ids != _NONE).all():
            return ids
        if len(tables.byte_ids):
            raw = [np.frombuffer(chr(code).encode(), np.uint8) for code in codes[ids == _NONE]]
            counts = np.ones(len(ids), np.int64)
            counts[ids == _NONE] = [len(part) for part in raw]
            spread = np.repeat(ids, counts)
            spread[spread == _NONE] = tables.byte_ids[np.concatenate(raw)]
            return spread
        first_of_run = (ids == _NONE) & np.append(True, ids[:-1] != _NONE)
        ids[first_of_run] = tables.unknown[0]
        return ids[ids != _NONE]

    def _ranks_of(self, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """i64[n] each: rank and joined id of every symbol with the next one; -1 where they do not join."""
        found = _positions(self._tables.pairs, symbols[:-1] << 32 | symbols[1:])
        ranks, made = (np.full(len(symbols), _NONE, np.int64) for _ in range(2))
        at = np.flatnonzero(found >= 0)
        ranks[at], made[at] = self._tables.ranks[found[at]], self._tables.joined[found[at]]
        return ranks, made


def _positions(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where each key stands in a sorted table; -1 if it does not."""
    if not len(table):
        return np.full(len(keys), -1)
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[at] == keys, at, -1)


def _find(pairs: Any, ranks: Any, joined: Any, key: int) -> tuple[int, int]:
    """The same for one key, without NumPy, which takes longer over one number."""
    at = bisect_left(pairs, key)
    if at == len(pairs) or pairs[at] != key:
        return _NONE, _NONE
    return ranks[at], joined[at]
