"""Attention over pages on CUDA, and writing them.        definition: refimpl/ops/attention.py

    k_pages  [N, K, P/32, H, 32]       v_pages  [N, K, P/32, ceil(H/32), 32, 32]
    table    i32[R, E]   position p of lane r lies in page table[r, p // P % E], slot p % P

Two launches:

attention_part   grid pieces of 64 positions, counted from position 0, from the first that is seen, once for
                 every HEADS query heads of a head of keys; heads of keys; tokens
                 block 8 warps
                 scores  a warp takes 32 positions of a quarter of the components; a lane reads 8 positions of
                         a component at once, 16 bytes, and keeps their sums over every 32nd component; 8
                         lanes add up, then the quarters
                 values  a warp takes 32 components; a lane reads 8 components of a position at once, and
                         keeps their sums over every eighth position; 8 lanes add up
                 loads   eight of a lane are on their way at a time, of 256 components (four of 128, where
                         eight do not fit its registers) or 64 positions; with types of 16 bits those of the
                         first values before anybody has a score
                 traffic keys and values once per HEADS heads; float32 sums of a piece, once
                 Keys and values of float16: attention_tensor.py, on tensor cores
attention_join   grid tokens, heads; block a thread per component: pieces in ascending order, one division

Pieces, and the order of every sum in them, hang on positions alone: not on pages, batch or chunk.
A piece of whose halves only one is seen reads that one twice, and throws away what it gives the second time.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import attention_tensor, device, kv_types
from fastpath.cuda.attention_relative import attend_to_neighbours
from fastpath.cuda.attention_tensor import PIECE, piece_and_heads
from fastpath.cuda.intrinsics import add_rn, as_f32, fma_rn, load_shared_v4
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.kv_types import block_of
from fastpath.cuda.warp import WHOLE_WARP, warp_sum
from refimpl.kv_types import STEP

WARPS, HEADS = 8, 4
QUARTERS = WARPS * STEP // PIECE
THREADS = 32 * WARPS
MAX_H = 512
QUERIES = HEADS * MAX_H
SCORES = HEADS * PIECE
PARTIAL_SCORES = QUARTERS * SCORES
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
    K, blocks = k_pages.shape[1:3]
    new, launch = device.current().empty, device.current().launch
    parts, peaks = new((T, N, n_pieces, H), np.float32), new((T, N, n_pieces, 2), np.float32)
    group = N // K
    pages = kv_types.bits_of(k_pages), kv_types.bits_of(v_pages), *map(np.int32, (K, group, blocks))
    kernel = part_kernel(kv_types.name_of(k_pages), kv_types.name_of(v_pages))
    heads, threads = shape_of(kernel, H)
    grid = n_pieces * -(-group // heads), K, T
    launch(kernel, grid, threads, q, *pages, table, *of_tokens, parts, peaks)
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
def _halve(sums, n, distance):
    """Of 2n sums of each head, a lane hands half to the lane `distance` away, and adds what it is handed."""
    is_upper = cuda.threadIdx.x & distance != 0
    for h in range(HEADS):
        for i in range(n):
            low, high = sums[h * 8 + i], sums[h * 8 + n + i]
            mine, others = (high, low) if is_upper else (low, high)
            sums[h * 8 + i] = add_rn(mine, cuda.shfl_xor_sync(WHOLE_WARP, others, distance))


@cuda.jit(device=True)
def _add_up(sums):
    """Over the 8 lanes whose numbers differ in the upper three bits: lane 4i + j has sum i, for each head."""
    _halve(sums, 4, 16)
    _halve(sums, 2, 8)
    _halve(sums, 1, 4)


@cuda.jit(device=True)
def _add_products(sums, a, b, c, d, numbers):
    """Eight numbers times those of HEADS heads."""
    for i in range(8):
        sums[i] = fma_rn(as_f32(a), numbers[i], sums[i])
        sums[8 + i] = fma_rn(as_f32(b), numbers[i], sums[8 + i])
        sums[16 + i] = fma_rn(as_f32(c), numbers[i], sums[16 + i])
        sums[24 + i] = fma_rn(as_f32(d), numbers[i], sums[24 + i])


def _of_keys(words, widened, n):
    """(n loads of a lane, 4 or 8, 32 components apart; adding up one of them; adding up all)"""

    @cuda.jit(device=True)
    def load_4(pages, block, H, columns, c, eight):
        return (
            words(pages, block, H, columns, c, eight),
            words(pages, block, H, columns, c + 32, eight),
            words(pages, block, H, columns, c + 64, eight),
            words(pages, block, H, columns, c + 96, eight),
        )

    @cuda.jit(device=True)
    def add(sums, queries, c, loaded, eight):
        a, b, d, e = load_shared_v4(queries, HEADS * c)
        _add_products(sums, a, b, d, e, widened(loaded, eight))

    @cuda.jit(device=True)
    def add_4(sums, queries, c, loaded, eight):
        add(sums, queries, c, loaded[0], eight)
        add(sums, queries, c + 32, loaded[1], eight)
        add(sums, queries, c + 64, loaded[2], eight)
        add(sums, queries, c + 96, loaded[3], eight)

    @cuda.jit(device=True)
    def load_8(pages, block, H, columns, c, eight):
        return load_4(pages, block, H, columns, c, eight) + load_4(pages, block, H, columns, c + 128, eight)

    @cuda.jit(device=True)
    def add_8(sums, queries, c, loaded, eight):
        add_4(sums, queries, c, loaded[:4], eight)
        add_4(sums, queries, c + 128, loaded[4:], eight)

    return (load_8, add, add_8) if n == 8 else (load_4, add, add_4)


def _of_values(words, widened):
    """(eight loads of a lane, 8 positions apart, from both halves of a piece; adding them up)"""

    @cuda.jit(device=True)
    def load_4(pages, block, columns, column, eighth, eight):
        return (
            words(pages, block, columns, column, eighth, eight),
            words(pages, block, columns, column, eighth + 8, eight),
            words(pages, block, columns, column, eighth + 16, eight),
            words(pages, block, columns, column, eighth + 24, eight),
        )

    @cuda.jit(device=True)
    def load(pages, low, high, columns, column, eighth, eight):
        return load_4(pages, low, columns, column, eighth, eight) + load_4(
            pages, high, columns, column, eighth, eight
        )

    @cuda.jit(device=True)
    def add_4(sums, weights, place, lo, hi, loaded, eight):
        """Where the weights lie: see `_weight_at`."""
        at = HEADS * place
        if lo <= place and place <= hi:
            a, b, c, d = load_shared_v4(weights, at)
            _add_products(sums, a, b, c, d, widened(loaded[0], eight))
        if lo <= place + 8 and place + 8 <= hi:
            d, a, b, c = load_shared_v4(weights, at + 32)
            _add_products(sums, a, b, c, d, widened(loaded[1], eight))
        if lo <= place + 16 and place + 16 <= hi:
            c, d, a, b = load_shared_v4(weights, at + 64)
            _add_products(sums, a, b, c, d, widened(loaded[2], eight))
        if lo <= place + 24 and place + 24 <= hi:
            b, c, d, a = load_shared_v4(weights, at + 96)
            _add_products(sums, a, b, c, d, widened(loaded[3], eight))

    @cuda.jit(device=True)
    def add(sums, weights, eighth, lo, hi, loaded, eight):
        """Positions lo .. hi of the piece."""
        add_4(sums, weights, eighth, lo, hi, loaded[:4], eight)
        add_4(sums, weights, eighth + STEP, lo, hi, loaded[4:], eight)

    return load, add


@cuda.jit(device=True)
def _weight_at(place, h):
    """Heads of a position side by side, turned every 8 positions: a head's warp stores without conflicts."""
    return HEADS * place + (h + (place >> 3) & HEADS - 1)


