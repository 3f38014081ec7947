"""Products of float32 activations with weights of any format on CUDA.     definition: refimpl/ops/linear.py

grid       pairs of tiles of 4 weight rows; groups of 8 tokens, or slots of experts (grouping.py)
block      2 warps, which have nothing to do with each other: a warp has a tile and all its columns.  A step
           is 4 rows times 8 units of 128 columns, a unit to a lane (layout.py)
arithmetic weights become float32 as their format says; one fma per product, a lane's columns ascending over
           all steps, even and odd ones apart; then both are added, and 8 lanes
traffic    weights are read once for 8 tokens, 16 bytes per lane and load, and are on their way while those
           before them are multiplied; activations are laid out first as lanes read them, and come from the
           caches

The result of a row does not depend on other rows or other tokens.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.codes import OF_UNIT, spot_of
from fastpath.cuda.grouping import TOKENS, entry_of, row_of_lane
from fastpath.cuda.intrinsics import (
    add32,
    as_f32,
    fma_rn,
    load_v4,
    load_weights_v4,
    mul32,
    of_lane_in_8,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, COLUMNS, PADDED, ROWS, UNIT, UNITS, WIDTH, padded_columns
from fastpath.cuda.ready import at_once, when_previous_ended
from fastpath.cuda.values import values_of
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 2
THREADS = 32 * WARPS
ACROSS = 4 * UNITS  # places from a lane's 4 columns to its next 4


def multiply(x, weight, slots, share, out):
    """x f32[rows, C]; weight layout.DeviceMatrix; out f32[rows, M]; for slots and share see grouping.py."""
    T, C = x.shape
    laid = device.current().empty((T, -(-C // COLUMNS) * COLUMNS), np.float32)
    device.current().launch(SPREAD, (padded_columns(C) // PADDED, T), PADDED, x, laid)
    grid = -(-weight.n_tiles // WARPS), len(slots) if share else -(-T // TOKENS)
    numbers = np.int32(weight.n_units), slots, np.int32(share)
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, laid, *numbers, out)


# -- activations


@cuda.jit(device=True)
def place_of(c):
    """Where column c of a row lies: of 8 units the first 4 columns of each, the second 4 of each, ..."""
    unit, piece = c // UNIT & (UNITS - 1), c // 4 & (UNIT // 4 - 1)
    return (c & ~(COLUMNS - 1)) + piece * ACROSS + unit * 4 + (c & 3)


def _spread_kernel(x, out):
    """Zeros from the last column to a multiple of 256; what lies behind is not read."""
    t, c = cuda.blockIdx.y, cuda.blockIdx.x * PADDED + cuda.threadIdx.x
    out[t, place_of(c)] = x[t, c] if c < x.shape[1] else float32(0)


# -- sums: a pair of them for each token, of even and of odd columns


@cuda.jit(device=True)
def _add_four(w, x, at, pair):
    v = load_v4(x, at)
    even, odd = fma_rn(w[0], as_f32(v[0]), pair[0]), fma_rn(w[1], as_f32(v[1]), pair[1])
    return fma_rn(w[2], as_f32(v[2]), even), fma_rn(w[3], as_f32(v[3]), odd)


def _adders(four, fours):
    """(of one token, of up to 8): (loaded, x, places of the tokens, place of the columns, n, sums) -> sums.

    four(loaded, i) -> columns 4i .. 4i + 3 of what was loaded, which are `fours` times four
    """
    of_one, of_all = _adders_of_16(four, 0)
    if fours == 4:
        return of_one, of_all
    assert fours == 8
    return _both(of_one, _adders_of_16(four, 4)[0]), _both(of_all, _adders_of_16(four, 4)[1])


def _both(first, second):
    @cuda.jit(device=True)
    def both(loaded, x, places, at, n, sums):
        sums = first(loaded, x, places, at, n, sums)
        return second(loaded, x, places, at, n, sums)

    return both


def _adders_of_16(four, first):
    """16 columns: as numbers they stay in registers while they meet the tokens."""

    @cuda.jit(device=True)
    def add(loaded, x, place, at, pair):
        start = int64(add32(place, at))
        for i in range(first, first + 4):
            pair = _add_four(four(loaded, i), x, start + ACROSS * i, pair)
        return pair

    @cuda.jit(device=True)
    def of_one(loaded, x, places, at, n, sums):
        return (add(loaded, x, places[0], at, sums[0]),)

    @cuda.jit(device=True)
    def of_all(loaded, x, places, at, n, sums):
        s0, s1, s2, s3, s4, s5, s6, s7 = sums
        s0 = add(loaded, x, places[0], at, s0)
        s1 = add(loaded, x, places[1], at, s1)
        if n > 2:
            s2 = add(loaded, x, places[2], at, s2)
        if n > 3:
            s3 = add(loaded, x, places[3], at, s3)
        if n > 4:
            s4 = add(loaded, x, places[4], at, s4)
        if n > 5:
            s5 = add(loaded, x, places[5], at, s5)
        if n > 6:
            s6 = add(loaded, x, places[6], at, s6)
        if n > 7:
            s7 = add(loaded, x, places[7], at, s7)
        return s0, s1, s2, s3, s4, s5, s6, s7

    return of_one, of_all


@cuda.jit(device=True)
def _total(pair):
    """Of 8 lanes side by side."""
    total = pair[0] + pair[1]
    for distance in (4, 2, 1):
        total += cuda.shfl_xor_sync(WHOLE_WARP, total, distance)
    return total


@cuda.jit(device=True)
def _totals(sums, u):
    """Lane u gets that of token u."""
    totals = (
        _total(sums[0]), _total(sums[1]), _total(sums[2]), _total(sums[3]),
        _total(sums[4]), _total(sums[5]), _total(sums[6]), _total(sums[7]),
    )  # fmt: skip
    mine = totals[0]
    for t in range(1, TOKENS):
        if u == t:
            mine = totals[t]
    return mine


@cuda.jit(device=True)
def _place(r, k, C, at):
    """Of token k's columns in activations; lane k has its row."""
    return add32(mul32(of_lane_in_8(r, int32(k)), C), at)


