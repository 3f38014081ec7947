"""32 positions of keys or values as float32, for those who read them many times.      part of attention.py"""

from fastpath.cpu import kv_types
from fastpath.cpu.kernel import helper
from fastpath.cpu.kv_types import load_bf16, load_codes, load_f16, spread_f16
from fastpath.cpu.simd import abs_bits, load_f32, max_i32, mul_f32, splat_i32, store_f32, top_i32
from refimpl.kv_types import COLUMNS, SCALES, STEP

F16, BF16 = kv_types.F16.code, kv_types.BF16.code
Q8_0, Q4_0 = kv_types.Q8_0.code, kv_types.Q4_0.code
Q8_0_BYTES, Q4_0_BYTES = kv_types.Q8_0.column_bytes, kv_types.Q4_0.column_bytes
_low_8, _high_8 = load_codes[Q8_0]
_low_4, _high_4 = load_codes[Q4_0]


@helper
def _widen_numbers(source, count, code, target):
    """`count` numbers, a multiple of 32; returns the largest |bits|."""
    top = splat_i32(0)
    for c in range(0, count, 16):
        if code == F16:
            v = load_f16(source + 2 * c)
        elif code == BF16:
            v = load_bf16(source + 2 * c)
        else:
            v = load_f32(source + 4 * c)
        top = max_i32(top, abs_bits(v))
        store_f32(target + 4 * c, v)
    return top_i32(top)


@helper
def _widen_tile(tile, code, of_keys, target):
    """32 by 32 numbers; returns the largest |bits| of each lane."""
    top = splat_i32(0)
    low, high = load_f16(tile), load_f16(tile + 32)
    for i in range(32):
        if not of_keys:
            low = spread_f16(tile + 2 * i)
            high = low
        if code == Q8_0:
            row = tile + SCALES + 32 * i
            x, y = mul_f32(low, _low_8(row)), mul_f32(high, _high_8(row))
        else:
            row = tile + SCALES + 16 * i
            x, y = mul_f32(low, _low_4(row)), mul_f32(high, _high_4(row))
        top = max_i32(top, max_i32(abs_bits(x), abs_bits(y)))
        store_f32(target + 128 * i, x)
        store_f32(target + 128 * i + 64, y)
    return top


@helper
def widen(source, count, code, of_keys, target):
    """A block of keys or values: `count` numbers, a multiple of 32, or as many whole tiles as that takes.

    Returns the largest |bits|.
    """
    if code != Q8_0 and code != Q4_0:
        return _widen_numbers(source, count, code, target)
    tile_bytes = Q8_0_BYTES if code == Q8_0 else Q4_0_BYTES
    top = splat_i32(0)
    for i in range((count + STEP * COLUMNS - 1) // (STEP * COLUMNS)):
        tile = source + tile_bytes * i
        top = max_i32(top, _widen_tile(tile, code, of_keys, target + 4 * STEP * COLUMNS * i))
    return top_i32(top)
