"""Weight blocks to unsigned bytes: one definition per format.        definition: quant (integer_parts)

A definition is written with `Lanes` (lanes.py): it takes a block of 16 rows, packed or as in the file, and
yields registers of 16 rows x 4 columns, bytes u = q + offset.  They are unsigned because the dot product
instruction multiplies unsigned by signed bytes.  Its users take each register as it comes: matvec.py
multiplies it, panels.py stores it for many rows of activations.

    blocks of 32    columns(block)        yields (g, u): u holds columns 4g .. 4g+3
    blocks of 256   columns(block, part)  part 0 to 3 of the block, a number at run time: yields (s, k, u):
                                          u holds columns 4k .. 4k+3 of the part's sub-block s
                    A part has 2 sub-blocks of 32 or 4 of 16; `sub_block` tells which they are.

Scales are float32 lanes, one per row, and the small integer scales and minima of sub-blocks int32 lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastpath.cpu.lanes import HAS_BIT_MATRIX, Fours
from fastpath.cpu.simd import I64
from quant.fp4 import LEVELS as FP4_LEVELS
from quant.i_quantize import LEVELS as IQ4_LEVELS

IQ4, FP4 = ([int(level) + 128 for level in levels] for levels in (IQ4_LEVELS, FP4_LEVELS))  # by code


@dataclass(frozen=True)
class Blocks32:
    columns: Callable
    scale: Callable
    minimum: Callable | None
    offset: int


@dataclass(frozen=True)
class Blocks256:
    columns: Callable
    scales: Callable  # block -> (d, dmin or None, the sc, the mn or None)
    n_sub: int
    offset: int
    has_minima: bool
    is_short: bool = False  # the dot product of a sub-block fits in 16 bits

    @property
    def width(self):
        """Vectors of a sub-block."""
        return 64 // self.n_sub

    def sub_block(self, b, part, s):
        """Number in the block, an LLVM value, of the part's sub-block s."""
        if self.n_sub == 8:
            return b.add(b.shl(part, I64(1)), I64(s))
        upper = b.shl(b.lshr(part, I64(1)), I64(3))
        return b.add(b.add(upper, b.and_(part, I64(1))), I64(2 * s))


# -- blocks of 32


def _half(at):
    return lambda block: block.half(at)


def _nibbles(at):
    """16 bytes: the low nibbles are columns 0 to 15, the high ones 16 to 31."""

    def columns(block):
        for g, bits in enumerate(block.bytes(at, 4)):
            yield g, bits.field(0, 4)
            yield g + 4, bits.field(4, 4)

    return columns


def _codes(at, table):
    """As `_nibbles`, but the nibbles are numbers of levels."""

    def columns(block):
        for g, bits in _nibbles(at)(block):
            yield g, bits.through(table)

    return columns


