"""Parsing one GGUF file: each length, count and offset is checked against the bytes that exist, then used.

    magic "GGUF" | u32 version | u64 n_tensors | u64 n_keys
    n_keys    x  string key | u32 kind | value            string = u64 length | UTF-8 bytes
    n_tensors x  string name | u32 n_dims | u64 dims[n_dims], row length first | u32 type | u64 offset
    padding to the alignment, then the tensor data; offsets count from here

Only the header is read; the tensors are views on the bytes behind it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant.format import Format
from quant.gguf_sniff import describe_content
from quant.gguf_strings import CutShort, find_strings
from quant.gguf_values import (
    ARRAY_KIND,
    DEFAULT_ALIGNMENT,
    KIND_NAMES,
    MAGIC,
    SCALAR_KINDS,
    STRING_KIND,
    Buffer,
    Metadata,
    StringArray,
)
from quant.qtensor import QTensor
from quant.registry import format_by_id

VERSIONS = (2, 3)

# No real file comes near these; they bound the time and the memory that a hostile header can take.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 255
MAX_STRING_BYTES = 16 << 20
MAX_ALIGNMENT = 1 << 20

MIN_KEY_RECORD = 8 + 1 + 4 + 1  # length, one character, kind, a one-byte value
MIN_TENSOR_RECORD = 8 + 1 + 4 + 4 + 8  # length, one character, n_dims = 0, type, offset

DOWNLOAD_AGAIN = "The file is cut short or damaged: download it again"
MADE_WRONGLY = "The program that wrote this file is at fault: convert the model again"

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


def shown(name: str) -> str:
    """A name from the file, quoted and short enough for a line."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class _Cursor:
    """A position in the header, and the only code that reads from it."""

    def __init__(self, buffer: Buffer, path: str) -> None:
        self.view = memoryview(buffer).cast("B")
        self.path = path
        self.pos = 0

    def fault(self, place: str, got: str, expected: str, advice: str) -> ValueError:
        return ValueError(f"{self.path}: {place}: got {got}, expected {expected}. {advice}")

    @property
    def left(self) -> int:
        return len(self.view) - self.pos

    def need(self, n: int, place: str) -> None:
        """n more bytes must exist."""
        if n > self.left:
            got = f"{self.left} bytes to the end of the file"
            raise self.fault(f"byte {self.pos}, {place}", got, f"{n}", DOWNLOAD_AGAIN)

    def u32(self, place: str) -> int:
        self.need(4, place)
        (value,) = _U32(self.view, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, place: str) -> int:
        self.need(8, place)
        (value,) = _U64(self.view, self.pos)
        self.pos += 8
        return int(value)

    def text(self, limit: int, place: str) -> str:
        at = self.pos
        length = self.u64(f"length of {place}")
        if length > limit:
            got = f"a string of {length} bytes"
            raise self.fault(f"byte {at}, {place}", got, f"at most {limit}", DOWNLOAD_AGAIN)
        self.need(length, place)
        raw = bytes(self.view[self.pos : self.pos + length])
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fault(f"byte {at}, {place}", f"{raw[:40]!r}", "UTF-8 text", DOWNLOAD_AGAIN) from None

    def numbers(self, dtype: np.dtype[Any], count: int, place: str) -> np.ndarray:
        """A copy, so that it is aligned and outlives the mapping."""
        self.need(count * dtype.itemsize, place)
        values = np.frombuffer(self.view, dtype, count, self.pos).copy() if count else np.empty(0, dtype)
        if dtype == np.bool_ and (bad := values.view(np.uint8) > 1).any():
            i = int(bad.argmax())
            got = f"the byte {values.view(np.uint8)[i]}"
            raise self.fault(f"byte {self.pos + i}, {place}", got, "a bool, 0 or 1", DOWNLOAD_AGAIN)
        self.pos += count * dtype.itemsize
        return values

    def strings(self, count: int, place: str) -> StringArray:
        self.need(8 * count, place)
        try:
            starts, self.pos = find_strings(self.view, self.pos, count)
        except CutShort as cut:
            where = f"byte {cut.at}, {place}, item {cut.i} of {count}"
            raise self.fault(
                where, "a string longer than the file", "one inside it", DOWNLOAD_AGAIN
            ) from None
        return StringArray(self.view, starts, self.pos, f"{self.path}: {place}")


