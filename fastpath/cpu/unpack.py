"""Weight blocks to unsigned bytes: one function per format.        definition: quant (integer_parts)

Each function writes the integers of one block as bytes u = q + offset, in the order of the row.  Unsigned, because
the dot product instruction multiplies unsigned by signed bytes; the offset is in `FORMATS` of linear.py.
Functions `<format>_scales` write the sub-block scales sc (and minima mn) of row `r` of 16 as int32, one vector of
16 rows per sub-block: scale j of row r at  sc + 64*j + 4*r.
"""

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import (
    and_x32,
    flip_x32,
    high4_x16,
    high4_x32,
    ld_i8,
    ld_u8,
    ld_u16,
    ld_u32,
    load_i8x16,
    load_i8x32,
    lookup_x16,
    low4_x16,
    low4_x32,
    or_x16,
    or_x32,
    shl_x32,
    shr_x32,
    spread_bits_x16,
    st_i32,
    store_i8x16,
    store_i8x32,
)

# code -> level + 128; the levels are data of the formats (quant/i_quants.py, quant/fp4.py)
iq4_level = lookup_x16([v + 128 for v in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)])
fp4_level = lookup_x16([v + 128 for v in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)])

shl1, shl2, shl3, shl4 = (shl_x32(n) for n in (1, 2, 3, 4))
shr1, shr2, shr3, shr4, shr5, shr6 = (shr_x32(n) for n in range(1, 7))
bits_03, bits_04, bits_10, bits_30 = (and_x32(n) for n in (0x03, 0x04, 0x10, 0x30))


# -- blocks of 32


@helper
def q4_0(source, target):
    nibbles = load_i8x16(source + 2)
    store_i8x16(target, low4_x16(nibbles))
    store_i8x16(target + 16, high4_x16(nibbles))


@helper
def q4_1(source, target):
    nibbles = load_i8x16(source + 4)
    store_i8x16(target, low4_x16(nibbles))
    store_i8x16(target + 16, high4_x16(nibbles))


@helper
def _five_bits(fifth, nibbles, target):
    low, high = low4_x16(nibbles), high4_x16(nibbles)
    store_i8x16(target, or_x16(low, spread_bits_x16(fifth & 0xFFFF)))
    store_i8x16(target + 16, or_x16(high, spread_bits_x16(fifth >> 16)))


@helper
def q5_0(source, target):
    _five_bits(ld_u32(source + 2), load_i8x16(source + 6), target)


@helper
def q5_1(source, target):
    _five_bits(ld_u32(source + 4), load_i8x16(source + 8), target)


@helper
def q8_0(source, target):
    store_i8x32(target, flip_x32(load_i8x32(source + 2)))


@helper
def iq4_nl(source, target):
    nibbles = load_i8x16(source + 2)
    store_i8x16(target, iq4_level(low4_x16(nibbles)))
    store_i8x16(target + 16, iq4_level(high4_x16(nibbles)))


@helper
def mxfp4(source, target):
    nibbles = load_i8x16(source + 1)
    store_i8x16(target, fp4_level(low4_x16(nibbles)))
    store_i8x16(target + 16, fp4_level(high4_x16(nibbles)))


# -- blocks of 256


@helper
def q2_k(source, target):
    for half in range(2):
        bits = load_i8x32(source + 16 + 32 * half)
        store_i8x32(target + 128 * half, bits_03(bits))
        store_i8x32(target + 128 * half + 32, bits_03(shr2(bits)))
        store_i8x32(target + 128 * half + 64, bits_03(shr4(bits)))
        store_i8x32(target + 128 * half + 96, shr6(bits))


@helper
def q2_k_scales(source, r, sc, mn):
    for j in range(16):
        both = ld_u8(source + j)
        st_i32(sc + 64 * j + 4 * r, both & 15)
        st_i32(mn + 64 * j + 4 * r, both >> 4)