def _five_bits(fifth_at, at):
    """As `_nibbles`, with bit i of a word on top of column i."""

    def columns(block):
        fifth = block.words(fifth_at).bytes
        for g, bits in _nibbles(at)(block):
            eight = fifth.spread(g // 2)
            yield g, bits.plus_where(eight.each_byte([1 << 4 * (g % 2) + k for k in range(4)]), 16)

    return columns


def _signed_bytes(at):
    def columns(block):
        for g, bits in enumerate(block.bytes(at, 8)):
            yield g, bits ^ 0x80

    return columns


Q4_0 = Blocks32(_nibbles(2), _half(0), None, 8)
Q4_1 = Blocks32(_nibbles(4), _half(0), _half(2), 0)
Q5_0 = Blocks32(_five_bits(2, 6), _half(0), None, 16)
Q5_1 = Blocks32(_five_bits(4, 8), _half(0), _half(2), 0)
Q8_0 = Blocks32(_signed_bytes(2), _half(0), None, 128)
IQ4_NL = Blocks32(_codes(2, IQ4), _half(0), None, 128)
MXFP4 = Blocks32(_codes(1, FP4), lambda block: block.byte(0).exponent(), None, 128)


# -- blocks of 256


def _quarter(block, part):
    """Of a 16-byte-wide field: where the part's bytes begin, in bytes per 64 columns and per 128 columns."""
    b = block.b
    half, side = b.lshr(part, I64(1)), b.and_(part, I64(1))
    return half, b.shl(side, I64(4))


def _q2_k(block, part):
    half, at = _quarter(block, part)
    for k, bits in enumerate(block.moved(block.b.add(block.b.shl(half, I64(5)), at)).bytes(16, 4)):
        for s in range(4):
            yield s, k, bits.field(2 * s, 2)


def _q2_k_scales(block):
    both = block.bytes(0, 4)
    sc, mn = (Fours([x.field(place, 4).words for x in both]) for place in (0, 4))
    return block.half(80), block.half(82), sc, mn


def _q3_k(block, part):
    b = block.b
    half, at = _quarter(block, part)
    third = block.moved(at).bytes(0, 4)
    pairs = block.moved(b.add(b.shl(half, I64(5)), at)).bytes(32, 4)
    first = b.shl(half, I64(2))  # the bit of sub-block 0 in `third`
    for k, (top, bits) in enumerate(zip(third, pairs, strict=True)):
        yield from ((s, k, u) for s, u in enumerate(_with_third_bits(bits, top, first)))


def _with_third_bits(bits, top, first):
    """Four pairs of bits, each with one of the four bits of `top` from `first` on as its third."""
    if not HAS_BIT_MATRIX:
        return [bits.field(2 * s, 2) | top.field(s, 1, 2, first) for s in range(4)]
    places = (2, 4, 6, 0)  # where none of the pairs lies that it belongs to
    top = top.gathered({place: s for s, place in enumerate(places)}, first)
    both = [bits.where(3 << 2 * s, top) for s in range(4)]
    return [both[0] & 7] + [both[s].gathered({0: 2 * s, 1: 2 * s + 1, 2: places[s]}) for s in (1, 2, 3)]


def _q3_k_scales(block):
    """16 low nibbles in 8 bytes, then their upper two bits in 4."""
    first, second, upper = (block.words(at).bytes for at in (96, 100, 104))
    low = [x.field(place, 4) for place in (0, 4) for x in (first, second)]
    sc = Fours([(x | upper.field(2 * i, 2, 4)).words for i, x in enumerate(low)], 32)
    return block.half(108), None, sc, None


def _q4_k(block, part):
    for k, bits in enumerate(block.moved(block.b.shl(part, I64(5))).bytes(16, 8)):
        yield 0, k, bits.field(0, 4)
        yield 1, k, bits.field(4, 4)


def _q5_k(block, part):
    b = block.b
    bit = b.shl(part, I64(1))  # on top of the low nibbles; the next one on the high nibbles
    nibbles = block.moved(b.shl(part, I64(5))).bytes(48, 8)
    for k, (top, bits) in enumerate(zip(block.bytes(16, 8), nibbles, strict=True)):
        yield 0, k, bits.field(0, 4) | top.field(0, 1, 4, bit)
        yield 1, k, bits.field(4, 4) | top.field(1, 1, 4, bit)


def _six_bit_scales(block):
    """The 16 bytes in front of Q4_K and Q5_K: d, dmin, 8 scales and 8 minima of 6 bits."""
    firsts, seconds, lows = (block.words(at).bytes for at in (4, 8, 12))
    sc = Fours([firsts.field(0, 6).words, (lows.field(0, 4) | firsts.field(6, 2, 4)).words])
    mn = Fours([seconds.field(0, 6).words, (lows.field(4, 4) | seconds.field(6, 2, 4)).words])
    return block.half(0), block.half(2), sc, mn


def _q6_k(block, part):
    b = block.b
    half, at = _quarter(block, part)
    low = block.moved(b.add(b.shl(half, I64(6)), at))
    upper = block.moved(b.add(b.shl(half, I64(5)), at)).bytes(128, 4)
    for k, (first, second, top) in enumerate(zip(low.bytes(0, 4), low.bytes(32, 4), upper, strict=True)):
        yield 0, k, first.field(0, 4) | top.field(0, 2, 4)
        yield 1, k, second.field(0, 4) | top.field(2, 2, 4)
        yield 2, k, first.field(4, 4) | top.field(4, 2, 4)
        yield 3, k, second.field(4, 4) | top.field(6, 2, 4)


def _q6_k_scales(block):
    return block.half(208), None, block.numbers(192, 16), None


def _iq4_xs(block, part):
    moved = block.moved(block.b.shl(part, I64(5)))
    for s in range(2):
        for k, bits in enumerate(moved.bytes(8 + 16 * s, 4)):
            yield s, k, bits.field(0, 4).through(IQ4)
            yield s, k + 4, bits.field(4, 4).through(IQ4)


def _iq4_xs_scales(block):
    upper, low = block.short(2), block.words(4)
    sc = [((low >> 4 * j) & 15 | (_shifted(upper, 2 * j - 4) & 0x30)) - 32 for j in range(8)]
    return block.half(0), None, sc, None


def _shifted(lanes, n):
    """To the right by n, which may be negative."""
    return lanes >> n if n >= 0 else lanes << -n


Q2_K = Blocks256(_q2_k, _q2_k_scales, 16, 0, True, True)
Q3_K = Blocks256(_q3_k, _q3_k_scales, 16, 4, False, True)
Q4_K = Blocks256(_q4_k, _six_bit_scales, 8, 0, True)
Q5_K = Blocks256(_q5_k, _six_bit_scales, 8, 0, True)
Q6_K = Blocks256(_q6_k, _q6_k_scales, 16, 32, False)
IQ4_XS = Blocks256(_iq4_xs, _iq4_xs_scales, 8, 128, False)