@cuda.jit(device=True)
def _weigh(scores, weights, h, lane, lo, hi):
    """A head's scores of both halves become weights: (largest score, sum of weights), in every lane."""
    low, high = scores[h * PIECE + lane], scores[h * PIECE + STEP + lane]
    for i in range(1, QUARTERS):
        low = add_rn(low, scores[i * SCORES + h * PIECE + lane])
        high = add_rn(high, scores[i * SCORES + h * PIECE + STEP + lane])
    sees_low, sees_high = lo <= lane and lane <= hi, lo <= lane + STEP and lane + STEP <= hi
    low, high = low if sees_low else float32(LOWEST), high if sees_high else float32(LOWEST)
    peak = max(low, high)
    for distance in (16, 8, 4, 2, 1):
        peak = max(peak, cuda.shfl_xor_sync(WHOLE_WARP, peak, distance))
    low = math.exp(low - peak) if sees_low else float32(0)
    high = math.exp(high - peak) if sees_high else float32(0)
    weights[_weight_at(lane, h)], weights[_weight_at(lane + STEP, h)] = low, high
    return peak, warp_sum(add_rn(low, high))


def _part(of_keys, of_values):
    together = 8 if of_keys.n_words <= 4 else 4  # loads of keys
    load_keys, add_key, add_keys = _of_keys(of_keys.key_words, of_keys.keys, together)
    every, but_last = 32 * together, 32 * (together - 1)
    load_values, add_values = _of_values(of_values.value_words, of_values.values)
    key_words = of_keys.key_words
    is_early = of_keys.n_words + of_values.n_words <= 8  # keys and values find room in registers

    def kernel(q, k_pages, v_pages, K, group, blocks, table, seq_ids, positions, ends, window, parts, peaks):
        queries = cuda.shared.array(QUERIES, float32, alignment=16)
        scores = cuda.shared.array(PARTIAL_SCORES, float32)
        weights = cuda.shared.array(SCORES, float32, alignment=16)
        H = q.shape[2]
        t, head = cuda.blockIdx.z, cuda.blockIdx.y
        piece, from_first = piece_and_heads(parts.shape[2], HEADS)
        n0, n_heads = head * group + from_first, min(HEADS, group - from_first)
        first, last = max(0, positions[t] - window + 1), ends[t]
        start = (first // PIECE + piece) * PIECE
        if start > last:
            return
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        columns = (H + STEP - 1) // STEP
        lo, hi = max(0, first - start), last - start  # positions of the piece that are seen
        low = block_of(table, seq_ids[t], start + (0 if lo < STEP else STEP), K, head, blocks)
        high = block_of(table, seq_ids[t], start + (STEP if hi >= STEP else 0), K, head, blocks)
        eight, eighth = (lane & 3) * 8, lane >> 2
        half, quarter = warp & 1, warp >> 1
        block = high if half == 1 else low
        c0, column = 8 * quarter + eighth, min(warp, columns - 1)

        for i in range(cuda.threadIdx.x, HEADS * H, THREADS):
            h = i & HEADS - 1
            queries[i] = q[t, n0 + h, i >> 2] if h < n_heads else float32(0)
        cuda.syncthreads()

        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        if is_early:
            values = load_values(v_pages, low, high, columns, column, eighth, eight)
        for c in range(c0, H - but_last, every):
            add_keys(sums, queries, c, load_keys(k_pages, block, H, columns, c, eight), eight)
        for c in range(c0 + max(0, H + 31 - c0) // every * every, H, 32):
            add_key(sums, queries, c, key_words(k_pages, block, H, columns, c, eight), eight)
        _add_up(sums)
        for h in range(HEADS):
            scores[quarter * SCORES + h * PIECE + half * STEP + eight + eighth] = sums[h * 8]
        if not is_early:
            values = load_values(v_pages, low, high, columns, column, eighth, eight)
        cuda.syncthreads()

        if warp < HEADS:  # a warp per head
            peak, total = _weigh(scores, weights, warp, lane, lo, hi)
            if lane == 0 and warp < n_heads:
                peaks[t, n0 + warp, piece, 0] = peak
                peaks[t, n0 + warp, piece, 1] = total
        cuda.syncthreads()

        for column in range(warp, columns, WARPS):
            following = values
            if is_early and column + WARPS < columns:
                following = load_values(v_pages, low, high, columns, column + WARPS, eighth, eight)
            for i in range(SUMS):
                sums[i] = float32(0)
            add_values(sums, weights, eighth, lo, hi, values, eight)
            _add_up(sums)
            c = column * STEP + eight + eighth
            for h in range(HEADS):
                if h < n_heads and c < H:
                    parts[t, n0 + h, piece, c] = sums[h * 8]
            if not is_early and column + WARPS < columns:
                following = load_values(v_pages, low, high, columns, column + WARPS, eighth, eight)
            values = following

    return kernel


TOGETHER = 8  # pieces whose numbers are on their way at a time


@cuda.jit(device=True)
def joined(parts, peaks, positions, ends, window, t, head, c):
    """Component c of a head from its pieces."""
    n = ends[t] // PIECE - max(0, positions[t] - window + 1) // PIECE + 1
    peak = float32(LOWEST)
    for start in range(0, n, TOGETHER):
        for i in range(TOGETHER):
            peak = max(peak, peaks[t, head, min(start + i, n - 1), 0])
    total, value = float32(0), float32(0)
    for start in range(0, n, TOGETHER):
        for i in range(TOGETHER):
            piece = min(start + i, n - 1)  # the last one again, and nothing comes of it
            weight = math.exp(peaks[t, head, piece, 0] - peak)
            of_total, of_value = peaks[t, head, piece, 1], parts[t, head, piece, c]
            if start + i < n:
                total, value = fma_rn(weight, of_total, total), fma_rn(weight, of_value, value)
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
        _HEADS, *pages, int32, int32, int32, _TABLE, _I, _I, _I, int32, _PARTS, _PARTS,
    )  # fmt: skip
    name, writes = f"attention_part_{k_kind}_{v_kind}", ("parts", "peaks")
    if on_tensor_cores(name):
        wants = "HMMA.16816.F32", "LDG.E.128", "LDG.E.64", "PRMT", "MUFU.EX2"
        return Kernel(
            attention_tensor.part, signature, wants,
            registers=128, bounds=(attention_tensor.MAX_THREADS, 1), name=name, writes=writes,
        )  # fmt: skip
    function = _part(kv_types.LOADS[k_kind], kv_types.LOADS[v_kind])
    is_wide = "f32" in (k_kind, v_kind)
    wants = ("LDG.E.64" if k_kind in kv_types.TILE_BYTES else "LDG.E.128", "SHFL", "MUFU.EX2")
    return Kernel(
        function,
        signature,
        wants,
        registers=192 if is_wide else 128,
        bounds=(THREADS, 1 if is_wide else 2),
        name=name,
        writes=writes,
    )


def on_tensor_cores(name):
    """Does a kernel of this name have a file of its own, attention_tensor.py?"""
    return "attention_part_f16_f16" in name


def shape_of(kernel, H):
    """(query heads of a block, threads)"""
    if on_tensor_cores(kernel.name):
        return attention_tensor.HEADS, attention_tensor.threads_of(H)
    return HEADS, THREADS


@cache
def write_kernel(k_kind, v_kind):
    signature = (_HEADS, _HEADS, kv_types.BITS[k_kind], kv_types.BITS[v_kind], int32, _TABLE, _I, _I)
    function = _write(kv_types.STORES[k_kind][0], kv_types.STORES[v_kind][1], k_kind == "q4_0")
    name, writes = f"write_kv_{k_kind}_{v_kind}", ("k_pages", "v_pages")
    return Kernel(function, signature, name=name, writes=writes)


# Other pairs of types are made when they are asked for.
KERNELS = (JOIN, *(make(kind, kind) for kind in kv_types.LOADS for make in (part_kernel, write_kernel)))
