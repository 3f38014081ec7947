"""What a lane has of a weight row at a time, a unit of 128 columns: loads, and then codes and scales.

For the planes, their pieces and steps see layout.py.  Codes come out as signed bytes, as `dp4a` takes them.
Those of a format with an offset are moved to the top of their byte, where flipping the highest bit subtracts
the offset.  They are then 2^n times what they stand for, and so are sums of products with them.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64

from fastpath.cuda.intrinsics import (
    WEIGHTS,
    add32,
    and32,
    and_or,
    and_xor,
    as_f32,
    f16_to_f32,
    loads_at,
    mul32,
    permute_bytes,
    piece_of,
    shl32,
    shr32,
    zeros_of,
)
from fastpath.cuda.layout import LANES, ROWS, UNITS

PIECE = 16  # bytes
APART = LANES * PIECE  # from one piece of a lane to its next


class Loads(NamedTuple):
    """load: (planes, units before the step, those left, row, unit) -> words; 0 where nothing is left."""

    load: Any
    n_words: int


@cache
def loads_of(coding):
    of_sub, of_block = (4 if coding.scales == "d m" else 2), (4 if coding.has_minimum else 2)
    parts = [_pieces(0, coding.low_bits)]
    if coding.high_bits:
        parts.append(_pieces(1, coding.high_bits))
    parts.append(_sub(of_sub))
    if coding.is_256:
        parts.append(_block(of_block))
    full, narrow = parts[0]
    for more_full, more_narrow in parts[1:]:
        full, narrow = _full_and(full, more_full), _narrow_and(narrow, more_narrow)
    n_words = 4 * (coding.low_bits + coding.high_bits) + of_sub + coding.is_256
    nothing = zeros_of(n_words)

    @cuda.jit(device=True)
    def load(planes, unit, left, row, u):
        words = nothing()
        if left >= UNITS:
            words = full(planes, unit, row, u)
        elif u < left:
            words = narrow(planes, unit, left, row, u)
        return words

    return Loads(load, n_words)


def _full_and(first, second):
    @cuda.jit(device=True)
    def both(planes, unit, row, u):
        return first(planes, unit, row, u) + second(planes, unit, row, u)

    return both


def _narrow_and(first, second):
    @cuda.jit(device=True)
    def both(planes, unit, left, row, u):
        return first(planes, unit, left, row, u) + second(planes, unit, left, row, u)

    return both


@cuda.jit(device=True)
def _piece(unit, n, row, width, u):
    """The first piece of a lane in a plane with n of them to a unit, where `width` units lie side by side."""
    return add32(mul32(unit, int32(ROWS * n)), add32(mul32(row, width), u))


def _pieces(plane, n):
    """(of a whole step, of a narrow one): where a step has `left` units, their pieces lie closer."""
    load, load_apart = loads_at(f"{WEIGHTS}.v4.u32", 4, n, APART), loads_at(f"{WEIGHTS}.v4.u32", 4, n)
    address = piece_of(PIECE)

    @cuda.jit(device=True)
    def full(planes, unit, row, u):
        return load(address(planes[plane], _piece(unit, n, row, int32(UNITS), u)))

    @cuda.jit(device=True)
    def narrow(planes, unit, left, row, u):
        at = address(planes[plane], _piece(unit, n, row, left, u))
        return load_apart(at, int64(left * (ROWS * PIECE)))

    return full, narrow


def _sub(n):
    load, address = loads_at(f"{WEIGHTS}.v{n}.u32", n, 1, APART), piece_of(4 * n)

    @cuda.jit(device=True)
    def full(planes, unit, row, u):
        return load(address(planes[2], _piece(unit, 1, row, int32(UNITS), u)))

    @cuda.jit(device=True)
    def narrow(planes, unit, left, row, u):
        return load(address(planes[2], _piece(unit, 1, row, left, u)))

    return full, narrow


def _block(n_bytes):
    """A step's are not always whole sectors: the next one finds the rest of its last in L1."""
    load, address = loads_at(f"ld.global.nc.u{8 * n_bytes}", 1, 1, APART), piece_of(n_bytes)

    @cuda.jit(device=True)
    def full(planes, unit, row, u):
        block = shr32(add32(unit, u), 1)
        return load(address(planes[3], add32(mul32(block, int32(ROWS)), row)))

    @cuda.jit(device=True)
    def narrow(planes, unit, left, row, u):
        return full(planes, unit, row, u)

    return full, narrow


# -- codes


