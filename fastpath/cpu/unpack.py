"""Weight blocks to unsigned bytes: one function per format.        definition: quant (integer_parts)

Each function takes one block of each of 16 rows: the rows are `stride` bytes apart, and row `last` stands
for those behind it.  It writes vectors of 16 rows x 4 columns, columns ascending, to `panel`: bytes u = q +
offset, unsigned because the dot product instruction multiplies unsigned by signed bytes (the offsets are in
linear.py). Scales and minima become float32 lanes, one per row, at `scales` and `scales` + MINIMA; the
small integer scales of sub-blocks int32 lanes, those of sub-block j at sc + 64*j and mn + 64*j.

All work is done on 16 rows at once, after a transposing load (`simd_dot.tile`): where a format keeps some
bits of a row, a register has the same bits of 16 rows.
"""

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import (
    and_i8,
    and_i32,
    as_i8,
    byte_s8,
    byte_u8,
    high_f16,
    load_i8,
    load_i32,
    low_e8m0,
    low_f16,
    mul_i32,
    or_i8,
    or_i32,
    shift_i32,
    shl_i8,
    shr_i8,
    splat_i32,
    store_f32,
    store_i8,
    store_i32,
    sub_i32,
    xor_i8,
)
from fastpath.cpu.simd_dot import column, lookup_i8, tile

SPARE = 4096  # bytes from the panel to room for transposed raw bytes
MINIMA = 512  # bytes from the scales of up to 8 blocks to their minima

# code -> level + 128; the levels are data of the formats (quant/i_quants.py, quant/fp4.py)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
iq4_level, fp4_level = (lookup_i8([level + 128 for level in levels]) for levels in (_IQ4, _FP4))

flip = xor_i8(-128)
low2, low4 = and_i8(0x03), and_i8(0x0F)
only_04, only_30 = and_i8(0x04), and_i8(0x30)
shl1, shl2, shl4 = (shl_i8(n) for n in (1, 2, 4))
shr1, shr2, shr3, shr4, shr5, shr6 = (shr_i8(n) for n in (1, 2, 3, 4, 5, 6))
word2, word4, word6, word_30 = (and_i32(mask) for mask in (0x03, 0x0F, 0x3F, 0x30))
word_01, word_10 = and_i32(0x01010101), and_i32(0x10101010)


# -- blocks of 32: (source, stride, last, panel, scales)


@helper
def _nibbles(source, stride, last, panel):
    """16 bytes: the low nibbles are columns 0 to 15, the high ones 16 to 31."""
    tile(source, stride, last, panel)
    for at in range(panel, panel + 256, 64):
        bits = load_i8(at)
        store_i8(at, low4(bits))
        store_i8(at + 256, shr4(bits))


@helper
def _levels(source, stride, last, panel, level):
    """As `_nibbles`, but the nibbles are codes of a table."""
    tile(source, stride, last, panel)
    for at in range(panel, panel + 256, 64):
        codes = load_i8(at)
        store_i8(at, level(low4(codes)))
        store_i8(at + 256, level(shr4(codes)))


@helper
def _five_bits(source, stride, last, panel, fifth):
    """As `_nibbles`, with bit i of `fifth` on top of column i."""
    tile(source, stride, last, panel)
    for j in range(4):
        bits = load_i8(panel + 64 * j)
        store_i8(panel + 64 * j, or_i8(low4(bits), _spread(shift_i32(fifth, 4 * j))))
        store_i8(panel + 256 + 64 * j, or_i8(shr4(bits), _spread(shift_i32(fifth, 16 + 4 * j))))


@helper
def _spread(bits):
    """Bit i of the lowest four -> bit 4 of byte i.  The product holds them 7 places apart; none overlap."""
    return as_i8(word_10(mul_i32(word4(bits), splat_i32(0x02040810))))


@helper
def q4_0(source, stride, last, panel, scales):
    _nibbles(source + 2, stride, last, panel)
    store_f32(scales, low_f16(column(source, stride, last)))


@helper
def q4_1(source, stride, last, panel, scales):
    _nibbles(source + 4, stride, last, panel)
    _two_scales(column(source, stride, last), scales)


