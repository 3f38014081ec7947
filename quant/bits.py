"""Bit fields inside bytes, and half-precision fields: what the formats are made of."""

from __future__ import annotations

import numpy as np


def unpack_fields(raw, group: int, bits: int):
    """Split bytes into fields of `bits` bits, plane by plane.

    Each group of `group` bytes gives first the lowest field of every byte, then the next field of every byte,
    and so on.  With group=1 the fields come out in little-endian bit order.

    Shapes:
        raw  u8[n, B]
    Returns:
        u8[n, B * 8 // bits]
    """
    n = raw.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (raw.reshape(n, -1, 1, group) >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(n, -1)


def pack_fields(fields, group: int, bits: int):
    """Inverse of `unpack_fields`; every field must be below 2**bits."""
    n = fields.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = fields.astype(np.uint8).reshape(n, -1, 8 // bits, group) << shifts
    return np.bitwise_or.reduce(planes, axis=2).reshape(n, -1)


def read_f16(blocks, start: int):
    """The float16 at byte `start` of each block, widened: u8[n, B] -> f32[n]."""
    return blocks[:, start : start + 2].view(np.float16)[:, 0].astype(np.float32)


def write_f16(values):
    """f32[n] -> u8[n, 2], rounded to nearest even; too large becomes infinity."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype(np.float16).reshape(-1, 1).view(np.uint8)


def reciprocal(d):
    """1/d, and 0 where d is 0: an all-zero block quantises to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d == 0, np.float32(0), np.float32(1) / d)


def round_half_away(x):
    """Round to the nearest integer, halves away from zero like C's roundf (NumPy rounds halves to even)."""
    magnitude = np.abs(x)
    whole = np.floor(magnitude)
    return np.copysign(whole + (magnitude - whole >= np.float32(0.5)), x)
