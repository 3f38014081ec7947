"""The largest logits of a row on CUDA.        definition: refimpl/ops/sampling.py

top_k    pieces of 4,096 logits of each row, of each its k largest; then pieces of what is left, until one is:
         two launches for k up to 64 of 262,144, three for more
grid     pieces, rows
block    256 threads; but for k = 1, each has 16 numbers in registers
traffic  logits are read once
best_of  k = 1: a comparison for each logit, then those of threads and warps
top_of   finds the k-th largest of a piece bit by bit: 32 times, how many are at least so large; then, where
         equal ones are too many, up to which place they belong.  Who is chosen finds its rank among them.
         Ten times the instructions of best_of
"""

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.activation import softcap_of
from fastpath.cuda.intrinsics import add32, as_f32, as_i32, shl32, xor32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import WHOLE_WARP
from fastpath.largest import MAX_K

THREADS, PIECE = 256, 4096
WARPS = THREADS // 32
NOBODY = 2**31 - 1


def top_k(logits, k, cap=None, *, out=None):
    T, V = logits.shape
    if not 1 <= k <= MAX_K:
        raise ValueError(f"top_k: k = {k}, expected 1 to {MAX_K}. Take the whole row for more")
    new, launch, n = device.current().empty, device.current().launch, V
    kernel, next_kernel, how_many = TOP_OF_LOGITS, TOP_OF_PAIRS, (np.int32(k),)
    if k == 1:
        kernel, next_kernel, how_many = BEST_OF_LOGITS, BEST_OF_PAIRS, ()
    source = logits, np.float32(0 if cap is None else cap)
    while True:
        pieces = -(-n // PIECE)
        is_last = pieces == 1
        values, ids = (
            (new((T, pieces * k), d) for d in (np.float32, np.int32)) if out is None or not is_last else out
        )
        launch(kernel, (pieces, T), THREADS, *source, *how_many, values, ids)
        if is_last:
            return values, ids
        kernel, source, n = next_kernel, (values, ids), pieces * k


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


def _best_of_logits_kernel(logits, cap, values, ids):
    warp_values, warp_ids = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
    t, start, V = cuda.blockIdx.y, cuda.blockIdx.x * PIECE, logits.shape[1]
    best, best_id = float32(-np.inf), int32(NOBODY)
    for v in range(start + cuda.threadIdx.x, min(V, start + PIECE), THREADS):
        x = logits[t, v]
        if cap > float32(0):
            x = softcap_of(x, cap)
        if not abs(x) < float32(np.inf):
            x = float32(np.nan)
        if is_better(x, v, best, best_id):
            best, best_id = x, int32(v)
    best, best_id = _best_of_block(best, best_id, warp_values, warp_ids)
    if cuda.threadIdx.x == 0:
        values[t, cuda.blockIdx.x], ids[t, cuda.blockIdx.x] = best, best_id


def _best_of_pairs_kernel(pairs, of, values, ids):
    warp_values, warp_ids = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
    t, start, n = cuda.blockIdx.y, cuda.blockIdx.x * PIECE, pairs.shape[1]
    best, best_id = float32(-np.inf), int32(NOBODY)
    for i in range(start + cuda.threadIdx.x, min(n, start + PIECE), THREADS):
        if is_better(pairs[t, i], of[t, i], best, best_id):
            best, best_id = pairs[t, i], of[t, i]
    best, best_id = _best_of_block(best, best_id, warp_values, warp_ids)
    if cuda.threadIdx.x == 0:
        values[t, cuda.blockIdx.x], ids[t, cuda.blockIdx.x] = best, best_id


PER_THREAD = PIECE // THREADS
COUNTS = 2 * WARPS
NOTHING, BROKEN = -(2**31), 2**31 - 1  # keys of no number, and of one that is not finite


@cuda.jit(device=True)
def _key_of(x):
    """Integers in the order of numbers; both zeros are one."""
    if not abs(x) < float32(np.inf):
        return int32(BROKEN)
    bits = as_i32(x)
    if x == float32(0):
        return int32(0)
    return bits if bits >= 0 else xor32(bits, 0x7FFFFFFF)


@cuda.jit(device=True)
def _number_of(key):
    if key == BROKEN:
        return float32(np.nan)
    if key == NOTHING:
        return float32(-np.inf)
    return as_f32(key if key >= 0 else xor32(key, 0x7FFFFFFF))


@cuda.jit(device=True)
def _total(n, counts, turn):
    """Of all threads.  counts: shared, twice WARPS; turns use its halves one after the other."""
    for distance in (16, 8, 4, 2, 1):
        n = add32(n, cuda.shfl_xor_sync(WHOLE_WARP, n, distance))
    half = (turn & 1) * WARPS
    if cuda.threadIdx.x & 31 == 0:
        counts[half + (cuda.threadIdx.x >> 5)] = n
    cuda.syncthreads()
    total = int32(0)
    for warp in range(WARPS):
        total = add32(total, counts[half + warp])
    return total


@cuda.jit(device=True)
def _kth(keys, k, counts):
    """The k-th largest key of all threads; (it, how many are larger)."""
    bound, larger = int32(NOTHING), int32(0)
    for turn in range(32):
        higher, n = add32(bound, shl32(int32(1), int32(31 - turn))), int32(0)
        for i in range(PER_THREAD):
            n = add32(n, int32(keys[i] >= higher))
        n = _total(n, counts, turn)
        if n >= k:
            bound = higher
        else:
            larger = n  # in the end: at least one more than the k-th
    return bound, larger


@cuda.jit(device=True)
def _end_of_equal(keys, bound, wanted, counts):
    """The place up to which as many keys as `wanted` are equal to `bound`."""
    end = int32(0)
    for turn in range(12):
        further, n = add32(end, shl32(int32(1), int32(11 - turn))), int32(0)
        for i in range(PER_THREAD):
            place = i * THREADS + cuda.threadIdx.x
            n = add32(n, int32(keys[i] == bound and place < further))
        if _total(n, counts, turn) < wanted:
            end = further
    return add32(end, 1)


@cuda.jit(device=True)
def _before(n, counts):
    """The sum of n over all threads before this one."""
    lane, warp, sum_ = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, n
    for distance in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(WHOLE_WARP, sum_, distance)
        if lane >= distance:
            sum_ = add32(sum_, other)
    if lane == 31:  # the half that the last turn of _total did not use
        counts[warp] = sum_
    cuda.syncthreads()
    for other in range(WARPS):
        if other < warp:
            sum_ = add32(sum_, counts[other])
    return sum_ - n


@cuda.jit(device=True)
def _keep_largest(keys, ids, k, best_keys, best_ids, counts, values_out, ids_out, first):
    """The k largest of a piece, descending, to places first ... of the results."""
    bound, larger = _kth(keys, k, counts)
    end = _end_of_equal(keys, bound, k - larger, counts)
    n = int32(0)
    for i in range(PER_THREAD):
        place = i * THREADS + cuda.threadIdx.x
        n = add32(n, int32(keys[i] > bound or (keys[i] == bound and place < end)))
    at = _before(n, counts)
    for i in range(PER_THREAD):
        place = i * THREADS + cuda.threadIdx.x
        if keys[i] > bound or (keys[i] == bound and place < end):
            best_keys[at], best_ids[at] = keys[i], ids[i]
            at += 1
    cuda.syncthreads()
    me = cuda.threadIdx.x
    if me < k:
        key, v, rank = best_keys[me], best_ids[me], int32(0)
        for other in range(k):
            is_before = best_ids[other] < v or (best_ids[other] == v and other < me)
            rank = add32(rank, int32(best_keys[other] > key or (best_keys[other] == key and is_before)))
        values_out[first + rank], ids_out[first + rank] = _number_of(key), v


def _top_of_logits_kernel(logits, cap, k, values, ids):
    best_keys, best_ids = cuda.shared.array(MAX_K, int32), cuda.shared.array(MAX_K, int32)
    counts = cuda.shared.array(COUNTS, int32)
    keys, vs = cuda.local.array(PER_THREAD, int32), cuda.local.array(PER_THREAD, int32)
    t, V = cuda.blockIdx.y, logits.shape[1]
    for i in range(PER_THREAD):
        v = cuda.blockIdx.x * PIECE + i * THREADS + cuda.threadIdx.x
        keys[i], vs[i] = int32(NOTHING), int32(-1)
        if v < V:
            x = logits[t, v]
            if cap > float32(0):
                x = softcap_of(x, cap)
            keys[i], vs[i] = _key_of(x), int32(v)
    _keep_largest(keys, vs, k, best_keys, best_ids, counts, values[t], ids[t], cuda.blockIdx.x * k)


def _top_of_pairs_kernel(pairs, of, k, values, ids):
    best_keys, best_ids = cuda.shared.array(MAX_K, int32), cuda.shared.array(MAX_K, int32)
    counts = cuda.shared.array(COUNTS, int32)
    keys, vs = cuda.local.array(PER_THREAD, int32), cuda.local.array(PER_THREAD, int32)
    t, n = cuda.blockIdx.y, pairs.shape[1]
    for i in range(PER_THREAD):
        place = cuda.blockIdx.x * PIECE + i * THREADS + cuda.threadIdx.x
        keys[i], vs[i] = int32(NOTHING), int32(-1)
        if place < n and of[t, place] >= 0:
            keys[i], vs[i] = _key_of(pairs[t, place]), of[t, place]
    _keep_largest(keys, vs, k, best_keys, best_ids, counts, values[t], ids[t], cuda.blockIdx.x * k)


_PAIRS = (float32[:, ::1], int32[:, ::1])
_LOGITS = (float32[:, ::1], float32)
BEST_OF_LOGITS, BEST_OF_PAIRS = (
    Kernel(function, (*source, *_PAIRS), ("SHFL",), writes=("values", "ids"))
    for function, source in ((_best_of_logits_kernel, _LOGITS), (_best_of_pairs_kernel, _PAIRS))
)
TOP_OF_LOGITS, TOP_OF_PAIRS = (
    Kernel(function, (*source, int32, *_PAIRS), ("SHFL",), registers=96, writes=("values", "ids"))
    for function, source in ((_top_of_logits_kernel, _LOGITS), (_top_of_pairs_kernel, _PAIRS))
)
KERNELS = (BEST_OF_LOGITS, BEST_OF_PAIRS, TOP_OF_LOGITS, TOP_OF_PAIRS)
