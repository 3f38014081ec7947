"""Q2_K to Q6_K: super-blocks of 256 values, cut into sub-blocks of 16 or 32 with small integer scales.

    value = (d*sc) * q - (dmin*mn)      d, dmin float16 per super-block; sc, mn integers per sub-block

              bytes of a block, in order                                       sub-blocks
    Q2_K  84  16 sc|mn nibbles, 64 q, d, dmin                                   16 of 16
    Q3_K 110  32 third bits, 64 q, 12 sc (6 bits, signed), d                    16 of 16, no mn
    Q4_K 144  d, dmin, 12 sc and mn (6 bits), 128 q                             8 of 32
    Q5_K 176  d, dmin, 12 sc and mn (6 bits), 32 fifth bits, 128 q              8 of 32
    Q6_K 210  128 low nibbles, 64 upper two bits, 16 sc (signed bytes), d       16 of 16, no mn

Quantisation is in k_quantize.py.
"""

from __future__ import annotations

import numpy as np

from quant.bits import read_f16, unpack_fields
from quant.format import Format
from quant.k_quantize import quantize_q2_k, quantize_q3_k, quantize_q4_k, quantize_q5_k, quantize_q6_k


def sub_block_values(parts):
    """value = (d*sc)*q (- dmin*mn) in float32, from the answer of a 256-value `integer_parts`."""
    q, sc, mn, d, dmin = parts
    n = q.shape[0]
    with np.errstate(invalid="ignore", over="ignore"):
        scale = d[:, None] * sc.astype(np.float32)
        values = scale[:, :, None] * q.reshape(n, 16, 16).astype(np.float32)
        if mn is not None:
            values -= (dmin[:, None] * mn.astype(np.float32))[:, :, None]
    return values.reshape(n, 256)


def _parts_q2_k(blocks):
    sc = (blocks[:, :16] & np.uint8(15)).astype(np.int16)
    mn = (blocks[:, :16] >> np.uint8(4)).astype(np.int16)
    q = unpack_fields(blocks[:, 16:80], 32, 2).view(np.int8)
    return q, sc, mn, read_f16(blocks, 80), read_f16(blocks, 82)


def _parts_q3_k(blocks):
    # A set bit in the first 32 bytes means "do not subtract 4".
    upper = unpack_fields(blocks[:, :32], 32, 1) << np.uint8(2)
    q = (unpack_fields(blocks[:, 32:96], 32, 2) | upper).view(np.int8) - np.int8(4)
    # Scales: 16 low nibbles in 8 bytes, then their upper two bits in 4 bytes.
    low = unpack_fields(blocks[:, 96:104], 8, 4)
    high = unpack_fields(blocks[:, 104:108], 4, 2)
    sc = (low | high << np.uint8(4)).astype(np.int16) - np.int16(32)
    return q, sc, None, read_f16(blocks, 108), None


def _scales_and_mins(packed):
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes.

    Bytes 0..3 hold scales 0..3 and bytes 4..7 minima 0..3, each in its low 6 bits; the two bits above them
    are the upper bits of scale or minimum 4..7, whose low nibbles share bytes 8..11.

    Shapes:
        packed  u8[n, 12]
    Returns:
        sc i16[n, 16], mn i16[n, 16]: each value twice, as one per 16 values of q
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, upper = np.uint8(0x3F), np.uint8(0x30)
    sc = np.hstack([first & six, (low & np.uint8(15)) | (first >> np.uint8(2) & upper)])
    mn = np.hstack([second & six, (low >> np.uint8(4)) | (second >> np.uint8(2) & upper)])
    return np.repeat(sc.astype(np.int16), 2, axis=1), np.repeat(mn.astype(np.int16), 2, axis=1)


def _parts_q4_k(blocks):
    sc, mn = _scales_and_mins(blocks[:, 4:16])
    q = unpack_fields(blocks[:, 16:144], 32, 4).view(np.int8)
    return q, sc, mn, read_f16(blocks, 0), read_f16(blocks, 2)


def _parts_q5_k(blocks):
    sc, mn = _scales_and_mins(blocks[:, 4:16])
    fifth = unpack_fields(blocks[:, 16:48], 32, 1) << np.uint8(4)
    q = (unpack_fields(blocks[:, 48:176], 32, 4) | fifth).view(np.int8)
    return q, sc, mn, read_f16(blocks, 0), read_f16(blocks, 2)


def _parts_q6_k(blocks):
    upper = unpack_fields(blocks[:, 128:192], 32, 2) << np.uint8(4)
    q = (unpack_fields(blocks[:, :128], 64, 4) | upper).view(np.int8) - np.int8(32)
    return q, blocks[:, 192:208].view(np.int8).astype(np.int16), None, read_f16(blocks, 208), None


def _format(name, ggml_id, block_bytes, parts, quantize_blocks):
    def dequantize_blocks(blocks):
        return sub_block_values(parts(blocks))

    return Format(name, ggml_id, 256, block_bytes, dequantize_blocks, quantize_blocks, parts)


FORMATS = (
    _format("Q2_K", 10, 84, _parts_q2_k, quantize_q2_k),
    _format("Q3_K", 11, 110, _parts_q3_k, quantize_q3_k),
    _format("Q4_K", 12, 144, _parts_q4_k, quantize_q4_k),
    _format("Q5_K", 13, 176, _parts_q5_k, quantize_q5_k),
    _format("Q6_K", 14, 210, _parts_q6_k, quantize_q6_k),
)
