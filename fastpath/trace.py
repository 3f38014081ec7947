"""Traces: every named intermediate of a forward call, recorded, kept in an .npz file, compared name by name.

Rows are tokens, in order. A trace of another engine needs the same names and nothing else: [T, N, H] and
[T, N*H] are taken as the same, metadata may be missing.
"""

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastpath.error_budget import limit_of, order_of, part_of, row_limit_of, split_name
from refimpl.batch import SoftTokens

META = "__meta__"  # the npz entry with the metadata, JSON text; no callback is called so


@dataclass(frozen=True)
class TraceFile:
    """arrays: name -> [T, ...]; meta: backend, activations, model, tokens, ... (empty from other engines)"""

    arrays: dict[str, np.ndarray]
    meta: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """A trace hook that keeps a float32 copy of everything; rows of several calls are joined."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[np.ndarray]] = {}

    def __call__(self, name: str, array: np.ndarray) -> None:
        self._pieces.setdefault(name, []).append(np.array(array, np.float32))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}


def record(
    engine, ids: Sequence[int], soft: Sequence[SoftTokens] = (), recorder: Recorder | None = None
) -> dict[str, np.ndarray]:
    """All intermediates of a sequence, in chunks of the engine's size.

    recorder  what has recorded the encoders of the soft tokens, if their values are wanted too
    """
    recorder = recorder or Recorder()
    for start, stop in engine.plan(len(ids), soft=soft):
        engine.extend([(0, ids[start:stop])], "all", trace=recorder, soft={0: soft})
    return recorder.arrays()


def save_trace(path: str | Path, trace: TraceFile) -> None:
    """Writes to exactly this path (np.savez alone would append a suffix)."""
    with open(path, "wb") as out:
        write_trace(out, trace)


def write_trace(out: Any, trace: TraceFile) -> None:
    """Into an open binary stream, which need not seek."""
    np.savez(out, allow_pickle=False, **{META: np.array(json.dumps(trace.meta))}, **trace.arrays)


def load_trace(path: str | Path) -> TraceFile:
    try:
        with open(path, "rb") as file:
            npz = np.load(file, allow_pickle=False)
            if not isinstance(npz, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, not named ones")
            arrays = {name: npz[name] for name in npz.files}
        meta = json.loads(str(arrays.pop(META))) if META in arrays else {}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a trace ({error}). Make one with: twinpath trace --out FILE.npz"
        ) from error
    if not arrays:
        raise ValueError(f"{path}: a trace without arrays. Make one with: twinpath trace --out FILE.npz")
    return TraceFile(arrays, meta if isinstance(meta, dict) else {})


@dataclass(frozen=True)
class Difference:
    """One name of two traces.

    limit       the budget of `normalised`, None where the name has none
    row_limit   the budget of `row_error`
    max_abs     largest |a - b|
    normalised  RMS(a - b) / RMS(a)
    row_error   RMS(a_t - b_t) / RMS(a) of the row t where it is largest; RMS(a) is over all rows
    row         t, the token's position
    note        why the numbers are missing, if they are
    """

    name: str
    limit: float | None
    row_limit: float | None
    max_abs: float = np.nan
    normalised: float = np.nan
    row_error: float = np.nan
    row: int | None = None
    note: str = ""

    @property
    def is_row_over(self) -> bool:
        return self.row_limit is not None and not self.row_error <= self.row_limit  # NaN is over

    @property
    def is_over(self) -> bool:
        if self.note or self.is_row_over:
            return True
        return self.limit is not None and not self.normalised <= self.limit


def compare(a: TraceFile, b: TraceFile, column: str) -> list[Difference]:
    """The names both traces have, in the order of computation, against one column of the error budget."""
    shared = sorted(a.arrays.keys() & b.arrays.keys(), key=order_of)
    n_layers: dict[int, int] = {}
    for name in shared:
        n_layers[part_of(name)] = max(n_layers.get(part_of(name), 1), 1 + (split_name(name)[1] or 0))

    def limits(name: str) -> tuple[float | None, float | None]:
        n = n_layers[part_of(name)]
        return limit_of(name, column, n), row_limit_of(name, column, n)

    # Soft tokens enter the text model with what their encoders lost.
    entering = [limits(name) for name in ("v.projected", "a.projected") if name in shared]
    found = []
    for name in shared:
        limit, row_limit = max(entering) if name == "inp_scaled" and entering else limits(name)
        found.append(Difference(name, limit, row_limit, **_figures(a.arrays[name], b.arrays[name])))
    return found


def _figures(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """What a Difference says of two arrays."""
    if a.ndim == 0 or b.ndim == 0 or a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return {"note": f"no numbers: {a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}"}
    if len(a) != len(b) or a.size != b.size:
        return {"note": f"shapes differ: {list(a.shape)}, {list(b.shape)}"}
    if a.size == 0:
        return {"max_abs": 0.0, "normalised": 0.0, "row_error": 0.0}
    x, y = (array.reshape(len(array), -1).astype(np.float64) for array in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(x - y)
        size, rows = np.sqrt(np.mean(x * x)), np.sqrt(np.mean(delta * delta, axis=1))
        error = np.sqrt(np.mean(rows * rows))
    row = int(np.argmax(rows))  # the first NaN, where there is one

    def relative(e: float) -> float:
        return float(e / size) if size > 0 else (0.0 if e == 0 else np.inf)

    return {
        "max_abs": float(delta.max()),
        "normalised": relative(error),
        "row_error": relative(rows[row]),
        "row": row,
    }


def column_for(a: TraceFile, b: TraceFile) -> str:
    """The budget's column for two traces: same arithmetic if both say so, otherwise the wide one."""
    kind, other = a.meta.get("activations"), b.meta.get("activations")
    if kind != other or kind not in ("int8", "float"):
        return "different"
    stored = {_kv_types(a), _kv_types(b)}  # what keys and values are rounded to
    if kind == "int8":
        return "int8" if len(stored) == 1 else "different"
    if stored == {("exact", "exact")}:
        return "float"
    return "half" if len(stored) == 1 or not any("bf16" in pair for pair in stored) else "different"


def _kv_types(trace: TraceFile) -> tuple[str, str]:
    """Of keys and of values; "exact" where they are not rounded, or nothing is said."""
    said = trace.meta.get("kv_type") or "f32"
    pair = (said, said) if isinstance(said, str) else tuple(map(str, said))[:2]
    k_type, v_type = ("exact" if name in ("f32", "f64") else name for name in pair)
    return k_type, v_type
