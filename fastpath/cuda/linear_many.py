"""Products of many tokens with quantised matrices on tensor cores.        definition: refimpl/ops/integer.py

grid       tiles of 64 weight rows; tiles of 64 tokens, or of 64 entries of one expert (tiles.py)
block      4 warps, 2 by 2: a warp has 32 rows and 32 tokens of the result, a lane 32 numbers of it
           (many_warp.py).  Warps without tokens only help to bring what the others multiply
step       256 columns.  Activations come by cp.async, weights are unpacked to int8 on their way
           (many_bring.py).  Nothing is kept twice: three or four blocks fit on a multiprocessor, and multiply
           while others wait for memory
arithmetic mma.sync m16n8k32, exact integers: a multiplication of matrices is a block of 32 values, or a
           sub-block of 256; all minima of a block of 256 are two more.  Then the definition's chain of
           float32 roundings, blocks ascending: the same bytes as linear.py's, whatever the number of tokens.
           Where columns are padded, fma adds 0 * 0, which changes nothing (a sum is never -0)
shared     less than 48 KB, which a kernel has without asking for more (many_places.py)
traffic    weights are read once for 64 tokens, activations once for 64 rows, both in whole sectors

Three instructions for each of the 32 numbers and block of 32 (scale by scale, integer to float, fma) are the
definition's; the rest should stay small beside them, and registers few.
"""

import numpy as np
from numba import cuda, float32, int32, uint16

from fastpath.cuda import device, many_bring, many_warp
from fastpath.cuda.intrinsics import add32, mul32, wait_copies
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS
from fastpath.cuda.many_places import (
    MANY_ROWS,
    MANY_TOKENS,
    OF_WARP,
    SOURCES,
    THREADS,
    places_of,
    row_of,
)
from fastpath.cuda.many_warp import NUMBERS, lane_places
from fastpath.cuda.shared_memory import load_words, shared_address, store_words
from fastpath.cuda.tiles import no_tiles


