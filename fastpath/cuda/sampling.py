"""The most likely token of a row of logits on CUDA.

    argmax(logits)[t] = the smallest v with logits[t, v] = max over v'; the first NaN where there is one

grid     two launches: pieces of 4,096 logits of each row; then the rows
block    256 threads
traffic  logits are read once
"""

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import WHOLE_WARP

THREADS, PIECE = 256, 4096
WARPS = THREADS // 32
NOBODY = 2**31 - 1


def argmax(logits, *, out=None):
    """logits f32[T, V] -> i32[T]"""
    T, V = logits.shape
    new, launch = device.current().empty, device.current().launch
    out = new((T,), np.int32) if out is None else out
    n_pieces = -(-V // PIECE)
    values, ids = new((T, n_pieces), np.float32), new((T, n_pieces), np.int32)
    launch(PIECES, (n_pieces, T), THREADS, logits, values, ids)
    launch(WHOLE, T, THREADS, values, ids, out)
    return out


@cuda.jit(device=True)
def is_better(value, v, than, other):
    """Is logit `value` of token v chosen before logit `than` of token `other`?"""
    if value != value:
        return than == than or v < other
    return value > than or (value == than and v < other)


@cuda.jit(device=True)
def _best_of_block(value, v, values, ids):
    """The best pair of all threads, in thread 0.  values, ids: shared, of WARPS."""
    for distance in (16, 8, 4, 2, 1):
        than, other = (
            cuda.shfl_xor_sync(WHOLE_WARP, value, distance),
            cuda.shfl_xor_sync(WHOLE_WARP, v, distance),
        )
        if is_better(than, other, value, v):
            value, v = than, other
    if cuda.threadIdx.x & 31 == 0:
        values[cuda.threadIdx.x >> 5], ids[cuda.threadIdx.x >> 5] = value, v
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        for warp in range(1, WARPS):
            if is_better(values[warp], ids[warp], value, v):
                value, v = values[warp], ids[warp]
    return value, v


def _pieces_kernel(logits, values, ids):
    warp_values, warp_ids = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
    t, start, V = cuda.blockIdx.y, cuda.blockIdx.x * PIECE, logits.shape[1]
    best, best_id = float32(-np.inf), int32(NOBODY)
    for v in range(start + cuda.threadIdx.x, min(V, start + PIECE), THREADS):
        if is_better(logits[t, v], v, best, best_id):
            best, best_id = logits[t, v], int32(v)
    best, best_id = _best_of_block(best, best_id, warp_values, warp_ids)
    if cuda.threadIdx.x == 0:
        values[t, cuda.blockIdx.x], ids[t, cuda.blockIdx.x] = best, best_id


def _whole_kernel(values, ids, out):
    warp_values, warp_ids = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
    t = cuda.blockIdx.x
    best, best_id = float32(-np.inf), int32(NOBODY)
    for i in range(cuda.threadIdx.x, values.shape[1], THREADS):
        if is_better(values[t, i], ids[t, i], best, best_id):
            best, best_id = values[t, i], ids[t, i]
    best, best_id = _best_of_block(best, best_id, warp_values, warp_ids)
    if cuda.threadIdx.x == 0:
        out[t] = best_id


PIECES = Kernel(
    _pieces_kernel,
    (float32[:, ::1], float32[:, ::1], int32[:, ::1]),
    ("SHFL",),
    name="argmax_pieces",
    writes=("values", "ids"),
)
WHOLE = Kernel(_whole_kernel, (float32[:, ::1], int32[:, ::1], int32[::1]), ("SHFL",), name="argmax_whole")
KERNELS = (PIECES, WHOLE)
