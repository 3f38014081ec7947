"""RMSNorm and LayerNorm on CUDA.        definition: refimpl/ops/norm.py

grid     one block per row
block    a warp per 256 columns, at most 8; threads stride over the columns
shared   one float per warp, the partial sums
traffic  a row is read from memory once, then from the caches; written once
LayerNorm: what the sum of thousands of large numbers lost of a mean, the sum of the centred ones finds
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.intrinsics import as_f32, fma_rn, load_weights_v1, mul_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import MAX_WARPS, block_sum, sum_of_warps


def rms_norm(x, weight, eps, *, out=None):
    out = device.current().empty(x.shape, np.float32) if out is None else out
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    is_weighted = weight is not None
    weight = device.constant(weight, np.float32) if is_weighted else rows.reshape(-1)[:1]
    arguments = rows, weight, np.int32(is_weighted), np.float32(eps)
    device.current().launch(RMS_NORM, len(rows), threads_for(D), *arguments, out.reshape(-1, D))
    return out


def layer_norm(x, weight, bias, eps, *, out=None):
    out = device.current().empty(x.shape, np.float32) if out is None else out
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    has_bias = bias is not None
    weight = device.constant(weight, np.float32)
    bias = device.constant(bias, np.float32) if has_bias else weight
    arguments = rows, weight, bias, np.int32(has_bias), np.float32(eps)
    device.current().launch(LAYER_NORM, len(rows), threads_for(D), *arguments, out.reshape(-1, D))
    return out


def threads_for(D):
    """By the width alone: the order of a sum must not depend on how many rows there are."""
    return 32 * max(1, min(8, D // 256))


@cuda.jit(device=True)
def _factor(x, x0, eps, D, threads, partial):
    """(what a row is multiplied by, this thread's first column); all threads of a block come here."""
    first = cuda.threadIdx.x if cuda.threadIdx.x < threads else D
    squares = float32(0)
    for d in range(first, D, threads):
        squares = fma_rn(x[x0 + d], x[x0 + d], squares)
    mean = sum_of_warps(squares, partial, threads >> 5) / float32(D)
    return float32(1) / math.sqrt(mean + eps), first


@cuda.jit(device=True)
def norm_row(x, x0, weight, is_weighted, eps, out, out0, D, threads, partial):
    """A row: x[x0 : x0 + D] -> out[out0 : ...], by the first `threads` of a block, all of which come here."""
    factor, first = _factor(x, x0, eps, D, threads, partial)
    for d in range(first, D, threads):
        value = mul_rn(x[x0 + d], factor)
        if is_weighted:
            value = mul_rn(value, weight[d])
        out[out0 + d] = value


@cache
def holding(n):
    """(hold, norm_row_with) for rows of which a thread has up to n columns: norm_row in two parts.

    hold(weight, D, threads)   what this thread multiplies by, in registers.  Nobody writes it, so this may
                               be long before there is a row
    norm_row_with(x, x0, weights, eps, out, out0, D, threads, partial)   the rest
    """
    hold, multiply = _held_columns(n)

    @cuda.jit(device=True)
    def norm_row_with(x, x0, weights, eps, out, out0, D, threads, partial):
        factor, first = _factor(x, x0, eps, D, threads, partial)
        multiply(x, x0, factor, weights, out, out0, first, D, threads)

    return hold, norm_row_with


def _held_columns(n):
    """One after the other: a tuple that a loop indexes would not stay in registers."""
    last = n - 1
    fewer, multiply_fewer = _held_columns(last) if last else (None, None)

    @cuda.jit(device=True)
    def one(weight, D, threads):
        return as_f32(load_weights_v1(weight, min(cuda.threadIdx.x + last * threads, D - 1))[0])

    @cuda.jit(device=True)
    def multiply_one(x, x0, factor, weights, out, out0, first, D, threads):
        d = first + last * threads
        if d < D:
            out[out0 + d] = mul_rn(mul_rn(x[x0 + d], factor), weights[last])

    if not last:

        @cuda.jit(device=True)
        def only(weight, D, threads):
            return (one(weight, D, threads),)

        return only, multiply_one

    @cuda.jit(device=True)
    def all_of(weight, D, threads):
        return fewer(weight, D, threads) + (one(weight, D, threads),)  # noqa: RUF005  Numba has no other way

    @cuda.jit(device=True)
    def multiply_all(x, x0, factor, weights, out, out0, first, D, threads):
        multiply_fewer(x, x0, factor, weights, out, out0, first, D, threads)
        multiply_one(x, x0, factor, weights, out, out0, first, D, threads)

    return all_of, multiply_all


def _rms_norm_kernel(x, weight, is_weighted, eps, out):
    partial = cuda.shared.array(MAX_WARPS, float32)
    t = cuda.blockIdx.x
    norm_row(x[t], 0, weight, is_weighted, eps, out[t], 0, x.shape[1], cuda.blockDim.x, partial)


def _layer_norm_kernel(x, weight, bias, has_bias, eps, out):
    partial = cuda.shared.array(MAX_WARPS, float32)
    t, D = cuda.blockIdx.x, x.shape[1]
    total = float32(0)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        total += x[t, d]
    mean = block_sum(total, partial) / float32(D)
    left, squares = float32(0), float32(0)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        centred = x[t, d] - mean
        left += centred
        squares += centred * centred
    lost = block_sum(left, partial) / float32(D)
    factor = float32(1) / math.sqrt(block_sum(squares, partial) / float32(D) + eps)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        value = (x[t, d] - mean - lost) * factor * weight[d]
        if has_bias:
            value += bias[d]
        out[t, d] = value


_ROWS, _VECTOR = float32[:, ::1], float32[::1]
RMS_NORM = Kernel(_rms_norm_kernel, (_ROWS, _VECTOR, int32, float32, _ROWS), wants=("SHFL", "MUFU.RSQ"))
LAYER_NORM = Kernel(
    _layer_norm_kernel, (_ROWS, _VECTOR, _VECTOR, int32, float32, _ROWS), wants=("SHFL", "MUFU.RSQ")
)
KERNELS = (RMS_NORM, LAYER_NORM)
