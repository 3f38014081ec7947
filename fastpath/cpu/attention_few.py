"""Attention of few tokens: three steps, each over all threads.      part of attention.py

A key/value head of one token keeps all threads busy, on one pass over memory: scores are split by positions,
the softmax by heads, values by components.  How many items a step has does not depend on the depth.

    work item    scores: a part of the blocks of one key/value head, for all tokens
                 softmax: a head of a token
                 values: some columns of 32 components of one key/value head, for all tokens
    arithmetic   that of attention.py
    traffic      keys once and values once per token; while a segment of keys or a column of values is read,
                 the one that comes next is prefetched, wherever its page is.  Query heads that share them are
                 computed together.  Products of 8 heads are bound by multiply-adds and widening as much as by
                 memory.
"""

from fastpath.cpu import kv_types, threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import inlined, kernel
from fastpath.cpu.kv_pages import block_at, block_bytes
from fastpath.cpu.kv_product import (
    SEGMENT,
    keys_q4_0,
    keys_q8_0,
    product_bf16,
    product_f16,
    product_f32,
    values_q4_0,
    values_q8_0,
)
from fastpath.cpu.simd import (
    div_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32,
    splat_f32,
    st_f32,
    store_first_f32,
)
from fastpath.cpu.softmax import softmax
from refimpl.kv_types import COLUMNS, STEP

ITEMS = 4  # of a step, per thread, if there are so many
F32_BYTES, F16_BYTES, Q8_0_BYTES, Q4_0_BYTES = (  # of 32 positions by 32 components
    kind.column_bytes for kind in (kv_types.F32, kv_types.F16, kv_types.Q8_0, kv_types.Q4_0)
)


@inlined
def _scores(args, lo, hi, column_bytes, product):
    q, pages, lanes, positions = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    ends, n_tokens, window = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    table, lane_bytes, n_entries, page_blocks = (
        ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80),
    )  # fmt: skip
    n_kv_heads, n_heads, width = ld_i64(args + 88), ld_i64(args + 96), ld_i64(args + 104)
    scores, pitch, n_parts = ld_i64(args + 112), ld_i64(args + 120), ld_i64(args + 144)
    group, n_bytes = n_heads // n_kv_heads, ld_i64(args + 152)
    for item in range(lo, hi):
        head, part = item % n_kv_heads, item // n_kv_heads
        for t in range(n_tokens):
            last = ld_i32(ends + 4 * t)
            base = max(0, ld_i32(positions + 4 * t) - window + 1) // STEP
            n_blocks = last // STEP + 1 - base
            lane = table + lane_bytes * ld_i32(lanes + 4 * t)
            row = t * n_heads + head * group
            begin, end = n_blocks * part // n_parts, n_blocks * (part + 1) // n_parts
            behind = block_at(pages, lane, n_entries, page_blocks, base + begin, head, n_kv_heads, n_bytes)
            rest = page_blocks - (base + begin) % page_blocks  # blocks of the page from here on
            for block in range(base + begin, base + end):
                source, rest = behind, rest - 1
                if STEP * (block + 1) <= last:  # maybe the next part's, which comes next
                    behind += n_bytes
                    if rest == 0:
                        rest, behind = page_blocks, block_at(
                            pages, lane, n_entries, page_blocks, block + 1, head, n_kv_heads, n_bytes
                        )  # fmt: skip
                for c in range(0, width, SEGMENT):
                    segment = source + c // COLUMNS * column_bytes
                    following = segment + SEGMENT // COLUMNS * column_bytes if c + SEGMENT < width else behind
                    product(
                        group, q + 4 * (width * row + c), 4 * width,
                        segment, 0, min(SEGMENT, width - c), following - segment,
                        scores + pitch * row + 4 * STEP * (block - base), pitch, c == 0,
                    )  # fmt: skip


@kernel
def _scores_f32(args, lo, hi, thread):
    _scores(args, lo, hi, F32_BYTES, product_f32)


@kernel
def _scores_f16(args, lo, hi, thread):
    _scores(args, lo, hi, F16_BYTES, product_f16)


@kernel
def _scores_bf16(args, lo, hi, thread):
    _scores(args, lo, hi, F16_BYTES, product_bf16)


@kernel
def _scores_q8_0(args, lo, hi, thread):
    _scores(args, lo, hi, Q8_0_BYTES, keys_q8_0)


@kernel
def _scores_q4_0(args, lo, hi, thread):
    _scores(args, lo, hi, Q4_0_BYTES, keys_q4_0)


