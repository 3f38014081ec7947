"""MXFP4 and NVFP4: 4-bit floats (E2M1) under a shared scale that is a small float, too.

    MXFP4  17  e, 16 bytes of nibbles (32 values)        scale 2^(e - 127)
    NVFP4  36  4 scales, 4 x 8 bytes of nibbles          scales unsigned E4M3, one per 16 values (64 in all)

The levels 0, 0.5, 1, 1.5, 2, 3, 4, 6 are kept doubled, as integers, and the scales halved.
"""

from __future__ import annotations

import numpy as np

from quant.bits import pack_fields, unpack_fields
from quant.format import Format
from quant.legacy import scaled_values

LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def half_e8m0(e):
    """2^(e - 128) as float32, exactly: u8[...] -> f32[...].  The two smallest are denormal."""
    normal = (e.astype(np.uint32) - np.uint32(1)) << np.uint32(23)
    denormal = np.uint32(0x00200000) << np.minimum(e, 1).astype(np.uint32)
    return np.where(e < 2, denormal, normal).view(np.float32)


def _half_ue4m3_table():
    """f32[256]: half the value of each unsigned E4M3 byte; bit 7 is ignored; 0x7F, the NaN, counts as 0."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


HALF_UE4M3 = _half_ue4m3_table()


def _parts_mxfp4(blocks):
    return LEVELS[unpack_fields(blocks[:, 1:], 16, 4)], half_e8m0(blocks[:, 0]), None


def _dequantize_mxfp4(blocks):
    return scaled_values(_parts_mxfp4(blocks))


def _nearest_level(x, scale):
    """Code of the level nearest to x, the first of equally near ones.

    Shapes:
        x f32[n, m], scale f32[n, 1]
    Returns:
        u8[n, m]
    """
    best = np.zeros(x.shape, np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(scale * np.float32(0) - x)
        for code in range(1, 16):
            this = np.abs(scale * np.float32(LEVELS[code]) - x)
            better = this < error
            best[better] = code
            error = np.where(better, this, error)
    return best


def _quantize_mxfp4(x):
    """The scale puts the largest magnitude between 4 and 8 undoubled: 4 or 6 is the nearest level."""
    peak = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(peak)) + np.float32(127 - 2)
    e = np.where(peak > 0, np.maximum(exponent, 0), np.float32(0)).astype(np.uint8)
    return np.hstack([e, pack_fields(_nearest_level(x, half_e8m0(e)), 16, 4)])


def _dequantize_nvfp4(blocks):
    n = blocks.shape[0]
    scale = HALF_UE4M3[blocks[:, :4]][:, :, None]
    q = LEVELS[unpack_fields(blocks[:, 4:], 8, 4)].reshape(n, 4, 16)
    return (scale * q.astype(np.float32)).reshape(n, 64)


FORMATS = (
    Format("MXFP4", 39, 32, 17, _dequantize_mxfp4, _quantize_mxfp4, _parts_mxfp4),
    Format("NVFP4", 40, 64, 36, _dequantize_nvfp4),
)