class Codes(NamedTuple):
    """
    of_unit  device function: words of a unit -> 32 words of 4 signed bytes, columns ascending
    shift    bytes are 2^shift times the numbers that they stand for
    """

    of_unit: Any
    shift: int


@cache
def codes_of(coding):
    n, m = coding.low_bits, coding.high_bits  # words of a sub-block
    first, n2, n3, n4, m2, m3, m4 = 4 * n, 2 * n, 3 * n, 4 * n, 2 * m, 3 * m, 4 * m
    shift = 8 - n - m if coding.offset else 0
    if n == 8:

        @cuda.jit(device=True)
        def of_unit(words):
            return words[:32]

    elif not m:
        unpack = _levels_of(coding.levels) if coding.levels else _eight(_word_of(n, 0, shift, coding.offset))

        @cuda.jit(device=True)
        def of_unit(words):
            return (
                unpack(words[:n], words) + unpack(words[n:n2], words)
                + unpack(words[n2:n3], words) + unpack(words[n3:n4], words)
            )  # fmt: skip

    else:
        unpack = _eight(_word_of(n, m, shift, coding.offset))

        @cuda.jit(device=True)
        def of_unit(words):
            high = words[first:]
            return (
                unpack(words[:n], high[:m]) + unpack(words[n:n2], high[m:m2])
                + unpack(words[n2:n3], high[m2:m3]) + unpack(words[n3:n4], high[m3:m4])
            )  # fmt: skip

    return Codes(of_unit, shift)


@cache
def codes_of_half(coding):
    """(half, low words of a sub-block, high words) -> 4 words of signed bytes, for tensor cores.

    Half 0 or 1 of a sub-block: with 8 bits values 16h .. 16h+15, of which a lane has the words; else values
    8h .. 8h+7 and then 16+8h .. 16+8h+7.  Of 4 bits a lane has words 2h and 2h+1, of fewer bits all of them.
    """
    n, m = coding.low_bits, coding.high_bits
    if n == 8:

        @cuda.jit(device=True)
        def of_half(half, low, high):
            return low

        return of_half
    shift = 8 - n - m if coding.offset else 0
    unpack = _levels_of(coding.levels) if coding.levels else _eight(_word_of(n, m, shift, coding.offset))
    here, here_high = _moved_by_half(n), _moved_by_half(m)

    @cuda.jit(device=True)
    def of_half(half, low, high):
        # words behind those that there are stand in for what nobody uses
        mine, above = here(half, low), here_high(half, high)
        a, b, _, _, c, d, _, _ = unpack(mine + mine, above)
        return a, b, c, d

    return of_half


def _moved_by_half(bits):
    """Fields h, h + 2 or h, h + 1, h + 4, h + 5 become 0, 2 or 0, 1, 4, 5."""

    @cuda.jit(device=True)
    def one(half, words):
        return (shr32(words[0], int32(2 * half)),)

    @cuda.jit(device=True)
    def two(half, words):
        return shr32(words[0], int32(2 * half)), shr32(words[1], int32(2 * half))

    @cuda.jit(device=True)
    def none(half, words):
        return words

    return {1: one, 2: two}.get(bits, none)


def _everywhere(byte):
    """An int32 of four such bytes."""
    return int(np.array([byte] * 4, np.uint8).view(np.int32)[0])


