"""What an oracle is: a program that takes a GGUF and token ids and writes what another engine computed.

    python -m oracles.hf_transformers MODEL.gguf --tokens 2,105,9 --out trace.npz
    python -m oracles.llama_cpp       MODEL.gguf --tokens 2,105,9 --out trace.npz

The file holds one array per named intermediate, under the names of llama.cpp's graph callbacks
(`inp_scaled`, `attn_norm-0`, `Qcur_pos-0`, `l_out-0`, `result_norm`, `result_output`: docs/glossary.md),
rows in token order, and one entry `__meta__`, a JSON object that says which engine, version, command, model
and tokens the numbers came from.  `twinpath diff` compares any two such files name by name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

META = "__meta__"


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all oracles share."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("model", type=Path, help="a Gemma 4 text model, GGUF")
    p.add_argument(
        "--tokens", required=True, type=token_ids, help="ids with commas between, or @FILE that holds them"
    )
    p.add_argument("--out", required=True, type=Path, help="the .npz file to write")
    p.add_argument(
        "--names", default="*", help="patterns of the names to keep, with commas between (default: all)"
    )
    p.add_argument("--rows", default=":", help="rows to keep, a slice such as ::4 or -1: (default: all)")
    p.add_argument(
        "--chunk", type=int, default=0, help="feed this many tokens at a time (default: all at once)"
    )
    p.add_argument(
        "--seed", type=int, default=None, help="noted in the meta data: the seed the model was made from"
    )
    return p


def token_ids(text: str) -> list[int]:
    """`2,105,9`, or `@file` with ids separated by commas or white space."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    return [int(word) for word in text.replace(",", " ").split()]


def row_slice(text: str) -> slice:
    """`2::4` as in Python."""
    return slice(*(int(part) if part else None for part in text.split(":")))


def wanted(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split(","))


class Trace:
    """Collects named arrays; pieces of the same name (chunks) are joined along the token axis, axis 0."""

    def __init__(self, names: str = "*"):
        self._names = names
        self._pieces: dict[str, list[np.ndarray]] = {}

    def wants(self, name: str) -> bool:
        return wanted(name, self._names)

    def add(self, name: str, array: np.ndarray) -> None:
        if self.wants(name):
            self._pieces.setdefault(name, []).append(np.array(array))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}


def save(args: argparse.Namespace, trace: Trace, *, oracle: str, version: str, **extra: object) -> None:
    """Writes the arrays with where they came from."""
    rows = row_slice(args.rows)
    arrays = {name: array[rows] for name, array in trace.arrays().items()}
    meta = {
        "oracle": oracle,
        "version": version,
        "command": command_line(),
        "model": args.model.name,
        "sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "seed": args.seed,
        "tokens": args.tokens,
        "rows": args.rows,
        "numpy": np.__version__,
        **extra,
    }
    arrays[META] = np.array(json.dumps(meta))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {len(arrays) - 1} arrays, {args.out.stat().st_size / 1e3:.0f} kB")


def command_line() -> str:
    """The command as it can be typed again, without the folders of this machine."""
    program = f"oracles.{Path(sys.argv[0]).stem}"
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", program, *words])


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Reads a trace back: (arrays, meta)."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop(META)))
