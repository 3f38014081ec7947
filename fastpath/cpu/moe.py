"""Mixture of experts: the choice, and the weighted sum.        definition: refimpl/ops/moe.py

work item   one token
arithmetic  the choice is made on the logits themselves, so that no rounding of a softmax makes ties; the
            weights are exp(logit - top) of the chosen ones over their sum, in the order of the choice;
            where the definition's softmax is NaN (a logit is, or the largest is infinite) the whole row is,
            and the choice is 0, 1, 2, ...;
            the sum: each product is rounded, then each sum, in the order of the choice
"""

import numba
import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, output, shaped, workspace
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    ld_f32,
    ld_i64,
    ld_u8,
    load_f32,
    load_first_f32,
    mul_f32,
    splat_f32,
    spread_f32,
    st_f32,
    st_i32,
    st_u8,
    store_f32,
    store_first_f32,
    sub_f32,
)
from fastpath.cpu.vector_math import exp_or_zero

F32 = numba.float32
NAN = np.float32(np.nan)
TOKENS_PER_PIECE = 16
SUMMED_VALUES_PER_PIECE = 1 << 15


@kernel
def _route_kernel(args, lo, hi, thread):
    logits, scale, ids, weights = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_experts, n_active = ld_i64(args + 32), ld_i64(args + 40)
    work = ld_i64(args + 48) + thread * ld_i64(args + 56)
    taken = work + 8 * ((n_active + 15) // 16 * 16)  # u8[E] after f32[A] values and f32[A] scales
    padded = (n_active + 15) // 16 * 16
    scales = work + 4 * padded
    for t in range(lo, hi):
        row = logits + 4 * n_experts * t
        highest = ld_f32(row)
        no_softmax = False
        for e in range(n_experts):
            st_u8(taken + e, 0)
            value = ld_f32(row + 4 * e)
            if value > highest:
                highest = value
            no_softmax |= value != value
        no_softmax |= highest - highest != F32(0.0)
        for a in range(padded):
            st_f32(work + 4 * a, F32(0.0))
            st_f32(scales + 4 * a, F32(1.0))
        for a in range(n_active):
            best = -1
            top = F32(0.0)
            for e in range(n_experts):
                value = ld_f32(row + 4 * e)
                if ld_u8(taken + e) == 0 and (best < 0 or (value > top and not no_softmax)):
                    best, top = e, value
            st_u8(taken + best, 1)
            st_i32(ids + 4 * (n_active * t + a), best)
            st_f32(work + 4 * a, top)
            if scale:
                st_f32(scales + 4 * a, ld_f32(scale + 4 * best))
        shift = splat_f32(NAN if no_softmax else highest)
        for a in range(0, padded, 16):
            store_f32(work + 4 * a, exp_or_zero(sub_f32(load_f32(work + 4 * a), shift)))
        total = F32(0.0)
        for a in range(n_active):
            total += ld_f32(work + 4 * a)
        for a in range(0, padded, 16):
            share = div_f32(load_f32(work + 4 * a), splat_f32(total))
            share = mul_f32(share, load_f32(scales + 4 * a))
            store_first_f32(weights + 4 * (n_active * t + a), min(16, n_active - a), share)


@kernel
def _expert_sum_kernel(args, lo, hi, thread):
    y, weights, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_active, width = ld_i64(args + 24), ld_i64(args + 32)
    for t in range(lo, hi):
        rows, shares = y + 4 * n_active * width * t, weights + 4 * n_active * t
        for c in range(0, width, 16):
            count = min(16, width - c)
            total = mul_f32(load_first_f32(rows + 4 * c, count), spread_f32(shares))
            for a in range(1, n_active):
                said = load_first_f32(rows + 4 * (a * width + c), count)
                total = add_f32(total, mul_f32(said, spread_f32(shares + 4 * a)))
            store_first_f32(out + 4 * (width * t + c), count, total)


def route(router_logits, n_active, expert_scale, *, out=None):
    logits = floats(router_logits, "route: router_logits")
    T, E = logits.shape
    if not 1 <= n_active <= E:
        raise ValueError(f"route: n_active {n_active}, expected 1 to {E}, the number of experts")
    if expert_scale is not None:
        expert_scale = shaped(expert_scale, (E,), "route: expert_scale")
    ids, weights = (None, None) if out is None else out
    ids = output(ids, (T, n_active), "route: ids", np.int32)
    weights = output(weights, (T, n_active), "route: weights")
    per_thread = -(-(8 * (n_active + 16) + E) // 64) * 64
    n_threads = threads.num_threads()
    args = (
        address(logits), 0 if expert_scale is None else address(expert_scale), address(ids), address(weights),
        E, n_active, workspace(per_thread * n_threads, "route"), per_thread,
    )  # fmt: skip
    threads.run(_route_kernel, args, T, TOKENS_PER_PIECE, n_threads)
    return ids, weights


def expert_sum(y, expert_weights, *, out=None):
    y = floats(y, "expert_sum: y")
    T, A, D = y.shape
    expert_weights = shaped(expert_weights, (T, A), "expert_sum: expert_weights")
    out = output(out, (T, D), "expert_sum")
    args = (address(y), address(expert_weights), address(out), A, D)
    threads.run(_expert_sum_kernel, args, T, SUMMED_VALUES_PER_PIECE // max(1, A * D))
    return out
