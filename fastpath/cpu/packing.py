"""Packed weights: the bytes of a file, permuted so that one load brings the same bytes of 16 rows.

A file holds a row after the other.  A product for 16 rows at once, one per lane, wants the same few bytes of
16 rows side by side.  So a matrix is packed in groups of 16 rows, and in a group block by block: a block's
bytes are cut into units of 1, 2 or 4 bytes, in the order of the file, and of each unit the 16 rows follow
each other.  Then the unit at byte `o` of a block lies at byte `16 * o` of the packed block, whatever the
format, and packed weights are as long as those of the file (but for the last group of a matrix, which
repeats its last row).

                      a block in the file                a packed block
    Q4_0    18 bytes  d, 16 bytes of nibbles             16 d, 16 x bytes 2..5, 16 x bytes 6..9, ...     288
    Q6_K   210 bytes  128 low, 64 upper, 16 scales, d    48 times 16 x 4 bytes, 16 times 16 x 1, 16 d   3360

Formats without a table entry keep their rows: packing copies them, so that the file can be let go.

    work item   a group
    traffic     weights are read once and written once; loads prefetch the rows of the next group
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import ld_i64, ld_u8, ld_u16, load_i8, st_u8, st_u16, store_i8, store_i32
from fastpath.cpu.simd_dot import column, tile
from quant import Format, QTensor

GROUP = 16  # rows
ALIGNMENT = 64
GROUPS_PER_PIECE = 4
COPY_BYTES = 1 << 18  # work item for formats that keep their rows

# bytes of a unit, number of units; in the order of the file
SEGMENTS = {
    "Q4_0": ((2, 1), (4, 4)),  # d, nibbles
    "Q4_1": ((2, 2), (4, 4)),  # d, m, nibbles
    "Q5_0": ((2, 1), (4, 1), (4, 4)),  # d, fifth bits, nibbles
    "Q5_1": ((2, 2), (4, 1), (4, 4)),  # d, m, fifth bits, nibbles
    "Q8_0": ((2, 1), (4, 8)),  # d, bytes
    "IQ4_NL": ((2, 1), (4, 4)),  # d, codes
    "MXFP4": ((1, 1), (4, 4)),  # exponent, codes
    "Q2_K": ((4, 4), (4, 16), (2, 2)),  # scales and minima, pairs of bits, d, dmin
    "Q3_K": ((4, 8), (4, 16), (4, 3), (2, 1)),  # third bits, pairs of bits, scales, d
    "Q4_K": ((2, 2), (4, 3), (4, 32)),  # d, dmin, scales and minima, nibbles
    "Q5_K": ((2, 2), (4, 3), (4, 8), (4, 32)),  # d, dmin, scales and minima, fifth bits, nibbles
    "Q6_K": ((4, 32), (4, 16), (1, 16), (2, 1)),  # nibbles, upper two bits, scales, d
    "IQ4_XS": ((2, 2), (4, 1), (4, 32)),  # d, upper bits of scales, lower bits of scales, codes
}


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A weight matrix, or a stack of them, in packed memory.

    Shapes:
        shape   [M, C], or [E, M, C] for experts
        memory  u8[packed_bytes(...)], aligned to 64 bytes
    """

    format: Format
    shape: tuple[int, ...]
    memory: np.ndarray = field(repr=False)
    name: str = ""

    def __post_init__(self):
        where, size, memory = self.name or "packed tensor", packed_bytes(self), self.memory
        if memory.dtype != np.uint8 or memory.shape != (size,) or address(memory) % ALIGNMENT:
            raise ValueError(
                f"{where}: memory is {memory.dtype}{list(memory.shape)} at {address(memory):#x}, but "
                f"{self.format.name} {list(self.shape)} packs to uint8[{size}] at a multiple of {ALIGNMENT}"
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_len(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1], self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as in the file: what a product has to read."""
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def is_grouped(self) -> bool:
        """Rows are interleaved in groups of 16; otherwise they lie as in the file."""
        return self.format.name in SEGMENTS

    @property
    def matrix_bytes(self) -> int:
        """From one matrix of the stack to the next."""
        return (
            _group_bytes(self) * _groups_per_matrix(self)
            if self.is_grouped
            else self.shape[-2] * self.row_bytes
        )

    def as_rows(self) -> QTensor:
        """The same memory as a QTensor, for formats that keep their rows."""
        if self.is_grouped:
            raise ValueError(f"{self.name}: {self.format.name} is packed in groups; unpack() it")
        data = self.memory[: self.nbytes].reshape(*self.shape[:-1], self.row_bytes)
        return QTensor(self.format, self.shape, data, self.name)

    def unpack(self) -> QTensor:
        """The tensor in the file's order, as a copy."""
        if not self.is_grouped:
            rows = self.as_rows()
            return QTensor(self.format, self.shape, rows.data.copy(), self.name)
        matrices = [self.unpack_rows(0, self.shape[-2], m) for m in range(math.prod(self.shape[:-2]))]
        data = np.stack([matrix.data for matrix in matrices]).reshape(*self.shape[:-1], -1)
        return QTensor(self.format, self.shape, data, self.name)

    def unpack_rows(self, first: int, stop: int, matrix: int = 0) -> QTensor:
        """Rows first .. stop - 1 of one matrix in the file's order, as a copy."""
        start, block_bytes = matrix * self.matrix_bytes, self.format.block_bytes
        lo, hi = first // GROUP, -(-stop // GROUP)
        groups = self.memory[start + lo * _group_bytes(self) : start + hi * _group_bytes(self)]
        blocks = groups.reshape(hi - lo, -1, GROUP * block_bytes)
        rows = np.empty((hi - lo, GROUP, blocks.shape[1], block_bytes), np.uint8)
        at = 0
        for unit, count in SEGMENTS[self.format.name]:
            end = at + unit * count
            units = blocks[..., GROUP * at : GROUP * end].reshape(*blocks.shape[:2], count, GROUP, unit)
            rows[..., at:end] = units.transpose(0, 3, 1, 2, 4).reshape(*rows.shape[:3], end - at)
            at = end
        data = rows.reshape(-1, self.row_bytes)[first - GROUP * lo : stop - GROUP * lo]
        return QTensor(self.format, (stop - first, self.row_len), data, self.name)


def packed_bytes(tensor) -> int:
    """Memory that a tensor needs, a multiple of 64."""
    if tensor.format.name in SEGMENTS:
        size = n_groups(tensor) * _group_bytes(tensor)
    else:
        size = tensor.nbytes
    return -(-size // ALIGNMENT) * ALIGNMENT


def n_groups(tensor) -> int:
    """Work items of packing: groups of 16 rows, or pieces of bytes where rows are kept."""
    if tensor.format.name in SEGMENTS:
        return math.prod(tensor.shape[:-2]) * _groups_per_matrix(tensor)
    return -(-tensor.nbytes // COPY_BYTES)


def pack(tensor, memory, groups=None):
    """Write a QTensor's packed form to `memory` u8[packed_bytes(tensor)], on all threads.

    groups  (first, last + 1) of n_groups(tensor): only these, so that a caller can report progress
    """
    if tensor.ndim not in (2, 3):
        raise ValueError(f"{tensor.name}: shape {list(tensor.shape)}; expected a matrix or a stack of them")
    data = tensor.data
    if data.strides[-2:] != (data.shape[-1], 1):
        raise ValueError(f"{tensor.name}: its rows are not contiguous; copy the tensor")
    PackedTensor(tensor.format, tensor.shape, memory, tensor.name)  # fits, or says what does not
    first, stop = (0, n_groups(tensor)) if groups is None else groups
    if tensor.format.name not in SEGMENTS:
        data = np.ascontiguousarray(data)  # of parts of a stack; other tensors are that already
        args = (address(data), address(memory), tensor.nbytes, first)
        threads.run(copy_rows, args, stop - first)
        return
    segments = _segment_words(tensor.format.name)
    args = (
        address(data), address(memory), tensor.shape[-2], tensor.row_bytes, tensor.format.block_bytes,
        address(segments), len(segments), first, data.strides[0] if tensor.ndim == 3 else 0,
    )  # fmt: skip
    threads.run(pack_groups, args, stop - first, GROUPS_PER_PIECE)


def packed(tensor) -> PackedTensor:
    """A QTensor packed into memory of its own."""
    size = packed_bytes(tensor)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -address(memory) % ALIGNMENT
    memory = memory[start : start + size]
    pack(tensor, memory)
    return PackedTensor(tensor.format, tensor.shape, memory, tensor.name)


def _groups_per_matrix(tensor):
    return -(-tensor.shape[-2] // GROUP)


def _group_bytes(tensor):
    return GROUP * tensor.format.row_bytes(tensor.shape[-1], tensor.name)


@cache
def _segment_words(format_name):
    return np.array(SEGMENTS[format_name], np.int64)


@kernel
def pack_groups(args, lo, hi, thread):
    source, target, n_rows = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    row_bytes, block_bytes = ld_i64(args + 24), ld_i64(args + 32)
    segments, n_segments, first = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    matrix_bytes = ld_i64(args + 64)
    per_matrix = (n_rows + 15) // 16
    for item in range(first + lo, first + hi):
        matrix, group = item // per_matrix, item % per_matrix
        rows = source + matrix * matrix_bytes + 16 * group * row_bytes
        last = min(15, n_rows - 16 * group - 1)
        out = target + item * 16 * row_bytes
        for block in range(0, row_bytes, block_bytes):
            at = block
            for s in range(segments, segments + 16 * n_segments, 16):
                unit, count = ld_i64(s), ld_i64(s + 8)
                if unit == 4:
                    whole = count // 4 * 4
                    for _ in range(0, whole, 4):
                        tile(rows + at, row_bytes, last, out + 16 * at)
                        at += 16
                    for _ in range(whole, count):
                        store_i32(out + 16 * at, column(rows + at, row_bytes, last))
                        at += 4
                elif unit == 2:
                    for _ in range(count):
                        for r in range(16):
                            st_u16(out + 16 * at + 2 * r, ld_u16(rows + at + min(r, last) * row_bytes))
                        at += 2
                else:
                    for _ in range(count):
                        for r in range(16):
                            st_u8(out + 16 * at + r, ld_u8(rows + at + min(r, last) * row_bytes))
                        at += 1


@kernel
def copy_rows(args, lo, hi, thread):
    source, target, n_bytes, first = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    start, stop = (first + lo) * COPY_BYTES, min((first + hi) * COPY_BYTES, n_bytes)
    whole = start + (stop - start) // 64 * 64
    for at in range(start, whole, 64):
        store_i8(target + at, load_i8(source + at))
    for at in range(whole, stop):
        st_u8(target + at, ld_u8(source + at))
