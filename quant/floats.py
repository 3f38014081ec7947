"""Plain numbers: F32, F16, BF16, F64 and the integer types; a block is one value."""

from __future__ import annotations

import numpy as np

from quant.format import Format


def _dequantize_as(dtype):
    def dequantize_blocks(blocks):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(blocks).view(dtype).astype(np.float32)

    return dequantize_blocks


def _quantize_as(dtype):
    def quantize_blocks(x):
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(x.astype(dtype)).view(np.uint8)

    return quantize_blocks


def _dequantize_bf16(blocks):
    """A bfloat16 is the upper half of a float32."""
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _quantize_bf16(x):
    """Round to nearest even; a NaN is made quiet, so that cutting it short cannot turn it into infinity."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # For finite values the sum cannot carry past infinity: the largest, 0x7F7FFFFF, rounds to 0x7F80.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(is_nan, quiet, rounded).astype(np.uint16).view(np.uint8)


FORMATS = (
    Format("F32", 0, 1, 4, _dequantize_as("<f4"), _quantize_as("<f4")),
    Format("F16", 1, 1, 2, _dequantize_as("<f2"), _quantize_as("<f2")),
    Format("BF16", 30, 1, 2, _dequantize_bf16, _quantize_bf16),
    Format("I8", 24, 1, 1, _dequantize_as("i1")),
    Format("I16", 25, 1, 2, _dequantize_as("<i2")),
    Format("I32", 26, 1, 4, _dequantize_as("<i4")),
    Format("I64", 27, 1, 8, _dequantize_as("<i8")),
    Format("F64", 28, 1, 8, _dequantize_as("<f8")),
)