@helper
def q5_0(source, stride, last, panel, scales):
    _five_bits(source + 6, stride, last, panel, column(source + 2, stride, last))
    store_f32(scales, low_f16(column(source, stride, last)))


@helper
def q5_1(source, stride, last, panel, scales):
    _five_bits(source + 8, stride, last, panel, column(source + 4, stride, last))
    _two_scales(column(source, stride, last), scales)


@helper
def q8_0(source, stride, last, panel, scales):
    tile(source + 2, stride, last, panel)
    tile(source + 18, stride, last, panel + 256)
    for at in range(panel, panel + 512, 64):
        store_i8(at, flip(load_i8(at)))
    store_f32(scales, low_f16(column(source, stride, last)))


@helper
def iq4_nl(source, stride, last, panel, scales):
    _levels(source + 2, stride, last, panel, iq4_level)
    store_f32(scales, low_f16(column(source, stride, last)))


@helper
def mxfp4(source, stride, last, panel, scales):
    _levels(source + 1, stride, last, panel, fp4_level)
    store_f32(scales, low_e8m0(column(source, stride, last)))


@helper
def _two_scales(both, scales):
    """Two halves per lane: the scale and the minimum."""
    store_f32(scales, low_f16(both))
    store_f32(scales + MINIMA, high_f16(both))


# -- blocks of 256: (source, stride, last, panel, scales, sc, mn)


@helper
def q2_k(source, stride, last, panel, scales, sc, mn):
    spare = panel + SPARE
    for i in range(4):
        tile(source + 16 + 16 * i, stride, last, spare)
        at = panel + 2048 * (i >> 1) + 256 * (i & 1)
        for j in range(0, 256, 64):
            bits = load_i8(spare + j)
            store_i8(at + j, low2(bits))
            store_i8(at + j + 512, low2(shr2(bits)))
            store_i8(at + j + 1024, low2(shr4(bits)))
            store_i8(at + j + 1536, shr6(bits))
    tile(source, stride, last, spare)
    for j in range(16):
        both = byte_u8(load_i32(spare + 64 * (j >> 2)), j & 3)
        store_i32(sc + 64 * j, word4(both))
        store_i32(mn + 64 * j, shift_i32(both, 4))
    _two_scales(column(source + 80, stride, last), scales)


@helper
def q3_k(source, stride, last, panel, scales, sc, mn):
    third, low, high = panel + SPARE, panel + SPARE + 256, panel + SPARE + 512
    for part in range(2):
        tile(source + 16 * part, stride, last, third)
        tile(source + 32 + 16 * part, stride, last, low)
        tile(source + 64 + 16 * part, stride, last, high)
        for j in range(0, 256, 64):
            at, top = panel + 256 * part + j, load_i8(third + j)
            bits = load_i8(low + j)
            store_i8(at, or_i8(low2(bits), only_04(shl2(top))))
            store_i8(at + 512, or_i8(low2(shr2(bits)), only_04(shl1(top))))
            store_i8(at + 1024, or_i8(low2(shr4(bits)), only_04(top)))
            store_i8(at + 1536, or_i8(shr6(bits), only_04(shr1(top))))
            bits = load_i8(high + j)
            store_i8(at + 2048, or_i8(low2(bits), only_04(shr2(top))))
            store_i8(at + 2560, or_i8(low2(shr2(bits)), only_04(shr3(top))))
            store_i8(at + 3072, or_i8(low2(shr4(bits)), only_04(shr4(top))))
            store_i8(at + 3584, or_i8(shr6(bits), only_04(shr5(top))))
    # scales: 16 low nibbles in 8 bytes, then their upper two bits in 4
    upper = column(source + 104, stride, last)
    for half in range(2):
        nibbles = column(source + 96 + 4 * half, stride, last)
        for j in range(4):
            low_byte, top = byte_u8(nibbles, j), shift_i32(byte_u8(upper, j), 2 * half)
            _signed_scale(sc + 64 * (4 * half + j), word4(low_byte), word2(top))
            _signed_scale(sc + 64 * (4 * half + j + 8), shift_i32(low_byte, 4), word2(shift_i32(top, 4)))
    store_f32(scales, high_f16(column(source + 106, stride, last)))


