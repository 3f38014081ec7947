"""Keys and values of a call into the cache.      part of attention.py

work item   one token
arithmetic  one rounding to the cache's type, to nearest even
traffic     values: a row per head.  Keys: lane p % 32 of H rows of 32 positions, a line each.  The 32
            positions of a block are written one after the other, so that in a prefill its lines stay in
            the first cache; a decode step touches H lines, a few microseconds for all layers together.
"""

from fastpath.cpu import kv_types
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_types import round_bf16, round_f16, store_u16
from fastpath.cpu.simd import (
    ld_i32,
    ld_i64,
    ld_u16,
    load_first_f32,
    st_i32,
    st_u16,
    store_f32,
)

STEP = 32  # positions of a block of keys
F16, BF16 = kv_types.F16.code, kv_types.BF16.code


@helper
def _store_row(source, count, code, target, stride, spare):
    """`count` numbers, rounded to a type, to places `stride` bytes apart; spare: 64 bytes."""
    for c in range(0, count, 16):
        n = min(16, count - c)
        v = load_first_f32(source + 4 * c, n)
        if code == F16:
            store_u16(spare, round_f16(v))
        elif code == BF16:
            store_u16(spare, round_bf16(v))
        else:
            store_f32(spare, v)
        at = target + stride * c
        if code == F16 or code == BF16:
            for l in range(n):
                st_u16(at + stride * l, ld_u16(spare + 2 * l))
        else:
            for l in range(n):
                st_i32(at + stride * l, ld_i32(spare + 4 * l))


@helper
def size_of(code):
    return 2 if code == F16 or code == BF16 else 4


@kernel
def write_kv_kernel(args, lo, hi, thread):
    k, v, k_cache, v_cache = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    lanes, positions = ld_i64(args + 32), ld_i64(args + 40)
    n_slots, n_kv_heads, width = ld_i64(args + 48), ld_i64(args + 56), ld_i64(args + 64)
    k_code, v_code = ld_i64(args + 72), ld_i64(args + 80)
    spare = ld_i64(args + 88) + 64 * thread
    k_size, v_size = size_of(k_code), size_of(v_code)
    for t in range(lo, hi):
        slot = ld_i32(positions + 4 * t) % n_slots
        for head in range(n_kv_heads):
            source = 4 * width * (t * n_kv_heads + head)
            first = (ld_i32(lanes + 4 * t) * n_kv_heads + head) * n_slots * width  # of this head's numbers
            block = first + slot // STEP * STEP * width + slot % STEP
            _store_row(k + source, width, k_code, k_cache + k_size * block, k_size * STEP, spare)
            row = first + slot * width
            _store_row(v + source, width, v_code, v_cache + v_size * row, v_size, spare)
