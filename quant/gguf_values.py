"""Metadata of a GGUF file: value kinds, typed scalars for the writer, the lazy string array, the mapping."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

Buffer = bytes | mmap.mmap | memoryview

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

STRING_KIND, ARRAY_KIND = 8, 9

# Name and little-endian layout of each scalar kind, by the number that stands in the file.
SCALAR_KINDS: dict[int, tuple[str, np.dtype[Any]]] = {
    0: ("u8", np.dtype("<u1")),
    1: ("i8", np.dtype("<i1")),
    2: ("u16", np.dtype("<u2")),
    3: ("i16", np.dtype("<i2")),
    4: ("u32", np.dtype("<u4")),
    5: ("i32", np.dtype("<i4")),
    6: ("f32", np.dtype("<f4")),
    7: ("bool", np.dtype("?")),
    10: ("u64", np.dtype("<u8")),
    11: ("i64", np.dtype("<i8")),
    12: ("f64", np.dtype("<f8")),
}
KIND_NAMES = {number: name for number, (name, _) in SCALAR_KINDS.items()}
KIND_NAMES |= {STRING_KIND: "str", ARRAY_KIND: "array"}
KIND_NUMBERS = {name: number for number, name in KIND_NAMES.items()}


class U8(int):
    """An int to be written as u8; likewise the classes below."""


class I8(int): ...


class U16(int): ...


class I16(int): ...


class U32(int): ...


class I32(int): ...


class U64(int): ...


class I64(int): ...


class F32(float): ...


class F64(float): ...


_TYPED = (U8, I8, U16, I16, U32, I32, U64, I64, F32, F64)
TYPED_SCALARS: dict[str, type] = {scalar.__name__.lower(): scalar for scalar in _TYPED}


class StringArray(Sequence[str]):
    """The strings of one metadata array, decoded when asked for.

    A vocabulary has hundreds of thousands of strings, and most readers of a file want few of them or none.
    """

    def __init__(self, buffer: Buffer, starts: np.ndarray, end: int, place: str) -> None:
        """`starts` i64[n]: where the text of each string begins in `buffer`; the last one stops at `end`."""
        self._view = memoryview(buffer)
        self._starts = starts
        self._end = end
        self._place = place

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, i: int) -> bytes:
        """String `i` as the bytes in the file."""
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"{self._place}: item {i} of {n}")
        i %= n
        stop = self._starts[i + 1] - 8 if i + 1 < n else self._end  # 8: the length field of the next string
        return bytes(self._view[self._starts[i] : stop])

    def raw_bytes(self) -> memoryview:
        """All strings as they lie in the file, lengths between them: equal bytes are equal strings."""
        return self._view[self._starts[0] : self._end] if len(self) else self._view[:0]

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self._decode(i, self.raw(i))

    def __iter__(self) -> Iterator[str]:
        if not len(self):
            return
        starts = self._starts.tolist()
        base = starts[0]
        text = bytes(self._view[base : self._end])  # one copy, then cheap slices
        start = base
        for i, after in enumerate([*starts[1:], self._end + 8]):
            raw = text[start - base : after - 8 - base]
            try:
                yield raw.decode()
            except UnicodeDecodeError:
                yield self._decode(i, raw)
            start = after

    def _decode(self, i: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as fault:
            raise ValueError(
                f"{self._place}, item {i}: got {raw[:40]!r}, expected UTF-8 text (byte {fault.start}). "
                "The file is damaged: download it again"
            ) from None

    def tolist(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


class Metadata(Mapping[str, Any]):
    """Keys and values of a file: Python scalars, str, NumPy arrays, StringArray; see `kind`."""

    def __init__(self, values: dict[str, Any], kinds: dict[str, str]) -> None:
        self._values = values
        self._kinds = kinds

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def kind(self, key: str) -> str:
        """Stored type of a value: "u32", "str", "bool", ..., and with "[]" after it for an array."""
        return self._kinds[key]

    def typed(self, key: str) -> Any:
        """The value in the form that makes `write_gguf` store it with the same type."""
        scalar = TYPED_SCALARS.get(self._kinds[key])
        return self._values[key] if scalar is None else scalar(self._values[key])

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys)"
