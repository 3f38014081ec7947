"""Activations rounded to int8, for integer dot products.        definition: refimpl/ops/integer.py

Each row is rounded once per call and then used by every weight row.  Beside the bytes it has sums of them,
because weights are unpacked to unsigned bytes with an offset: sum (u - offset) q = sum u q - offset sum q.

    q     i8[T, C]        scale  f32[T, C / block]
    sums  i32[T, C / 32] for blocks of 32, i32[T, C / 16] for blocks of 256
"""

import numba

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.simd import (
    abs_bits,
    add_i32,
    bits1_to_f32,
    f32_to_i32,
    i32_to_i8,
    ld_i64,
    load_f32,
    max_i32,
    mul_f32,
    round_f32,
    splat_f32,
    splat_i32,
    st_f32,
    st_i32,
    store_i8x16,
    sum_i32,
    top_i32,
)

F32 = numba.float32
INFINITY_BITS = 0x7F800000
ROWS_PER_PIECE = 4096  # values: below that a second thread does not pay


@helper
def _top(x, n_vectors):
    """Bits of the largest magnitude of 16 * n_vectors floats."""
    bits = splat_i32(0)
    for i in range(n_vectors):
        bits = max_i32(bits, abs_bits(load_f32(x + 64 * i)))
    return top_i32(bits)


@helper
def _scale_of(top_bits):
    """(scale, inverse) of a block; an unusable block has inverse 0."""
    top = bits1_to_f32(top_bits)
    if top < F32(1e-30):
        return F32(0.0), F32(0.0)
    if top_bits >= INFINITY_BITS:
        return top / F32(127.0), F32(0.0)
    return top / F32(127.0), F32(127.0) / top


@helper
def _round16(x, inverse, q):
    """16 floats to int8; returns them as int32 lanes.  inverse == 0 gives zeros, whatever x holds."""
    rounded = splat_i32(0)
    if inverse != F32(0.0):
        rounded = f32_to_i32(round_f32(mul_f32(load_f32(x), splat_f32(inverse))))
    store_i8x16(q, i32_to_i8(rounded))
    return rounded


@kernel
def quantize_32(args, lo, hi, thread):
    x, n_cols, q = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    scales, sums = ld_i64(args + 24), ld_i64(args + 32)
    n_blocks = n_cols // 32
    for block in range(lo * n_blocks, hi * n_blocks):
        scale, inverse = _scale_of(_top(x + 128 * block, 2))
        st_f32(scales + 4 * block, scale)
        first = _round16(x + 128 * block, inverse, q + 32 * block)
        second = _round16(x + 128 * block + 64, inverse, q + 32 * block + 16)
        st_i32(sums + 4 * block, sum_i32(add_i32(first, second)))


@kernel
def quantize_256(args, lo, hi, thread):
    x, n_cols, q = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    scales, sums = ld_i64(args + 24), ld_i64(args + 32)
    n_blocks = n_cols // 256
    for block in range(lo * n_blocks, hi * n_blocks):
        scale, inverse = _scale_of(_top(x + 1024 * block, 16))
        st_f32(scales + 4 * block, scale)
        for i in range(16):
            rounded = _round16(x + 1024 * block + 64 * i, inverse, q + 256 * block + 16 * i)
            st_i32(sums + 64 * block + 4 * i, sum_i32(rounded))


def quantize(x, block_size):
    """Round the rows of x f32[T, C]; returns the addresses of (q, scale, sums), valid until the next call."""
    T, C = x.shape
    n_bytes = T * C
    space = workspace(n_bytes * 2 + 256, "activations")  # scale and sums together take at most half of q
    q, scales = space, space + -(-n_bytes // 64) * 64
    sums = scales + -(-T * (C // block_size) * 4 // 64) * 64
    run = quantize_256 if block_size == 256 else quantize_32
    threads.run(run, (address(x), C, q, scales, sums), T, max(1, ROWS_PER_PIECE // max(C, 1)))
    return q, scales, sums
