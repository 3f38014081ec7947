"""Writing GGUF: one file, or several parts."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quant.gguf_parse import MAX_ALIGNMENT, MAX_KEY_BYTES, VERSIONS
from quant.gguf_values import (
    ARRAY_KIND,
    DEFAULT_ALIGNMENT,
    KIND_NUMBERS,
    MAGIC,
    SCALAR_KINDS,
    STRING_KIND,
    TYPED_SCALARS,
    Metadata,
    StringArray,
)
from quant.qtensor import QTensor

# Other readers keep names in 64-byte fields that end in a zero byte.
MAX_NAME_BYTES = 63

_KIND_OF_TYPE = {scalar: name for name, scalar in TYPED_SCALARS.items()}
_KIND_OF_DTYPE = {dtype: name for name, dtype in SCALAR_KINDS.values()}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[QTensor] | Mapping[str, QTensor],
    *,
    version: int = 3,
    alignment: int = DEFAULT_ALIGNMENT,
    n_parts: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write a model; the file appears under its name when it is complete, and not before.

    Shapes:
        metadata   key -> value.  A Metadata keeps its stored types.  Otherwise an int becomes u32 if it fits,
                   else i32, i64, u64; a float f32; a list of str, bool, int (i32, else i64) or float (f32) an
                   array; NumPy values keep their type; wrappers such as gguf.U64(5) say it outright
        tensors    in file order; a mapping gives the names
        alignment  of tensor data, power of two; stored as general.alignment unless it is 32
        n_parts    above 1, `m.gguf` becomes m-00001-of-0000N.gguf and so on; the first has the metadata
        progress   called with (bytes of tensors written, of how many) after each tensor
    Returns:
        the paths written
    """
    path = Path(path)
    if version not in VERSIONS:
        raise ValueError(f"{path}: version {version}; this writer knows 2 and 3")
    if alignment & (alignment - 1) or not 8 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"{path}: alignment {alignment}; expected a power of two, 8 .. {MAX_ALIGNMENT}")
    entries = _named(tensors, path)
    if not 1 <= n_parts <= max(1, len(entries)):
        most = max(1, len(entries))
        raise ValueError(f"{path}: {n_parts} parts for {len(entries)} tensors; expected 1 .. {most}")
    values = _encoded_metadata(metadata, alignment, path)
    jobs = [(path, values, entries)] if n_parts == 1 else _split_jobs(path, values, entries, n_parts)
    report = _counter(progress, sum(tensor.nbytes for _, tensor in entries))
    temporary = [target.with_name(f".{target.name}.{os.getpid()}.tmp") for target, _, _ in jobs]
    try:
        for name, (_, part_values, part_entries) in zip(temporary, jobs, strict=True):
            with open(name, "wb") as file:
                _write_part(file, part_values, part_entries, version, alignment, report)
        for name, (target, _, _) in zip(temporary, jobs, strict=True):
            os.replace(name, target)
    finally:
        for name in temporary:
            name.unlink(missing_ok=True)
    return [target for target, _, _ in jobs]


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """A function that is told the bytes of each tensor as it is written."""
    done = 0

    def report(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, total)

    return report


def _named(tensors: Iterable[QTensor] | Mapping[str, QTensor], path: Path) -> list[tuple[str, QTensor]]:
    pairs = list(tensors.items()) if isinstance(tensors, Mapping) else [(t.name, t) for t in tensors]
    seen: set[str] = set()
    for name, tensor in pairs:
        size = len(name.encode())
        if not 1 <= size <= MAX_NAME_BYTES:
            raise ValueError(f"{path}: tensor name {name!r} of {size} bytes; expected 1 .. {MAX_NAME_BYTES}")
        if name in seen:
            raise ValueError(f"{path}: two tensors named {name!r}; give each its own name")
        if tensor.ndim > 4 or 0 in tensor.shape:
            raise ValueError(f"{path}: {name}: shape {list(tensor.shape)}; expected 1 to 4 axes, none empty")
        seen.add(name)
    return pairs


def _encoded_metadata(metadata: Mapping[str, Any], alignment: int, path: Path) -> dict[str, bytes]:
    encoded: dict[str, bytes] = {}
    for key in metadata:
        if not 1 <= len(key.encode()) <= MAX_KEY_BYTES:
            raise ValueError(f"{path}: metadata key {key[:40]!r}; expected 1 .. {MAX_KEY_BYTES} bytes")
        if key == "general.alignment":
            continue  # the argument decides
        value = metadata.typed(key) if isinstance(metadata, Metadata) else metadata[key]
        encoded[key] = _encode(value, f"{path}: key {key!r}")
    if alignment != DEFAULT_ALIGNMENT:
        encoded["general.alignment"] = _scalar("u32", alignment, "general.alignment")
    return encoded


def _encode(value: Any, place: str) -> bytes:
    """Kind and value as they stand in the file."""
    if isinstance(value, str):
        return struct.pack("<I", STRING_KIND) + _string(value)
    if isinstance(value, StringArray):
        return _string_array([value.raw(i) for i in range(len(value))])
    if isinstance(value, np.ndarray):
        return _number_array(value, place)
    if isinstance(value, (list, tuple)):
        return _list(value, place)
    return _scalar(_scalar_kind(value, place), value, place)


