"""32 components of a position as a scale and codes: q8_0, q4_0.      part of attention.py

definition  refimpl/kv_tiles.py
arithmetic  float32, an operation at a time: the largest magnitude, of equal ones the first; one division for
            the scale, one for its reciprocal; a product per number, and its rounding.  The scale is rounded
            to float16 at the end: codes are those of the scale before.
"""

import numba
import numpy as np

from fastpath.cpu import kv_types
from fastpath.cpu.kernel import helper
from fastpath.cpu.kv_types import round_f16, store_u16
from fastpath.cpu.simd import (
    abs_bits,
    abs_f32,
    add_f32,
    bits1_to_f32,
    copysign_f32,
    div_f32,
    f32_to_i32,
    i32_to_f32,
    i32_to_i8,
    ld_i32,
    ld_u16,
    less_f32,
    max_i32,
    min_f32,
    mul_f32,
    splat_f32,
    splat_i32,
    store_i8x16,
    sub_f32,
    top_i32,
)
from refimpl.kv_types import NOTHING

F32 = numba.float32
Q8_0, Q4_0 = kv_types.Q8_0.code, kv_types.Q4_0.code
INFINITY, LEAST = 0x7F800000, int(NOTHING.view(np.int32))  # as bits
NAN = 0x7E00  # a float16


@helper
def _half(x, spare):
    """The bits of a float32 in 16 lanes as a float16."""
    store_u16(spare, round_f16(x))
    return ld_u16(spare)


@helper
def _first_of_size(source, n, bits):
    """The first of n numbers that has this magnitude, with its sign."""
    i = 0
    while i < n - 1 and ld_i32(source + 4 * i) & 0x7FFFFFFF != bits:
        i += 1
    return bits1_to_f32(ld_i32(source + 4 * i))


@helper
def _rounded(x):
    """To the nearest integer, halves away from zero; |x| < 2^31."""
    whole = i32_to_f32(f32_to_i32(x))
    one, none = splat_f32(F32(1.0)), splat_f32(F32(0.0))
    away = less_f32(abs_f32(sub_f32(x, whole)), splat_f32(F32(0.5)), none, one)
    return f32_to_i32(add_f32(whole, copysign_f32(away, x)))


@helper
def _fours(x):
    """Codes 0 .. 15: what lies beside is cut off, not rounded."""
    return f32_to_i32(min_f32(add_f32(x, splat_f32(F32(8.5))), splat_f32(F32(15.5))))


@helper
def quantize(low, high, source, n, code, codes):
    """Numbers `low` and `high`, the first n of them at `source`: 32 bytes of codes, in q4_0 plus 8.

    Returns the bits of the scale.  Bytes at `codes` are written over before that, too.
    """
    top = top_i32(max_i32(abs_bits(low), abs_bits(high)))
    if top >= INFINITY or top < LEAST:
        nothing = i32_to_i8(splat_i32(8 if code == Q4_0 else 0))
        store_i8x16(codes, nothing)
        store_i8x16(codes + 16, nothing)
        if top >= INFINITY:
            return NAN
        return 0x8000 if code == Q4_0 else 0  # 0 / -8
    if code == Q4_0:
        scale = div_f32(splat_f32(_first_of_size(source, n, top)), splat_f32(F32(-8.0)))
    else:
        scale = div_f32(splat_f32(bits1_to_f32(top)), splat_f32(F32(127.0)))
    half = _half(scale, codes)
    factor = div_f32(splat_f32(F32(1.0)), scale)
    low, high = mul_f32(low, factor), mul_f32(high, factor)
    if code == Q4_0:
        store_i8x16(codes, i32_to_i8(_fours(low)))
        store_i8x16(codes + 16, i32_to_i8(_fours(high)))
    else:
        store_i8x16(codes, i32_to_i8(_rounded(low)))
        store_i8x16(codes + 16, i32_to_i8(_rounded(high)))
    return half
