"""Attention of many tokens: all of it for some tokens of one key/value head.      part of attention.py

    work item   up to ROWS rows, the query heads of neighbouring tokens that share a key/value head
    arithmetic  that of attention.py, chain by chain
    traffic     32 positions of keys, then of values, are widened to float32 once per item and meet all its
                rows while they lie in the caches; scores are written and read a few times, from wherever they
                fit: about 1 byte for 50 multiplications

Tokens of one item that belong to different sequences, or do not follow each other, are computed one run after
the other.  A row's hidden positions get exp(...) = 0 and are multiplied like the others, which adds nothing,
unless a value is infinite or no number: then the step is computed row by row, each with what it sees.
"""

from fastpath.cpu import kv_types, threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_product import COLUMNS, SEGMENT, product_panel
from fastpath.cpu.kv_types import load_bf16, load_f16
from fastpath.cpu.simd import (
    abs_bits,
    div_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    ld_u16,
    load_f32,
    load_first_f32,
    max_i32,
    splat_f32,
    splat_i32,
    st_f32,
    st_u16,
    store_f32,
    store_first_f32,
    top_i32,
)
from fastpath.cpu.softmax import F32, softmax
from fastpath.cpu.write_kv import STEP, size_of

ROWS = 128  # of an item: with as many, widening costs a few percent of the products
ITEMS = 4  # per thread, if there are so many tokens
SCORES_LIMIT = 1 << 26  # bytes of scores per thread beyond which an item has fewer rows
F16, BF16 = kv_types.F16.code, kv_types.BF16.code
INFINITY = 0x7F800000


