"""The codes and scales of 32 columns, as a lane takes them from the planes of layout.py.

Each function here makes device functions for a Coding; what a format does not have costs nothing.
"""

from functools import cache

import numpy as np
from numba import cuda, int32, uint64

from fastpath.cuda.intrinsics import (
    and32,
    as_f32,
    f16_to_f32,
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
from fastpath.cuda.layout import ROWS


@cache
def codes_of(coding):
    """(low, high, step, lane) -> 8 words of 4 codes each: columns 0..3, 4..7, ... of the lane's 32.

    Codes are unsigned bytes without the format's offset; those of Q8_0 and of levels are signed.
    """
    load_words, unpacked = words_of(coding), unpacked_of(coding)

    @cuda.jit(device=True)
    def load(low, high, step, lane):
        return unpacked(load_words(low, high, step, lane))

    return load


@cache
def words_of(coding):
    """(low, high, step, lane) -> words as they lie: what a lane loads long before it needs it."""
    load_low, load_high = _LOW_WORDS[coding.low_bits], _HIGH_WORDS[coding.high_bits]
    if load_high is None:

        @cuda.jit(device=True)
        def load(low, high, step, lane):
            return load_low(low, step, lane)

    else:

        @cuda.jit(device=True)
        def load(low, high, step, lane):
            return load_low(low, step, lane) + load_high(high, step, lane)

    return load


@cache
def unpacked_of(coding):
    """Those words -> what `codes_of` gives."""
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
def _eight(low, step, lane):
    return load_weights_v4(low, (step * 64 + lane) * 4) + load_weights_v4(low, (step * 64 + 32 + lane) * 4)


@cuda.jit(device=True)
def _four(low, step, lane):
    return load_weights_v4(low, (step * 32 + lane) * 4)


@cuda.jit(device=True)
def _two(plane, step, lane):
    return load_weights_v2(plane, (step * 32 + lane) * 2)


@cuda.jit(device=True)
def _one(plane, step, lane):
    return load_weights_v1(plane, step * 32 + lane)


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


@cache
def scales_of(coding):
    """(sub, step, lane) -> (d, m) as float32, or (sc0, sc1, mn0, mn1) as int32: one sc and mn per 16 values.

    Where 32 values share one, sc1 is sc0 and mn1 is mn0; what there is not is 0.
    """
    load_words, unpacked = _SCALE_WORDS[coding.scales], unpacked_scales_of(coding)

    @cuda.jit(device=True)
    def load(sub, step, lane):
        return unpacked(load_words(sub, step, lane))

    return load


@cache
def scale_words_of(coding):
    """(sub, block, step, lane) -> all scales of a lane as they lie: those of `sub`, then those of `block`."""
    load_words, planes = _SCALE_WORDS[coding.scales], 2 if coding.has_minimum else 1
    if not coding.is_256:

        @cuda.jit(device=True)
        def load(sub, block, step, lane):
            return load_words(sub, step, lane)

        return load

    @cuda.jit(device=True)
    def load_256(sub, block, step, lane):
        at = step * planes * ROWS + (lane >> 3)
        words = load_words(sub, step, lane)
        if planes == 2:
            return (words[0], int32(block[uint64(at)]), int32(block[uint64(at + ROWS)]))
        return (words[0], int32(block[uint64(at)]), int32(0))

    return load_256


def unpacked_scales_of(coding):
    """The words of `sub` -> what `scales_of` gives."""
    return _SCALES[coding.scales]


@cuda.jit(device=True)
def _one_scale(sub, step, lane):
    return (int32(sub[uint64(step * 32 + lane)]),)


@cuda.jit(device=True)
def _two_scales(sub, step, lane):
    at = step * 64 + lane
    return int32(sub[uint64(at)]), int32(sub[uint64(at + 32)])


@cuda.jit(device=True)
def _scale(words):
    d = f16_to_f32(words[0])
    return d, d


@cuda.jit(device=True)
def _power(words):
    d = as_f32(shl32(words[0], 16))
    return d, d


@cuda.jit(device=True)
def _scale_and_minimum(words):
    return f16_to_f32(words[0]), f16_to_f32(words[1])


@cuda.jit(device=True)
def _bytes(words):
    sc, mn = and32(words[0], 0xFF), shr32(words[0], 8)
    return sc, sc, mn, mn


@cuda.jit(device=True)
def _nibbles(words):
    word = words[0]
    return and32(word, 15), and32(shr32(word, 8), 15), and32(shr32(word, 4), 15), shr32(word, 12)


@cuda.jit(device=True)
def _signed_bytes(words):
    word, zero = words[0], int32(0)
    return sar32(shl32(word, 24), 24), sar32(shl32(word, 16), 24), zero, zero


_SCALE_WORDS = {
    "d": _one_scale, "e": _one_scale, "d m": _two_scales,
    "8 sc mn": _one_scale, "16 sc mn": _one_scale, "16 sc": _one_scale,
}  # fmt: skip
_SCALES = {
    "d": _scale, "e": _power, "d m": _scale_and_minimum,
    "8 sc mn": _bytes, "16 sc mn": _nibbles, "16 sc": _signed_bytes,
}  # fmt: skip
