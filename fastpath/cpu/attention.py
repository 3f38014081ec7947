"""Attention over a cache of float32 keys and values.        definition: refimpl/ops/attention.py

    work item   heads of one token that share a key/value head: all of them, or a part if threads would idle
    arithmetic  two passes over steps of 32 absolute positions.  Scores: 16 lanes over H, joined in the order
                of simd.sum_f32, and their exact maximum.  Then p = exp(score - max), the sum of p in 16 lanes
                by absolute position, and p * v per component, both ascending.  One division at the end.
    traffic     keys once and values once per item: a step (32 KiB at H = 256) stays in the cache for all
                heads.  Two heads by four positions are in registers; the scores lie in scratch.

Nothing in this depends on other tokens, on the slots where keys lie, or on who computes the item.
"""

import numba
import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, numbers, output, workspace
from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    fma_f32,
    keep_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    max_f32,
    splat_f32,
    spread_f32,
    st_f32,
    store_f32,
    store_first_f32,
    sub_f32,
    sum_f32,
    top_f32,
)
from fastpath.cpu.simd_dot import sums_f32
from fastpath.cpu.vector_math import exp_or_zero

F32 = numba.float32
STEP = 32  # absolute positions that are summed together
LANES = 2 * STEP * 64  # bytes of lane sums: two heads by one step
HIDDEN = F32(-np.inf)  # score of a position that the query does not see
MIN_WORK = 1 << 15  # multiplications of a piece that a second thread is worth


@helper
def _two_by_four(q0, q1, k0, k1, k2, k3, width, lanes0, lanes1):
    """Lane sums of two queries with four keys: 64 bytes each, four in a row per query."""
    zero = splat_f32(F32(0.0))
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    whole, rest = width // 16 * 64, width % 16
    for c in range(0, whole, 64):
        u, v = load_f32(q0 + c), load_f32(q1 + c)
        k = load_f32(k0 + c)
        a0, b0 = fma_f32(u, k, a0), fma_f32(v, k, b0)
        k = load_f32(k1 + c)
        a1, b1 = fma_f32(u, k, a1), fma_f32(v, k, b1)
        k = load_f32(k2 + c)
        a2, b2 = fma_f32(u, k, a2), fma_f32(v, k, b2)
        k = load_f32(k3 + c)
        a3, b3 = fma_f32(u, k, a3), fma_f32(v, k, b3)
    if rest:
        u, v = load_first_f32(q0 + whole, rest), load_first_f32(q1 + whole, rest)
        k = load_first_f32(k0 + whole, rest)
        a0, b0 = fma_f32(u, k, a0), fma_f32(v, k, b0)
        k = load_first_f32(k1 + whole, rest)
        a1, b1 = fma_f32(u, k, a1), fma_f32(v, k, b1)
        k = load_first_f32(k2 + whole, rest)
        a2, b2 = fma_f32(u, k, a2), fma_f32(v, k, b2)
        k = load_first_f32(k3 + whole, rest)
        a3, b3 = fma_f32(u, k, a3), fma_f32(v, k, b3)
    store_f32(lanes0, a0)
    store_f32(lanes0 + 64, a1)
    store_f32(lanes0 + 128, a2)
    store_f32(lanes0 + 192, a3)
    store_f32(lanes1, b0)
    store_f32(lanes1 + 64, b1)
    store_f32(lanes1 + 128, b2)
    store_f32(lanes1 + 192, b3)


@helper
def _key(keys, stride, position, begin, end, n_slots):
    """Where the key of a position lies; of the nearest visible one for a hidden position."""
    return keys + min(max(position, begin), end - 1) % n_slots * stride


