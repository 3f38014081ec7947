"""Sums and scalings.        definition: refimpl/ops/elementwise.py

work item   1,024 values; with a vector for all rows: one row
arithmetic  one rounding per value
traffic     bound by memory: every value once in, once out
"""

import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, output, shaped
from fastpath.cpu.kernel import f32_word, kernel
from fastpath.cpu.simd import (
    add_f32,
    ld_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    mul_f32,
    splat_f32,
    store_f32,
    store_first_f32,
    sub_f32,
)

ITEM = 1024  # values
ITEMS_PER_PIECE = 16


@kernel
def _add_kernel(args, lo, hi, thread):
    x, y, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    first, last = ITEM * lo, min(ITEM * hi, n)
    for i in range(first, last - 15, 16):
        store_f32(out + 4 * i, add_f32(load_f32(x + 4 * i), load_f32(y + 4 * i)))
    rest = (last - first) % 16
    if rest:
        at = 4 * (last - rest)
        store_first_f32(out + at, rest, add_f32(load_first_f32(x + at, rest), load_first_f32(y + at, rest)))


@kernel
def _scale_kernel(args, lo, hi, thread):
    x, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    factor = splat_f32(ld_f32(args + 24))
    first, last = ITEM * lo, min(ITEM * hi, n)
    for i in range(first, last - 15, 16):
        store_f32(out + 4 * i, mul_f32(load_f32(x + 4 * i), factor))
    rest = (last - first) % 16
    if rest:
        at = 4 * (last - rest)
        store_first_f32(out + at, rest, mul_f32(load_first_f32(x + at, rest), factor))


@kernel
def _bias_kernel(args, lo, hi, thread):
    x, bias, out, width = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    for row in range(lo, hi):
        for c in range(0, width, 16):
            at, rest = 4 * (row * width + c), min(16, width - c)
            value = add_f32(load_first_f32(x + at, rest), load_first_f32(bias + 4 * c, rest))
            store_first_f32(out + at, rest, value)


@kernel
def _standardize_kernel(args, lo, hi, thread):
    x, mean, factor, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    width = ld_i64(args + 32)
    for row in range(lo, hi):
        for c in range(0, width, 16):
            at, rest = 4 * (row * width + c), min(16, width - c)
            value = sub_f32(load_first_f32(x + at, rest), load_first_f32(mean + 4 * c, rest))
            store_first_f32(out + at, rest, mul_f32(value, load_first_f32(factor + 4 * c, rest)))


def add(x, y, *, out=None):
    x = floats(x, "add: x")
    y = shaped(y, x.shape, "add: y")
    out = output(out, x.shape, "add")
    args = (address(x), address(y), address(out), x.size)
    threads.run(_add_kernel, args, -(-x.size // ITEM), ITEMS_PER_PIECE)
    return out


def scale(x, factor, *, out=None):
    x = floats(x, "scale: x")
    out = output(out, x.shape, "scale")
    args = (address(x), address(out), x.size, f32_word(factor))
    threads.run(_scale_kernel, args, -(-x.size // ITEM), ITEMS_PER_PIECE)
    return out


def add_bias(x, bias, *, out=None):
    x = floats(x, "add_bias: x")
    C = x.shape[-1]
    bias = np.full(C, bias, x.dtype) if np.ndim(bias) == 0 else shaped(bias, (C,), "add_bias: bias")
    out = output(out, x.shape, "add_bias")
    args = (address(x), address(bias), address(out), C)
    threads.run(_bias_kernel, args, x.size // max(1, C), ITEM * ITEMS_PER_PIECE // max(1, C))
    return out


def standardize(x, mean, factor, *, out=None):
    x = floats(x, "standardize: x")
    C = x.shape[-1]
    mean, factor = shaped(mean, (C,), "standardize: mean"), shaped(factor, (C,), "standardize: factor")
    out = output(out, x.shape, "standardize")
    args = (address(x), address(mean), address(factor), address(out), C)
    threads.run(_standardize_kernel, args, x.size // max(1, C), ITEM * ITEMS_PER_PIECE // max(1, C))
    return out
