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

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.kv_pages import block_at, block_bytes
from fastpath.cpu.kv_product import SEGMENT, product_panel
from fastpath.cpu.kv_widen import widen
from fastpath.cpu.simd import (
    div_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32,
    load_first_f32,
    splat_f32,
    st_f32,
    store_f32,
    store_first_f32,
)
from fastpath.cpu.softmax import F32, softmax
from refimpl.kv_types import COLUMNS, STEP

ROWS = 128  # of an item: with as many, widening costs a few percent of the products
ITEMS = 4  # per thread, if there are so many tokens
SCORES_LIMIT = 1 << 26  # bytes of scores per thread beyond which an item has fewer rows
INFINITY = 0x7F800000


@helper
def line_of(width):
    """Bytes between rows of float32 in scratch: whole columns of 32, and no power of two."""
    return (width + COLUMNS - 1) // COLUMNS * COLUMNS * 4 + 64


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
def _row(t, r, head, group, n_heads, width):
    """Where row r of a run that begins at token t lies in q and in the result, in bytes."""
    return 4 * width * ((t + r // group) * n_heads + head * group + r % group)


@helper
def _begin(source, width, query, totals):
    """Copies a query to where all rows lie close together; its sums of values begin at 0."""
    for c in range(0, width, 16):
        store_f32(query + 4 * c, load_first_f32(source + 4 * c, min(16, width - c)))
    for c in range(0, width, COLUMNS):
        store_f32(totals + 4 * c, splat_f32(F32(0.0)))
        store_f32(totals + 4 * c + 64, splat_f32(F32(0.0)))


@helper
def _score(rows, queries, line, width, panel, scores, pitch):
    """Scores of all rows with the 32 keys of a panel."""
    for c in range(0, width, SEGMENT):
        product_panel(
            rows,
            queries + 4 * c,
            line,
            panel + 4 * STEP * c,
            0,
            min(SEGMENT, width - c),
            0,
            scores,
            pitch,
            c == 0,
        )


@helper
def _weigh(rows, probs, pitch, n, width, panel, totals, line):
    """Adds n positions' values, from a panel, times their weights to the totals of all rows."""
    for c in range(0, width, COLUMNS):
        product_panel(rows, probs, pitch, panel + 4 * STEP * c, 0, n, 0, totals + 4 * c, line, False)


@helper
def _divide(totals, total, width, target):
    for c in range(0, width, 16):
        value = div_f32(load_f32(totals + 4 * c), splat_f32(total))
        store_first_f32(target + 4 * c, min(16, width - c), value)


@kernel
def many_kernel(args, lo, hi, thread):
    q, k_pages, lanes, positions = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    ends, n_tokens, window = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    table, lane_bytes, n_entries, page_blocks = (
        ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80),
    )  # fmt: skip
    n_kv_heads, n_heads, width = ld_i64(args + 88), ld_i64(args + 96), ld_i64(args + 104)
    v_pages, k_code, v_code = ld_i64(args + 112), ld_i64(args + 120), ld_i64(args + 128)
    out, n_together, pitch = ld_i64(args + 136), ld_i64(args + 144), ld_i64(args + 152)
    work = ld_i64(args + 160) + thread * ld_i64(args + 168)
    group, line = n_heads // n_kv_heads, line_of(width)
    padded = (width + COLUMNS - 1) // COLUMNS * COLUMNS
    k_numbers, v_numbers = STEP * width, STEP * padded  # in a block
    k_bytes, v_bytes = ld_i64(args + 176), ld_i64(args + 184)
    panel = work
    queries = panel + 4 * v_numbers
    totals = queries + n_together * group * line
    sums = totals + n_together * group * line
    scores = sums + (4 * n_together * group + 63) // 64 * 64
    for item in range(lo, hi):
        head, t = item % n_kv_heads, item // n_kv_heads * n_together
        stop = min(t + n_together, n_tokens)
        while t < stop:
            n = _run_length(lanes, positions, t, stop)
            rows, lane = n * group, table + lane_bytes * ld_i32(lanes + 4 * t)
            here = ld_i32(positions + 4 * t)
            first, last = max(0, here - window + 1), here
            for i in range(n):
                last = max(last, ld_i32(ends + 4 * (t + i)))
            base = first // STEP * STEP
            for r in range(rows):
                source = q + _row(t, r, head, group, n_heads, width)
                _begin(source, width, queries + line * r, totals + line * r)
            for step in range(base, last + 1, STEP):
                source = block_at(
                    k_pages, lane, n_entries, page_blocks, step // STEP, head, n_kv_heads, k_bytes
                )
                widen(source, k_numbers, k_code, True, panel)
                _score(rows, queries, line, width, panel, scores + 4 * (step - base), pitch)
            for r in range(rows):
                n_scores = last // STEP * STEP + STEP - base
                begin = max(0, here + r // group - window + 1) - base
                end = ld_i32(ends + 4 * (t + r // group)) + 1 - base
                st_f32(sums + 4 * r, softmax(scores + pitch * r, begin, end, n_scores))
            for step in range(base, last + 1, STEP):
                begin, end = max(step, first), min(step + STEP, last + 1)
                source = block_at(
                    v_pages, lane, n_entries, page_blocks, step // STEP, head, n_kv_heads, v_bytes
                )
                probs, seen = scores + 4 * (begin - base), panel + 4 * COLUMNS * (begin - step)
                if widen(source, v_numbers, v_code, False, panel) < INFINITY:
                    _weigh(rows, probs, pitch, end - begin, width, seen, totals, line)
                    continue
                for r in range(rows):  # what a row does not see must not meet its zeros
                    a = max(begin, here + r // group - window + 1) - begin
                    b = min(end, ld_i32(ends + 4 * (t + r // group)) + 1) - begin
                    if a < b:
                        _weigh(
                            1, probs + pitch * r + 4 * a, pitch, b - a, width, seen + 4 * COLUMNS * a,
                            totals + line * r, line,
                        )  # fmt: skip
            for r in range(rows):
                target = out + _row(t, r, head, group, n_heads, width)
                _divide(totals + line * r, ld_f32(sums + 4 * r), width, target)
            t += n


def many_tokens(words, k_pages, v_pages, k_type, v_type, seen, out):
    """The call whose first fourteen argument words are given; `seen`: most positions that a query sees."""
    T, K, N, H = words[5], *words[-3:]
    group, n_threads = N // K, threads.num_threads()
    most = max(1, min(ROWS, SCORES_LIMIT // (4 * seen)) // group)
    together = max(1, min(most, -(-T * K // (ITEMS * n_threads))))
    pitch = 4 * ((seen + together) // STEP + 2) * STEP + 64
    line = line_of.py_func(H)
    rows = together * group
    per_thread = (STEP + 2 * rows) * line + 4 * rows + 64 + rows * pitch
    per_thread = -(-per_thread // 64) * 64
    args = (
        words[0], address(k_pages), *words[2:], address(v_pages), k_type.code, v_type.code, address(out),
        together, pitch,
        workspace(per_thread * n_threads, "attention_many"), per_thread, block_bytes(k_pages),
        block_bytes(v_pages),
    )  # fmt: skip
    threads.run(many_kernel, args, -(-T // together) * K, 1, n_threads)