@helper
def _signed_scale(target, low, upper):
    """Six bits, 32 of them negative."""
    store_i32(target, sub_i32(or_i32(low, mul_i32(upper, splat_i32(16))), splat_i32(32)))


@helper
def q4_k(source, stride, last, panel, scales, sc, mn):
    for i in range(8):
        at = panel + 1024 * (i >> 1) + 256 * (i & 1)
        tile(source + 16 + 16 * i, stride, last, at)
        for j in range(at, at + 256, 64):
            bits = load_i8(j)
            store_i8(j, low4(bits))
            store_i8(j + 512, shr4(bits))
    _six_bit_scales(source, stride, last, panel + SPARE, scales, sc, mn)


@helper
def q5_k(source, stride, last, panel, scales, sc, mn):
    fifth = panel + SPARE
    for part in range(2):
        tile(source + 16 + 16 * part, stride, last, fifth)
        for c in range(4):
            at = panel + 1024 * c + 256 * part
            tile(source + 48 + 32 * c + 16 * part, stride, last, at)
            for j in range(0, 256, 64):
                # bit 2c of `fifth` is on top of the low nibble, bit 2c + 1 on top of the high one
                bits, top = load_i8(at + j), shift_i32(load_i32(fifth + j), 2 * c)
                store_i8(at + j, or_i8(low4(bits), _lowest_to_10(top)))
                store_i8(at + j + 512, or_i8(shr4(bits), _lowest_to_10(shift_i32(top, 1))))
    _six_bit_scales(source, stride, last, fifth, scales, sc, mn)


@helper
def _lowest_to_10(four):
    """The lowest bit of each byte as 0x10 in that byte."""
    return as_i8(mul_i32(word_01(four), splat_i32(16)))


@helper
def _six_bit_scales(source, stride, last, spare, scales, sc, mn):
    """The 16 bytes in front of Q4_K and Q5_K: d, dmin, 8 scales and 8 minima of 6 bits."""
    tile(source, stride, last, spare)
    _two_scales(load_i32(spare), scales)
    firsts, seconds, lows = load_i32(spare + 64), load_i32(spare + 128), load_i32(spare + 192)
    for j in range(4):
        first, second, low = byte_u8(firsts, j), byte_u8(seconds, j), byte_u8(lows, j)
        store_i32(sc + 64 * j, word6(first))
        store_i32(mn + 64 * j, word6(second))
        store_i32(sc + 64 * j + 256, or_i32(word4(low), word_30(shift_i32(first, 2))))
        store_i32(mn + 64 * j + 256, or_i32(shift_i32(low, 4), word_30(shift_i32(second, 2))))


@helper
def q6_k(source, stride, last, panel, scales, sc, mn):
    low, more, upper = panel + SPARE, panel + SPARE + 256, panel + SPARE + 512
    for i in range(4):
        half, part = i >> 1, i & 1
        tile(source + 64 * half + 16 * part, stride, last, low)
        tile(source + 64 * half + 32 + 16 * part, stride, last, more)
        tile(source + 128 + 32 * half + 16 * part, stride, last, upper)
        at = panel + 2048 * half + 256 * part
        for j in range(0, 256, 64):
            first, second, top = load_i8(low + j), load_i8(more + j), load_i8(upper + j)
            store_i8(at + j, or_i8(low4(first), only_30(shl4(top))))
            store_i8(at + j + 512, or_i8(low4(second), only_30(shl2(top))))
            store_i8(at + j + 1024, or_i8(shr4(first), only_30(top)))
            store_i8(at + j + 1536, or_i8(shr4(second), only_30(shr2(top))))
    tile(source + 192, stride, last, low)
    for j in range(16):
        store_i32(sc + 64 * j, byte_s8(load_i32(low + 64 * (j >> 2)), j & 3))
    store_f32(scales, high_f16(column(source + 206, stride, last)))


@helper
def iq4_xs(source, stride, last, panel, scales, sc, mn):
    for j in range(8):
        _levels(source + 8 + 16 * j, stride, last, panel + 512 * j, iq4_level)
    front, low = column(source, stride, last), column(source + 4, stride, last)
    for j in range(8):
        _signed_scale(sc + 64 * j, word4(shift_i32(low, 4 * j)), word2(shift_i32(front, 16 + 2 * j)))
    store_f32(scales, low_f16(front))
