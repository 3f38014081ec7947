"""Attention over pages on CUDA, and writing them.        definition: refimpl/ops/attention.py

    k_pages  [N, K, P/32, H, 32]       v_pages  [N, K, P/32, ceil(H/32), 32, 32]
    table    i32[R, E]   position p of lane r lies in page table[r, p // P % E], slot p % P

Two launches:

attention_part   grid pieces of 256 positions, counted from position 0, from the first that is seen; query
                 heads, HEADS at a time; tokens
                 block 4 warps
                 scores  a warp takes 32 positions; a lane reads 8 positions of a component at once, 16 bytes,
                         and keeps their sums over every eighth component; 8 lanes add up
                 values  a warp takes 32 components; a lane reads 8 components of a position at once, and
                         keeps their sums over every eighth position; 8 lanes add up
                 traffic keys and values once per HEADS heads; float32 sums of a piece, once
attention_join   grid tokens, heads; block a thread per component: pieces in ascending order, one division

Pieces, and the order of every sum in them, hang on positions alone: not on pages, batch or chunk.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device, kv_types
from fastpath.cuda.attention_relative import attend_to_neighbours
from fastpath.cuda.intrinsics import fma_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.kv_types import block_of
from fastpath.cuda.warp import WHOLE_WARP
from refimpl.kv_types import STEP

PIECE = 256  # positions
WARPS, HEADS = 4, 4
THREADS = 32 * WARPS
MAX_H = 512
QUERIES = HEADS * MAX_H
SCORES = HEADS * PIECE
SUMS = HEADS * 8
LOWEST = -3.0e38
SCRATCH = 1 << 28  # bytes for partial results; with more, tokens come in several launches


def attention(q, k_pages, v_pages, table, seq_ids, positions, window, ends=None, *, out=None):
    T, N, H = q.shape
    out = device.current().empty(q.shape, np.float32) if out is None else out
    seq_ids, positions, table = (device.put(array, np.int32) for array in (seq_ids, positions, table))
    n_pieces = _most_pieces(table.shape[1] * k_pages.shape[2] * STEP, window, ends is not None)
    ends = positions if ends is None else device.put(ends, np.int32)
    window = np.int32(2**31 - 1 if window is None else window)
    step = max(1, SCRATCH // (4 * N * n_pieces * (H + 2)))
    for t in range(0, T, step):
        rows = slice(t, t + step)
        of_tokens = seq_ids[rows], positions[rows], ends[rows], window
        _attend(q[rows], k_pages, v_pages, table, of_tokens, n_pieces, out[rows])
    return out


def _most_pieces(held, window, has_ends):
    """Pieces that the positions of any query touch; `held`: what the table's columns hold."""
    if window is None:
        return -(-held // PIECE)
    return -(-(held if has_ends else min(held, window)) // PIECE) + 1


def _attend(q, k_pages, v_pages, table, of_tokens, n_pieces, out):
    T, N, H = q.shape
    K = k_pages.shape[1]
    new, launch = device.current().empty, device.current().launch
    parts, peaks = new((T, N, n_pieces, H), np.float32), new((T, N, n_pieces, 2), np.float32)
    pages = kv_types.bits_of(k_pages), kv_types.bits_of(v_pages), np.int32(K), np.int32(k_pages.shape[2])
    grid = n_pieces, K * -(-N // K // HEADS), T
    kernel = part_kernel(kv_types.name_of(k_pages), kv_types.name_of(v_pages))
    launch(kernel, grid, THREADS, q, *pages, table, *of_tokens, parts, peaks)
    launch(JOIN, (N, T), H, parts, peaks, *of_tokens[1:], out)


def write_kv(k, v, k_pages, v_pages, table, seq_ids, positions):
    kernel = write_kernel(kv_types.name_of(k_pages), kv_types.name_of(v_pages))
    pages = kv_types.bits_of(k_pages), kv_types.bits_of(v_pages), np.int32(k_pages.shape[2])
    seq_ids, positions, table = (device.put(array, np.int32) for array in (seq_ids, positions, table))
    device.current().launch(kernel, (k.shape[1], len(k)), THREADS, k, v, *pages, table, seq_ids, positions)


def relative_attention(q, k, v, relative, q_scale, k_scale, cap, *, out=None):
    out = device.current().empty(q.shape, np.float32) if out is None else out
    attend_to_neighbours(q, k, v, relative, q_scale, k_scale, cap, out)
    return out


@cuda.jit(device=True)
def _sum_of_every_fourth(x):
    """Over the 8 lanes whose numbers differ in the upper three bits."""
    for distance in (4, 8, 16):
        x += cuda.shfl_xor_sync(WHOLE_WARP, x, distance)
    return x


@cuda.jit(device=True)
def add_products(sums, queries, c, H, keys):
    """Component c of HEADS queries times that of 8 positions."""
    for h in range(HEADS):
        component = queries[h * H + c]
        for i in range(8):
            sums[h * 8 + i] += component * keys[i]


@cuda.jit(device=True)
def add_weighted(sums, scores, place, values):
    """8 components of a position, weighted for HEADS heads."""
    for h in range(HEADS):
        weight = scores[h * PIECE + place]
        for i in range(8):
            sums[h * 8 + i] += weight * values[i]


def _part(load_keys, load_values):
    def kernel(q, k_pages, v_pages, K, blocks, table, seq_ids, positions, ends, window, parts, peaks):
        queries, scores = cuda.shared.array(QUERIES, float32), cuda.shared.array(SCORES, float32)
        N, H = q.shape[1], q.shape[2]
        group = N // K
        in_group = (group + HEADS - 1) // HEADS
        t, head = cuda.blockIdx.z, cuda.blockIdx.y // in_group
        n0 = head * group + cuda.blockIdx.y % in_group * HEADS
        n_heads = min(HEADS, (head + 1) * group - n0)
        first, last = max(0, positions[t] - window + 1), ends[t]
        start = (first // PIECE + cuda.blockIdx.x) * PIECE
        if start > last:
            return
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        sequence = seq_ids[t]
        columns = (H + STEP - 1) // STEP

        for i in range(cuda.threadIdx.x, HEADS * H, THREADS):
            queries[i] = q[t, n0 + i // H, i % H] if i // H < n_heads else float32(0)
        cuda.syncthreads()

        eight, eighth = (lane & 3) * 8, lane >> 2
        for step in range(warp, PIECE // STEP, WARPS):
            p = start + step * STEP
            if p + STEP <= first or p > last:
                for h in range(HEADS):
                    scores[h * PIECE + step * STEP + lane] = float32(LOWEST)
                continue
            block = block_of(table, sequence, p, K, head, blocks)
            sums = cuda.local.array(SUMS, float32)
            for i in range(SUMS):
                sums[i] = float32(0)
            for c in range(eighth, H - 24, 32):  # four loads on their way
                a = load_keys(k_pages, block, H, columns, c, eight)
                b = load_keys(k_pages, block, H, columns, c + 8, eight)
                d = load_keys(k_pages, block, H, columns, c + 16, eight)
                e = load_keys(k_pages, block, H, columns, c + 24, eight)
                add_products(sums, queries, c, H, a)
                add_products(sums, queries, c + 8, H, b)
                add_products(sums, queries, c + 16, H, d)
                add_products(sums, queries, c + 24, H, e)
            for c in range(eighth + (H + 7 - eighth) // 32 * 32, H, 8):
                add_products(sums, queries, c, H, load_keys(k_pages, block, H, columns, c, eight))
            is_seen = first <= p + eight + eighth and p + eight + eighth <= last
            for h in range(HEADS):
                score = float32(LOWEST)
                for i in range(8):
                    total = _sum_of_every_fourth(sums[h * 8 + i])
                    if is_seen and eighth == i:
                        score = total
                scores[h * PIECE + step * STEP + eight + eighth] = score
        cuda.syncthreads()

        if warp < n_heads:  # HEADS <= WARPS: a warp per head
            peak = float32(LOWEST)
            for i in range(lane, PIECE, 32):
                peak = max(peak, scores[warp * PIECE + i])
            for distance in (16, 8, 4, 2, 1):
                peak = max(peak, cuda.shfl_xor_sync(WHOLE_WARP, peak, distance))
            total = float32(0)
            for i in range(lane, PIECE, 32):
                p = start + i
                weight = float32(0)
                if first <= p and p <= last:
                    weight = math.exp(scores[warp * PIECE + i] - peak)
                scores[warp * PIECE + i] = weight
                total += weight
            for distance in (16, 8, 4, 2, 1):
                total += cuda.shfl_xor_sync(WHOLE_WARP, total, distance)
            if lane == 0:
                peaks[t, n0 + warp, cuda.blockIdx.x, 0] = peak
                peaks[t, n0 + warp, cuda.blockIdx.x, 1] = total
        cuda.syncthreads()

        for column in range(warp, columns, WARPS):
            sums = cuda.local.array(SUMS, float32)
            for i in range(SUMS):
                sums[i] = float32(0)
            for place in range(eighth, PIECE, STEP):  # four positions of a block: four loads on their way
                p = start + place
                if p + 24 < first or p > last:
                    continue
                block = block_of(table, sequence, p, K, head, blocks)
                a = load_values(v_pages, block, columns, column, p % STEP, eight)
                b = load_values(v_pages, block, columns, column, p % STEP + 8, eight)
                d = load_values(v_pages, block, columns, column, p % STEP + 16, eight)
                e = load_values(v_pages, block, columns, column, p % STEP + 24, eight)
                if first <= p:
                    add_weighted(sums, scores, place, a)
                if first <= p + 8 and p + 8 <= last:
                    add_weighted(sums, scores, place + 8, b)
                if first <= p + 16 and p + 16 <= last:
                    add_weighted(sums, scores, place + 16, d)
                if first <= p + 24 and p + 24 <= last:
                    add_weighted(sums, scores, place + 24, e)
            c = column * STEP + eight + eighth
            for h in range(HEADS):
                value = float32(0)
                for i in range(8):
                    total = _sum_of_every_fourth(sums[h * 8 + i])
                    if eighth == i:
                        value = total
                if h < n_heads and c < H:
                    parts[t, n0 + h, cuda.blockIdx.x, c] = value

    return kernel


@cuda.jit(device=True)
def joined(parts, peaks, positions, ends, window, t, head, c):
    """Component c of a head from its pieces."""
    n = ends[t] // PIECE - max(0, positions[t] - window + 1) // PIECE + 1
    peak = float32(LOWEST)
    for i in range(n):
        peak = max(peak, peaks[t, head, i, 0])
    total, value = float32(0), float32(0)
    for i in range(n):
        weight = math.exp(peaks[t, head, i, 0] - peak)
        total = fma_rn(weight, peaks[t, head, i, 1], total)
        value = fma_rn(weight, parts[t, head, i, c], value)
    return value / total


def _join_kernel(parts, peaks, positions, ends, window, out):
    t, head, c = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
    out[t, head, c] = joined(parts, peaks, positions, ends, window, t, head, c)


def _write(store_key, store_value, keys_in_pairs):
    def kernel(k, v, k_pages, v_pages, blocks, table, seq_ids, positions):
        t, head, T, K, H = cuda.blockIdx.y, cuda.blockIdx.x, k.shape[0], k.shape[1], k.shape[2]
        p, columns = positions[t], (H + STEP - 1) // STEP
        block, place = block_of(table, seq_ids[t], p, K, head, blocks), p % STEP
        is_second, has_second = False, False
        if keys_in_pairs:  # whoever writes a byte writes both of its positions, if both are new
            if place >= 16:
                is_second = t >= 16 and seq_ids[t - 16] == seq_ids[t] and positions[t - 16] == p - 16
            else:
                has_second = t + 16 < T and seq_ids[t + 16] == seq_ids[t] and positions[t + 16] == p + 16
        for c in range(cuda.threadIdx.x, columns * STEP, THREADS):
            key, second, value = float32(0), float32(0), float32(0)
            if c < H:
                key, value = k[t, head, c], v[t, head, c]
                if has_second:
                    second = k[t + 16, head, c]
            if not is_second:
                store_key(key, second, has_second, k_pages, block, H, columns, c, place)
            store_value(value, v_pages, block, columns, c, place)

    return kernel


_I = int32[::1]
_TABLE = int32[:, :]  # perhaps the first columns of a wider one
_HEADS = float32[:, :, ::1]
_PARTS = float32[:, :, :, ::1]
JOIN = Kernel(_join_kernel, (_PARTS, _PARTS, _I, _I, int32, _HEADS), ("MUFU.EX2",), name="attention_join")


@cache
def part_kernel(k_kind, v_kind):
    """Keys and values may have types of their own."""
    pages = kv_types.BITS[k_kind], kv_types.BITS[v_kind]
    signature = (
        _HEADS, *pages, int32, int32, _TABLE, _I, _I, _I, int32, _PARTS, _PARTS,
    )  # fmt: skip
    function = _part(kv_types.LOADS[k_kind][0], kv_types.LOADS[v_kind][1])
    wants = ("LDG.E.64" if k_kind in kv_types.TILE_BYTES else "LDG.E.128", "SHFL", "MUFU.EX2")
    return Kernel(
        function,
        signature,
        wants,
        registers=128,
        name=f"attention_part_{k_kind}_{v_kind}",
        writes=("parts", "peaks"),
    )


@cache
def write_kernel(k_kind, v_kind):
    signature = (_HEADS, _HEADS, kv_types.BITS[k_kind], kv_types.BITS[v_kind], int32, _TABLE, _I, _I)
    function = _write(kv_types.STORES[k_kind][0], kv_types.STORES[v_kind][1], k_kind == "q4_0")
    name, writes = f"write_kv_{k_kind}_{v_kind}", ("k_pages", "v_pages")
    return Kernel(function, signature, name=name, writes=writes)


# Other pairs of types are made when they are asked for.
KERNELS = (JOIN, *(make(kind, kind) for kind in kv_types.LOADS for make in (part_kernel, write_kernel)))
