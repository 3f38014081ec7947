"""Softmax of one row of scores, in place: exp(score - max) and its sum.  The division comes at the end.

arithmetic  the exact maximum; then 16 lanes by position, whose sums over steps of 32 positions are added
            up, ascending; the lanes are joined in the order of simd.sum_f32.  A row that lies elsewhere,
            beside other rows, sums the same numbers in the same order.
"""

import numba
import numpy as np

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import (
    add_f32,
    keep_f32,
    load_f32,
    max_f32,
    splat_f32,
    store_f32,
    sub_f32,
    sum_f32,
    top_f32,
)
from fastpath.cpu.vector_math import exp_or_zero

F32 = numba.float32
HIDDEN = F32(-np.inf)  # score of a position that the query does not see


@helper
def softmax(scores, begin, end, n):
    """Scores begin .. end-1 of n (a multiple of 32) count; the others become 0.  Returns the sum."""
    zero, hidden = splat_f32(F32(0.0)), splat_f32(HIDDEN)
    low, high = begin // 32 * 32, (end + 31) // 32 * 32
    for i in range(0, low, 16):
        store_f32(scores + 4 * i, zero)
    for i in range(high, n, 16):
        store_f32(scores + 4 * i, zero)
    for i in (low, low + 16, high - 32, high - 16):  # only there is something hidden
        store_f32(scores + 4 * i, keep_f32(load_f32(scores + 4 * i), begin - i, end - i, hidden))
    a, b = hidden, hidden
    for at in range(scores + 4 * low, scores + 4 * high, 128):
        a, b = max_f32(a, load_f32(at)), max_f32(b, load_f32(at + 64))
    highest = splat_f32(top_f32(max_f32(a, b)))
    total = zero
    for at in range(scores + 4 * low, scores + 4 * high, 128):
        p = exp_or_zero(sub_f32(load_f32(at), highest))
        r = exp_or_zero(sub_f32(load_f32(at + 64), highest))
        store_f32(at, p)
        store_f32(at + 64, r)
        total = add_f32(total, add_f32(p, r))
    return sum_f32(total)
