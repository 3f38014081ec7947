"""Products with weight matrices.        definition: refimpl/ops/linear.py, refimpl/ops/integer.py

Wrappers only: they choose the kernel of the format (dot.py, dot_float.py), round the activations once, and say
which rows meet which matrix.  A stack of experts is the same kernel with more matrices: rows are grouped by
expert, so that the weights of a chosen expert are read and unpacked once per call, and of others never.
"""

import numpy as np

from fastpath.cpu import dot, dot_float, threads, unpack
from fastpath.cpu.buffers import address, floats, output, words, workspace
from fastpath.cpu.dot import blocks_of_32, blocks_of_256
from fastpath.cpu.kernel import kernel
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
    where = f"linear({weight.name or weight.format.name})"
    if weight.ndim != 2 or x.ndim != 2 or x.shape[1] != weight.row_len:
        raise ValueError(f"{where}: x {x.shape} and weight {weight.shape}, expected x [T, C] and weight [M, C]")
    x, T = floats(x, where), x.shape[0]
    out = output(out, (T, weight.shape[0]), where)
    rows = np.arange(T, dtype=np.int64)
    _multiply(x, weight, activations, out, np.zeros(1, np.int64), np.array([0, T], np.int64), rows, rows)
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
        raise ValueError(f"{where}: expert {expert_ids.min()}..{expert_ids.max()}, but there are {E}, 0 .. {E - 1}")
    x = floats(x, where)
    out = output(out, (T, A, M), where)
    flat = expert_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    starts = np.append(starts, len(flat)).astype(np.int64)
    x_rows = order // A if x.ndim == 2 else order
    _multiply(x.reshape(-1, C), weight, activations, out, experts.astype(np.int64), starts, x_rows, order)
    return out


def _multiply(x, weight, activations, out, matrices, starts, x_rows, out_rows):
    """out[out_rows[i]] = x[x_rows[i]] @ weight[matrices[e]].T for the entries starts[e] .. starts[e+1]-1.

    Shapes:
        x f32[*, C], out f32[..., M], matrices i64[U], starts i64[U + 1], x_rows and out_rows i64[n]
    """
    if activations not in ("int8", "float"):
        raise ValueError(f"activations: got {activations!r}, expected 'int8' or 'float'. Choose one of them")
    name = weight.format.name
    if activations == "int8" and name in INTEGER_KERNELS:
        kernel, per_thread = INTEGER_KERNELS[name], dot.scratch_bytes(int(np.diff(starts).max(initial=0)))
        activation = quantize(x, weight.format.block_size)
    elif name in FLOAT_KERNELS:
        kernel, per_thread = FLOAT_KERNELS[name], dot_float.scratch_bytes(weight.row_len)
        activation = (address(x), 0, 0)
    else:
        _multiply_dequantized(x, weight, out, matrices, starts, x_rows, out_rows)
        return
    _launch(kernel, per_thread, activation, weight, out, matrices, starts, x_rows, out_rows, address(out))


def _launch(kernel, per_thread, activation, weight, out, matrices, starts, x_rows, out_rows, target):
    M, C = weight.shape[-2:]
    data = weight.data
    if data.strides[-1] != 1 or data.strides[-2] != data.shape[-1]:
        raise ValueError(f"{weight.name or 'weight'}: rows are not contiguous (strides {data.strides}); copy the tensor")
    matrix_bytes = data.strides[0] if weight.ndim == 3 else 0
    per_thread = -(-per_thread // 64) * 64
    args = words(
        address(data), matrix_bytes, data.shape[-1], M, C, *activation, target, 4 * out.shape[-1],
        len(matrices), address(matrices), address(starts), address(x_rows), address(out_rows),
        workspace(per_thread * threads.num_threads(), slot="dot"), per_thread,
    )  # fmt: skip
    n_groups = -(-M // 16)
    n_items = len(matrices) * n_groups
    work_of_item = 16 * C * max(1, len(x_rows) // max(1, len(matrices)))
    # about eight pieces per thread, so that the last one is not waited for long
    grain = max(MIN_WORK // work_of_item, n_items // (8 * threads.num_threads()), 1)
    threads.run(kernel, args, n_items, grain)


def _multiply_dequantized(x, weight, out, matrices, starts, x_rows, out_rows):
    """Formats without a kernel: some rows at a time become float32 and go through the kernel for F32."""
    M, C = weight.shape[-2:]
    activation = (address(x), 0, 0)
    step = max(16, DEQUANTIZED_VALUES // C // 16 * 16)
    one = np.zeros(1, np.int64)
    for e, matrix in enumerate(matrices):
        part = weight if weight.ndim == 2 else weight.expert(int(matrix))
        chosen = slice(starts[e], starts[e + 1])
        ends = np.array([0, starts[e + 1] - starts[e]], np.int64)
        x_part, out_part = np.ascontiguousarray(x_rows[chosen]), np.ascontiguousarray(out_rows[chosen])
        for start in range(0, M, step):
            rows = QTensor.from_array(part.take_rows(start, min(start + step, M)).dequantize(), "F32", weight.name)
            _launch(
                dot_float.linear_f32, dot_float.scratch_bytes(C), activation, rows, out,
                one, ends, x_part, out_part, address(out) + 4 * start,
            )  # fmt: skip
