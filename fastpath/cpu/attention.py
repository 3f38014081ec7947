"""Attention over a cache of float32 keys and values.        definition: refimpl/ops/attention.py

    work item   one head of one token
    arithmetic  two passes.  Scores: 16 lanes over H, added in the fixed order of simd.sum_f32, and their
                exact maximum.  Then p = exp(score - max); the sum of p in 16 lanes by absolute position, and
                p * v per component, both ascending over absolute positions.  One division at the end.
    traffic     keys once, values once; the scores stay in a row of scratch, 4 bytes per visible position

Nothing in this depends on other tokens, on the slots where keys lie, or on who computes the item.
"""

import numba
import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, numbers, output, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    fma_f32,
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
from fastpath.cpu.vector_math import exp_or_zero

F32 = numba.float32
STEP = 32  # absolute positions that are summed together
HIDDEN = F32(-np.inf)  # score of a position that the query does not see
MIN_WORK = 1 << 15  # multiplications of a piece that a second thread is worth


@helper
def _score(q, k, whole, rest):
    lanes = splat_f32(F32(0.0))
    for c in range(0, whole, 64):
        lanes = fma_f32(load_f32(q + c), load_f32(k + c), lanes)
    if rest:
        lanes = fma_f32(load_first_f32(q + whole, rest), load_first_f32(k + whole, rest), lanes)
    return sum_f32(lanes)


@helper
def _scores(q, keys, stride, first, last, n_slots, width, scores):
    """Scores of positions first .. last, at scores + 4 * (position - first rounded down to a step)."""
    whole, rest = width // 16 * 64, width % 16
    base = first // STEP * STEP
    for i in range(first - base):
        st_f32(scores + 4 * i, HIDDEN)
    slot = first % n_slots
    for position in range(first, last + 1):
        st_f32(scores + 4 * (position - base), _score(q, keys + slot * stride, whole, rest))
        slot = slot + 1 if slot + 1 < n_slots else 0
    n = last + 1 - base
    for i in range(n, (n + STEP - 1) // STEP * STEP):
        st_f32(scores + 4 * i, HIDDEN)


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
def _add_values(probs, values, stride, slot, n, n_slots, width, out):
    """out += p * v over n positions from `slot` on."""
    c = 0
    while c + 64 <= width:
        at = out + 4 * c
        a0, a1, a2, a3 = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
        s = slot
        for i in range(n):
            p = spread_f32(probs + 4 * i)
            v = values + s * stride + 4 * c
            a0, a1 = fma_f32(p, load_f32(v), a0), fma_f32(p, load_f32(v + 64), a1)
            a2, a3 = fma_f32(p, load_f32(v + 128), a2), fma_f32(p, load_f32(v + 192), a3)
            s = s + 1 if s + 1 < n_slots else 0
        store_f32(at, a0)
        store_f32(at + 64, a1)
        store_f32(at + 128, a2)
        store_f32(at + 192, a3)
        c += 64
    while c < width:
        count = min(16, width - c)
        a0 = load_f32(out + 4 * c)
        s = slot
        for i in range(n):
            a0 = fma_f32(spread_f32(probs + 4 * i), load_first_f32(values + s * stride + 4 * c, count), a0)
            s = s + 1 if s + 1 < n_slots else 0
        store_f32(out + 4 * c, a0)
        c += 16


@kernel
def _attention_kernel(args, lo, hi, thread):
    q, keys, values = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    lanes, positions, window = ld_i64(args + 24), ld_i64(args + 32), ld_i64(args + 40)
    n_slots, n_kv_heads, group = ld_i64(args + 48), ld_i64(args + 56), ld_i64(args + 64)
    width, out = ld_i64(args + 72), ld_i64(args + 80)
    work = ld_i64(args + 88) + thread * ld_i64(args + 96)
    padded = (width + 15) // 16 * 64
    sums, scores = work, work + padded  # f32[H], then the scores
    n_heads, stride = n_kv_heads * group, 4 * n_kv_heads * width
    for item in range(lo, hi):
        t, n = item // n_heads, item % n_heads
        last = ld_i64(positions + 8 * t)
        first = max(0, last - window + 1)
        base = first // STEP * STEP
        at = (ld_i64(lanes + 8 * t) * n_slots * n_kv_heads + n // group) * width * 4
        _scores(q + 4 * width * item, keys + at, stride, first, last, n_slots, width, scores)
        count = (last + STEP - base) // STEP * STEP
        total = _softmax(scores, count)
        for c in range(0, padded, 64):
            store_f32(sums + c, splat_f32(F32(0.0)))
        for step in range(base, last + 1, STEP):
            begin, end = max(step, first), min(step + STEP, last + 1)
            probs = scores + 4 * (begin - base)
            _add_values(probs, values + at, stride, begin % n_slots, end - begin, n_slots, width, sums)
        target = out + 4 * width * item
        for c in range(0, width, 16):
            value = div_f32(load_f32(sums + 4 * c), splat_f32(total))
            store_first_f32(target + 4 * c, min(16, width - c), value)


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
    per_thread = 4 * ((H + 15) // 16 * 16 + window + 2 * STEP)
    per_thread = -(-per_thread // 64) * 64
    args = (
        address(q), address(k_cache), address(v_cache), address(lanes), address(positions), window,
        S, K, N // K, H, address(out), workspace(per_thread * threads.num_threads(), "attention"), per_thread,
    )  # fmt: skip
    seen = min(window, reach)
    threads.run(_attention_kernel, args, T * N, max(1, MIN_WORK // (2 * H * seen)))
    return out
