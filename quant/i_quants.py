"""The IQ formats: values come from codebooks instead of evenly spaced levels.

IQ4_NL and IQ4_XS look up 4-bit codes in one table of 16 values.  The others look up whole groups of 4 or 8
values (`i_quant_grids.py`): the groups that occur often in weights get a code, all others do without.

              bytes of a block, in order
    IQ4_NL   18  d, 16 of nibbles                                               32 values
    IQ4_XS  136  d, 2 of upper scale bits, 4 of scale nibbles, 128 of nibbles   8 sub-blocks of 32
    IQ2_XXS  66  d, 8 x (4 codes of 8 bits | 4 sign codes of 7 bits, scale of 4 bits)
    IQ2_XS   74  d, 32 x (code of 9 bits, sign code of 7 bits), 16 scales of 4 bits
    IQ2_S    82  d, 32 low code bytes, 32 of signs, 8 of upper code bits, 16 scales of 4 bits
    IQ3_XXS  98  d, 64 code bytes, 8 x (4 sign codes of 7 bits, scale of 4 bits)
    IQ3_S   110  d, 64 low code bytes, 8 of ninth code bits, 32 of signs, 8 scales of 4 bits
    IQ1_S    50  d, 32 low code bytes, 8 x (4 x 3 upper code bits, scale of 3 bits, sign of the shift)
    IQ1_M    56  32 low code bytes, 32 x (3 upper code bits, sign of the shift),
                 4 x (4 scales of 3 bits, 4 bits of d)
"""

from __future__ import annotations

import base64

import numpy as np

from quant import i_quant_grids as grids
from quant.bits import read_f16, unpack_fields
from quant.format import Format
from quant.i_quantize import LEVELS, quantize_iq4_nl, quantize_iq4_xs
from quant.k_quants import sub_block_values
from quant.legacy import scaled_values

IQ1_SHIFT = np.float32(0.125)


def _decode_grid(packed: str, values: tuple[int, ...], width: int):
    """Codebook as f32[n_codes, width]."""
    bits = 16 // width
    entries = np.frombuffer(base64.b64decode(packed), "<u2")
    codes = entries[:, None] >> np.arange(0, 16, bits, dtype=np.uint16) & np.uint16(2**bits - 1)
    return np.array(values, np.float32)[codes]


GRID_IQ2_XXS = _decode_grid(grids.IQ2_XXS, grids.IQ2_XXS_VALUES, 8)
GRID_IQ2_XS = _decode_grid(grids.IQ2_XS, grids.IQ2_XS_VALUES, 8)
GRID_IQ2_S = _decode_grid(grids.IQ2_S, grids.IQ2_S_VALUES, 8)
GRID_IQ3_XXS = _decode_grid(grids.IQ3_XXS, grids.IQ3_XXS_VALUES, 4)
GRID_IQ3_S = _decode_grid(grids.IQ3_S, grids.IQ3_S_VALUES, 4)
GRID_IQ1 = _decode_grid(grids.IQ1_S, grids.IQ1_S_VALUES, 8)


def _sign_table():
    """f32[128, 8]: the signs of 8 values for a 7-bit code; the eighth makes the count of minus signs even."""
    codes = np.arange(128, dtype=np.uint8)
    bits = unpack_fields(codes[:, None], 1, 1)
    bits[:, 7] = bits.sum(axis=1) & 1
    return np.where(bits == 0, np.float32(1), np.float32(-1))


SIGNS = _sign_table()


def _sign_bits(raw):
    """One sign per bit: u8[n, B] -> f32[n, B, 8]."""
    bits = unpack_fields(raw, 1, 1).reshape(*raw.shape, 8)
    return np.where(bits == 0, np.float32(1), np.float32(-1))


def _grid_values(scale, values, signs):
    """scale * values * signs, the scale shared by equal runs of values.

    Shapes:
        scale          f32[n, n_scales]
        values, signs  f32[n, ...] of 256 values per block
    """
    n, n_scales = scale.shape
    with np.errstate(invalid="ignore", over="ignore"):
        runs = scale[:, :, None] * values.reshape(n, n_scales, -1) * signs.reshape(n, n_scales, -1)
    return runs.reshape(n, 256)