@helper
def q3_k(source, target):
    third = load_i8x32(source)
    bits = load_i8x32(source + 32)
    store_i8x32(target, or_x32(bits_03(bits), bits_04(shl2(third))))
    store_i8x32(target + 32, or_x32(bits_03(shr2(bits)), bits_04(shl1(third))))
    store_i8x32(target + 64, or_x32(bits_03(shr4(bits)), bits_04(third)))
    store_i8x32(target + 96, or_x32(shr6(bits), bits_04(shr1(third))))
    bits = load_i8x32(source + 64)
    store_i8x32(target + 128, or_x32(bits_03(bits), bits_04(shr2(third))))
    store_i8x32(target + 160, or_x32(bits_03(shr2(bits)), bits_04(shr3(third))))
    store_i8x32(target + 192, or_x32(bits_03(shr4(bits)), bits_04(shr4(third))))
    store_i8x32(target + 224, or_x32(shr6(bits), bits_04(shr5(third))))


@helper
def q3_k_scales(source, r, sc, mn):
    for j in range(16):
        low = ld_u8(source + 96 + (j & 7)) >> (4 * (j >> 3)) & 15
        high = ld_u8(source + 104 + (j & 3)) >> (2 * (j >> 2)) & 3
        st_i32(sc + 64 * j + 4 * r, (low | high << 4) - 32)


@helper
def q4_k(source, target):
    for c in range(4):
        nibbles = load_i8x32(source + 16 + 32 * c)
        store_i8x32(target + 64 * c, low4_x32(nibbles))
        store_i8x32(target + 64 * c + 32, high4_x32(nibbles))


@helper
def q4_k_scales(source, r, sc, mn):
    for j in range(4):
        first, second, low = ld_u8(source + 4 + j), ld_u8(source + 8 + j), ld_u8(source + 12 + j)
        st_i32(sc + 64 * j + 4 * r, first & 63)
        st_i32(mn + 64 * j + 4 * r, second & 63)
        st_i32(sc + 64 * (j + 4) + 4 * r, low & 15 | first >> 2 & 48)
        st_i32(mn + 64 * (j + 4) + 4 * r, low >> 4 | second >> 2 & 48)


@helper
def q5_k(source, target):
    fifth = load_i8x32(source + 16)
    n0, n1 = load_i8x32(source + 48), load_i8x32(source + 80)
    n2, n3 = load_i8x32(source + 112), load_i8x32(source + 144)
    store_i8x32(target, or_x32(low4_x32(n0), bits_10(shl4(fifth))))
    store_i8x32(target + 32, or_x32(high4_x32(n0), bits_10(shl3(fifth))))
    store_i8x32(target + 64, or_x32(low4_x32(n1), bits_10(shl2(fifth))))
    store_i8x32(target + 96, or_x32(high4_x32(n1), bits_10(shl1(fifth))))
    store_i8x32(target + 128, or_x32(low4_x32(n2), bits_10(fifth)))
    store_i8x32(target + 160, or_x32(high4_x32(n2), bits_10(shr1(fifth))))
    store_i8x32(target + 192, or_x32(low4_x32(n3), bits_10(shr2(fifth))))
    store_i8x32(target + 224, or_x32(high4_x32(n3), bits_10(shr3(fifth))))


@helper
def q6_k(source, target):
    for half in range(2):
        low, more = load_i8x32(source + 64 * half), load_i8x32(source + 64 * half + 32)
        upper = load_i8x32(source + 128 + 32 * half)
        store_i8x32(target + 128 * half, or_x32(low4_x32(low), bits_30(shl4(upper))))
        store_i8x32(target + 128 * half + 32, or_x32(low4_x32(more), bits_30(shl2(upper))))
        store_i8x32(target + 128 * half + 64, or_x32(high4_x32(low), bits_30(upper)))
        store_i8x32(target + 128 * half + 96, or_x32(high4_x32(more), bits_30(shr2(upper))))


@helper
def q6_k_scales(source, r, sc, mn):
    for j in range(16):
        st_i32(sc + 64 * j + 4 * r, ld_i8(source + 192 + j))


@helper
def iq4_xs(source, target):
    for j in range(8):
        nibbles = load_i8x16(source + 8 + 16 * j)
        store_i8x16(target + 32 * j, iq4_level(low4_x16(nibbles)))
        store_i8x16(target + 32 * j + 16, iq4_level(high4_x16(nibbles)))


@helper
def iq4_xs_scales(source, r, sc, mn):
    upper = ld_u16(source + 2)
    for j in range(8):
        low = ld_u8(source + 4 + (j >> 1)) >> (4 * (j & 1)) & 15
        st_i32(sc + 64 * j + 4 * r, (low | (upper >> 2 * j & 3) << 4) - 32)
