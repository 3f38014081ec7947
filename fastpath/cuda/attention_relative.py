"""Attention of the audio encoder: a few frames back, a learnt key per distance.      part of attention.py

grid       heads, frames
block      128 threads.  A warp takes every fourth distance, its lanes every 32nd component; then a thread
           takes every 128th component of the result
arithmetic sums of a score: 32 lanes, halves added to halves; softmax and values by distance, ascending
"""

import math

import numpy as np
from numba import cuda, float32

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import warp_sum

THREADS, MAX_DISTANCES = 128, 128


def attend_to_neighbours(q, k, v, relative, q_scale, k_scale, cap, out):
    T, N, _ = q.shape
    if len(relative) > MAX_DISTANCES:
        raise ValueError(
            f"relative_attention: {len(relative)} distances, a block holds {MAX_DISTANCES}. Raise "
            "MAX_DISTANCES in fastpath/cuda/attention_relative.py"
        )
    numbers = device.put(q_scale, np.float32), np.float32(k_scale), np.float32(cap)
    device.current().launch(RELATIVE, (N, T), THREADS, q, k, v, relative, *numbers, out)


def _attention_relative_kernel(q, k, v, relative, q_scale, k_scale, cap, out):
    scores = cuda.shared.array(MAX_DISTANCES, float32)
    t, n, H = cuda.blockIdx.y, cuda.blockIdx.x, q.shape[2]
    seen = min(relative.shape[0], t + 1)
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    for d in range(warp, seen, 4):
        score = float32(0)
        for h in range(lane, H, 32):
            score += (q[t, n, h] * q_scale[h]) * (k[t - d, n, h] * k_scale + relative[d, n, h])
        score = warp_sum(score)
        if lane == 0:
            scores[d] = cap * math.tanh(score / cap)
    cuda.syncthreads()
    peak, total = scores[0], float32(0)
    for d in range(1, seen):
        peak = max(peak, scores[d])
    for d in range(seen):
        total += math.exp(scores[d] - peak)
    for h in range(cuda.threadIdx.x, H, THREADS):
        value = float32(0)
        for d in range(seen):
            value += math.exp(scores[d] - peak) * v[t - d, n, h]
        out[t, n, h] = value / total


_HEADS = float32[:, :, ::1]
RELATIVE = Kernel(
    _attention_relative_kernel,
    (_HEADS, _HEADS, _HEADS, _HEADS, float32[::1], float32, float32, _HEADS),
    ("SHFL", "MUFU.EX2"),
    registers=80,
)
KERNELS = (RELATIVE,)