def multiply(weight, rounded, out):
    """rounded: quantize.Rounded, of all tokens; out f32[T, M]."""
    _launch(weight, rounded, -(-out.shape[0] // MANY_TOKENS), *no_tiles(), 0, out)


def multiply_experts(weight, rounded, tiles, entries, share, out):
    """Of a stack of matrices; tiles and entries as tiles.py has them, share rows of out for one of x."""
    _launch(weight, rounded, len(tiles), tiles, entries, share, out)


def _launch(weight, rounded, n_tiles, tiles, entries, share, out):
    grid = -(-out.shape[1] // MANY_ROWS), n_tiles
    arguments = rounded.q.view(np.int32), rounded.scale, rounded.sums
    device.current().launch(
        PRODUCTS[weight.coding_name], grid, THREADS, *weight.planes, *arguments, np.int32(weight.n_tiles),
        tiles, entries, np.int32(share), out,
    )  # fmt: skip


@cuda.jit(device=True)
def _tile_of(tiles, share, n_rows):
    """(matrix, first entry, number of entries); matrix -1: nothing to do."""
    y = cuda.blockIdx.y
    if share == 0:
        first = int32(y * MANY_TOKENS)
        return int32(0), first, int32(min(MANY_TOKENS, n_rows - first))
    return tiles[y, 0], tiles[y, 1], tiles[y, 2]


def _note_entries(places):
    put_entry, put_source = store_words(1, places.entries), store_words(1, places.sources)

    @cuda.jit(device=True)
    def note(base, thread, first, n, entries, share, row_words):
        """Which rows the tokens of the tile are; those behind the last one are the last one again."""
        entry = int32(first + min(thread, n - 1))
        if share != 0:
            entry = entries[entry]
        put_entry(base + 4 * thread, entry)
        put_source(base + SOURCES * (thread & 7) + 4 * (thread >> 3), mul32(row_of(entry, share), row_words))

    return note


def _product(coding):
    places, is_256 = places_of(coding), coding.is_256
    note_entries, write = _note_entries(places), _write_of(places)
    begin, bring = many_bring.begin_of(coding, places), many_bring.step_of(coding, places)
    multiply_step, n_words = many_warp.step_of(coding, places), places.words

    def kernel(low, high, sub, block, q, scale, sums, n_tiles, tiles, entries, share, out):
        base, thread = (
            shared_address(cuda.shared.array(n_words, int32, alignment=16)),
            int32(cuda.threadIdx.x),
        )
        matrix, first, n = _tile_of(tiles, share, out.shape[0])
        if matrix < 0:
            return
        if thread < MANY_TOKENS:
            note_entries(base, thread, first, n, entries, share, int32(q.shape[1]))
        cuda.syncthreads()
        n_units = int32(2 * scale.shape[1]) if is_256 else int32(scale.shape[1] >> 2)
        begin(base, thread, matrix, n_units, n_tiles, low, high, sub, block, scale, sums, share)
        rows_at, tokens_at, of_rows, of_tokens = lane_places(base, thread)
        is_busy = OF_WARP * (thread >> 6) < n
        acc, dots = cuda.local.array(NUMBERS, float32), cuda.local.array(NUMBERS, int32)
        for k in range(NUMBERS):
            acc[k] = float32(0)
        step = int32(0)
        while step < n_units >> 1:
            bring(base, thread, step, n_units, n_tiles, q, scale, sums)
            wait_copies()
            cuda.syncthreads()
            if is_busy:
                multiply_step(acc, dots, base, thread, rows_at, tokens_at, of_rows, of_tokens)
            cuda.syncthreads()
            step = add32(step, 1)
        if is_busy:
            write(base, thread, n, acc, out)

    return kernel


def _write_of(places):
    entries0, entries1, entries2, entries3 = (load_words(2, places.entries + 32 * n) for n in range(4))

    @cuda.jit(device=True)
    def write(base, thread, n, acc, out):
        m = int32(cuda.blockIdx.x * MANY_ROWS + OF_WARP * (thread >> 5 & 1) + (thread >> 2 & 7))
        t = int32(OF_WARP * (thread >> 6) + 2 * (thread & 3))
        at = int32(base + 4 * t)
        _write(out, acc, 0, entries0(at), m, n - t)
        _write(out, acc, 4, entries1(at), m, n - t - 8)
        _write(out, acc, 8, entries2(at), m, n - t - 16)
        _write(out, acc, 12, entries3(at), m, n - t - 24)

    return write


@cuda.jit(device=True)
def _write(out, acc, at, entries, m, n):
    """Two tokens, if there are as many, and rows m, m + 8, ..."""
    if n > 0:
        _write_rows(out, entries[0], m, acc[at], acc[at + 2], acc[at + 16], acc[at + 18])
    if n > 1:
        _write_rows(out, entries[1], m, acc[at + 1], acc[at + 3], acc[at + 17], acc[at + 19])


@cuda.jit(device=True)
def _write_rows(out, entry, m, a, b, c, d):
    M = out.shape[1]
    if m < M:
        out[entry, m] = a
    if m + 8 < M:
        out[entry, m + 8] = b
    if m + 16 < M:
        out[entry, m + 16] = c
    if m + 24 < M:
        out[entry, m + 24] = d


def _kernel(name, coding):
    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32,
        int32[:, ::1], int32[::1], int32, float32[:, ::1],
    )  # fmt: skip
    wants = ("IMMA", "LDGSTS", "LDSM.16.M88.4", "STS.128", "FFMA")
    blocks, registers = (3, 168) if coding.is_256 else (4, 128)
    bounds = (THREADS, blocks)
    return Kernel(
        _product(coding), signature, wants, registers=registers, bounds=bounds, name=f"many_{name.lower()}"
    )


PRODUCTS = {name: _kernel(name, coding) for name, coding in CODINGS.items() if not coding.is_plain}
KERNELS = tuple(PRODUCTS.values())
