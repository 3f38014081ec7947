"""Weights as float32 numbers: four neighbouring columns of a sub-block at a time.

What they are is their format's definition (quant), every rounding included.
"""

from functools import cache

from numba import cuda, float32, int32

from fastpath.cuda.codes import blocks_of, codes_of, scales_of
from fastpath.cuda.intrinsics import (
    add_rn,
    and32,
    as_f32,
    f16_to_f32,
    load_weights_v4,
    mul_rn,
    sar32,
    shl32,
    shr32,
    sub32,
)


@cache
def values_of(coding):
    """(load, four).  load(low, high, sub, block, spot) -> what a lane needs for 32 columns (codes.spot_of);
    four(that, i) -> columns 4i .. 4i + 3 of them."""
    if coding.scales in _PLAIN:
        return _PLAIN[coding.scales]
    load_codes = codes_of(coding)
    load_factors = _factors_256(coding) if coding.is_256 else _factors_32(coding)
    offset, has_minimum = coding.offset, coding.has_minimum

    @cuda.jit(device=True)
    def load(low, high, sub, block, spot):
        return load_codes(low, high, spot), load_factors(sub, block, spot)

    @cuda.jit(device=True)
    def one(word, k, scale, minimum):
        code = sub32(sar32(shl32(word, 24 - 8 * k), 24), int32(offset))  # bytes are below 128, or signed
        value = mul_rn(scale, float32(code))
        return add_rn(value, minimum) if has_minimum else value

    @cuda.jit(device=True)
    def four(loaded, i):
        words, factors = loaded
        word = words[i]
        scale, minimum = (factors[0], factors[2]) if i < 4 else (factors[1], factors[3])
        return (
            one(word, 0, scale, minimum), one(word, 1, scale, minimum),
            one(word, 2, scale, minimum), one(word, 3, scale, minimum),
        )  # fmt: skip

    return load, four


def _factors_32(coding):
    load_scales = scales_of(coding)

    @cuda.jit(device=True)
    def factors(sub, block, spot):
        d, m = load_scales(sub, spot)
        return d, d, m, m

    return factors


def _factors_256(coding):
    """Scales and minima of either half."""
    load_scales, load_block, has_minimum = scales_of(coding), blocks_of(coding), coding.has_minimum

    @cuda.jit(device=True)
    def factors(sub, block, spot):
        sc0, sc1, mn0, mn1 = load_scales(sub, spot)
        d, dmin = load_block(block, spot)
        m0, m1 = float32(0), float32(0)
        if has_minimum:
            m0, m1 = -mul_rn(dmin, float32(mn0)), -mul_rn(dmin, float32(mn1))
        return mul_rn(d, float32(sc0)), mul_rn(d, float32(sc1)), m0, m1

    return factors


# -- plain numbers


@cuda.jit(device=True)
def _piece(low, spot, pieces, i):
    """Piece i of a sub-block that has so many."""
    return load_weights_v4(low, 4 * (spot[0] * 4 * pieces + (spot[3] * pieces + i) * spot[1] + spot[2]))


@cuda.jit(device=True)
def _load_32(low, high, sub, block, spot):
    return (
        _piece(low, spot, 8, 0) + _piece(low, spot, 8, 1)
        + _piece(low, spot, 8, 2) + _piece(low, spot, 8, 3)
        + _piece(low, spot, 8, 4) + _piece(low, spot, 8, 5)
        + _piece(low, spot, 8, 6) + _piece(low, spot, 8, 7)
    )  # fmt: skip


@cuda.jit(device=True)
def _load_16(low, high, sub, block, spot):
    return (
        _piece(low, spot, 4, 0) + _piece(low, spot, 4, 1) + _piece(low, spot, 4, 2) + _piece(low, spot, 4, 3)
    )


@cuda.jit(device=True)
def _four_f32(words, i):
    return as_f32(words[4 * i]), as_f32(words[4 * i + 1]), as_f32(words[4 * i + 2]), as_f32(words[4 * i + 3])


@cuda.jit(device=True)
def _four_f16(words, i):
    a, b = words[2 * i], words[2 * i + 1]
    return f16_to_f32(a), f16_to_f32(shr32(a, 16)), f16_to_f32(b), f16_to_f32(shr32(b, 16))


@cuda.jit(device=True)
def _four_bf16(words, i):
    a, b, upper = words[2 * i], words[2 * i + 1], -65536
    return as_f32(shl32(a, 16)), as_f32(and32(a, upper)), as_f32(shl32(b, 16)), as_f32(and32(b, upper))


_PLAIN = {"f32": (_load_32, _four_f32), "f16": (_load_16, _four_f16), "bf16": (_load_16, _four_bf16)}
