"""Opening a GGUF model: its file, or all the files of one that was split, mapped into memory.

Opening reads the headers only (gguf_parse.py).  The parts of a split model are named
m-00001-of-00003.gguf and so on, and any of them stands for the whole.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from quant.gguf_parse import DOWNLOAD_AGAIN, MADE_WRONGLY, Part, parse_part, shown
from quant.gguf_values import Metadata
from quant.qtensor import QTensor

_PART_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(repr=False)
class GGUFFile:
    """An open model: metadata of its first part, tensors of all parts, as views on the mapped files.

    Closing drops this object's references; the mapping goes when the last view on it does.
    """

    path: Path
    version: int
    alignment: int
    nbytes: int
    metadata: Metadata
    tensors: dict[str, QTensor]
    paths: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def close(self) -> None:
        self.tensors = {}
        self.metadata = Metadata({}, {})

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model; given any part of a split model, open all its parts.

    Returns:
        GGUFFile whose tensors are views: nothing of the weights is read
    Raises:
        ValueError: one line with file, place, what was found, what was expected, what to do
    """
    path = Path(path)
    given = _open_part(path)
    if "split.count" not in given.metadata:
        paths, parts = [path], [given]
    else:
        paths = _part_paths(path, given)
        parts = [given if p == path else _open_part(p) for p in paths]
        _check_split(parts)
    tensors: dict[str, QTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ValueError(
                    f"{part.path}: tensor {shown(name)} is also in an earlier part. {MADE_WRONGLY}"
                )
            tensors[name] = tensor
    first = parts[0]
    nbytes = sum(part.nbytes for part in parts)
    return GGUFFile(path, first.version, first.alignment, nbytes, first.metadata, tensors, tuple(paths))


def _open_part(path: Path) -> Part:
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a .gguf file. Name the file in it")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is a pipe or a device, expected a file. Save the model to a file first")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{path}: is empty (0 bytes), expected a GGUF model. {DOWNLOAD_AGAIN}")
        return parse_part(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), str(path))


def _part_paths(path: Path, part: Part) -> list[Path]:
    count = _split_number(part, "split.count")
    if count == 1:
        return [path]
    match = _PART_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ValueError(
            f"{path}: key 'split.count' says that this is one of {count} parts, but the name does not end in "
            f"-0000i-of-{count:05d}.gguf. Give the parts back the names they were published with"
        )
    paths = [path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(
            f"{path}: part missing in {path.parent}: {shown}. Expected {count} parts: download all"
        )
    return paths


def _check_split(parts: list[Part]) -> None:
    count = len(parts)
    for no, part in enumerate(parts):
        for key, expected in (("split.count", count), ("split.no", no)):
            if (got := _split_number(part, key)) != expected:
                raise ValueError(
                    f"{part.path}: key {shown(key)}: got {got}, expected {expected}. "
                    "Parts of different models, or renamed ones? Download all parts again"
                )
    if "split.tensors.count" in parts[0].metadata:
        expected = _split_number(parts[0], "split.tensors.count")
        got = sum(len(part.tensors) for part in parts)
        if got != expected:
            raise ValueError(
                f"{parts[0].path}: key 'split.tensors.count': got {got} tensors in {count} parts, "
                f"expected {expected}. Download all parts again"
            )


def _split_number(part: Part, key: str) -> int:
    value = part.metadata.get(key)
    if type(value) is not int or not 0 <= value < 100_000 or (key == "split.count" and value == 0):
        got = str(value)[:40]
        raise ValueError(f"{part.path}: key {shown(key)}: got {got}, expected a whole number. {MADE_WRONGLY}")
    return value
