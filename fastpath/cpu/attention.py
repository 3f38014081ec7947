"""Attention over a cache of keys and values.        definition: refimpl/ops/attention.py

    few tokens   three steps, each over all threads, so that one key/value head of one token keeps them busy:
                 scores (split by positions), softmax (by heads), values (by components).  How many items a
                 step has does not depend on the depth.
    many tokens  attention_many.py: all three for some tokens of one key/value head.

    work item    scores: a part of the blocks of one key/value head, for all tokens
                 softmax: a head of a token
                 values: some columns of 32 components of one key/value head, for all tokens
    arithmetic   scores: fma chains over 128 components, added up; kv_product.py
                 softmax.py
                 values: fma chains over steps of 32 absolute positions, added up; one division at the end
    traffic      keys once and values once per token; heads that share them are computed together

Nothing in this depends on other tokens, on the slots where keys lie, or on who computes an item.
"""

import numba

from fastpath.cpu import threads
from fastpath.cpu.attention_many import many_kernel, many_tokens
from fastpath.cpu.buffers import address, floats, integers, output, workspace
from fastpath.cpu.kernel import inlined, kernel
from fastpath.cpu.kv_product import (
    COLUMNS,
    SEGMENT,
    edge_bf16,
    edge_f16,
    edge_f32,
    product_bf16,
    product_f16,
    product_f32,
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
from fastpath.cpu.write_kv import STEP, check_cache

F32 = numba.float32
FEW = 16  # tokens that are computed in three steps
ITEMS = 8  # of a step, per thread, if there are so many
SCORES_LIMIT = 1 << 26  # bytes of scores beyond which fewer tokens share a step
AHEAD = 4096  # bytes of keys between reading and prefetching
EVERYTHING = 1 << 40  # the window of a global layer


@inlined
def _scores(args, lo, hi, size, product):
    q, cache, lanes, positions = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_tokens, window, n_slots = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    n_kv_heads, n_heads, width = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    scores, pitch, n_parts = ld_i64(args + 80), ld_i64(args + 88), ld_i64(args + 112)
    group, block_bytes = n_heads // n_kv_heads, STEP * width * size
    for item in range(lo, hi):
        head, part = item % n_kv_heads, item // n_kv_heads
        for t in range(n_tokens):
            last = ld_i32(positions + 4 * t)
            base = max(0, last - window + 1) // STEP
            n_blocks = last // STEP + 1 - base
            keys = cache + (ld_i32(lanes + 4 * t) * n_kv_heads + head) * (n_slots // STEP) * block_bytes
            row = t * n_heads + head * group
            for block in range(n_blocks * part // n_parts, n_blocks * (part + 1) // n_parts):
                source = keys + (base + block) % (n_slots // STEP) * block_bytes
                for c in range(0, width, SEGMENT):
                    product(
                        group, q + 4 * (width * row + c), 4 * width,
                        source + STEP * size * c, STEP * size, min(SEGMENT, width - c), AHEAD, COLUMNS,
                        scores + pitch * row + 4 * STEP * block, pitch, c == 0,
                    )  # fmt: skip


@kernel
def _scores_f32(args, lo, hi, thread):
    _scores(args, lo, hi, 4, product_f32)


@kernel
def _scores_f16(args, lo, hi, thread):
    _scores(args, lo, hi, 2, product_f16)


@kernel
def _scores_bf16(args, lo, hi, thread):
    _scores(args, lo, hi, 2, product_bf16)


@kernel
def _softmax_kernel(args, lo, hi, thread):
    positions, window, n_heads = ld_i64(args + 24), ld_i64(args + 40), ld_i64(args + 64)
    scores, pitch, sums = ld_i64(args + 80), ld_i64(args + 88), ld_i64(args + 96)
    for row in range(lo, hi):
        last = ld_i32(positions + 4 * (row // n_heads))
        first = max(0, last - window + 1)
        base = first // STEP * STEP
        n = last // STEP * STEP + STEP - base
        st_f32(sums + 4 * row, softmax(scores + pitch * row, first - base, last + 1 - base, n))


@inlined
def _values(args, lo, hi, thread, size, product, edge):
    cache, lanes, positions = ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_tokens, window, n_slots = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    n_kv_heads, n_heads, width = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    scores, pitch, sums, out = ld_i64(args + 80), ld_i64(args + 88), ld_i64(args + 96), ld_i64(args + 104)
    n_columns, totals = ld_i64(args + 112), ld_i64(args + 120) + thread * ld_i64(args + 128)
    group, row_bytes = n_heads // n_kv_heads, width * size
    n_pieces = (width + n_columns - 1) // n_columns
    for item in range(lo, hi):
        head, left = item // n_pieces, item % n_pieces * n_columns
        right = min(left + n_columns, width)
        for t in range(n_tokens):
            last = ld_i32(positions + 4 * t)
            first = max(0, last - window + 1)
            base = first // STEP * STEP
            values = cache + (ld_i32(lanes + 4 * t) * n_kv_heads + head) * n_slots * row_bytes
            row = t * n_heads + head * group
            for step in range(base, last + 1, STEP):
                begin, end = max(step, first), min(step + STEP, last + 1)
                probs = scores + pitch * row + 4 * (begin - base)
                source = values + begin % n_slots * row_bytes
                for c in range(left, right, COLUMNS):
                    target = totals + 4 * group * (c - left)
                    if right - c >= COLUMNS:
                        product(
                            group, probs, pitch, source + size * c, row_bytes, end - begin,
                            STEP * row_bytes, COLUMNS, target, 4 * COLUMNS, step == base,
                        )  # fmt: skip
                    else:
                        edge(
                            group, probs, pitch, source + size * c, row_bytes, end - begin,
                            0, right - c, target, 4 * COLUMNS, step == base,
                        )  # fmt: skip
            for c in range(left, right, 16):
                column = totals + 4 * group * ((c - left) // COLUMNS * COLUMNS) + c % COLUMNS * 4
                for n in range(group):
                    value = div_f32(load_f32(column + 4 * COLUMNS * n), splat_f32(ld_f32(sums + 4 * (row + n))))
                    store_first_f32(out + 4 * (width * (row + n) + c), min(16, right - c), value)


@kernel
def _values_f32(args, lo, hi, thread):
    _values(args, lo, hi, thread, 4, product_f32, edge_f32)


@kernel
def _values_f16(args, lo, hi, thread):
    _values(args, lo, hi, thread, 2, product_f16, edge_f16)


@kernel
def _values_bf16(args, lo, hi, thread):
    _values(args, lo, hi, thread, 2, product_bf16, edge_bf16)


SCORES = {"f32": _scores_f32, "f16": _scores_f16, "bf16": _scores_bf16}
VALUES = {"f32": _values_f32, "f16": _values_f16, "bf16": _values_bf16}


def attention_kernels(kv_type):
    """Those for a cache of this type, or pair of types (keys, values); for compiling ahead."""
    k_type, v_type = (kv_type, kv_type) if isinstance(kv_type, str) else kv_type
    return SCORES[k_type], _softmax_kernel, VALUES[v_type], many_kernel


def attention(q, k_cache, v_cache, seq_ids, positions, window, *, out=None):
    T, N, H = q.shape
    R, K, S, _ = v_cache.shape
    k_type, v_type = check_cache(k_cache, v_cache, K, H, "attention")
    if N % K:
        raise ValueError(f"attention: {N} query heads, {K} key heads; expected a multiple of those")
    q, out = floats(q, "attention: q"), output(out, q.shape, "attention")
    lanes = integers(seq_ids, (T,), "attention: seq_ids")
    positions = integers(positions, (T,), "attention: positions")
    if T == 0:
        return out
    _check_reach(lanes, positions, window, R, S)
    seen = S if window is None else min(window, S)  # most positions that a query sees
    window = EVERYTHING if window is None else window
    words = (address(q), 0, address(lanes), address(positions), T, window, S, K, N, H)
    pitch = 4 * (seen // STEP + 2) * STEP + 64  # of a row of scores; not a power of two
    if T > FEW or T * N * pitch > SCORES_LIMIT:
        many_tokens(words, k_cache, v_cache, k_type, v_type, seen, out)
        return out
    _three_steps(words, k_cache, v_cache, k_type, v_type, pitch, out)
    return out


def _check_reach(lanes, positions, window, R, S):
    low, high = int(positions.min()), int(positions.max())
    seen = high + 1 if window is None else min(window, high + 1)
    if low < 0 or lanes.min() < 0 or lanes.max() >= R or not 1 <= seen <= S:
        raise ValueError(
            f"attention: positions {low}..{high}, lanes {lanes.min()}..{lanes.max()}, window {window}, "
            f"but the cache has {R} lanes of {S} slots. Grow the cache, or reset it"
        )


def _three_steps(words, k_cache, v_cache, k_type, v_type, pitch, out):
    q, _, lanes, positions, T, window, S, K, N, H = words
    n_threads = threads.num_threads()
    wanted = -(-ITEMS * n_threads // K)  # items per key/value head
    n_columns = COLUMNS * max(1, -(-H // COLUMNS) // wanted)
    totals_bytes = 4 * (N // K) * (n_columns + 16)
    scores = workspace(T * N * (pitch + 4) + n_threads * totals_bytes + 64, "attention")
    sums = scores + T * N * pitch
    words = (lanes, positions, T, window, S, K, N, H, scores, pitch, sums, address(out))
    threads.run(SCORES[k_type.name], (q, address(k_cache), *words, wanted), K * wanted, 1, n_threads)
    threads.run(_softmax_kernel, (q, 0, *words), T * N, 1, n_threads)
    totals = -(-(sums + 4 * T * N) // 64) * 64
    args = (q, address(v_cache), *words, n_columns, totals, totals_bytes)
    threads.run(VALUES[v_type.name], args, K * -(-H // n_columns), 1, n_threads)
