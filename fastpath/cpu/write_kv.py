"""Keys and values of a call into their pages.      part of attention.py

work item   32 components of a head, of all tokens: positions whose codes share a byte have one writer
arithmetic  one rounding to the type of the pages, to nearest even; or a scale and codes (kv_quantize.py)
traffic     values: a row of 32.  Keys: place p % 32 of 32 rows of 32 positions, a line each.  The positions
            of a block are written one after the other, so that in a prefill its lines stay in the first
            cache; a decode step touches H lines, a few microseconds for all layers together.
"""

from fastpath.cpu import kv_types, threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_pages import block_at, block_bytes
from fastpath.cpu.kv_quantize import quantize
from fastpath.cpu.kv_types import round_bf16, round_f16, store_u16
from fastpath.cpu.simd import (
    ld_i32,
    ld_i64,
    ld_u8,
    ld_u16,
    load_first_f32,
    st_i32,
    st_i64,
    st_u8,
    st_u16,
    store_f32,
)
from refimpl.kv_types import COLUMNS, SCALES, STEP

F16, BF16 = kv_types.F16.code, kv_types.BF16.code
Q8_0, Q4_0 = kv_types.Q8_0.code, kv_types.Q4_0.code
GRAIN = 4  # tokens that a second thread is worth
SPARE = 128  # bytes per thread


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
def _store_numbers(low, high, n, place, code, of_keys, column, spare):
    """32 numbers, of keys the first n, at a place of a column of 32 positions."""
    size = 2 if code == F16 or code == BF16 else 4
    target = spare if of_keys else column + COLUMNS * size * place
    _store(low, code, target)
    _store(high, code, target + 16 * size)
    if of_keys:
        for i in range(n):
            at = column + size * (STEP * i + place)
            if size == 2:
                st_u16(at, ld_u16(spare + 2 * i))
            else:
                st_i32(at, ld_i32(spare + 4 * i))


@helper
def _store_codes(place, code, of_keys, row, spare):
    """32 codes, a byte each at `spare`, at a place of the codes that begin at `row`."""
    if not of_keys and code == Q8_0:
        for i in range(0, 32, 8):
            st_i64(row + 32 * place + i, ld_i64(spare + i))
    elif not of_keys:
        for i in range(16):
            st_u8(row + 16 * place + i, ld_u8(spare + i) | ld_u8(spare + 16 + i) << 4)
    elif code == Q8_0:
        for i in range(32):
            st_u8(row + 32 * i + place, ld_u8(spare + i))
    else:  # positions 16 apart share a byte
        shift = place // 16 * 4
        for i in range(32):
            at = row + 16 * i + place % 16
            st_u8(at, ld_u8(at) & ~(15 << shift) | ld_u8(spare + i) << shift)


@helper
def _write(source, n, place, code, of_keys, column, spare):
    """n <= 32 components of one token; `column`: where those of its 32 positions lie."""
    low, high = load_first_f32(source, min(16, n)), load_first_f32(source + 64, max(0, n - 16))
    if code == Q8_0 or code == Q4_0:
        st_u16(column + 2 * place, quantize(low, high, source, n, code, spare))
        _store_codes(place, code, of_keys, column + SCALES, spare)
    else:
        _store_numbers(low, high, n, place, code, of_keys, column, spare)


@kernel
def write_kv_kernel(args, lo, hi, thread):
    k, v, k_pages, v_pages = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    lanes, positions, n_tokens = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    table, lane_bytes, n_entries, page_blocks = (
        ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80),
    )  # fmt: skip
    n_kv_heads, width = ld_i64(args + 88), ld_i64(args + 96)
    k_code, k_block, k_column = ld_i64(args + 104), ld_i64(args + 112), ld_i64(args + 120)
    v_code, v_block, v_column = ld_i64(args + 128), ld_i64(args + 136), ld_i64(args + 144)
    spare = ld_i64(args + 152) + SPARE * thread
    n_columns = (width + COLUMNS - 1) // COLUMNS
    for item in range(lo, hi):
        head, c = item // n_columns, item % n_columns
        n = min(COLUMNS, width - COLUMNS * c)
        row, block = -1, -1
        key, value = 0, 0
        for t in range(n_tokens):
            position, mine = ld_i32(positions + 4 * t), table + lane_bytes * ld_i32(lanes + 4 * t)
            if position // STEP != block or mine != row:
                block, row = position // STEP, mine
                key = block_at(k_pages, row, n_entries, page_blocks, block, head, n_kv_heads, k_block)
                value = block_at(v_pages, row, n_entries, page_blocks, block, head, n_kv_heads, v_block)
            source = 4 * (width * (t * n_kv_heads + head) + COLUMNS * c)
            place = position % STEP
            _write(k + source, n, place, k_code, True, key + c * k_column, spare)
            _write(v + source, n, place, v_code, False, value + c * v_column, spare)


def write_all(k, v, k_pages, v_pages, k_type, v_type, lanes, positions, table_words):
    T, K, H = k.shape
    n_threads, n_items = threads.num_threads(), K * -(-H // COLUMNS)
    args = (
        address(k), address(v), address(k_pages), address(v_pages), address(lanes), address(positions), T,
        *table_words, K, H, k_type.code, block_bytes(k_pages), k_type.column_bytes, v_type.code,
        block_bytes(v_pages), v_type.column_bytes, workspace(SPARE * n_threads, "write_kv"),
    )  # fmt: skip
    threads.run(write_kv_kernel, args, n_items, -(-GRAIN * n_items // T), n_threads)
