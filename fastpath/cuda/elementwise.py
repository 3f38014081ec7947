"""Sums and scalings on CUDA.        definition: refimpl/ops/elementwise.py

grid     one block per 1,024 numbers
block    256 threads, 4 numbers each, 256 apart
traffic  each number is read once and written once
"""

import numpy as np
from numba import cuda, float32

from fastpath.cuda import device
from fastpath.cuda.intrinsics import add_rn, mul_rn
from fastpath.cuda.kernel import Kernel

THREADS, PER_BLOCK = 256, 1024


def launch(kernel, out, *arguments):
    """A kernel over all numbers of `out`, each of which comes from those of its place; returns `out`."""
    n = int(np.prod(out.shape))
    device.current().launch(kernel, -(-n // PER_BLOCK), THREADS, *arguments, out.reshape(-1))
    return out


def like(x, out):
    return device.current().empty(x.shape, np.float32) if out is None else out


def add(x, y, *, out=None):
    return launch(ADD, like(x, out), x.reshape(-1), y.reshape(-1))


def scale(x, factor, *, out=None):
    return launch(SCALE, like(x, out), x.reshape(-1), np.float32(factor))


def add_bias(x, bias, *, out=None):
    return launch(ADD_BIAS, like(x, out), x.reshape(-1), _vector(bias))


def standardize(x, mean, factor, *, out=None):
    return launch(STANDARDIZE, like(x, out), x.reshape(-1), _vector(mean), _vector(factor))


def _vector(numbers):
    """One number for all columns, or one for each."""
    if np.isscalar(numbers):
        return device.put(np.atleast_1d(numbers), np.float32)
    return device.constant(numbers, np.float32)


@cuda.jit(device=True)
def places(n):
    """The numbers of this thread."""
    start = cuda.blockIdx.x * PER_BLOCK + cuda.threadIdx.x
    return range(start, min(n, (cuda.blockIdx.x + 1) * PER_BLOCK), THREADS)


def _add_kernel(x, y, out):
    for i in places(out.size):
        out[i] = add_rn(x[i], y[i])


def _scale_kernel(x, factor, out):
    for i in places(out.size):
        out[i] = mul_rn(x[i], factor)


def _add_bias_kernel(x, bias, out):
    for i in places(out.size):
        out[i] = x[i] + bias[i % bias.size]


def _standardize_kernel(x, mean, factor, out):
    for i in places(out.size):
        out[i] = (x[i] - mean[i % mean.size]) * factor[i % mean.size]


_F = float32[::1]
ADD = Kernel(_add_kernel, (_F, _F, _F), wants=("FADD",))
SCALE = Kernel(_scale_kernel, (_F, float32, _F), wants=("FMUL",))
ADD_BIAS = Kernel(_add_bias_kernel, (_F, _F, _F), wants=("FADD",))
STANDARDIZE = Kernel(_standardize_kernel, (_F, _F, _F, _F))
KERNELS = (ADD, SCALE, ADD_BIAS, STANDARDIZE)
