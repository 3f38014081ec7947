"""The codes and scales of 32 columns, as a lane takes them from the planes of layout.py.

Each function here makes device functions for a Coding; what a format does not have costs nothing.
"""

from functools import cache

import numpy as np
from numba import cuda, int32

from fastpath.cuda.intrinsics import (
    and32,
    as_f32,
    f16_to_f32,
    load_weights_v2,
    load_weights_v4,
    mul32,
    or32,
    permute_bytes,
    sar32,
    shl32,
    shr32,
    xor32,
)


@cache
def codes_of(coding):
    """(low, high, step, lane) -> 8 words of 4 codes each: columns 0..3, 4..7, ... of the lane's 32.

    Codes are unsigned bytes without the format's offset; those of Q8_0 and of levels are signed.
    """
    if coding.levels is not None:
        return _levels_of(coding.levels)
    load_low, load_high = _LOW[coding.low_bits], _HIGH[coding.high_bits]
    shift = coding.low_bits

    @cuda.jit(device=True)
    def load(low, high, step, lane):
        a, b, c, d, e, f, g, h = load_low(low, step, lane)
        if shift == 8:
            return a, b, c, d, e, f, g, h
        i, j, k, l, m, n, o, p = load_high(high, step, lane)
        return (
            or32(a, shl32(i, shift)), or32(b, shl32(j, shift)),
            or32(c, shl32(k, shift)), or32(d, shl32(l, shift)),
            or32(e, shl32(m, shift)), or32(f, shl32(n, shift)),
            or32(g, shl32(o, shift)), or32(h, shl32(p, shift)),
        )  # fmt: skip

    return load


def _levels_of(levels):
    """Codes of 4 bits that stand for signed bytes: a table of 16 bytes in 4 words, 8 of which `prmt` sees."""
    a, b, c, d = (int(word) for word in np.array(levels, np.int8).view("<i4"))

    @cuda.jit(device=True)
    def looked_up(word):
        choices = and32(word, 0x07070707)
        choices = permute_bytes(or32(choices, shr32(choices, 4)), int32(0), 0x4420)  # four nibbles
        lower, upper = permute_bytes(a, b, choices), permute_bytes(c, d, choices)
        is_upper = mul32(and32(shr32(word, 3), 0x01010101), 255)  # whole bytes
        return xor32(lower, and32(xor32(lower, upper), is_upper))

    @cuda.jit(device=True)
    def load(low, high, step, lane):
        a, b, c, d, e, f, g, h = _low_4(low, step, lane)
        return (
            looked_up(a), looked_up(b), looked_up(c), looked_up(d),
            looked_up(e), looked_up(f), looked_up(g), looked_up(h),
        )  # fmt: skip

    return load


@cuda.jit(device=True)
def _low_8(low, step, lane):
    a, b, c, d = load_weights_v4(low, (step * 64 + lane) * 4)
    e, f, g, h = load_weights_v4(low, (step * 64 + 32 + lane) * 4)
    return a, b, c, d, e, f, g, h


@cuda.jit(device=True)
def _low_4(low, step, lane):
    a, b, c, d = load_weights_v4(low, (step * 32 + lane) * 4)
    mask = 0x0F0F0F0F
    return (
        and32(a, mask), and32(b, mask), and32(c, mask), and32(d, mask),
        and32(shr32(a, 4), mask), and32(shr32(b, 4), mask),
        and32(shr32(c, 4), mask), and32(shr32(d, 4), mask),
    )  # fmt: skip


@cuda.jit(device=True)
def _pairs_of_bits(plane, step, lane):
    a, b = load_weights_v2(plane, (step * 32 + lane) * 2)
    mask = 0x03030303
    return (
        and32(a, mask), and32(b, mask), and32(shr32(a, 2), mask), and32(shr32(b, 2), mask),
        and32(shr32(a, 4), mask), and32(shr32(b, 4), mask),
        and32(shr32(a, 6), mask), and32(shr32(b, 6), mask),
    )  # fmt: skip


@cuda.jit(device=True)
def _single_bits(plane, step, lane):
    a = plane[step * 32 + lane]
    mask = 0x01010101
    return (
        and32(a, mask), and32(shr32(a, 1), mask), and32(shr32(a, 2), mask), and32(shr32(a, 3), mask),
        and32(shr32(a, 4), mask), and32(shr32(a, 5), mask),
        and32(shr32(a, 6), mask), and32(shr32(a, 7), mask),
    )  # fmt: skip


@cuda.jit(device=True)
def _nothing(plane, step, lane):
    zero = int32(0)
    return zero, zero, zero, zero, zero, zero, zero, zero


_LOW = {8: _low_8, 4: _low_4, 2: _pairs_of_bits}
_HIGH = {0: _nothing, 1: _single_bits, 2: _pairs_of_bits}


@cache
def scales_of(coding):
    """(sub, step, lane) -> (d, m) as float32, or (sc0, sc1, mn0, mn1) as int32: one sc and mn per 16 values.

    Where 32 values share one, sc1 is sc0 and mn1 is mn0; what there is not is 0.
    """
    return _SCALES[coding.scales]


@cuda.jit(device=True)
def _scale(sub, step, lane):
    d = f16_to_f32(int32(sub[step * 32 + lane]))
    return d, d


@cuda.jit(device=True)
def _power(sub, step, lane):
    d = as_f32(shl32(int32(sub[step * 32 + lane]), 16))
    return d, d


@cuda.jit(device=True)
def _scale_and_minimum(sub, step, lane):
    at = step * 64 + lane
    return f16_to_f32(int32(sub[at])), f16_to_f32(int32(sub[at + 32]))


@cuda.jit(device=True)
def _bytes(sub, step, lane):
    word = int32(sub[step * 32 + lane])
    sc, mn = and32(word, 0xFF), shr32(word, 8)
    return sc, sc, mn, mn


@cuda.jit(device=True)
def _nibbles(sub, step, lane):
    word = int32(sub[step * 32 + lane])
    return and32(word, 15), and32(shr32(word, 8), 15), and32(shr32(word, 4), 15), shr32(word, 12)


@cuda.jit(device=True)
def _signed_bytes(sub, step, lane):
    word = int32(sub[step * 32 + lane])
    zero = int32(0)
    return sar32(shl32(word, 24), 24), sar32(shl32(word, 16), 24), zero, zero


_SCALES = {
    "d": _scale, "e": _power, "d m": _scale_and_minimum,
    "8 sc mn": _bytes, "16 sc mn": _nibbles, "16 sc": _signed_bytes,
}  # fmt: skip
