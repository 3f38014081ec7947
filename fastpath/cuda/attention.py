"""Attention over pages on CUDA, and writing them.        definition: refimpl/ops/attention.py

    k_pages  [N, K, P/32, H, 32]       v_pages  [N, K, P/32, ceil(H/32), 32, 32]
    table    i32[R, E]   position p of lane r lies in page table[r, p // P % E], slot p % P

Two launches:

attention_part   grid pieces of 256 positions, counted from position 0; query heads, HEADS at a time; tokens
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
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.intrinsics import and32, as_f32, f16_to_f32, load_v4, pack_bf16, pack_f16, shl32, shr32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import WHOLE_WARP

STEP = 32  # positions, and components, that lie together
PIECE = 256  # positions
WARPS, HEADS = 4, 4
THREADS = 32 * WARPS
MAX_H = 512
QUERIES = HEADS * MAX_H
SCORES = HEADS * PIECE
SUMS = HEADS * 8
LOWEST = -3.0e38
KV_NAMES = {"float32": "f32", "float16": "f16", "uint16": "bf16"}


def attention(q, k_pages, v_pages, table, seq_ids, positions, window, ends=None, *, depth, out=None):
    """As the definition; `depth`, which the host knows, is more than any of `ends`."""
    T, N, H = q.shape
    new, launch = device.current().empty, device.current().launch
    out = new(q.shape, np.float32) if out is None else out
    n_pieces = -(-depth // PIECE)
    parts, peaks = new((T, N, n_pieces, H), np.float32), new((T, N, n_pieces, 2), np.float32)
    pages = bits_of(k_pages), bits_of(v_pages), np.int32(k_pages.shape[1]), np.int32(k_pages.shape[2])
    ends = positions if ends is None else ends
    window = np.int32(2**31 - 1 if window is None else window)
    group = N // k_pages.shape[1]
    in_group = -(-group // HEADS)
    grid = n_pieces, k_pages.shape[1] * in_group, T
    launch(
        part_kernel(*kinds_of(k_pages, v_pages)),
        grid,
        THREADS,
        q,
        *pages,
        table,
        seq_ids,
        positions,
        ends,
        window,
        parts,
        peaks,
    )
    launch(JOIN, (N, T), H, parts, peaks, positions, ends, window, out)
    return out


def write_kv(k, v, k_pages, v_pages, table, seq_ids, positions):
    kernel = write_kernel(*kinds_of(k_pages, v_pages))
    pages = bits_of(k_pages), bits_of(v_pages), np.int32(k_pages.shape[2])
    device.current().launch(kernel, (k.shape[1], len(k)), THREADS, k, v, *pages, table, seq_ids, positions)


def kinds_of(k_pages, v_pages):
    return KV_NAMES[str(k_pages.dtype)], KV_NAMES[str(v_pages.dtype)]


def bits_of(pages):
    """Flat view for kernels: float32 words, or the halves of 16-bit types."""
    flat = pages.reshape(-1)
    return flat if pages.dtype == np.float32 else flat.view(np.uint16)


# -- eight numbers of a cache, side by side


@cuda.jit(device=True)
def _load_f32(pages, at):
    a, b = load_v4(pages, at), load_v4(pages, at + 4)
    return (
        as_f32(a[0]), as_f32(a[1]), as_f32(a[2]), as_f32(a[3]),
        as_f32(b[0]), as_f32(b[1]), as_f32(b[2]), as_f32(b[3]),
    )  # fmt: skip


@cuda.jit(device=True)
def _load_f16(pages, at):
    a, b, c, d = load_v4(pages, at)
    return (
        f16_to_f32(a), f16_to_f32(shr32(a, 16)), f16_to_f32(b), f16_to_f32(shr32(b, 16)),
        f16_to_f32(c), f16_to_f32(shr32(c, 16)), f16_to_f32(d), f16_to_f32(shr32(d, 16)),
    )  # fmt: skip


@cuda.jit(device=True)
def _load_bf16(pages, at):
    a, b, c, d = load_v4(pages, at)
    upper = -65536  # 0xffff0000
    return (
        as_f32(shl32(a, 16)), as_f32(and32(a, upper)), as_f32(shl32(b, 16)), as_f32(and32(b, upper)),
        as_f32(shl32(c, 16)), as_f32(and32(c, upper)), as_f32(shl32(d, 16)), as_f32(and32(d, upper)),
    )  # fmt: skip


@cuda.jit(device=True)
def _page(table, lane, position, blocks):
    """Number of the page of a position; a page has `blocks` blocks of 32 positions."""
    return table[lane, position // (STEP * blocks) % table.shape[1]]


@cuda.jit(device=True)
def _sum_of_every_fourth(x):
    """Over the 8 lanes whose numbers differ in the upper three bits."""
    for distance in (4, 8, 16):
        x += cuda.shfl_xor_sync(WHOLE_WARP, x, distance)
    return x


def _part(load_keys, load_values):
    def kernel(q, k_pages, v_pages, K, blocks, table, seq_ids, positions, ends, window, parts, peaks):
        queries, scores = cuda.shared.array(QUERIES, float32), cuda.shared.array(SCORES, float32)
        N, H = q.shape[1], q.shape[2]
        group = N // K
        in_group = (group + HEADS - 1) // HEADS
        t, head = cuda.blockIdx.z, cuda.blockIdx.y // in_group
        n0 = head * group + cuda.blockIdx.y % in_group * HEADS
        n_heads = min(HEADS, (head + 1) * group - n0)
        start = cuda.blockIdx.x * PIECE
        first, last = max(0, positions[t] - window + 1), ends[t]
        if start > last or start + PIECE <= first:
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
            block = (int64(_page(table, sequence, p, blocks)) * K + head) * blocks + p // STEP % blocks
            sums = cuda.local.array(SUMS, float32)
            for i in range(SUMS):
                sums[i] = float32(0)
            for c in range(eighth, H, 8):
                keys = load_keys(k_pages, (block * H + c) * STEP + eight)
                for h in range(HEADS):
                    component = queries[h * H + c]
                    for i in range(8):
                        sums[h * 8 + i] += component * keys[i]
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
            for place in range(eighth, PIECE, 8):
                p = start + place
                if first <= p and p <= last:
                    block = (
                        int64(_page(table, sequence, p, blocks)) * K + head
                    ) * blocks + p // STEP % blocks
                    values = load_values(
                        v_pages, ((block * columns + column) * STEP + p % STEP) * STEP + eight
                    )
                    for h in range(HEADS):
                        weight = scores[h * PIECE + place]
                        for i in range(8):
                            sums[h * 8 + i] += weight * values[i]
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


def _join_kernel(parts, peaks, positions, ends, window, out):
    t, n, c = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
    start, stop = max(0, positions[t] - window + 1) // PIECE, ends[t] // PIECE + 1
    peak = float32(LOWEST)
    for i in range(start, stop):
        peak = max(peak, peaks[t, n, i, 0])
    total, value = float32(0), float32(0)
    for i in range(start, stop):
        weight = math.exp(peaks[t, n, i, 0] - peak)
        total += weight * peaks[t, n, i, 1]
        value += weight * parts[t, n, i, c]
    out[t, n, c] = value / total


def _write(narrow_k, narrow_v):
    def kernel(k, v, k_pages, v_pages, blocks, table, seq_ids, positions):
        t, head, K, H = cuda.blockIdx.y, cuda.blockIdx.x, k.shape[1], k.shape[2]
        p, columns = positions[t], (H + STEP - 1) // STEP
        block = (int64(_page(table, seq_ids[t], p, blocks)) * K + head) * blocks + p // STEP % blocks
        place = p % STEP
        for c in range(cuda.threadIdx.x, columns * STEP, THREADS):
            value = float32(0)
            if c < H:
                k_pages[(block * H + c) * STEP + place] = narrow_k(k[t, head, c])
                value = v[t, head, c]
            v_pages[((block * columns + c // STEP) * STEP + place) * STEP + c % STEP] = narrow_v(value)

    return kernel


@cuda.jit(device=True)
def _as_f32(x):
    return x


@cuda.jit(device=True)
def _as_f16(x):
    return uint16(and32(pack_f16(float32(0), x), 0xFFFF))


@cuda.jit(device=True)
def _as_bf16(x):
    return uint16(and32(pack_bf16(float32(0), x), 0xFFFF))


_LOADS = {"f32": _load_f32, "f16": _load_f16, "bf16": _load_bf16}
_NARROW = {"f32": _as_f32, "f16": _as_f16, "bf16": _as_bf16}
_BITS = {"f32": float32[::1], "f16": uint16[::1], "bf16": uint16[::1]}
_I = int32[::1]
_TABLE = int32[:, ::1]
_HEADS = float32[:, :, ::1]
_PARTS = float32[:, :, :, ::1]
JOIN = Kernel(_join_kernel, (_PARTS, _PARTS, _I, _I, int32, _HEADS), ("MUFU.EX2",), name="attention_join")


@cache
def part_kernel(k_kind, v_kind):
    """Keys and values may have types of their own."""
    signature = (
        _HEADS, _BITS[k_kind], _BITS[v_kind], int32, int32, _TABLE, _I, _I, _I, int32, _PARTS, _PARTS,
    )  # fmt: skip
    function = _part(_LOADS[k_kind], _LOADS[v_kind])
    wants = ("LDG.E.128", "SHFL", "MUFU.EX2")
    return Kernel(function, signature, wants, registers=128, name=f"attention_part_{k_kind}_{v_kind}")


@cache
def write_kernel(k_kind, v_kind):
    signature = (_HEADS, _HEADS, _BITS[k_kind], _BITS[v_kind], int32, _TABLE, _I, _I)
    function = _write(_NARROW[k_kind], _NARROW[v_kind])
    return Kernel(function, signature, name=f"write_kv_{k_kind}_{v_kind}")


# Other pairs of types are made when they are asked for.
KERNELS = (JOIN, *(make(kind, kind) for kind in _LOADS for make in (part_kernel, write_kernel)))