@helper
def _widen(source, count, code, target, spare):
    """`count` numbers as float32, with zeros up to a multiple of 32; returns the largest |bits|."""
    top = splat_i32(0)
    for c in range(0, (count + 31) // 32 * 32, 16):
        n = count - c
        if n >= 16 and code == F16:
            v = load_f16(source + 2 * c)
        elif n >= 16 and code == BF16:
            v = load_bf16(source + 2 * c)
        elif code == F16 or code == BF16:
            for l in range(16):
                st_u16(spare + 2 * l, ld_u16(source + 2 * (c + l)) if l < n else 0)
            v = load_f16(spare) if code == F16 else load_bf16(spare)
        else:
            v = load_first_f32(source + 4 * c, min(16, max(0, n)))
        top = max_i32(top, abs_bits(v))
        store_f32(target + 4 * c, v)
    return top_i32(top)


@helper
def _run_length(lanes, positions, t, stop):
    """How many of the tokens t .. stop-1 follow each other in one sequence."""
    n = 1
    while (
        t + n < stop
        and ld_i32(lanes + 4 * (t + n)) == ld_i32(lanes + 4 * t)
        and ld_i32(positions + 4 * (t + n)) == ld_i32(positions + 4 * t) + n
    ):
        n += 1
    return n


@helper
def _value_panel(source, row_bytes, n, width, code, panel, spare):
    """n rows of values as float32 [columns of 32][32 rows][32]; True if all are finite."""
    line, top = spare + 64, 0
    for i in range(n):
        top = max(top, _widen(source + i * row_bytes, width, code, line, spare))
        for c in range(0, width, COLUMNS):
            target = panel + 4 * STEP * c + 4 * COLUMNS * i
            store_f32(target, load_f32(line + 4 * c))
            store_f32(target + 64, load_f32(line + 4 * c + 64))
    return top < INFINITY


@kernel
def many_kernel(args, lo, hi, thread):
    q, k_cache, lanes, positions = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_tokens, window, n_slots = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    n_kv_heads, n_heads, width = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    v_cache, k_code, v_code, out = ld_i64(args + 80), ld_i64(args + 88), ld_i64(args + 96), ld_i64(args + 104)
    n_together, pitch = ld_i64(args + 112), ld_i64(args + 120)
    work = ld_i64(args + 128) + thread * ld_i64(args + 136)
    group, line = n_heads // n_kv_heads, (width + 31) // 32 * 128 + 64
    n_rows = n_together * group
    spare, panel = work, work + 64 + line
    queries = panel + STEP * line
    totals = queries + n_rows * line
    sums = totals + n_rows * line
    scores = sums + (4 * n_rows + 63) // 64 * 64
    block_bytes, row_bytes = STEP * width * size_of(k_code), width * size_of(v_code)
    for item in range(lo, hi):
        head = item % n_kv_heads
        t = item // n_kv_heads * n_together
        stop = min(t + n_together, n_tokens)
        while t < stop:
            n = _run_length(lanes, positions, t, stop)
            place = ld_i32(lanes + 4 * t) * n_kv_heads + head
            first_position, rows = ld_i32(positions + 4 * t), n * group
            first, last = max(0, first_position - window + 1), first_position + n - 1
            base = first // STEP * STEP
            for r in range(rows):
                source = q + 4 * width * ((t + r // group) * n_heads + head * group + r % group)
                for c in range(0, width, 16):
                    store_f32(queries + line * r + 4 * c, load_first_f32(source + 4 * c, min(16, width - c)))
                    store_f32(totals + line * r + 4 * c, splat_f32(F32(0.0)))
                if width % 32 and width % 32 <= 16:
                    store_f32(totals + line * r + (width + 15) // 16 * 64, splat_f32(F32(0.0)))

            for step in range(base, last + 1, STEP):
                source = k_cache + (place * (n_slots // STEP) + step // STEP % (n_slots // STEP)) * block_bytes
                _widen(source, STEP * width, k_code, panel, spare)
                for c in range(0, width, SEGMENT):
                    product_panel(
                        rows, queries + 4 * c, line, panel + 4 * STEP * c, 4 * STEP, min(SEGMENT, width - c),
                        0, COLUMNS, scores + 4 * (step - base), pitch, c == 0,
                    )  # fmt: skip

            for r in range(rows):
                p = first_position + r // group
                begin = max(0, p - window + 1) - base
                padded = last // STEP * STEP + STEP - base
                st_f32(sums + 4 * r, softmax(scores + pitch * r, begin, p + 1 - base, padded))

            for step in range(base, last + 1, STEP):
                begin, end = max(step, first), min(step + STEP, last + 1)
                source = v_cache + (place * n_slots + begin % n_slots) * row_bytes
                finite = _value_panel(source, row_bytes, end - begin, width, v_code, panel, spare)
                for r in range(0, rows, rows if finite else 1):
                    p = first_position + r // group
                    a, b = (begin, end) if finite else (max(begin, p - window + 1), min(end, p + 1))
                    if a < b:
                        for c in range(0, width, COLUMNS):
                            product_panel(
                                rows if finite else 1, scores + pitch * r + 4 * (a - base), pitch,
                                panel + 4 * STEP * c + 4 * COLUMNS * (a - begin), 4 * COLUMNS, b - a, 0, COLUMNS,
                                totals + line * r + 4 * c, line, False,
                            )  # fmt: skip

            for r in range(rows):
                target = out + 4 * width * ((t + r // group) * n_heads + head * group + r % group)
                total = splat_f32(ld_f32(sums + 4 * r))
                for c in range(0, width, 16):
                    value = div_f32(load_f32(totals + line * r + 4 * c), total)
                    store_first_f32(target + 4 * c, min(16, width - c), value)
            t += n


def many_tokens(words, k_cache, v_cache, k_type, v_type, seen, out):
    """The call whose first ten argument words are given; `seen`: most positions that a query sees."""
    q, _, lanes, positions, T, window, S, K, N, H = words
    group, n_threads = N // K, threads.num_threads()
    most = max(1, min(ROWS, SCORES_LIMIT // (4 * seen)) // group)
    together = max(1, min(most, -(-T * K // (ITEMS * n_threads))))
    pitch = 4 * ((seen + together) // STEP + 2) * STEP + 64
    line = -(-H // 32) * 128 + 64
    rows = together * group
    per_thread = 64 + (1 + STEP + 2 * rows) * line + 4 * rows + 64 + rows * pitch
    per_thread = -(-per_thread // 64) * 64
    args = (
        q, address(k_cache), lanes, positions, T, window, S, K, N, H, address(v_cache), k_type.code,
        v_type.code, address(out), together, pitch,
        workspace(per_thread * n_threads, "attention_many"), per_thread,
    )  # fmt: skip
    threads.run(many_kernel, args, -(-T // together) * K, 1, n_threads)
