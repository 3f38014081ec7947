"""Attention of the audio encoder: a few frames back, a learnt key per distance.      part of attention.py

work item   one frame, all its heads
arithmetic  scores: 16 lanes over the components, joined in the order of simd.sum_f32; the soft cap; the
            softmax of softmax.py; values: fma chains by distance, ascending, and one division
traffic     keys, values and the keys of distances stay in the second-level cache: twelve frames of them
"""

from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.simd import (
    div_f32,
    fma_f32,
    ld_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    mul_f32,
    splat_f32,
    spread_f32,
    st_f32,
    store_f32,
    store_first_f32,
    sum_f32,
)
from fastpath.cpu.softmax import F32, softmax
from fastpath.cpu.vector_math import tanh

LANES = 32  # what softmax counts in


def scratch_of(n_distances, width):
    """Bytes of a thread: scores, and the scaled query."""
    return 4 * (-(-n_distances // LANES) * LANES + -(-width // 16) * 16)


@helper
def _scores(query, keys, relative, k_scale, n, row_bytes, width, scores):
    """Scores of the distances 0 .. n-1; the key of distance d lies d rows before `keys`."""
    for d in range(n):
        total = splat_f32(F32(0.0))
        for c in range(0, width, 16):
            rest = min(16, width - c)
            key = load_first_f32(keys - d * row_bytes + 4 * c, rest)
            key = fma_f32(key, k_scale, load_first_f32(relative + d * row_bytes + 4 * c, rest))
            total = fma_f32(load_f32(query + 4 * c), key, total)
        st_f32(scores + 4 * d, sum_f32(total))


@kernel
def relative_kernel(args, lo, hi, thread):
    q, k, v, relative = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    q_scale, out, most = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    n_heads, width = ld_i64(args + 56), ld_i64(args + 64)
    k_scale, cap = spread_f32(args + 72), spread_f32(args + 80)
    scores = ld_i64(args + 88) + thread * ld_i64(args + 96)
    n_scores = (most + LANES - 1) // LANES * LANES
    query, row_bytes = scores + 4 * n_scores, 4 * n_heads * width
    for t in range(lo, hi):
        n = min(most, t + 1)
        for head in range(n_heads):
            at = t * row_bytes + 4 * width * head
            for c in range(0, width, 16):
                rest = min(16, width - c)
                scaled = mul_f32(load_first_f32(q + at + 4 * c, rest), load_first_f32(q_scale + 4 * c, rest))
                store_f32(query + 4 * c, scaled)
            _scores(query, k + at, relative + 4 * width * head, k_scale, n, row_bytes, width, scores)
            for i in range(0, n_scores, 16):
                capped = mul_f32(cap, tanh(div_f32(load_f32(scores + 4 * i), cap)))
                store_f32(scores + 4 * i, capped)
            total = splat_f32(softmax(scores, 0, n, n_scores))
            for c in range(0, width, 16):
                rest = min(16, width - c)
                value = splat_f32(F32(0.0))
                for d in range(n):
                    seen = load_first_f32(v + at - d * row_bytes + 4 * c, rest)
                    value = fma_f32(splat_f32(ld_f32(scores + 4 * d)), seen, value)
                store_first_f32(out + at + 4 * c, rest, div_f32(value, total))
