"""A model's matrices from the mapped file into private memory, in the order that the kernels read.

    plan    which tensors, how many bytes; refused in one line if the memory is not there
    pack    pieces of the file in the file's order, each on all threads (cpu/packing.py)
    advise  pages of the file are asked for ahead, and given back when they have been packed, so that a model
            does not count twice

Lookup tables stay in the file: of them a row per token is read.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fastpath.cpu import packing
from fastpath.cpu.arena import Arena
from fastpath.cpu.buffers import address
from fastpath.memory import available_bytes, in_words
from quant import QTensor
from refimpl.tensors import Weights

Progress = Callable[[int, int], None]

TABLES = ("token_embd", "per_layer_token_embd")  # fields of Weights
PIECE_BYTES = 64 << 20  # of the file between two looks at progress, and most that counts twice
SPARE_BYTES = 256 << 20  # for the cache of a short conversation, results and the interpreter
WILL_NEED = getattr(mmap, "MADV_WILLNEED", 0)
DONT_NEED = getattr(mmap, "MADV_DONTNEED", 0)  # only for a mapped file: other memory would be erased
WITHOUT = "Leave them in the file with --no-repack (slower), or free memory"


@dataclass(frozen=True)
class Plan:
    """Tensors in the order of the file, and the memory that they need."""

    tensors: tuple[QTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(packing.packed_bytes, self.tensors))

    @property
    def file_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan(weights: Weights) -> Plan:
    found = {id(tensor): tensor for tensor in _matrices(weights)}
    return Plan(tuple(sorted(found.values(), key=lambda tensor: address(tensor.data))))


def check_room(plan: Plan) -> None:
    """The packed weights fit into memory, or ValueError."""
    available, needed = available_bytes(), plan.nbytes + SPARE_BYTES
    if available is not None and needed > available:
        raise ValueError(
            f"memory: {needed / 1e9:.1f} GB asked for, {plan.nbytes / 1e9:.1f} of it for packed weights, "
            f"but only {available / 1e9:.1f} GB are free. {WITHOUT}"
        )


def pack(weights: Weights, plan: Plan, progress: Progress | None = None) -> tuple[Weights, Arena]:
    """The same weights with packed matrices.

    progress(done, total) in bytes of the file, after each piece; an exception from it ends the packing there
    """
    try:
        arena = Arena(plan.nbytes)
    except (OSError, MemoryError):
        raise ValueError(
            f"memory: no {plan.nbytes / 1e9:.1f} GB for packed weights; {in_words()}. {WITHOUT}"
        ) from None
    done, packed = 0, {}
    for tensor in plan.tensors:
        memory = arena.take(packing.packed_bytes(tensor))
        for first, stop in _pieces(tensor):
            _advise(WILL_NEED, tensor, stop, 2 * stop - first)  # also beyond the tensor: files lie in order
            packing.pack(tensor, memory, (first, stop))
            _advise(DONT_NEED, tensor, first, stop)
            if progress is not None:
                progress(done + tensor.nbytes * stop // packing.n_groups(tensor), plan.file_bytes)
        done += tensor.nbytes
        packed[id(tensor)] = packing.PackedTensor(tensor.format, tensor.shape, memory, tensor.name)
    return _replaced(weights, packed), arena


def _matrices(weights: Weights) -> Iterator[QTensor]:
    """All that products multiply by. A table that is also the output head is one of them."""
    records: tuple[Any, ...] = (weights, *weights.layers)
    for record in records:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, QTensor) and not (record is weights and field.name in TABLES):
                yield value


def _replaced(weights: Weights, packed: dict[int, Any]) -> Weights:
    def of(record: Any) -> Any:
        kept = TABLES if isinstance(record, Weights) else ()
        found = {field.name: packed.get(id(getattr(record, field.name))) for field in fields(record)}
        return replace(
            record, **{name: new for name, new in found.items() if new is not None and name not in kept}
        )

    return replace(of(weights), layers=tuple(map(of, weights.layers)))


def _pieces(tensor: QTensor) -> Iterator[tuple[int, int]]:
    """Ranges of groups of PIECE_BYTES or less."""
    n = packing.n_groups(tensor)
    step = max(1, PIECE_BYTES * n // max(1, tensor.nbytes))
    for first in range(0, n, step):
        yield first, min(first + step, n)


def _advise(advice: int, tensor: QTensor, first: int, stop: int) -> None:
    """Tell the system about the file's pages that hold groups first .. stop - 1."""
    mapping = _mapping(tensor.data)
    if mapping is None:
        return
    begin = address(tensor.data) - address(np.frombuffer(mapping, np.uint8))
    span = tensor.data.shape[0] * tensor.data.strides[0]  # more than its bytes for a part of a stack
    n = packing.n_groups(tensor)
    _advise_bytes(mapping, advice, begin + span * first // n, begin + span * stop // n)


def _mapping(data: np.ndarray) -> mmap.mmap | None:
    """The mapped file below an array; None for memory that would lose its content."""
    base: Any = data
    while True:
        if isinstance(base, mmap.mmap):
            return base if hasattr(base, "madvise") else None
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        if base is None:
            return None


def _advise_bytes(mapping: mmap.mmap, advice: int, begin: int, end: int) -> None:
    """Whole pages between two places, inside the file."""
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = min(end, len(mapping)) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapping.madvise(advice, begin, end - begin)
