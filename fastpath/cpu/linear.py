"""Products with weight matrices.        definition: refimpl/ops/linear.py, refimpl/ops/integer.py

Wrappers choose the kernel of the format and of the number of rows, round the activations once, and say which
rows meet which matrix:

    packed weights, one or two rows            matvec.py; of experts up to MATVEC_ROWS (on average, if all are
                                               chosen alike)
    packed weights, LEAST to MOST rows         matvec_few.py
    more rows, and weights as in the file      matmul.py
    plain numbers                              dot_float.py; many rows: matmul_float.py
    formats without a kernel                   some rows at a time become float32: correct, and slow

A stack of experts is the same kernel with more matrices: rows are grouped by expert, so that the weights of a
chosen expert are read once per call, and those of others never.
"""

import ctypes
from functools import cache

import numpy as np

from fastpath.cpu import dot_float, matmul, matmul_float, matvec, matvec_few, recording, threads
from fastpath.cpu.buffers import address, floats, output
from fastpath.cpu.grouping import Groups, group_by_expert
from fastpath.cpu.matvec import MATVEC_ROWS
from fastpath.cpu.packing import PackedTensor
from fastpath.cpu.quantize import quantize
from quant import QTensor

DEQUANTIZED_VALUES = 1 << 21  # values of weights widened at a time, where there is no kernel for the format
MIN_WORK = 1 << 17  # multiplications of the smallest piece: below that a second thread does not pay


def linear(x, weight, activations, *, out=None):
    where = weight.name or weight.format.name
    if len(weight.shape) != 2 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: {where}: x {x.shape} and weight {weight.shape}, expected x [T, C] and weight [M, C]"
        )
    x, T = floats(x, where), x.shape[0]
    out = output(out, (T, weight.shape[0]), where)
    _multiply(x, weight, activations, out, _one_matrix(T), T)
    return out


def expert_linear(x, weight, expert_ids, activations, *, out=None):
    where = f"expert_linear({weight.name or weight.format.name})"
    T, A = expert_ids.shape
    if weight.ndim != 3 or x.shape not in ((T, weight.row_len), (T, A, weight.row_len)):
        raise ValueError(
            f"{where}: x {x.shape}, expert_ids {expert_ids.shape}, weight {weight.shape}; "
            "expected x [T, C] or [T, A, C], ids [T, A], weight [E, M, C]"
        )
    E, M, C = weight.shape
    if expert_ids.size and not 0 <= expert_ids.min() <= expert_ids.max() < E:
        raise ValueError(
            f"{where}: expert {expert_ids.min()}..{expert_ids.max()}, but there are {E}, 0 .. {E - 1}"
        )
    x = floats(x, where)
    out = output(out, (T, A, M), where)
    groups = group_by_expert(expert_ids, E, A if x.ndim == 2 else 1)
    _multiply(x.reshape(-1, C), weight, activations, out, groups, T)
    return out


@cache
def _numbers(n):
    """0 0 n | 0 1 2 .. n-1: matrix 0 has the entries 0 .. n, entry i is row i."""
    return np.concatenate([[0, 0, n], np.arange(n)]).astype(np.int64)


def _one_matrix(T):
    first = address(_numbers(T))
    return Groups(1, T, (first, first + 8, first + 24, first + 24))