@dataclass(frozen=True)
class Part:
    """One file of a model: what its header says, with the tensors as views on `buffer`."""

    path: str
    version: int
    alignment: int
    nbytes: int
    metadata: Metadata
    tensors: dict[str, QTensor]


def parse_part(buffer: Buffer, path: str) -> Part:
    """Parse the bytes of one GGUF file; `path` is for messages."""
    cursor = _Cursor(buffer, path)
    version = _read_version(cursor)
    n_tensors = cursor.u64("number of tensors")
    n_keys = cursor.u64("number of metadata keys")
    _check_count(cursor, "number of metadata keys", n_keys, MAX_KEYS, MIN_KEY_RECORD)
    _check_count(cursor, "number of tensors", n_tensors, MAX_TENSORS, MIN_TENSOR_RECORD)
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    infos = [_read_tensor_info(cursor, t, n_tensors) for t in range(n_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    _check_data_ranges(cursor, infos, data_start, alignment)
    raw = np.frombuffer(cursor.view, np.uint8)
    tensors: dict[str, QTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise cursor.fault(f"tensor {shown(info.name)}", "two of this name", "one", MADE_WRONGLY)
        begin = data_start + info.offset
        data = raw[begin : begin + info.nbytes].reshape(*info.shape[:-1], info.row_bytes)
        tensors[info.name] = QTensor(info.format, info.shape, data, info.name)
    return Part(path, version, alignment, len(cursor.view), metadata, tensors)


def _read_version(cursor: _Cursor) -> int:
    if bytes(cursor.view[:4]) != MAGIC:
        found = describe_content(bytes(cursor.view[:512]), len(cursor.view))
        advice = "Check what was downloaded, and from where"
        raise cursor.fault("byte 0", found, "a GGUF model (it starts with GGUF)", advice)
    cursor.pos = 4
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        got = f"{version:#x}, a big-endian file"
        raise cursor.fault("byte 4, version", got, "little-endian", "Get the little-endian file")
    if version not in VERSIONS:
        advice = "Convert the model again with a current tool"
        raise cursor.fault("byte 4, version", f"{version}", "2 or 3", advice)
    return version


def _check_count(cursor: _Cursor, place: str, count: int, limit: int, record_bytes: int) -> None:
    possible = min(limit, cursor.left // record_bytes)
    if count > possible:
        expected = f"at most {possible} (the file is {len(cursor.view)} bytes)"
        raise cursor.fault(place, f"{count}", expected, DOWNLOAD_AGAIN)


def _read_metadata(cursor: _Cursor, n_keys: int) -> Metadata:
    values: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for k in range(n_keys):
        at = cursor.pos
        key = cursor.text(MAX_KEY_BYTES, f"key {k} of {n_keys}")
        if not key:
            raise cursor.fault(f"byte {at}, key {k} of {n_keys}", "an empty key", "a name", MADE_WRONGLY)
        if key in values:
            raise cursor.fault(
                f"byte {at}, key {shown(key)}", "it a second time", "each key once", MADE_WRONGLY
            )
        kinds[key], values[key] = _read_value(cursor, f"key {shown(key)}")
    return Metadata(values, kinds)


def _read_value(cursor: _Cursor, place: str) -> tuple[str, Any]:
    kind = cursor.u32(f"kind of {place}")
    if kind in SCALAR_KINDS:
        name, dtype = SCALAR_KINDS[kind]
        return name, cursor.numbers(dtype, 1, place)[0].item()
    if kind == STRING_KIND:
        return "str", cursor.text(MAX_STRING_BYTES, place)
    if kind == ARRAY_KIND:
        return _read_array(cursor, place)
    raise cursor.fault(f"byte {cursor.pos - 4}, {place}", f"value kind {kind}", "0 .. 12", DOWNLOAD_AGAIN)


def _read_array(cursor: _Cursor, place: str) -> tuple[str, Any]:
    at = cursor.pos
    kind = cursor.u32(f"item kind of {place}")
    if kind not in SCALAR_KINDS and kind != STRING_KIND:
        got = "an array of arrays" if kind == ARRAY_KIND else f"an array of kind {kind}"
        raise cursor.fault(f"byte {at}, {place}", got, "an array of numbers, bools or strings", MADE_WRONGLY)
    count = cursor.u64(f"length of {place}")
    place = f"{place} ({KIND_NAMES[kind]}[{count}])"
    if kind == STRING_KIND:
        return "str[]", cursor.strings(count, place)
    name, dtype = SCALAR_KINDS[kind]
    return f"{name}[]", cursor.numbers(dtype, count, place)


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    value, kind = metadata[key], metadata.kind(key)
    if kind != "u32" or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        expected = f"a u32 that is a power of two, 8 .. {MAX_ALIGNMENT}"
        raise cursor.fault(f"key {shown(key)}", f"{str(value)[:40]} ({kind})", expected, MADE_WRONGLY)
    return int(value)


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    format: Format
    shape: tuple[int, ...]
    row_bytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def _read_tensor_info(cursor: _Cursor, t: int, n_tensors: int) -> _TensorInfo:
    at = cursor.pos
    name = cursor.text(MAX_NAME_BYTES, f"name of tensor {t} of {n_tensors}")
    if not name:
        raise cursor.fault(f"byte {at}, tensor {t} of {n_tensors}", "an empty name", "a name", MADE_WRONGLY)
    place = f"tensor {shown(name)}"
    n_dims = cursor.u32(f"number of dims of {place}")
    if n_dims > 4:
        raise cursor.fault(f"byte {cursor.pos - 4}, {place}", f"{n_dims} dims", "at most 4", DOWNLOAD_AGAIN)
    dims = [cursor.u64(f"dims of {place}") for _ in range(n_dims)] or [1]  # no dims: a single number
    if not all(0 < dim < 1 << 63 for dim in dims):
        got = f"dims {dims}"
        raise cursor.fault(f"byte {at}, {place}", got, "each at least 1 and below 2^63", MADE_WRONGLY)
    type_id = cursor.u32(f"type of {place}")
    offset = cursor.u64(f"offset of {place}")
    try:
        fmt = format_by_id(type_id)
        row_bytes = fmt.row_bytes(dims[0])
    except ValueError as fault:
        raise ValueError(f"{cursor.path}: {place}: {fault}") from None
    return _TensorInfo(name, fmt, tuple(reversed(dims)), row_bytes, offset)


def _check_data_ranges(cursor: _Cursor, infos: list[_TensorInfo], data_start: int, alignment: int) -> None:
    """Aligned, inside the file, and no two over the same bytes."""
    size = len(cursor.view)
    previous_end, previous = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        place = f"tensor {shown(info.name)} ({info.format.name} {list(info.shape)})"
        if info.offset % alignment:
            raise cursor.fault(place, f"offset {info.offset}", f"a multiple of {alignment}", DOWNLOAD_AGAIN)
        if info.offset < previous_end:
            got = f"offset {info.offset}, inside {shown(previous)}"
            raise cursor.fault(place, got, f"{previous_end} or more", MADE_WRONGLY)
        previous_end, previous = info.offset + info.nbytes, info.name
        if data_start + previous_end > size:
            got = f"a file of {size} bytes"
            raise cursor.fault(place, got, f"at least {data_start + previous_end}", DOWNLOAD_AGAIN)
