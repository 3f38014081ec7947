"""Reading .safetensors files: a length, a JSON header, and the bytes of the tensors.

    u64 n | n bytes of JSON {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [from, to]}, ..} | data

Only plain floats become tensors here; a file may hold others, which stay out.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.qtensor import QTensor
from quant.registry import as_format

FORMATS = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}
MAX_HEADER = 100_000_000  # the limit of the format's own library
ADVICE = "Download the file again"


@dataclass(repr=False)
class SafetensorsFile:
    """An open file: tensors are views on the mapped file.  A number without axes has the shape (1,)."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, QTensor]


def looks_like_safetensors(head: bytes) -> bool:
    """From the first nine bytes of a file."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open a file; nothing of the weights is read.

    Raises:
        ValueError: one line with file, place, what was found, what was expected, what to do
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path}: is {what}, expected a safetensors file. Check the path")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            n = int.from_bytes(head, "little")
            if len(head) < 8 or n > min(MAX_HEADER, size - 8):
                raise ValueError(
                    f"{path}: header of {n} bytes, expected at most {max(0, size - 8)} in a file of {size}. "
                    f"{ADVICE}"
                )
            text = file.read(n)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror or error}), expected a safetensors file. Check the path"
        ) from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: the header is no JSON, expected names, types and places. {ADVICE}"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is no JSON object, expected names of tensors. {ADVICE}")
    metadata = header.pop("__metadata__", None)
    body = np.frombuffer(data, np.uint8)[8 + n :]
    tensors = {}
    for name, entry in header.items():
        tensor = _tensor(path, name, entry, body)
        if tensor is not None:
            tensors[name] = tensor
    return SafetensorsFile(path, metadata if isinstance(metadata, dict) else {}, tensors)


def _tensor(path: Path, name: str, entry: Any, body: np.ndarray) -> QTensor | None:
    def fault(got: str, expected: str) -> ValueError:
        return ValueError(f"{path}: tensor {name[:200]}: {got}, expected {expected}. {ADVICE}")

    if not isinstance(entry, dict):
        raise fault("no entry", "its type, shape and place")
    dtype, shape, place = (entry.get(key, "nothing") for key in ("dtype", "shape", "data_offsets"))
    if not (_whole_numbers(shape) and _whole_numbers(place)) or len(place) != 2:
        raise fault(f"shape {shape!r}, place {place!r}"[:200], "lists of whole numbers")
    if dtype not in FORMATS:
        return None
    form = as_format(FORMATS[dtype])
    n_bytes = math.prod(shape) * form.block_bytes
    if not 0 <= place[0] <= place[1] <= len(body):
        raise fault(f"bytes {place[0]} .. {place[1]}", f"them within the {len(body)} that there are")
    if place[1] - place[0] != n_bytes:
        raise fault(f"{place[1] - place[0]} bytes", f"{n_bytes} for {dtype} of shape {shape}")
    if 0 in shape:
        return None
    shape = shape or [1]
    return QTensor(form, tuple(shape), body[place[0] : place[1]].reshape(*shape[:-1], -1), name)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)
