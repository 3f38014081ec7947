"""Products with weight matrices.        definition: refimpl/ops/linear.py, refimpl/ops/integer.py

Wrappers choose the kernel of the format (dot.py, dot_float.py), round the activations once, and say which
rows meet which matrix.  A stack of experts is the same kernel with more matrices: rows are grouped by
expert, so that the weights of a chosen expert are read and unpacked once per call, and those of others
never.
"""

from functools import lru_cache

import numpy as np

from fastpath.cpu import dot, dot_float, threads, unpack
from fastpath.cpu.buffers import address, floats, output, workspace
from fastpath.cpu.dot import blocks_of_32, blocks_of_256
from fastpath.cpu.kernel import kernel
from fastpath.cpu.packing import PackedTensor
from fastpath.cpu.quantize import quantize, quantize_32, quantize_256
from quant import QTensor

DEQUANTIZED_VALUES = 1 << 21  # values of weights widened at a time, where there is no kernel for the format
MIN_WORK = 1 << 17  # multiplications below which a second thread does not pay


# Per format: unpacking function, bytes of a block, offset of the unpacked bytes, (sub-blocks,) has minima.


@kernel
def linear_q4_0(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.q4_0, 18, 8, False)


@kernel
def linear_q4_1(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.q4_1, 20, 0, True)


@kernel
def linear_q5_0(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.q5_0, 22, 16, False)


@kernel
def linear_q5_1(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.q5_1, 24, 0, True)


@kernel
def linear_q8_0(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.q8_0, 34, 128, False)


@kernel
def linear_iq4_nl(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.iq4_nl, 18, 128, False)


@kernel
def linear_mxfp4(args, lo, hi, thread):
    blocks_of_32(args, lo, hi, thread, unpack.mxfp4, 17, 128, False)


@kernel
def linear_q2_k(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.q2_k, 84, 0, 16, True)


@kernel
def linear_q3_k(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.q3_k, 110, 4, 16, False)


@kernel
def linear_q4_k(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.q4_k, 144, 0, 8, True)


@kernel
def linear_q5_k(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.q5_k, 176, 0, 8, True)


@kernel
def linear_q6_k(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.q6_k, 210, 32, 16, False)


@kernel
def linear_iq4_xs(args, lo, hi, thread):
    blocks_of_256(args, lo, hi, thread, unpack.iq4_xs, 136, 128, 8, False)


INTEGER_KERNELS = {
    "Q4_0": linear_q4_0,
    "Q4_1": linear_q4_1,
    "Q5_0": linear_q5_0,
    "Q5_1": linear_q5_1,
    "Q8_0": linear_q8_0,
    "IQ4_NL": linear_iq4_nl,
    "MXFP4": linear_mxfp4,
    "Q2_K": linear_q2_k,
    "Q3_K": linear_q3_k,
    "Q4_K": linear_q4_k,
    "Q5_K": linear_q5_k,
    "Q6_K": linear_q6_k,
    "IQ4_XS": linear_iq4_xs,
}
FLOAT_KERNELS = {"F32": dot_float.linear_f32, "F16": dot_float.linear_f16, "BF16": dot_float.linear_bf16}


def kernels_for(format_name, activations):
    """The kernels that products with this format need (for warming up)."""
    if activations == "int8" and format_name in INTEGER_KERNELS:
        rounding = quantize_256 if format_name.endswith(("_K", "_XS")) else quantize_32
        return (rounding, INTEGER_KERNELS[format_name])
    return (FLOAT_KERNELS.get(format_name, dot_float.linear_f32),)


def linear(x, weight, activations, *, out=None):
    where = weight.name or weight.format.name
    if len(weight.shape) != 2 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: {where}: x {x.shape} and weight {weight.shape}, expected x [T, C] and weight [M, C]"
        )
    x, T = floats(x, where), x.shape[0]
    out = output(out, (T, weight.shape[0]), where)
    _multiply(x, weight, activations, out, _one_matrix(T))
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
    flat = expert_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    starts = np.append(starts, len(flat))
    x_rows = order // A if x.ndim == 2 else order
    _multiply(x.reshape(-1, C), weight, activations, out, Routing(experts, starts, x_rows, order))
    return out