def _scale(d, codes, quarter):
    """d * (0.5 + code) * quarter, in this order: d f32[n], codes u[n, n_scales]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return d[:, None] * (np.float32(0.5) + codes.astype(np.float32)) * np.float32(quarter)


def _words(blocks, start: int, stop: int, dtype):
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _sign_codes(words):
    """The four 7-bit sign codes in the low 28 bits of each word: u32[n, 8] -> f32[n, 8, 4, 8]."""
    codes = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return SIGNS[codes]


def _dequantize_iq2_xxs(blocks):
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scale = _scale(read_f16(blocks, 0), words[:, :, 1] >> np.uint32(28), 0.25)
    return _grid_values(scale, GRID_IQ2_XXS[codes], _sign_codes(words[:, :, 1]))


def _dequantize_iq2_xs(blocks):
    codes = _words(blocks, 2, 66, "<u2")
    scale = _scale(read_f16(blocks, 0), unpack_fields(blocks[:, 66:74], 1, 4), 0.25)
    return _grid_values(scale, GRID_IQ2_XS[codes & np.uint16(511)], SIGNS[codes >> np.uint16(9)])


def _dequantize_iq2_s(blocks):
    upper = unpack_fields(blocks[:, 66:74], 1, 2).astype(np.uint16) << np.uint16(8)
    scale = _scale(read_f16(blocks, 0), unpack_fields(blocks[:, 74:82], 1, 4), 0.25)
    return _grid_values(scale, GRID_IQ2_S[blocks[:, 2:34] | upper], _sign_bits(blocks[:, 34:66]))


def _dequantize_iq3_xxs(blocks):
    words = _words(blocks, 66, 98, "<u4")
    scale = _scale(read_f16(blocks, 0), words >> np.uint32(28), 0.5)
    return _grid_values(scale, GRID_IQ3_XXS[blocks[:, 2:66]], _sign_codes(words))


def _dequantize_iq3_s(blocks):
    ninth = unpack_fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << np.uint16(8)
    codes = unpack_fields(blocks[:, 106:110], 1, 4).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = read_f16(blocks, 0)[:, None] * (1 + 2 * codes)
    return _grid_values(scale, GRID_IQ3_S[blocks[:, 2:66] | ninth], _sign_bits(blocks[:, 74:106]))


def _shifted_values(scale, values, negative):
    """scale * (value +- 1/8): scale f32[n, n_scales], values f32[n, 32, 8], negative bool, one per shift."""
    n, n_scales = scale.shape
    shift = np.where(negative, -IQ1_SHIFT, IQ1_SHIFT).reshape(n, -1, 1)
    shifted = values.reshape(n, shift.shape[1], -1) + shift
    with np.errstate(invalid="ignore", over="ignore"):
        return (scale[:, :, None] * shifted.reshape(n, n_scales, -1)).reshape(n, 256)


def _dequantize_iq1_s(blocks):
    words = _words(blocks, 34, 50, "<u2")
    upper = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    codes = blocks[:, 2:34] | (upper << np.uint16(8)).reshape(-1, 32)
    multiple = 2 * (words >> np.uint16(12) & np.uint16(7)).astype(np.float32) + 1
    with np.errstate(invalid="ignore", over="ignore"):
        scale = read_f16(blocks, 0)[:, None] * multiple
    return _shifted_values(scale, GRID_IQ1[codes], words >> np.uint16(15) != 0)


def _dequantize_iq1_m(blocks):
    fields = unpack_fields(blocks[:, 32:48], 1, 4)
    codes = blocks[:, :32] | (fields & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    words = _words(blocks, 48, 56, "<u2")
    # The float16 scale lies in the top four bits of the four words, lowest first.
    d_bits = np.bitwise_or.reduce(words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16), axis=1)
    d = d_bits.view(np.float16).astype(np.float32)
    small = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(-1, 16)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = d[:, None] * (2 * small.astype(np.float32) + 1)
    return _shifted_values(scale, GRID_IQ1[codes], fields & np.uint8(8) != 0)


def _parts_iq4_nl(blocks):
    return LEVELS[unpack_fields(blocks[:, 2:18], 16, 4)], read_f16(blocks, 0), None


def _parts_iq4_xs(blocks):
    low = unpack_fields(blocks[:, 4:8], 1, 4)
    upper = unpack_fields(blocks[:, 2:4], 1, 2)
    sc = (low | upper << np.uint8(4)).astype(np.int16) - np.int16(32)
    q = LEVELS[unpack_fields(blocks[:, 8:136], 16, 4)]
    return q, np.repeat(sc, 2, axis=1), None, read_f16(blocks, 0), None


def _dequantize_iq4_nl(blocks):
    return scaled_values(_parts_iq4_nl(blocks))


def _dequantize_iq4_xs(blocks):
    return sub_block_values(_parts_iq4_xs(blocks))


FORMATS = (
    Format("IQ2_XXS", 16, 256, 66, _dequantize_iq2_xxs),
    Format("IQ2_XS", 17, 256, 74, _dequantize_iq2_xs),
    Format("IQ3_XXS", 18, 256, 98, _dequantize_iq3_xxs),
    Format("IQ1_S", 19, 256, 50, _dequantize_iq1_s),
    Format("IQ4_NL", 20, 32, 18, _dequantize_iq4_nl, quantize_iq4_nl, _parts_iq4_nl),
    Format("IQ3_S", 21, 256, 110, _dequantize_iq3_s),
    Format("IQ2_S", 22, 256, 82, _dequantize_iq2_s),
    Format("IQ4_XS", 23, 256, 136, _dequantize_iq4_xs, quantize_iq4_xs, _parts_iq4_xs),
    Format("IQ1_M", 29, 256, 56, _dequantize_iq1_m),
)
