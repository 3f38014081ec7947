"""Mixture of experts on CUDA: the choice, and the sum.        definition: refimpl/ops/moe.py

route       a warp per token; a lane has every 32nd logit in registers.  A times the largest one left is
            chosen, by comparisons of logits: of equal ones the lower number
expert_sum  as elementwise.py; a token's experts in the order in which they were chosen
"""

import math

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.elementwise import launch, places
from fastpath.cuda.intrinsics import fma_rn, mul_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.sampling import NOBODY, is_better
from fastpath.cuda.warp import WHOLE_WARP

PER_LANE = 8
MAX_EXPERTS = 32 * PER_LANE


def route(router_logits, n_active, expert_scale, *, out=None):
    """`out`: (expert_ids i32[T, A], expert_weights f32[T, A])"""
    T, E = router_logits.shape
    if E > MAX_EXPERTS:
        raise ValueError(
            f"route: {E} experts, and a warp holds {MAX_EXPERTS}. Raise PER_LANE in fastpath/cuda/moe.py"
        )
    new = device.current().empty
    ids, weights = out or (new((T, n_active), np.int32), new((T, n_active), np.float32))
    is_scaled = expert_scale is not None
    scale = device.constant(expert_scale, np.float32) if is_scaled else router_logits.reshape(-1)[:1]
    device.current().launch(ROUTE, T, 32, router_logits, scale, np.int32(is_scaled), ids, weights)
    return ids, weights


def expert_sum(y, expert_weights, *, out=None):
    T, _, D = y.shape
    out = device.current().empty((T, D), np.float32) if out is None else out
    return launch(EXPERT_SUM, out, y, expert_weights)


@cuda.jit(device=True)
def route_token(t, logits, scale, is_scaled, ids, weights):
    """By one warp."""
    values = cuda.local.array(PER_LANE, float32)
    lane, E, A = cuda.threadIdx.x & 31, logits.shape[1], ids.shape[1]
    for i in range(PER_LANE):
        e = lane + 32 * i
        values[i] = logits[t, e] if e < E else float32(-np.inf)
    largest, total = float32(0), float32(0)
    for a in range(A):
        best, best_id = float32(-np.inf), int32(NOBODY)
        for i in range(PER_LANE):
            e = lane + 32 * i
            if e < E and is_better(values[i], e, best, best_id):
                best, best_id = values[i], int32(e)
        for distance in (16, 8, 4, 2, 1):
            than, other = (
                cuda.shfl_xor_sync(WHOLE_WARP, best, distance),
                cuda.shfl_xor_sync(WHOLE_WARP, best_id, distance),
            )
            if is_better(than, other, best, best_id):
                best, best_id = than, other
        for i in range(PER_LANE):
            if lane + 32 * i == best_id:
                values[i] = float32(-np.inf)
        if a == 0:
            largest = best
        weight = math.exp(best - largest)
        total += weight
        if lane == 0:
            ids[t, a], weights[t, a] = best_id, weight
    cuda.syncwarp(WHOLE_WARP)
    for a in range(lane, A, 32):
        weight = weights[t, a] / total
        if is_scaled:
            weight *= scale[ids[t, a]]
        weights[t, a] = weight


def _route_kernel(logits, scale, is_scaled, ids, weights):
    route_token(cuda.blockIdx.x, logits, scale, is_scaled, ids, weights)


@cuda.jit(device=True)
def expert_sum_of(y, weights, t, d):
    total = mul_rn(y[t, 0, d], weights[t, 0])
    for a in range(1, y.shape[1]):
        total = fma_rn(y[t, a, d], weights[t, a], total)
    return total


def _expert_sum_kernel(y, weights, out):
    D = y.shape[2]
    for i in places(out.size):
        out[i] = expert_sum_of(y, weights, i // D, i % D)


_ROWS = float32[:, ::1]
ROUTE = Kernel(
    _route_kernel,
    (_ROWS, float32[::1], int32, int32[:, ::1], _ROWS),
    ("SHFL", "MUFU.EX2"),
    writes=("ids", "weights"),
)
EXPERT_SUM = Kernel(_expert_sum_kernel, (float32[:, :, ::1], _ROWS, float32[::1]))
KERNELS = (ROUTE, EXPERT_SUM)