class Routing:
    """Which rows meet which matrix: out[out_rows[i]] = x[x_rows[i]] @ weight[matrices[u]].T for the entries
    i = starts[u] .. starts[u+1]-1.

    Shapes:
        matrices i[U], starts i[U + 1], x_rows and out_rows i[n]
    """

    def __init__(self, matrices, starts, x_rows, out_rows):
        self.matrices, self.starts, self.x_rows, self.out_rows = matrices, starts, x_rows, out_rows
        self.n_matrices, self.n_entries = len(matrices), len(x_rows)
        self.most = int(np.diff(starts).max(initial=0))
        self._memory = np.concatenate([matrices, starts, x_rows, out_rows]).astype(np.int64)
        first = address(self._memory)
        sizes = np.cumsum([0, len(matrices), len(starts), len(x_rows)])
        self.words = (len(matrices), *(first + 8 * int(size) for size in sizes))


@lru_cache(maxsize=64)
def _one_matrix(T):
    return Routing(np.zeros(1, np.int64), np.array([0, T]), np.arange(T), np.arange(T))


def _multiply(x, weight, activations, out, routing):
    if activations not in ("int8", "float"):
        raise ValueError(f"activations: got {activations!r}, expected 'int8' or 'float'. Choose one of them")
    weight = _rows_of(weight)
    name = weight.format.name
    if activations == "int8" and name in INTEGER_KERNELS:
        activation = quantize(x, weight.format.block_size)
        _launch(INTEGER_KERNELS[name], dot.scratch_bytes(routing.most), activation, weight, out, routing)
    elif name in FLOAT_KERNELS:
        activation = (address(x), 0, 0)
        _launch(
            FLOAT_KERNELS[name], dot_float.scratch_bytes(weight.row_len), activation, weight, out, routing
        )
    else:
        _multiply_dequantized(x, weight, out, routing)


def _rows_of(weight):
    if not isinstance(weight, PackedTensor):
        return weight
    return weight.unpack() if weight.is_grouped else weight.as_rows()


def _launch(kernel, per_thread, activation, weight, out, routing, first_column=0):
    M, C = weight.shape[-2:]
    data = weight.data
    if data.strides[-1] != 1 or data.strides[-2] != data.shape[-1]:
        where = weight.name or "weight"
        raise ValueError(f"{where}: its rows are not contiguous (strides {data.strides}); copy the tensor")
    matrix_bytes = data.strides[0] if weight.ndim == 3 else 0
    per_thread = -(-per_thread // 64) * 64
    n_threads = threads.num_threads()
    args = (
        address(data), matrix_bytes, data.shape[-1], M, C, *activation,
        address(out) + 4 * first_column, 4 * out.shape[-1], *routing.words,
        workspace(per_thread * n_threads, "dot"), per_thread,
    )  # fmt: skip
    n_items = routing.n_matrices * -(-M // 16)
    work_of_item = 16 * C * max(1, routing.n_entries // max(1, routing.n_matrices))
    # about eight pieces per thread, so that the last one is not waited for long
    grain = max(MIN_WORK // work_of_item, n_items // (8 * n_threads), 1)
    threads.run(kernel, args, n_items, grain, n_threads)


def _multiply_dequantized(x, weight, out, routing):
    """Formats without a kernel: some rows at a time become float32 and go through the kernel for F32."""
    M, C = weight.shape[-2:]
    activation, per_thread = (address(x), 0, 0), dot_float.scratch_bytes(C)
    step = max(16, DEQUANTIZED_VALUES // C // 16 * 16)
    for u, matrix in enumerate(routing.matrices):
        part = weight if weight.ndim == 2 else weight.expert(int(matrix))
        chosen = slice(routing.starts[u], routing.starts[u + 1])
        ends = np.array([0, chosen.stop - chosen.start])
        alone = Routing(np.zeros(1, np.int64), ends, routing.x_rows[chosen], routing.out_rows[chosen])
        for start in range(0, M, step):
            numbers = part.take_rows(start, min(start + step, M)).dequantize()
            rows = QTensor.from_array(numbers, "F32", weight.name)
            _launch(dot_float.linear_f32, per_thread, activation, rows, out, alone, start)
