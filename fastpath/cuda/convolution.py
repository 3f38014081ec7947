"""Convolutions of the audio encoder, pooling of the vision encoder.    definition: refimpl/ops/convolution.py

conv2d       a thread per number of the result; 9 C products, ascending: rows, columns, channels
causal_conv  a thread per number, frames ascending;  mean_pool: the same, row by row of the square
traffic      inputs come from the caches: they are small, and read 9 or 4 times each
"""

import numpy as np
from numba import float32, int32

from fastpath.cuda import device
from fastpath.cuda.elementwise import launch, places
from fastpath.cuda.kernel import Kernel


def conv2d(x, weight, *, out=None):
    (T, F, _), M = x.shape, weight.shape[0]
    shape = (T + 1) // 2, (F + 1) // 2, M
    out = device.current().empty(shape, np.float32) if out is None else out
    weight = device.constant(weight, np.float32)
    return launch(CONV2D, out, x, weight, np.int32(shape[1]))


def causal_conv(x, weight, *, out=None):
    out = device.current().empty(x.shape, np.float32) if out is None else out
    return launch(CAUSAL_CONV, out, x, device.constant(weight, np.float32))


def mean_pool(x, n_columns, side, *, out=None):
    n, D = x.shape[0] // (side * side), x.shape[1]
    out = device.current().empty((n, D), np.float32) if out is None else out
    return launch(MEAN_POOL, out, x, np.int32(n_columns), np.int32(side))


def _conv2d_kernel(x, weight, n_columns, out):
    T, F, C = x.shape
    M = weight.shape[0]
    for place in places(out.size):
        m, pixel = place % M, place // M
        t, f = pixel // n_columns, pixel % n_columns
        total = float32(0)
        for i in range(3):
            row = 2 * t + i - 1
            if row < 0 or row >= T:
                continue
            for j in range(3):
                column = 2 * f + j - 1
                if column < 0 or column >= F:
                    continue
                for c in range(C):
                    total += x[row, column, c] * weight[m, c, i, j]
        out[place] = total


def _causal_conv_kernel(x, weight, out):
    C, k = weight.shape
    for place in places(out.size):
        t, c = place // C, place % C
        total = float32(0)
        for j in range(max(0, k - 1 - t), k):
            total += x[t - (k - 1) + j, c] * weight[c, j]
        out[place] = total


def _mean_pool_kernel(x, n_columns, side, out):
    D = x.shape[1]
    per_row = n_columns // side
    for place in places(out.size):
        square, d = place // D, place % D
        first = square // per_row * side * n_columns + square % per_row * side
        total = float32(0)
        for i in range(side):
            for j in range(side):
                total += x[first + i * n_columns + j, d]
        out[place] = total / float32(side * side)


_FLAT, _ROWS = float32[::1], float32[:, ::1]
CONV2D = Kernel(_conv2d_kernel, (float32[:, :, ::1], float32[:, :, :, ::1], int32, _FLAT), ("FFMA",))
CAUSAL_CONV = Kernel(_causal_conv_kernel, (_ROWS, _ROWS, _FLAT), ("FFMA",), registers=80)
MEAN_POOL = Kernel(_mean_pool_kernel, (_ROWS, int32, int32, _FLAT), ("FADD",))
KERNELS = (CONV2D, CAUSAL_CONV, MEAN_POOL)