# -- weights: (begin, walk over all columns of a lane for one token, the same for up to 8)


def _plain(coding):
    """Numbers as they are.  A turn is 8 pieces of 16 bytes, in halves, which are loaded a turn ahead."""
    of_unit = coding.low_bits  # pieces
    fours = 4 * 32 // coding.low_bits  # of half a turn
    turns_of_unit = of_unit // 8
    of_turn = 2 * fours * ACROSS
    four = values_of(coding)[1]

    @cuda.jit(device=True)
    def half(low, at, apart):
        return (
            load_weights_v4(low, at) + load_weights_v4(low, at + apart)
            + load_weights_v4(low, at + 2 * apart) + load_weights_v4(low, at + 3 * apart)
        )  # fmt: skip

    @cuda.jit(device=True)
    def begin(low, high, sub, block, tile, n_units, row, u):
        whole, width = int32(n_units // UNITS), int32(n_units & (UNITS - 1))
        turns = int32(whole * turns_of_unit)
        in_end = turns
        if u < width:
            turns = int32(turns + turns_of_unit)
        at, apart = tile * n_units * (16 * of_unit), int32(16 * UNITS)
        end = at + int64(whole) * (16 * of_unit * UNITS) + (row * width + u) * 4, int32(16 * width)
        if whole > 0:
            at += (row * UNITS + u) * 4
        else:
            apart = end[1]
            if turns > 0:  # others load what their neighbours do, and make nothing of it
                at = end[0]
        return half(low, at, apart), half(low, at + 4 * apart, apart), at, apart, end, in_end, turns

    def walk(add):
        @cuda.jit(device=True)
        def function(state, low, high, sub, block, tile, n_units, row, u, x, places, n, sums):
            a, b, at, apart, end, in_end, turns = state
            of_x = int32(0)
            for turn in range(int32(1), int32(turns + 1)):
                at += 8 * apart
                if turn == in_end:
                    at, apart = end
                sums = add(a, x, places, of_x, n, sums)
                if turn < turns:
                    a = half(low, at, apart)
                sums = add(b, x, places, add32(of_x, of_turn // 2), n, sums)
                if turn < turns:
                    b = half(low, at + 4 * apart, apart)
                of_x = add32(of_x, of_turn)
            return sums

        return function

    return begin, *map(walk, _adders(four, fours))


def _coded(coding):
    """Formats with codes and scales, a sub-block of 32 columns after the other."""
    load, four = values_of(coding)

    @cuda.jit(device=True)
    def sub_block(low, high, sub, block, tile, n_units, row, u, i):
        of_row = ((i & ~(OF_UNIT - 1)) * UNITS) + u * OF_UNIT + (i & (OF_UNIT - 1))
        return load(low, high, sub, block, spot_of(tile, n_units, of_row, row))

    @cuda.jit(device=True)
    def begin(low, high, sub, block, tile, n_units, row, u):
        return sub_block(low, high, sub, block, tile, n_units, row, min(u, n_units - 1), 0)

    def walk(add):
        @cuda.jit(device=True)
        def function(state, low, high, sub, block, tile, n_units, row, u, x, places, n, sums):
            n_sub_blocks = int32((n_units - u + UNITS - 1) // UNITS * OF_UNIT)
            now, of_x = state, int32(0)
            for i in range(int32(1), int32(n_sub_blocks + 1)):
                following = now
                if i < n_sub_blocks:
                    following = sub_block(low, high, sub, block, tile, n_units, row, u, i)
                sums = add(now, x, places, of_x, n, sums)
                now, of_x = following, add32(of_x, WIDTH // 4 * ACROSS)
            return sums

        return function

    return begin, *map(walk, _adders(four, WIDTH // 4))


# -- tiles


def _maker(coding):
    """ready -> function of a block; ready() waits until activations are there (ready.py)."""
    begin, walk_one, walk_all = (_plain if coding.is_plain else _coded)(coding)

    @cuda.jit(device=True)
    def finish(state, tile, n, r, low, high, sub, block, x, n_units):
        lane = cuda.threadIdx.x & 31
        row, u = lane >> 3, int32(lane & 7)
        C, at = int32(x.shape[1]), int32(4 * u)
        zero = float32(0), float32(0)
        if n == 1:
            places = (add32(mul32(r, C), at),)
            sums = walk_one(state, low, high, sub, block, tile, n_units, row, u, x, places, n, (zero,))
            return _total(sums[0])
        places = (
            _place(r, 0, C, at), _place(r, 1, C, at), _place(r, 2, C, at), _place(r, 3, C, at),
            _place(r, 4, C, at), _place(r, 5, C, at), _place(r, 6, C, at), _place(r, 7, C, at),
        )  # fmt: skip
        zeros = zero, zero, zero, zero, zero, zero, zero, zero
        sums = walk_all(state, low, high, sub, block, tile, n_units, row, u, x, places, n, zeros)
        return _totals(sums, u)

    def made(ready):
        @cuda.jit(device=True)
        def product(b, y, n_pairs, low, high, sub, block, x, n_units, slots, share, out):
            warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
            row, u, M = lane >> 3, int32(lane & 7), out.shape[1]
            tile, n_tiles = int32(b * WARPS + warp), int32((M + ROWS - 1) // ROWS)
            if share != 0:
                ready()
            matrix, n, r = row_of_lane(slots, share, out.shape[0], y)
            tile_of_all = int64(max(matrix, 0)) * n_tiles + min(tile, n_tiles - 1)
            state = begin(low, high, sub, block, tile_of_all, n_units, row, u)
            ready()  # whoever has waited before waits no more
            if matrix < 0 or tile >= n_tiles:
                return
            total = finish(state, tile_of_all, n, r, low, high, sub, block, x, n_units)
            m = tile * ROWS + row
            if u < n and m < M:
                out[entry_of(slots, share, u, y), m] = total

        return product

    return made


_MADE = {name: _maker(coding) for name, coding in CODINGS.items()}
TILES = {name: made(at_once) for name, made in _MADE.items()}
EARLY_TILES = {name: made(when_previous_ended) for name, made in _MADE.items()}


def _function(tile):
    def kernel(low, high, sub, block, x, n_units, slots, share, out):
        b, y, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        tile(b, y, n, low, high, sub, block, x, n_units, slots, share, out)

    return kernel


def _kernel(name):
    half, rows = uint16[::1], float32[:, ::1]
    signature = int32[::1], int32[::1], half, half, rows, int32, int32[:, ::1], int32, rows
    return Kernel(
        _function(TILES[name]), signature, ("LDG.E.NA.128", "FFMA"), registers=128, bounds=(THREADS, 8),
        name=f"float_{name.lower()}", early=_function(EARLY_TILES[name]),
    )  # fmt: skip


_ROWS = float32[:, ::1]
SPREAD = Kernel(_spread_kernel, (_ROWS, _ROWS))
PRODUCTS = {name: _kernel(name) for name in CODINGS}
KERNELS = (SPREAD, *PRODUCTS.values())
