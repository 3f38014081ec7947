"""The codes and scales of 32 columns, a sub-block, as a lane takes them from the planes of layout.py.

Each function here makes device functions for a Coding; what a format does not have costs nothing.
"""

from functools import cache

import numpy as np
from numba import cuda, int32, int64

from fastpath.cuda.intrinsics import (
    and32,
    as_f32,
    f16_to_f32,
    load_weights_half,
    load_weights_v1,
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
from fastpath.cuda.layout import ROWS, UNIT, UNITS, WIDTH

OF_UNIT = UNIT // WIDTH  # sub-blocks


@cuda.jit(device=True)
def spot_of(tile, n_units, sub_block, row):
    """Where a sub-block of a row lies, for the functions below.

    (pieces before those of its step, if a unit had one; pieces of a kind side by side; the unit's place among
    them; sub-block of the unit; row of the tile, counted with blocks of 256 columns)
    """
    unit = sub_block // OF_UNIT
    first = unit & ~(UNITS - 1)
    width = min(UNITS, n_units - first)
    return (
        (int64(tile) * n_units + first) * ROWS,
        int64(width * ROWS),
        int64(row * width + unit - first),
        int64(sub_block & (OF_UNIT - 1)),
        (int64(tile) * (n_units >> 1) + (unit >> 1)) * ROWS + row,
    )


@cuda.jit(device=True)
def _piece(spot, pieces, i):
    """Piece i of a unit that has so many."""
    return spot[0] * pieces + i * spot[1] + spot[2]


@cache
def codes_of(coding):
    """(low, high, spot) -> 8 words of 4 codes each: columns 0..3, 4..7, ... of the sub-block.

    Codes are unsigned bytes without the format's offset; those of Q8_0 and of levels are signed.
    """
    load_low, load_high = _LOW_WORDS[coding.low_bits], _HIGH_WORDS[coding.high_bits]
    unpacked = unpacked_of(coding)
    if load_high is None:

        @cuda.jit(device=True)
        def load(low, high, spot):
            return unpacked(load_low(low, spot))

    else:

        @cuda.jit(device=True)
        def load(low, high, spot):
            return unpacked(load_low(low, spot) + load_high(high, spot))

    return load


@cache
def unpacked_of(coding):
    """The words of a sub-block, low ones first -> what `codes_of` gives."""
    if coding.levels is not None:
        return _levels_of(coding.levels)
    if coding.low_bits == 8:
        return _same
    unpack_low, unpack_high = _LOW[coding.low_bits], _HIGH[coding.high_bits]
    shift, n = coding.low_bits, coding.low_bits
    if unpack_high is None:
        return unpack_low

    @cuda.jit(device=True)
    def unpack(words):
        a, b, c, d, e, f, g, h = unpack_low(words)
        i, j, k, l, m, o, p, q = unpack_high(words[n:])
        return (
            or32(a, shl32(i, shift)), or32(b, shl32(j, shift)),
            or32(c, shl32(k, shift)), or32(d, shl32(l, shift)),
            or32(e, shl32(m, shift)), or32(f, shl32(o, shift)),
            or32(g, shl32(p, shift)), or32(h, shl32(q, shift)),
        )  # fmt: skip

    return unpack


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
    def unpack(words):
        a, b, c, d, e, f, g, h = _nibbles_of(words)
        return (
            looked_up(a), looked_up(b), looked_up(c), looked_up(d),
            looked_up(e), looked_up(f), looked_up(g), looked_up(h),
        )  # fmt: skip

    return unpack


# -- words as they lie


@cuda.jit(device=True)
def _eight(low, spot):
    first = load_weights_v4(low, 4 * _piece(spot, 8, 2 * spot[3]))
    return first + load_weights_v4(low, 4 * _piece(spot, 8, 2 * spot[3] + 1))


@cuda.jit(device=True)
def _four(low, spot):
    return load_weights_v4(low, 4 * _piece(spot, 4, spot[3]))


@cuda.jit(device=True)
def _two(plane, spot):
    return load_weights_v2(plane, 4 * _piece(spot, 2, spot[3] >> 1) + 2 * (spot[3] & 1))


@cuda.jit(device=True)
def _one(plane, spot):
    return load_weights_v1(plane, 4 * _piece(spot, 1, 0) + spot[3])


_LOW_WORDS = {8: _eight, 4: _four, 2: _two}
_HIGH_WORDS = {0: None, 1: _one, 2: _two}


# -- the fields in them


@cuda.jit(device=True)
def _same(words):
    return words


@cuda.jit(device=True)
def _nibbles_of(words):
    a, b, c, d = words[0], words[1], words[2], words[3]
    mask = 0x0F0F0F0F
    return (
        and32(a, mask), and32(b, mask), and32(c, mask), and32(d, mask),
        and32(shr32(a, 4), mask), and32(shr32(b, 4), mask),
        and32(shr32(c, 4), mask), and32(shr32(d, 4), mask),
    )  # fmt: skip


@cuda.jit(device=True)
def _pairs_of_bits(words):
    a, b, mask = words[0], words[1], 0x03030303
    return (
        and32(a, mask), and32(b, mask), and32(shr32(a, 2), mask), and32(shr32(b, 2), mask),
        and32(shr32(a, 4), mask), and32(shr32(b, 4), mask),
        and32(shr32(a, 6), mask), and32(shr32(b, 6), mask),
    )  # fmt: skip


@cuda.jit(device=True)
def _single_bits(words):
    a, mask = words[0], 0x01010101
    return (
        and32(a, mask), and32(shr32(a, 1), mask), and32(shr32(a, 2), mask), and32(shr32(a, 3), mask),
        and32(shr32(a, 4), mask), and32(shr32(a, 5), mask),
        and32(shr32(a, 6), mask), and32(shr32(a, 7), mask),
    )  # fmt: skip


_LOW = {4: _nibbles_of, 2: _pairs_of_bits}
_HIGH = {0: None, 1: _single_bits, 2: _pairs_of_bits}


# -- scales


@cache
def scales_of(coding):
    """(sub, spot) -> (d, m) as float32, or (sc0, sc1, mn0, mn1) as int32: one sc and mn per 16 values.

    Where 32 values share one, sc1 is sc0 and mn1 is mn0; what there is not is 0.
    """
    return _SCALES[coding.scales]


@cache
def blocks_of(coding):
    """(block, spot) -> (d, dmin) of the block of 256 that a sub-block is in, as float32; no dmin: 0."""
    if coding.has_minimum:

        @cuda.jit(device=True)
        def load(block, spot):
            return f16_to_f32(_half(block, 2 * spot[4])), f16_to_f32(_half(block, 2 * spot[4] + 1))

    else:

        @cuda.jit(device=True)
        def load(block, spot):
            d = f16_to_f32(_half(block, spot[4]))
            return d, d

    return load


@cuda.jit(device=True)
def _half(sub, at):
    return load_weights_half(sub, int64(at))[0]


@cuda.jit(device=True)
def _scale(sub, spot):
    d = f16_to_f32(_half(sub, 4 * _piece(spot, 1, 0) + spot[3]))
    return d, d


@cuda.jit(device=True)
def _power(sub, spot):
    d = as_f32(shl32(_half(sub, 4 * _piece(spot, 1, 0) + spot[3]), 16))
    return d, d


@cuda.jit(device=True)
def _scale_and_minimum(sub, spot):
    at = 8 * _piece(spot, 1, 0) + spot[3]
    return f16_to_f32(_half(sub, at)), f16_to_f32(_half(sub, at + OF_UNIT))


@cuda.jit(device=True)
def _bytes(sub, spot):
    at, shift = 4 * _piece(spot, 1, 0) + (spot[3] >> 1), int32(8 * (spot[3] & 1))
    sc, mn = and32(shr32(_half(sub, at), shift), 0xFF), and32(shr32(_half(sub, at + 2), shift), 0xFF)
    return sc, sc, mn, mn


@cuda.jit(device=True)
def _nibbles(sub, spot):
    word = _half(sub, 4 * _piece(spot, 1, 0) + spot[3])
    return and32(word, 15), and32(shr32(word, 8), 15), and32(shr32(word, 4), 15), shr32(word, 12)


@cuda.jit(device=True)
def _signed_bytes(sub, spot):
    word, zero = _half(sub, 4 * _piece(spot, 1, 0) + spot[3]), int32(0)
    return sar32(shl32(word, 24), 24), sar32(shl32(word, 16), 24), zero, zero


_SCALES = {
    "d": _scale, "e": _power, "d m": _scale_and_minimum,
    "8 sc mn": _bytes, "16 sc mn": _nibbles, "16 sc": _signed_bytes,
}  # fmt: skip
