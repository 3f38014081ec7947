"""Convolutions of the audio encoder, pooling of the vision encoder.    definition: refimpl/ops/convolution.py

conv2d       work item   one row of the result, all its frequencies and channels
             arithmetic  per row of the kernel one fma chain over 3 C products, by the product of attention
                         (kv_product.py); the three are added, ascending
             traffic     three rows of the input, with a border of zeros, are copied to where all channels
                         of the result find them in the caches: 3 copies per 9 M products
causal_conv  work item   one row; an fma chain over the frames, ascending
mean_pool    work item   one row of the result; sums row by row of the square, one division
"""

import numba
import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, output, shaped, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_product import product_panel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    fma_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    splat_f32,
    store_first_f32,
)

F32 = numba.float32
COLUMNS = 32  # channels of a result that are computed together
VALUES_PER_PIECE = 1 << 13


@helper
def _copy_row(x, t, n_rows, n_pixels, width, target):
    """Row t with a pixel of zeros at each end; a row of zeros if there is none."""
    n = n_pixels * width
    for i in range(0, n + 2 * width, 16):
        store_first_f32(target + 4 * i, min(16, n + 2 * width - i), splat_f32(F32(0.0)))
    if 0 <= t < n_rows:
        for i in range(0, n, 16):
            value = load_first_f32(x + 4 * (t * n + i), min(16, n - i))
            store_first_f32(target + 4 * (width + i), min(16, n - i), value)


@kernel
def _conv2d_kernel(args, lo, hi, thread):
    x, panels, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_pixels, width, n_out = (
        ld_i64(args + 24),
        ld_i64(args + 32),
        ld_i64(args + 40),
        ld_i64(args + 48),
    )
    rows = ld_i64(args + 56) + thread * ld_i64(args + 64)
    row_bytes, n_results = 4 * (n_pixels + 2) * width, (n_pixels + 1) // 2
    sums = rows + 3 * row_bytes
    for t in range(lo, hi):
        for i in range(3):
            _copy_row(x, 2 * t + i - 1, n_rows, n_pixels, width, rows + i * row_bytes)
        for first in range(0, n_out, COLUMNS):
            panel = panels + 4 * 9 * width * first
            for i in range(3):
                product_panel(
                    n_results, rows + i * row_bytes, 8 * width, panel + 4 * 3 * width * COLUMNS * i,
                    0, 3 * width, 0, sums, 4 * COLUMNS, i == 0,
                )  # fmt: skip
            for r in range(n_results):
                target = out + 4 * ((t * n_results + r) * n_out + first)
                for c in range(0, min(COLUMNS, n_out - first), 16):
                    value = load_f32(sums + 4 * (COLUMNS * r + c))
                    store_first_f32(target + 4 * c, min(16, n_out - first - c), value)


@kernel
def _causal_kernel(args, lo, hi, thread):
    x, weight, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    width, n_frames = ld_i64(args + 24), ld_i64(args + 32)
    for t in range(lo, hi):
        for c in range(0, width, 16):
            rest = min(16, width - c)
            total = splat_f32(F32(0.0))
            for j in range(max(0, n_frames - 1 - t), n_frames):
                frame = load_first_f32(x + 4 * ((t - (n_frames - 1) + j) * width + c), rest)
                total = fma_f32(frame, load_first_f32(weight + 4 * (j * width + c), rest), total)
            store_first_f32(out + 4 * (t * width + c), rest, total)


@kernel
def _pool_kernel(args, lo, hi, thread):
    x, out, width = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_columns, side = ld_i64(args + 24), ld_i64(args + 32)
    count, across = splat_f32(F32(side * side)), n_columns // side
    for item in range(lo, hi):
        corner = item // across * side * n_columns + item % across * side
        for c in range(0, width, 16):
            rest = min(16, width - c)
            total = splat_f32(F32(0.0))
            for i in range(side):
                for j in range(side):
                    at = x + 4 * ((corner + i * n_columns + j) * width + c)
                    total = add_f32(total, load_first_f32(at, rest))
            store_first_f32(out + 4 * (item * width + c), rest, div_f32(total, count))


def conv2d(x, weight, *, out=None):
    T, F, C = x.shape
    M = len(weight)
    x, weight = floats(x, "conv2d: x"), shaped(weight, (M, C, 3, 3), "conv2d: weight")
    out = output(out, ((T + 1) // 2, (F + 1) // 2, M), "conv2d")
    n_panels = -(-M // COLUMNS)
    panels = np.zeros((n_panels * COLUMNS, 3, 3, C), np.float32)  # 32 channels side by side, as they are read
    panels[:M] = weight.transpose(0, 2, 3, 1)
    panels = np.ascontiguousarray(panels.reshape(n_panels, COLUMNS, 9 * C).transpose(0, 2, 1))
    per_thread = 4 * (3 * (F + 2) * C + COLUMNS * ((F + 1) // 2)) + 64
    n_threads = threads.num_threads()
    args = (
        address(x), address(panels), address(out), T, F, C, M,
        workspace(per_thread * n_threads, "conv2d"), per_thread,
    )  # fmt: skip
    threads.run(_conv2d_kernel, args, len(out), 1, n_threads)
    return out


def causal_conv(x, weight, *, out=None):
    T, C = x.shape
    k = weight.shape[-1]
    x, weight = floats(x, "causal_conv: x"), shaped(weight, (C, k), "causal_conv: weight")
    weight = np.ascontiguousarray(weight.T)
    out = output(out, (T, C), "causal_conv")
    args = (address(x), address(weight), address(out), C, k)
    threads.run(_causal_kernel, args, T, VALUES_PER_PIECE // max(1, C))
    return out


def mean_pool(x, n_columns, side, *, out=None):
    D = x.shape[1]
    x = floats(x, "mean_pool: x")
    n_rows = len(x) // max(1, n_columns)
    if n_rows * n_columns != len(x) or n_rows % side or n_columns % side:
        raise ValueError(
            f"mean_pool: {len(x)} rows in {n_columns} columns, expected a grid of {side} x {side} squares"
        )
    out = output(out, (len(x) // side**2, D), "mean_pool")
    args = (address(x), address(out), D, n_columns, side)
    threads.run(_pool_kernel, args, len(out), max(1, VALUES_PER_PIECE // (side**2 * max(1, D))))
    return out
