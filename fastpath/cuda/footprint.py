"""How much memory of a device a model takes, before anything is brought there.

Weights: from the header of the file alone, by the sizes of layout.py; equals the bytes that are allocated.
Cache: kv/geometry.py.  Workspace: a forward call on arrays without memory (rehearsal.py).
Python's integers: no size is too large for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fastpath.cuda import device
from fastpath.cuda.layout import CODINGS, ROWS, UNIT, padded_columns
from fastpath.replay import MOST_TOKENS
from quant import QTensor

SPARE_BYTES = 1 << 29  # for the driver, kernels, graphs, and what an allocator rounds up


@dataclass(frozen=True)
class Footprint:
    """Bytes of each part."""

    weights: int
    cache: int
    workspace: int

    @property
    def nbytes(self) -> int:
        return self.weights + self.cache + self.workspace

    def __str__(self) -> str:
        parts = ((self.weights, "weights"), (self.cache, "cache"), (self.workspace, "workspace"))
        listed = ", ".join(f"{n / 1e9:.2f} {name}" for n, name in parts)
        return f"{self.nbytes / 1e9:.2f} GB ({listed})"


def plane_sizes(coding, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Elements of low, high, sub and block (layout.py) of a matrix or a stack of them."""
    M, C = shape[-2:]
    n_rows = (shape[0] if len(shape) == 3 else 1) * -(-M // ROWS) * ROWS
    units = n_rows * (padded_columns(C) // UNIT)
    low = units * UNIT // 32 * coding.low_bits
    if coding.is_plain:
        return low, 1, 1, 1
    kinds = 2 if coding.has_minimum else 1
    high = units * UNIT // 32 * coding.high_bits or 1
    if coding.is_256:
        return low, high, 4 * units, units * UNIT // 256 * kinds
    return low, high, 4 * kinds * units, 1


def matrix_bytes(weight: QTensor) -> int:
    name = weight.format.name if weight.format.name in CODINGS else "F32"
    low, high, sub, block = plane_sizes(CODINGS[name], weight.shape)
    return 4 * (low + high) + 2 * (sub + block)


def weights_bytes(weights: Any) -> int:
    """Of all matrices and vectors of a record of weights; what is used twice is there once."""
    found = {id(weight): weight for weight in _leaves(weights)}
    return sum(
        matrix_bytes(weight) if isinstance(weight, QTensor) else 4 * weight.size for weight in found.values()
    )


def workspace_bytes(model: Any, n_tokens: int, n_seqs: int = 1) -> int:
    """The most that a call of so many tokens of one sequence needs beside weights and cache, and what
    recorded calls keep: those of one token of each sequence, and of one alone.

    A fifth of a block of memory may stay unused (pool.py).
    """
    from fastpath.cuda import rehearsal

    chunk = rehearsal.of(model, rehearsal.Call(n_tokens), keeps_launches=False).peak_bytes
    steps = rehearsal.of(model, rehearsal.Call(1, min(n_seqs, MOST_TOKENS))).made_bytes
    return (chunk + 2 * steps) * 5 // 4


def plan(
    model: Any, *, context_len: int, chunk: int, n_seqs: int = 1, kv_type: Any = "f16", n_pages: Any = None
) -> Footprint:
    """What an engine of these sizes will take."""
    from fastpath.kv import geometry

    cache = geometry.plan(model.config, n_seqs, context_len, chunk, kv_type, n_pages=n_pages).nbytes
    return Footprint(
        weights_bytes(model.weights), cache, workspace_bytes(model, min(chunk, context_len), n_seqs)
    )


def of_options(args: Any, model: Any) -> Footprint:
    """What the engine of a command line will take: full contexts, and pages for prefixes that nobody uses."""
    from fastpath.kv.budget import full_and_spare
    from fastpath.lanes import default_chunk

    context = args.context or model.config.context_len
    chunk = min(args.chunk or default_chunk(model.config), context)
    n_seqs, most = getattr(args, "sequences", 1), None
    if getattr(args, "batch_file", None) is not None:
        n_seqs, most = args.parallel, args.kv_memory
    found = plan(
        model, context_len=context, chunk=chunk, n_seqs=n_seqs, kv_type=args.kv_type, n_pages=full_and_spare
    )
    return found if most is None else replace(found, cache=min(found.cache, most))


def free_bytes() -> int | None:
    """Of the device in use; None where it does not say."""
    ask = getattr(device.real(), "free_bytes", None)
    return None if ask is None else int(ask())


def misfit(footprint: Footprint) -> str | None:
    """Half a line: why a model does not fit the device in use; None where it does, or nobody says."""
    free = free_bytes()
    if free is None or footprint.nbytes + SPARE_BYTES <= free:
        return None
    return (
        f"{device.describe()} has {free / 1e9:.2f} GB free, and {footprint} are needed with "
        f"{SPARE_BYTES / 1e9:.2f} GB to spare; --context and --kv-type q8_0 make the cache smaller"
    )


def _leaves(record: Any) -> Iterator[Any]:
    """Matrices and vectors."""
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name == "layers":
            for layer in value:
                yield from _leaves(layer)
        elif isinstance(value, (QTensor, np.ndarray)):
            yield value
