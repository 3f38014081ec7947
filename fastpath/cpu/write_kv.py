"""Keys and values of a call into the cache.      part of attention.py

work item   one token
arithmetic  one rounding to the cache's type, to nearest even
traffic     values: a row per head.  Keys: lane p % 32 of H rows of 32 positions, a line each.  The 32
            positions of a block are written one after the other, so that in a prefill its lines stay in
            the first cache; a decode step touches H lines, a few microseconds for all layers together.
"""

from fastpath.cpu import kv_types
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_pages import block_at
from fastpath.cpu.kv_types import round_bf16, round_f16, store_u16
from fastpath.cpu.simd import ld_i32, ld_i64, ld_u16, load_first_f32, st_i32, st_u16, store_f32
from refimpl.kv_types import COLUMNS, STEP

F16, BF16 = kv_types.F16.code, kv_types.BF16.code


@helper
def size_of(code):
    return 2 if code == F16 or code == BF16 else 4


@helper
def _store(v, code, target):
    """16 numbers, rounded to a type, side by side."""
    if code == F16:
        store_u16(target, round_f16(v))
    elif code == BF16:
        store_u16(target, round_bf16(v))
    else:
        store_f32(target, v)


@helper
def _store_key(source, width, code, target, spare):
    """Component c goes to 32 * c numbers behind `target`."""
    size = size_of(code)
    for c in range(0, width, 16):
        n = min(16, width - c)
        _store(load_first_f32(source + 4 * c, n), code, spare)
        for l in range(n):
            at = target + STEP * size * (c + l)
            if size == 2:
                st_u16(at, ld_u16(spare + 2 * l))
            else:
                st_i32(at, ld_i32(spare + 4 * l))


@helper
def _store_value(source, width, code, target):
    """Components 32 i .. 32 i + 31, with zeros behind the last one, go to 1024 i numbers behind `target`."""
    size = size_of(code)
    for c in range(0, (width + COLUMNS - 1) // COLUMNS * COLUMNS, 16):
        v = load_first_f32(source + 4 * c, min(16, max(0, width - c)))
        _store(v, code, target + size * (c // COLUMNS * STEP * COLUMNS + c % COLUMNS))


@kernel
def write_kv_kernel(args, lo, hi, thread):
    k, v, k_pages, v_pages = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    lanes, positions = ld_i64(args + 32), ld_i64(args + 40)
    table, lane_bytes, n_entries, page_blocks = (
        ld_i64(args + 48), ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72),
    )  # fmt: skip
    n_kv_heads, width = ld_i64(args + 80), ld_i64(args + 88)
    k_code, v_code = ld_i64(args + 96), ld_i64(args + 104)
    spare = ld_i64(args + 112) + 64 * thread
    k_bytes = size_of(k_code) * STEP * width  # of a block
    v_bytes = size_of(v_code) * STEP * ((width + COLUMNS - 1) // COLUMNS * COLUMNS)
    for t in range(lo, hi):
        block, place = ld_i32(positions + 4 * t) // STEP, ld_i32(positions + 4 * t) % STEP
        lane = table + lane_bytes * ld_i32(lanes + 4 * t)
        for head in range(n_kv_heads):
            source = 4 * width * (t * n_kv_heads + head)
            key = (
                block_at(k_pages, lane, n_entries, page_blocks, block, head, n_kv_heads, k_bytes)
                + size_of(k_code) * place
            )
            _store_key(k + source, width, k_code, key, spare)
            value = (
                block_at(v_pages, lane, n_entries, page_blocks, block, head, n_kv_heads, v_bytes)
                + size_of(v_code) * place * COLUMNS
            )
            _store_value(v + source, width, v_code, value)