@kernel
def softmax_kernel(args, lo, hi, thread):
    positions, ends, window, n_heads = (
        ld_i64(args + 24), ld_i64(args + 32), ld_i64(args + 48), ld_i64(args + 96),
    )  # fmt: skip
    scores, pitch, sums = ld_i64(args + 112), ld_i64(args + 120), ld_i64(args + 128)
    for row in range(lo, hi):
        last = ld_i32(ends + 4 * (row // n_heads))
        first = max(0, ld_i32(positions + 4 * (row // n_heads)) - window + 1)
        base = first // STEP * STEP
        n = last // STEP * STEP + STEP - base
        st_f32(sums + 4 * row, softmax(scores + pitch * row, first - base, last + 1 - base, n))


@inlined
def _values(args, lo, hi, thread, column_bytes, product):
    pages, lanes, positions, ends = (
        ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24), ld_i64(args + 32),
    )  # fmt: skip
    n_tokens, window = ld_i64(args + 40), ld_i64(args + 48)
    table, lane_bytes, n_entries, page_blocks = (
        ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80),
    )  # fmt: skip
    n_kv_heads, n_heads, width = ld_i64(args + 88), ld_i64(args + 96), ld_i64(args + 104)
    scores, pitch, sums, out = ld_i64(args + 112), ld_i64(args + 120), ld_i64(args + 128), ld_i64(args + 136)
    n_columns, totals = ld_i64(args + 144), ld_i64(args + 152) + thread * ld_i64(args + 160)
    group, n_bytes = n_heads // n_kv_heads, ld_i64(args + 168)
    n_pieces = (width + n_columns - 1) // n_columns
    for item in range(lo, hi):
        head, left = item // n_pieces, item % n_pieces * n_columns
        right = min(left + n_columns, width)
        for t in range(n_tokens):
            last = ld_i32(ends + 4 * t)
            first = max(0, ld_i32(positions + 4 * t) - window + 1)
            base = first // STEP * STEP
            lane = table + lane_bytes * ld_i32(lanes + 4 * t)
            row = t * n_heads + head * group
            front = block_at(pages, lane, n_entries, page_blocks, base // STEP, head, n_kv_heads, n_bytes)
            behind, rest = front, page_blocks - base // STEP % page_blocks
            for step in range(base, last + 1, STEP):
                source, rest = behind, rest - 1
                if step + STEP > last:
                    behind = front + n_columns // COLUMNS * column_bytes  # the next columns, which come next
                elif rest > 0:
                    behind += n_bytes
                else:
                    rest, behind = page_blocks, block_at(
                        pages, lane, n_entries, page_blocks, step // STEP + 1, head, n_kv_heads, n_bytes
                    )  # fmt: skip
                begin, end = max(step, first), min(step + STEP, last + 1)
                probs = scores + pitch * row + 4 * (begin - base)
                for c in range(left, right, COLUMNS):
                    product(
                        group, probs, pitch, source + c // COLUMNS * column_bytes, begin - step, end - begin,
                        behind - source, totals + 4 * group * (c - left), 4 * COLUMNS, step == base,
                    )  # fmt: skip
            for c in range(left, right, 16):
                column = totals + 4 * group * ((c - left) // COLUMNS * COLUMNS) + c % COLUMNS * 4
                for n in range(group):
                    value = div_f32(
                        load_f32(column + 4 * COLUMNS * n), splat_f32(ld_f32(sums + 4 * (row + n)))
                    )
                    store_first_f32(out + 4 * (width * (row + n) + c), min(16, right - c), value)


@kernel
def _values_f32(args, lo, hi, thread):
    _values(args, lo, hi, thread, F32_BYTES, product_f32)


@kernel
def _values_f16(args, lo, hi, thread):
    _values(args, lo, hi, thread, F16_BYTES, product_f16)


@kernel
def _values_bf16(args, lo, hi, thread):
    _values(args, lo, hi, thread, F16_BYTES, product_bf16)


@kernel
def _values_q8_0(args, lo, hi, thread):
    _values(args, lo, hi, thread, Q8_0_BYTES, values_q8_0)


@kernel
def _values_q4_0(args, lo, hi, thread):
    _values(args, lo, hi, thread, Q4_0_BYTES, values_q4_0)


SCORES = {
    "f32": _scores_f32, "f16": _scores_f16, "bf16": _scores_bf16, "q8_0": _scores_q8_0, "q4_0": _scores_q4_0,
}  # fmt: skip
VALUES = {
    "f32": _values_f32, "f16": _values_f16, "bf16": _values_bf16, "q8_0": _values_q8_0, "q4_0": _values_q4_0,
}  # fmt: skip


def few_tokens(words, k_pages, v_pages, k_type, v_type, pitch, out):
    """The call whose first fourteen argument words are given; pitch: bytes of a row of scores."""
    k_bytes, v_bytes = block_bytes(k_pages), block_bytes(v_pages)
    q, T, K, N, H = words[0], words[5], *words[-3:]
    n_threads = threads.num_threads()
    wanted = -(-ITEMS * n_threads // K)  # items per key/value head
    n_columns = COLUMNS * max(1, -(-H // COLUMNS) // wanted)
    totals_bytes = 4 * (N // K) * (n_columns + 16)
    scores = workspace(T * N * (pitch + 4) + n_threads * totals_bytes + 64, "attention")
    sums = scores + T * N * pitch
    words = (*words[2:], scores, pitch, sums, address(out))
    args = (q, address(k_pages), *words, wanted, k_bytes)
    threads.run(SCORES[k_type.name], args, K * wanted, 1, n_threads)
    threads.run(softmax_kernel, (q, 0, *words), T * N, 1, n_threads)
    totals = -(-(sums + 4 * T * N) // 64) * 64
    args = (q, address(v_pages), *words, n_columns, totals, totals_bytes, v_bytes)
    threads.run(VALUES[v_type.name], args, K * -(-H // n_columns), 1, n_threads)