def _word_of(n, m, shift, offset):
    """[(low words, high words) -> word i of a sub-block]; n low bits and m high ones to a code.

    Bits are moved to bit `shift` of their bytes.  Field k of a byte begins at its bit k * n.
    """
    mask, mask_high = _everywhere((1 << n) - 1 << shift), _everywhere((1 << m) - 1 << shift + n)
    top = _everywhere(0x80) if offset else 0

    @cuda.jit(device=True)
    def of_low(word):
        # not `and`, not `xor`: NVVM would compute them again wherever their result is used
        return and_xor(word, mask, top)

    def word(i):
        a, moved = i % n, _moved(shift - i // n * n)
        if m:
            b, moved_high = i % m, _moved(shift + n - i // m * m)

            @cuda.jit(device=True)
            def function(low, high):
                return and_xor(moved_high(high[b]), mask_high, of_low(moved(low[a])))

        else:

            @cuda.jit(device=True)
            def function(low, high):
                return of_low(moved(low[a]))

        return function

    return [word(i) for i in range(8)]


@cache
def _moved(by):
    """Up by so many bits, or down."""
    if by == 0:

        @cuda.jit(device=True)
        def moved(word):
            return word

    elif by > 0:

        @cuda.jit(device=True)
        def moved(word):
            return shl32(word, by)

    else:
        down = -by

        @cuda.jit(device=True)
        def moved(word):
            return shr32(word, down)

    return moved


def _eight(words):
    a, b, c, d, e, f, g, h = words

    @cuda.jit(device=True)
    def unpack(low, high):
        return (
            a(low, high), b(low, high), c(low, high), d(low, high),
            e(low, high), f(low, high), g(low, high), h(low, high),
        )  # fmt: skip

    return unpack


def _levels_of(levels):
    """Nibbles that stand for signed bytes: selectors of `prmt`, which sees 8 bytes of the table at a time."""
    a, b, c, d = (int(word) for word in np.array(levels, np.int8).view("<i4"))

    @cuda.jit(device=True)
    def four(choices, half):
        return permute_bytes(permute_bytes(a, b, choices), permute_bytes(c, d, choices), half)

    @cuda.jit(device=True)
    def looked_up(word):
        choices, half = and32(word, 0x77777777), and_or(shr32(word, 1), 0x44444444, 0x32103210)
        first, second = four(choices, half), four(shr32(choices, 16), shr32(half, 16))
        return permute_bytes(first, second, 0x6420), permute_bytes(first, second, 0x7531)

    @cuda.jit(device=True)
    def unpack(words, _):
        a, e = looked_up(words[0])
        b, f = looked_up(words[1])
        c, g = looked_up(words[2])
        d, h = looked_up(words[3])
        return a, b, c, d, e, f, g, h

    return unpack


# -- scales


@cache
def scales_of(coding):
    """(words of a unit) -> float32, or int32.

    d: 4 scales; d m: 4 scales, 4 minima; 8 sc mn: the same as integers; 16 sc: 8 of them; 16 sc mn: 8 and 8
    """
    first, of_words = 4 * (coding.low_bits + coding.high_bits), numbers_of(coding)

    @cuda.jit(device=True)
    def scales(words):
        return of_words(words[first:])

    return scales


def numbers_of(coding):
    """(the words of a unit in `sub`) -> the same."""
    return _SCALES[coding.scales]


@cache
def blocks_of(coding):
    """(words of a unit) -> (d, dmin) of its block of 256; no dmin: 0."""
    place = loads_of(coding).n_words - 1

    @cuda.jit(device=True)
    def blocks(words):
        return f16_to_f32(words[place]), f16_to_f32(shr32(words[place], 16))

    return blocks


@cuda.jit(device=True)
def _halves(words):
    return (
        f16_to_f32(words[0]), f16_to_f32(shr32(words[0], 16)),
        f16_to_f32(words[1]), f16_to_f32(shr32(words[1], 16)),
    )  # fmt: skip


@cuda.jit(device=True)
def _halves_twice(words):
    return _halves(words[:2]) + _halves(words[2:4])


@cuda.jit(device=True)
def _powers(words):
    upper = -0x10000
    return (
        as_f32(shl32(words[0], 16)), as_f32(and32(words[0], upper)),
        as_f32(shl32(words[1], 16)), as_f32(and32(words[1], upper)),
    )  # fmt: skip


@cuda.jit(device=True)
def _four_bytes(word):
    zero = int32(0)
    return (
        permute_bytes(word, zero, 0x4440), permute_bytes(word, zero, 0x4441),
        permute_bytes(word, zero, 0x4442), permute_bytes(word, zero, 0x4443),
    )  # fmt: skip


@cuda.jit(device=True)
def _four_signed_bytes(word):
    """An 8 in a selector: the sign of a byte, eight times."""
    return (
        permute_bytes(word, word, 0x8880), permute_bytes(word, word, 0x9991),
        permute_bytes(word, word, 0xAAA2), permute_bytes(word, word, 0xBBB3),
    )  # fmt: skip


@cuda.jit(device=True)
def _bytes(words):
    return _four_bytes(words[0]) + _four_bytes(words[1])


@cuda.jit(device=True)
def _signed_bytes(words):
    return _four_signed_bytes(words[0]) + _four_signed_bytes(words[1])


@cuda.jit(device=True)
def _nibbles(words):
    mask = 0x0F0F0F0F
    sc, mn = and32(words[0], mask), and32(shr32(words[0], 4), mask)
    more_sc, more_mn = and32(words[1], mask), and32(shr32(words[1], 4), mask)
    return _four_bytes(sc) + _four_bytes(more_sc) + _four_bytes(mn) + _four_bytes(more_mn)


_SCALES = {
    "d": _halves, "e": _powers, "d m": _halves_twice,
    "8 sc mn": _bytes, "16 sc": _signed_bytes, "16 sc mn": _nibbles,
}  # fmt: skip
