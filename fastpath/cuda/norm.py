"""RMSNorm and LayerNorm on CUDA.        definition: refimpl/ops/norm.py

grid     one block per row
block    a warp per 256 columns, at most 8; threads stride over the columns
shared   one float per warp, the partial sums
traffic  a row is read from memory once, then from the caches; written once
"""

import math

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import MAX_WARPS, block_sum


def rms_norm(x, weight, eps, *, out=None):
    out = device.current().empty(x.shape, np.float32) if out is None else out
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    is_weighted = weight is not None
    weight = device.constant(weight, np.float32) if is_weighted else rows.reshape(-1)[:1]
    arguments = rows, weight, np.int32(is_weighted), np.float32(eps)
    device.current().launch(RMS_NORM, len(rows), _threads(D), *arguments, out.reshape(-1, D))
    return out


def layer_norm(x, weight, bias, eps, *, out=None):
    out = device.current().empty(x.shape, np.float32) if out is None else out
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    has_bias = bias is not None
    weight = device.constant(weight, np.float32)
    bias = device.constant(bias, np.float32) if has_bias else weight
    arguments = rows, weight, bias, np.int32(has_bias), np.float32(eps)
    device.current().launch(LAYER_NORM, len(rows), _threads(D), *arguments, out.reshape(-1, D))
    return out


def _threads(D):
    """By the width alone: the order of a sum must not depend on how many rows there are."""
    return 32 * max(1, min(8, D // 256))


def _rms_norm_kernel(x, weight, is_weighted, eps, out):
    partial = cuda.shared.array(MAX_WARPS, float32)
    t, D = cuda.blockIdx.x, x.shape[1]
    squares = float32(0)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        squares += x[t, d] * x[t, d]
    mean = block_sum(squares, partial) / float32(D)
    factor = float32(1) / math.sqrt(mean + eps)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        value = x[t, d] * factor
        if is_weighted:
            value *= weight[d]
        out[t, d] = value


def _layer_norm_kernel(x, weight, bias, has_bias, eps, out):
    partial = cuda.shared.array(MAX_WARPS, float32)
    t, D = cuda.blockIdx.x, x.shape[1]
    total = float32(0)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        total += x[t, d]
    mean = block_sum(total, partial) / float32(D)
    squares = float32(0)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        centred = x[t, d] - mean
        squares += centred * centred
    factor = float32(1) / math.sqrt(block_sum(squares, partial) / float32(D) + eps)
    for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
        value = (x[t, d] - mean) * factor * weight[d]
        if has_bias:
            value += bias[d]
        out[t, d] = value


_ROWS, _VECTOR = float32[:, ::1], float32[::1]
RMS_NORM = Kernel(_rms_norm_kernel, (_ROWS, _VECTOR, int32, float32, _ROWS), wants=("SHFL", "MUFU.RSQ"))
LAYER_NORM = Kernel(
    _layer_norm_kernel, (_ROWS, _VECTOR, _VECTOR, int32, float32, _ROWS), wants=("SHFL", "MUFU.RSQ")
)
KERNELS = (RMS_NORM, LAYER_NORM)