def _multiply(x, weight, activations, out, groups, T):
    """T: entries that a matrix has at most, if no token chose an expert twice."""
    if activations not in ("int8", "float"):
        raise ValueError(f"activations: got {activations!r}, expected 'int8' or 'float'. Choose one of them")
    name, is_packed = weight.format.name, isinstance(weight, PackedTensor)
    if activations == "int8" and name in matvec.KERNELS:
        n_matrices = 1 if weight.ndim == 2 else weight.shape[0]
        if is_packed and weight.ndim == 2 and matvec_few.takes(T):
            activation = matvec_few.activations(x, weight, groups)
            _launch(matvec_few.KERNELS[name], activation, weight, out, groups)
        elif is_packed and groups.n_entries <= MATVEC_ROWS * n_matrices:
            activation = quantize(x, weight.format.block_size)
            _launch(matvec.KERNELS[name], activation, weight, out, groups)
        else:
            most = T if groups.n_groups > 1 else groups.n_entries
            matmul.multiply(x, weight, _memory_of(weight), out, groups, most)
        return
    if is_packed and not weight.is_grouped:
        weight = weight.as_rows()
    if name in dot_float.KERNELS and weight.ndim == 2 and T >= matmul_float.MANY:
        start, _, row_bytes = _memory_of(weight)
        matmul_float.multiply(x, weight, (start, row_bytes), out, weight.name or name)
    elif name in dot_float.KERNELS:
        _launch(dot_float.KERNELS[name], (address(x), 0, 0), weight, out, groups)
    else:
        _multiply_dequantized(x, weight, out, groups)


def _launch(kernel, activation, weight, out, groups, first_column=0):
    """Run a kernel over all groups of 16 rows of the matrices in use."""
    M, C = weight.shape[-2:]
    args = (
        *_memory_of(weight), M, C, *activation,
        address(out) + 4 * first_column, 4 * out.shape[-1], groups.n_groups, *groups.addresses,
    )  # fmt: skip
    n_items = groups.n_groups * -(-M // 16)
    work_of_item = 16 * C * max(1, groups.n_entries // max(1, groups.n_groups))
    grain = max(1, MIN_WORK // work_of_item)
    threads.run(kernel, args, n_items, grain, threads.num_threads(), label=weight.name or weight.format.name)


def _memory_of(weight):
    """Address, bytes from one matrix to the next, bytes of a row."""
    if isinstance(weight, PackedTensor):
        return address(weight.memory), weight.matrix_bytes, weight.row_bytes
    data = weight.data
    if data.strides[-1] != 1 or data.strides[-2] != data.shape[-1]:
        where = weight.name or "weight"
        raise ValueError(f"{where}: its rows are not contiguous (strides {data.strides}); copy the tensor")
    return address(data), data.strides[0] if weight.ndim == 3 else 0, data.shape[-1]


def _multiply_dequantized(x, weight, out, groups):
    """Formats without a kernel: some rows at a time become float32 and go through the kernel for F32."""
    if recording.current() is not None:
        raise recording.UnableError(
            f"{weight.name or 'weight'}: {weight.format.name} has no kernel and cannot be recorded, expected "
            f"one of {', '.join((*matvec.KERNELS, *dot_float.KERNELS))}. Run without replay"
        )
    M, C = weight.shape[-2:]
    n = groups.n_groups
    matrices, starts = (_int64s(a, k) for a, k in zip(groups.addresses[:2], (n, n + 1), strict=True))
    step = max(16, DEQUANTIZED_VALUES // C // 16 * 16)
    for u in np.flatnonzero(np.diff(starts)):
        ends = np.array([0, 0, starts[u + 1] - starts[u]])
        first = address(ends)
        entries = (at + 8 * int(starts[u]) for at in groups.addresses[2:])
        alone = Groups(1, int(ends[2]), (first, first + 8, *entries))
        for start in range(0, M, step):
            numbers = _rows_of(weight, int(matrices[u]), start, min(start + step, M)).dequantize()
            rows = QTensor.from_array(numbers, "F32", weight.name)
            _launch(dot_float.linear_f32, (address(x), 0, 0), rows, out, alone, start)


def _rows_of(weight, matrix, start, stop):
    """Some rows of one of its matrices, as in the file."""
    if isinstance(weight, PackedTensor):
        return weight.unpack_rows(start, stop, matrix)
    return (weight if weight.ndim == 2 else weight.expert(matrix)).take_rows(start, stop)


def _int64s(at, n):
    return np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(at))
