"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 values with one float16 scale, some with a float16 minimum.

    Q4_0  d | 16 bytes of nibbles                       value = d*(q - 8)
    Q4_1  d | m | 16 bytes of nibbles                   value = d*q + m
    Q5_0  d | 4 bytes of fifth bits | 16 bytes          value = d*(q - 16)
    Q5_1  d | m | 4 bytes of fifth bits | 16 bytes      value = d*q + m
    Q8_0  d | 32 signed bytes                           value = d*q

Values 0..15 are the low nibbles and 16..31 the high ones; bit i of the fifth bits belongs to value i.
"""

from __future__ import annotations

import numpy as np

from quant.bits import pack_fields, read_f16, reciprocal, round_half_away, unpack_fields, write_f16
from quant.format import Format


def scaled_values(parts):
    """value = d*q (+ m) in float32, from the answer of a 32-value `integer_parts`."""
    q, d, m = parts
    with np.errstate(invalid="ignore", over="ignore"):
        values = d[:, None] * q.astype(np.float32)
        return values if m is None else values + m[:, None]


def _nibbles(blocks, start):
    return unpack_fields(blocks[:, start : start + 16], 16, 4)


def _five_bits(blocks, start):
    """Low nibbles after the 4 bytes of fifth bits at `start`."""
    return _nibbles(blocks, start + 4) | unpack_fields(blocks[:, start : start + 4], 1, 1) << np.uint8(4)


def _parts_q4_0(blocks):
    return _nibbles(blocks, 2).view(np.int8) - np.int8(8), read_f16(blocks, 0), None


def _parts_q4_1(blocks):
    return _nibbles(blocks, 4).view(np.int8), read_f16(blocks, 0), read_f16(blocks, 2)


def _parts_q5_0(blocks):
    return _five_bits(blocks, 2).view(np.int8) - np.int8(16), read_f16(blocks, 0), None


def _parts_q5_1(blocks):
    return _five_bits(blocks, 4).view(np.int8), read_f16(blocks, 0), read_f16(blocks, 2)


def _parts_q8_0(blocks):
    return blocks[:, 2:].view(np.int8), read_f16(blocks, 0), None


def _quantize_signed(x, half: int):
    """d maps the value of largest magnitude to -half exactly: the one code that has no positive twin is used.

    Shapes:
        x  f32[n, 32]
    Returns:
        d f32[n], q u8[n, 32] in 0 .. 2*half - 1
    """
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    d = peak / np.float32(-half)
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.trunc(x * reciprocal(d) + np.float32(half + 0.5)).astype(np.uint8).clip(0, 2 * half - 1)
    return d[:, 0], q


def _quantize_affine(x, top: int):
    """d and m map the smallest value to 0, the largest to `top`.  Returns d f32[n], m f32[n], q u8[n, 32]."""
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(top)
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.trunc((x - low) * reciprocal(d) + np.float32(0.5)).astype(np.uint8).clip(0, top)
    return d[:, 0], low[:, 0], q


def _pack_nibbles(q):
    return pack_fields(q & np.uint8(15), 16, 4)


def _pack_fifth_bits(q):
    return pack_fields(q >> np.uint8(4), 1, 1)


def _quantize_q4_0(x):
    d, q = _quantize_signed(x, 8)
    return np.hstack([write_f16(d), _pack_nibbles(q)])


def _quantize_q4_1(x):
    d, m, q = _quantize_affine(x, 15)
    return np.hstack([write_f16(d), write_f16(m), _pack_nibbles(q)])


def _quantize_q5_0(x):
    d, q = _quantize_signed(x, 16)
    return np.hstack([write_f16(d), _pack_fifth_bits(q), _pack_nibbles(q)])


def _quantize_q5_1(x):
    d, m, q = _quantize_affine(x, 31)
    return np.hstack([write_f16(d), write_f16(m), _pack_fifth_bits(q), _pack_nibbles(q)])


def _quantize_q8_0(x):
    d = np.abs(x).max(axis=1) / np.float32(127)
    with np.errstate(invalid="ignore", over="ignore"):
        q = round_half_away(x * reciprocal(d)[:, None]).astype(np.int8)
    return np.hstack([write_f16(d), q.view(np.uint8)])


def _format(name, ggml_id, block_bytes, parts, quantize_blocks):
    def dequantize_blocks(blocks):
        return scaled_values(parts(blocks))

    return Format(name, ggml_id, 32, block_bytes, dequantize_blocks, quantize_blocks, parts)


FORMATS = (
    _format("Q4_0", 2, 18, _parts_q4_0, _quantize_q4_0),
    _format("Q4_1", 3, 20, _parts_q4_1, _quantize_q4_1),
    _format("Q5_0", 6, 22, _parts_q5_0, _quantize_q5_0),
    _format("Q5_1", 7, 24, _parts_q5_1, _quantize_q5_1),
    _format("Q8_0", 8, 34, _parts_q8_0, _quantize_q8_0),
)