def _scalar_kind(value: Any, place: str) -> str:
    if type(value) in _KIND_OF_TYPE:
        return _KIND_OF_TYPE[type(value)]
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, np.generic) and value.dtype in _KIND_OF_DTYPE:
        return _KIND_OF_DTYPE[value.dtype]
    if isinstance(value, int):
        for kind in ("u32", "i32", "i64", "u64"):
            bounds = np.iinfo(SCALAR_KINDS[KIND_NUMBERS[kind]][1])
            if bounds.min <= value <= bounds.max:
                return kind
    if isinstance(value, float):
        return "f32"
    raise ValueError(
        f"{place}: {type(value).__name__} {str(value)[:40]} has no GGUF type; expected str, bool, "
        "int (64 bits), float, a list of these, or a NumPy array"
    )


def _scalar(kind: str, value: Any, place: str) -> bytes:
    number = KIND_NUMBERS[kind]
    dtype = SCALAR_KINDS[number][1]
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max:
        raise ValueError(f"{place}: {int(value)} does not fit {kind}; choose a wider type")
    with np.errstate(over="ignore"):
        return struct.pack("<I", number) + np.asarray(value).astype(dtype).tobytes()


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _string_array(items: list[bytes]) -> bytes:
    header = struct.pack("<IIQ", ARRAY_KIND, STRING_KIND, len(items))
    return header + b"".join([struct.pack("<Q", len(raw)) + raw for raw in items])


def _number_array(values: np.ndarray, place: str) -> bytes:
    kind = _KIND_OF_DTYPE.get(values.dtype.newbyteorder("<"))
    if kind is None or values.ndim != 1:
        raise ValueError(
            f"{place}: array {values.dtype}{list(values.shape)}; expected one axis of bool, integers, "
            "float32 or float64"
        )
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return struct.pack("<IIQ", ARRAY_KIND, KIND_NUMBERS[kind], len(values)) + little.tobytes()


def _list(items: list[Any] | tuple[Any, ...], place: str) -> bytes:
    if not items:
        raise ValueError(f"{place}: an empty list has no type; write an empty NumPy array of the wanted type")
    if all(isinstance(item, str) for item in items):
        return _string_array([item.encode() for item in items])
    if all(isinstance(item, (bool, np.bool_)) for item in items):
        return _number_array(np.array(items, np.bool_), place)
    if any(isinstance(item, (bool, np.bool_)) for item in items):
        raise ValueError(f"{place}: a list of bools and others; expected all of one type")
    if all(isinstance(item, (int, float, np.integer, np.floating)) for item in items):
        if any(isinstance(item, (float, np.floating)) for item in items):
            return _number_array(np.array(items, np.float32), place)
        for dtype in (np.int32, np.int64):
            if np.iinfo(dtype).min <= min(items) and max(items) <= np.iinfo(dtype).max:
                return _number_array(np.array(items, dtype), place)
        raise ValueError(f"{place}: a list with {max(items, key=abs)} does not fit i64; write a uint64 array")
    raise ValueError(f"{place}: a list of mixed types; expected all str, all bool, or all numbers")


def _split_jobs(
    path: Path, values: dict[str, bytes], entries: list[tuple[str, QTensor]], n_parts: int
) -> list[tuple[Path, dict[str, bytes], list[tuple[str, QTensor]]]]:
    """Contiguous runs of tensors, of about equal bytes, at least one tensor each."""
    ends = np.cumsum([tensor.nbytes for _, tensor in entries])
    stem = path.name.removesuffix(".gguf")
    jobs = []
    begin = 0
    for no in range(n_parts):
        share = int(np.searchsorted(ends, ends[-1] * (no + 1) / n_parts)) + 1
        stop = min(max(share, begin + 1), len(entries) - (n_parts - 1 - no))
        split = {
            "split.no": _scalar("u16", no, "split.no"),
            "split.count": _scalar("u16", n_parts, "split.count"),
            "split.tensors.count": _scalar("i32", len(entries), "split.tensors.count"),
        }
        own = values if no == 0 else {k: v for k, v in values.items() if k == "general.alignment"}
        name = f"{stem}-{no + 1:05d}-of-{n_parts:05d}.gguf"
        jobs.append((path.with_name(name), own | split, entries[begin:stop]))
        begin = stop
    return jobs


def _write_part(
    file: BinaryIO,
    values: dict[str, bytes],
    entries: list[tuple[str, QTensor]],
    version: int,
    alignment: int,
    report: Callable[[int], None],
) -> None:
    file.write(MAGIC + struct.pack("<IQQ", version, len(entries), len(values)))
    for key, encoded in values.items():
        file.write(_string(key) + encoded)
    offset = 0
    for name, tensor in entries:
        dims = tensor.shape[::-1]
        file.write(_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        file.write(struct.pack("<IQ", tensor.format.ggml_id, offset))
        offset += tensor.nbytes + -tensor.nbytes % alignment
    file.write(bytes(-file.tell() % alignment))
    for _, tensor in entries:
        _write_data(file, tensor)
        file.write(bytes(-tensor.nbytes % alignment))
        report(tensor.nbytes)


def _write_data(file: BinaryIO, tensor: QTensor) -> None:
    """One leading index at a time, so that a sliced tensor is never copied whole."""
    if tensor.data.flags.c_contiguous:
        file.write(tensor.data.reshape(-1).data)
        return
    for part in tensor.data:
        file.write(np.ascontiguousarray(part).tobytes())
