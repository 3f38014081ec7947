"""The tables of a vocabulary, kept in a file between runs: making them takes 0.6 s, reading them 0.01 s.

The file's name is a hash of all that the tables are made from, so that a file never belongs to another
vocabulary. It is written whole or not at all; a damaged one (the zip format has check sums) is made again,
and where nothing can be written the tables are made in each run.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.frontend.bpe import Tables

VERSION = "1"  # of the tables' meaning and form: another one gets other files
KEEP_DAYS, KEEP_FILES = 30, 8  # files not used for so long are removed, and the oldest of too many
KEYS = ("tokens", "merges", "token_type", "unknown_token_id")  # under tokenizer.ggml: what tables depend on


def kept(folder: Path | None, metadata: Mapping[str, Any], make: Callable[[], Tables]) -> Tables:
    """The tables out of the folder; made, and put there, if it does not have them."""
    key = None if folder is None else _hash(metadata)
    if folder is None or key is None:
        return make()
    path = folder / f"vocabulary-{key}.npz"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _hash(metadata: Mapping[str, Any]) -> str | None:
    """None for metadata that does not come from a file: there is no quick way over its strings."""
    state = hashlib.sha256(VERSION.encode())
    for key in KEYS:
        value: Any = metadata.get(f"tokenizer.ggml.{key}")
        if hasattr(value, "raw_bytes"):
            raw = value.raw_bytes()
        elif isinstance(value, np.ndarray):
            raw = np.ascontiguousarray(value, np.int64).view(np.uint8)
        elif value is None or isinstance(value, int):
            raw = repr(value).encode()
        else:
            return None
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()[:24]


def _read(path: Path) -> Tables | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            tables = Tables(**{name: file[name] for name in Tables._fields})
        with contextlib.suppress(OSError):
            os.utime(path)  # in use: it stays
        return tables
    except Exception:  # damage shows as almost any of them, by which byte it hits: the tables are made again
        return None


def _write(path: Path, tables: Tables) -> None:
    """Two processes may do so at once: each writes its own file, the last one to be done has the name."""
    part = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.savez(file, **tables._asdict())
        part.replace(path)
        _remove_old(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()


def _remove_old(written: Path) -> None:
    limit = time.time() - KEEP_DAYS * 86400
    ages = [
        (file.stat().st_mtime, file) for file in written.parent.glob("vocabulary-*.npz") if file != written
    ]
    ages.sort(reverse=True)
    for n, (used, file) in enumerate(ages):
        if n >= KEEP_FILES - 1 or used < limit:
            with contextlib.suppress(OSError):
                file.unlink()