@helper
def _score_step(q0, q1, keys, stride, step, begin, end, n_slots, width, lanes, scores0, scores1):
    """Scores of two heads with the positions step .. step+31, of which begin .. end-1 are visible."""
    for i in range(0, STEP, 4):
        k0 = _key(keys, stride, step + i, begin, end, n_slots)
        k1 = _key(keys, stride, step + i + 1, begin, end, n_slots)
        k2 = _key(keys, stride, step + i + 2, begin, end, n_slots)
        k3 = _key(keys, stride, step + i + 3, begin, end, n_slots)
        _two_by_four(q0, q1, k0, k1, k2, k3, width, lanes + 64 * i, lanes + LANES // 2 + 64 * i)
    hidden = splat_f32(HIDDEN)
    for i in range(0, STEP, 16):
        lo, hi = begin - step - i, end - step - i
        store_f32(scores0 + 4 * i, keep_f32(sums_f32(lanes + 64 * i), lo, hi, hidden))
        store_f32(scores1 + 4 * i, keep_f32(sums_f32(lanes + LANES // 2 + 64 * i), lo, hi, hidden))


@helper
def _softmax(scores, n):
    """Scores to exp(score - max), for n scores, a multiple of 32; returns their sum."""
    top = splat_f32(HIDDEN)
    for i in range(0, 4 * n, 64):
        top = max_f32(top, load_f32(scores + i))
    highest = splat_f32(top_f32(top))
    total = splat_f32(F32(0.0))
    for i in range(0, 4 * n, 64):
        p = exp_or_zero(sub_f32(load_f32(scores + i), highest))
        store_f32(scores + i, p)
        total = add_f32(total, p)
    return sum_f32(total)


@helper
def _value_step(probs0, probs1, values, stride, slot, n, n_slots, width, out0, out1):
    """out += p * v for two heads, over n positions from `slot` on."""
    c = 0
    while c + 64 <= width:
        x, y = out0 + 4 * c, out1 + 4 * c
        a0, a1, a2, a3 = load_f32(x), load_f32(x + 64), load_f32(x + 128), load_f32(x + 192)
        b0, b1, b2, b3 = load_f32(y), load_f32(y + 64), load_f32(y + 128), load_f32(y + 192)
        s = slot
        for i in range(0, 4 * n, 4):
            p, r = spread_f32(probs0 + i), spread_f32(probs1 + i)
            at = values + s * stride + 4 * c
            v = load_f32(at)
            a0, b0 = fma_f32(p, v, a0), fma_f32(r, v, b0)
            v = load_f32(at + 64)
            a1, b1 = fma_f32(p, v, a1), fma_f32(r, v, b1)
            v = load_f32(at + 128)
            a2, b2 = fma_f32(p, v, a2), fma_f32(r, v, b2)
            v = load_f32(at + 192)
            a3, b3 = fma_f32(p, v, a3), fma_f32(r, v, b3)
            s = s + 1 if s + 1 < n_slots else 0
        _store_four(y, b0, b1, b2, b3)
        _store_four(x, a0, a1, a2, a3)
        c += 64
    while c < width:
        count = min(16, width - c)
        x, y = out0 + 4 * c, out1 + 4 * c
        a0, b0 = load_f32(x), load_f32(y)
        s = slot
        for i in range(0, 4 * n, 4):
            v = load_first_f32(values + s * stride + 4 * c, count)
            a0, b0 = fma_f32(spread_f32(probs0 + i), v, a0), fma_f32(spread_f32(probs1 + i), v, b0)
            s = s + 1 if s + 1 < n_slots else 0
        store_f32(y, b0)
        store_f32(x, a0)
        c += 16


@inlined
def _store_four(target, v0, v1, v2, v3):
    store_f32(target, v0)
    store_f32(target + 64, v1)
    store_f32(target + 128, v2)
    store_f32(target + 192, v3)


@kernel
def _attention_kernel(args, lo, hi, thread):
    q, keys, values = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    lanes_of, positions, window = ld_i64(args + 24), ld_i64(args + 32), ld_i64(args + 40)
    n_slots, n_kv_heads, n_heads = ld_i64(args + 48), ld_i64(args + 56), ld_i64(args + 64)
    width, out, n_together = ld_i64(args + 72), ld_i64(args + 80), ld_i64(args + 88)
    work = ld_i64(args + 96) + thread * ld_i64(args + 104)
    pitch, score_pitch = (width + 15) // 16 * 64, ld_i64(args + 112)
    lanes, sums = work, work + LANES
    scores = sums + n_together * pitch
    per_token, group, stride = n_heads // n_together, n_heads // n_kv_heads, 4 * n_kv_heads * width
    for item in range(lo, hi):
        t, head = item // per_token, item % per_token * n_together
        last = ld_i64(positions + 8 * t)
        first = max(0, last - window + 1)
        base = first // STEP * STEP
        at = (ld_i64(lanes_of + 8 * t) * n_slots * n_kv_heads + head // group) * width * 4
        query = q + 4 * width * (t * n_heads + head)
        for step in range(base, last + 1, STEP):
            begin, end = max(step, first), min(step + STEP, last + 1)
            for n in range(0, n_together, 2):
                also = min(n + 1, n_together - 1)  # an odd head is computed twice, to the same bytes
                _score_step(
                    query + 4 * width * n, query + 4 * width * also,
                    keys + at, stride, step, begin, end, n_slots, width, lanes,
                    scores + score_pitch * n + 4 * (step - base),
                    scores + score_pitch * also + 4 * (step - base),
                )  # fmt: skip
        for c in range(0, n_together * pitch, 64):
            store_f32(sums + c, splat_f32(F32(0.0)))
        count = (last + STEP - base) // STEP * STEP
        for n in range(n_together):
            # the sum of p waits in the place behind the head's last score
            st_f32(scores + score_pitch * n + 4 * count, _softmax(scores + score_pitch * n, count))
        for step in range(base, last + 1, STEP):
            begin, end = max(step, first), min(step + STEP, last + 1)
            for n in range(0, n_together, 2):
                also = min(n + 1, n_together - 1)
                _value_step(
                    scores + score_pitch * n + 4 * (begin - base),
                    scores + score_pitch * also + 4 * (begin - base),
                    values + at, stride, begin % n_slots, end - begin, n_slots, width,
                    sums + pitch * n, sums + pitch * also,
                )  # fmt: skip
        for n in range(n_together):
            total = spread_f32(scores + score_pitch * n + 4 * count)
            target = out + 4 * width * (t * n_heads + head + n)
            for c in range(0, width, 16):
                value = div_f32(load_f32(sums + pitch * n + 4 * c), total)
                store_first_f32(target + 4 * c, min(16, width - c), value)


def _heads_together(n_heads, n_kv_heads, n_tokens):
    """Heads of an item: as many as share keys, fewer if that leaves threads without work."""
    together = n_heads // n_kv_heads
    wanted = threads.num_threads()
    while together % 2 == 0 and n_tokens * n_heads // together < wanted:
        together //= 2
    return together


def write_kv(k, v, k_cache, v_cache, seq_ids, positions):
    slots = np.asarray(positions) % k_cache.shape[1]
    k_cache[seq_ids, slots] = k
    v_cache[seq_ids, slots] = v


def attention(q, k_cache, v_cache, seq_ids, positions, window, *, out=None):
    T, N, H = q.shape
    R, S, K, _ = k_cache.shape
    if k_cache.shape != (R, S, K, H) or v_cache.shape != k_cache.shape or N % K:
        raise ValueError(
            f"attention: q {q.shape}, k_cache {k_cache.shape}, v_cache {v_cache.shape}; "
            "expected [T, N, H] and twice [R, S, K, H] with N a multiple of K"
        )
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        if cache.dtype != np.float32 or not cache.flags.c_contiguous:
            raise ValueError(f"attention: {name} is {cache.dtype}, expected contiguous float32[R, S, K, H]")
    q, out = floats(q, "attention: q"), output(out, q.shape, "attention")
    lanes, positions = (
        numbers(seq_ids, T, "attention: seq_ids"),
        numbers(positions, T, "attention: positions"),
    )
    if T == 0:
        return out
    reach = int(positions.max()) + 1
    window = reach if window is None else min(int(window), reach)
    if positions.min() < 0 or lanes.min() < 0 or lanes.max() >= R or window > S or window < 1:
        raise ValueError(
            f"attention: positions {positions.min()}..{positions.max()}, lanes {lanes.min()}..{lanes.max()}, "
            f"window {window}, but the cache has {R} lanes of {S} slots. Grow the cache, or reset it"
        )
    together = _heads_together(N, K, T)
    score_pitch = 4 * (window // STEP + 3) * STEP
    per_thread = LANES + together * (4 * ((H + 15) // 16 * 16) + score_pitch)
    n_threads = threads.num_threads()
    args = (
        address(q), address(k_cache), address(v_cache), address(lanes), address(positions), window,
        S, K, N, H, address(out), together,
        workspace(per_thread * n_threads, "attention"), per_thread, score_pitch,
    )  # fmt: skip
    grain = max(1, MIN_WORK // (2 * H * window * together))
    threads.run(_attention_kernel, args, T * N // together, grain, n_threads)
    return out
