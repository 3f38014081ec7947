"""Products of 3 to 16 tokens with quantised matrices on tensor cores.    definition: refimpl/ops/integer.py

grid       pairs of 8 weight rows; groups of 8 tokens
block      2 warps, which have nothing to do with each other: a warp has two tiles of 4 rows and all their
           columns.  No shared memory, no barriers
arithmetic mma.sync m16n8k32: 16 rows are 8 tokens times 2 units of a row, 8 columns are weight rows.  Which
           places of k are which columns is free, if both sides agree.  Lane 4g + t brings of weight row g
           what it can load at once: half t >> 1 of a sub-block of unit t & 1.  Activations are zero where
           units differ, so that a sum holds one sub-block (or half of one) of one unit, and lane 4g + t has
           those of both units, for token g and weight rows 2t and 2t + 1.  The definition's chain of float32
           roundings runs inside a lane
traffic    weights are read once for 8 tokens, whole sectors, 32 bytes of a row at a time.  All of a warp's
           next step (8 units of 8 rows) is on its way: what a pair of units has used up, is loaded again
start      a kernel may wait for the one before it behind its first loads of weights, which nobody writes

Same bytes as linear.py: integers are exact in any order, and padding adds 0 * 0.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.grouping import TOKENS, no_slots
from fastpath.cuda.integers import by_pairs, eight_products, four_products
from fastpath.cuda.intrinsics import (
    WEIGHTS,
    add32,
    and32,
    as_f32,
    f16_to_f32,
    fma_rn,
    loads_at,
    mma_s8,
    mul32,
    mul_rn,
    permute_bytes,
    piece_of,
    sar32,
    shr32,
    zeros_of,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, UNITS
from fastpath.cuda.ready import at_once, when_previous_ended
from fastpath.cuda.unit import codes_of, codes_of_half, numbers_of
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 2
THREADS = 32 * WARPS
TILES_OF_WARP = 2
ROWS_OF_WARP = TILES_OF_WARP * ROWS
PAIRS = UNITS // 2  # of units, in a step


def multiply(weight, rounded, out):
    """weight: on the device; rounded: activations (quantize.py); out f32[T, M]."""
    grid = -(-weight.n_tiles // (WARPS * TILES_OF_WARP)), -(-len(out) // TOKENS)
    activation = rounded.q.view(np.int32), rounded.scale, rounded.sums
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, *activation, no_slots(), np.int32(0), out)


# -- weights.  At: addresses of the lane's first piece of a step in low, high, sub, block; see layout.py


def _loads_of_codes(bits, pair):
    """(whole step, narrow one): (address, [units, row, half]) -> words of a lane, by sub-blocks."""
    words, count, apart = {8: (4, 4, 1024), 4: (2, 4, 512), 2: (4, 2, 512), 1: (4, 1, 512)}[bits]
    opcode, first, is_byte = f"{WEIGHTS}.v{words}.u32", 32 * pair, bits == 8
    load, load_apart = (
        loads_at(opcode, words, count, apart, first),
        loads_at(opcode, words, count, None, first),
    )

    @cuda.jit(device=True)
    def narrow(at, units, row, half):
        missing = int32(UNITS - units)
        behind = int32(16 * row + 64 * half) if is_byte else int32(16 * row)
        return load_apart(at - int64(mul32(behind, missing)), int64(units * (128 if is_byte else 64)))

    return load, narrow


@cache
def _load_of(coding, pair):
    """(at, units left, row, half, words) -> words of a pair of units; where there is none, those given."""
    full_low, narrow_low = _loads_of_codes(coding.low_bits, pair)

    if coding.high_bits:
        full_high, narrow_high = _loads_of_codes(coding.high_bits, pair)

        @cuda.jit(device=True)
        def load(at, left, row, half, words):
            if left >= UNITS:
                words = full_low(at[0]) + full_high(at[1])
            elif left > 2 * pair:
                words = narrow_low(at[0], left, row, half) + narrow_high(at[1], left, row, half)
            return words

    else:

        @cuda.jit(device=True)
        def load(at, left, row, half, words):
            if left >= UNITS:
                words = full_low(at[0])
            elif left > 2 * pair:
                words = narrow_low(at[0], left, row, half)
            return words

    return load


def _sizes(coding):
    """Bytes of a unit in `sub`, and of a block in `block`."""
    return (16 if coding.scales == "d m" else 8), (4 if coding.has_minimum else 2) if coding.is_256 else 0


def _scales_of(coding):
    """(at, units left, row, t, words) -> words of scales of pair t of a step; and how many they are."""
    of_unit, of_block = _sizes(coding)
    load = loads_at(f"{WEIGHTS}.v4.u32", 4, of_unit // 8, 16)
    load_block = loads_at(f"{WEIGHTS}.u{8 * of_block}", 1, 1, 4) if of_block else None

    @cuda.jit(device=True)
    def sub(at, left, row):
        missing = int32(UNITS - min(left, UNITS))
        return load(at[2] - int64(mul32(int32(of_unit * row), missing)))

    if of_block:

        @cuda.jit(device=True)
        def scales(at, left, row, t, words):
            if left > 2 * t:
                words = sub(at, left, row) + load_block(at[3])
            return words

    else:

        @cuda.jit(device=True)
        def scales(at, left, row, t, words):
            if left > 2 * t:
                words = sub(at, left, row)
            return words

    return scales, of_unit // 2 + (1 if of_block else 0)


def _places(coding):
    """start: (planes, tile, units of a row, row, t) -> at, of a row's first step; next: of the next step."""
    low, high = 64 * coding.low_bits, 64 * coding.high_bits
    of_unit, of_block = _sizes(coding)
    half_bytes = {8: 512, 4: 8, 2: 0}[coding.low_bits]
    low_at, high_at, sub_at, block_at = (
        piece_of(low),
        piece_of(high),
        piece_of(4 * of_unit),
        piece_of(4 * of_block),
    )

    @cuda.jit(device=True)
    def start(planes, tile, n_units, row, t):
        unit = mul32(tile, n_units)
        in_piece = int32(128 * row + 16 * (t & 1))
        return (
            low_at(planes[0], unit) + int64(in_piece + half_bytes * (t >> 1)),
            high_at(planes[1], unit) + int64(in_piece),
            sub_at(planes[2], unit) + int64(of_unit * (UNITS * row + 2 * t)),
            block_at(planes[3], shr32(unit, 1)) + int64(of_block * (ROWS * t + row)),
        )

    @cuda.jit(device=True)
    def next(at):
        return at[0] + UNITS * low, at[1] + UNITS * high, at[2] + 32 * of_unit, at[3] + 16 * of_block

    return start, next


# -- a pair of units


@cuda.jit(device=True)
def _left(q, r, even, odd):
    """Two words of activations, for tokens times units."""
    return and32(q, even), and32(q, odd), and32(r, even), and32(r, odd)


def _sums_of(coding):
    """(codes of a lane: 4 words, its activations, masks) -> sums of a sub-block: for 32 or twice 16 columns.

    Four numbers each: unit 0 with rows 2t and 2t + 1, then unit 1.
    """
    nothing = zeros_of(4)

    @cuda.jit(device=True)
    def of_32(w, q, even, odd):
        first = mma_s8(_left(q[0], q[1], even, odd), (w[0], w[1]), nothing())
        return mma_s8(_left(q[2], q[3], even, odd), (w[2], w[3]), first)

    @cuda.jit(device=True)
    def of_16(w, q, even, odd):
        first = mma_s8(_left(q[0], q[1], even, odd), (w[0], w[1]), nothing())
        return first + mma_s8(_left(q[2], q[3], even, odd), (w[2], w[3]), nothing())

    return of_16 if coding.scales.startswith("16") else of_32


def _codes_of(coding):
    """(half, words of a pair of units) -> for each sub-block, 4 words of codes."""
    n, m = {8: 4, 4: 2, 2: 2}[coding.low_bits], coding.high_bits
    n2, n3, n4, m2, m3, m4 = 2 * n, 3 * n, 4 * n, 2 * m, 3 * m, 4 * m
    of_half = codes_of_half(coding)

    @cuda.jit(device=True)
    def codes(half, words):
        high = words[n4:]
        return (
            of_half(half, words[:n], high[:m]), of_half(half, words[n:n2], high[m:m2]),
            of_half(half, words[n2:n3], high[m2:m3]), of_half(half, words[n3:n4], high[m3:m4]),
        )  # fmt: skip

    return codes


def _of_lanes(n):
    """(words, lane) -> n words of that lane."""
    if n == 1:

        @cuda.jit(device=True)
        def one(words, lane):
            return (cuda.shfl_sync(WHOLE_WARP, words[0], lane),)

        return one
    fewer = _of_lanes(n - 1)

    @cuda.jit(device=True)
    def more(words, lane):
        return (cuda.shfl_sync(WHOLE_WARP, words[0], lane), *fewer(words[1:], lane))

    return more


def _chain_32(coding, pair):
    """(chains of two rows, sums of four sub-blocks, scales of both, activations) -> chains, 8 blocks on."""
    shift, numbers = codes_of(coding).shift, numbers_of(coding)
    of_unit = 4 if coding.has_minimum else 2  # words
    load_x = loads_at("ld.global.v4.u32", 4, 2, 16, 32 * pair)
    load_sums = loads_at("ld.global.v4.u32", 4, 4, 16, 64 * pair)

    @cuda.jit(device=True)
    def block(acc, total, d, x):
        return fma_rn(float32(sar32(total, shift) if shift else total), mul_rn(d, as_f32(x)), acc)

    @cuda.jit(device=True)
    def plain(acc, a, b, c, e, d, x, s):
        acc = block(block(acc, a, d[0], x[0]), b, d[1], x[1])
        return block(block(acc, c, d[2], x[2]), e, d[3], x[3])

    @cuda.jit(device=True)
    def minimum(acc, s, m, x):
        return fma_rn(float32(s), mul_rn(m, as_f32(x)), acc)

    @cuda.jit(device=True)
    def with_minima(acc, a, b, c, e, d, x, s):
        acc = minimum(block(acc, a, d[0], x[0]), s[0], d[4], x[0])
        acc = minimum(block(acc, b, d[1], x[1]), s[1], d[5], x[1])
        acc = minimum(block(acc, c, d[2], x[2]), s[2], d[6], x[2])
        return minimum(block(acc, e, d[3], x[3]), s[3], d[7], x[3])

    if coding.has_minimum:

        @cuda.jit(device=True)
        def chain(acc, i, j, k, l, first, second, at):
            x, s = load_x(at[1]), load_sums(at[2])
            a, b = numbers(first[:of_unit]), numbers(second[:of_unit])
            c, d = numbers(first[of_unit:]), numbers(second[of_unit:])
            s, t = by_pairs(s[:8]), by_pairs(s[8:])
            y = x[4:]
            one = with_minima(acc[0], i[0], j[0], k[0], l[0], a, x, s)
            two = with_minima(acc[1], i[1], j[1], k[1], l[1], b, x, s)
            return (
                with_minima(one, i[2], j[2], k[2], l[2], c, y, t),
                with_minima(two, i[3], j[3], k[3], l[3], d, y, t),
            )

    else:

        @cuda.jit(device=True)
        def chain(acc, i, j, k, l, first, second, at):
            x = load_x(at[1])
            a, b = numbers(first[:of_unit]), numbers(second[:of_unit])
            c, d = numbers(first[of_unit:]), numbers(second[of_unit:])
            y = x[4:]
            one = plain(acc[0], i[0], j[0], k[0], l[0], a, x, x)
            two = plain(acc[1], i[1], j[1], k[1], l[1], b, x, x)
            return plain(one, i[2], j[2], k[2], l[2], c, y, y), plain(two, i[3], j[3], k[3], l[3], d, y, y)

    return chain


def _chain_256(coding, pair):
    """The same, one block on: a pair of units is a block of 256.  With minima: their sums of both rows."""
    shift, numbers, is_16 = codes_of(coding).shift, numbers_of(coding), coding.scales.startswith("16")
    load_x = loads_at("ld.global.u32", 1, 1, 4, 4 * pair)

    if is_16:

        @cuda.jit(device=True)
        def of_unit(sc, r, i, j, k, l):
            return eight_products(sc, (i[r], i[r + 4], j[r], j[r + 4], k[r], k[r + 4], l[r], l[r + 4]))

    else:

        @cuda.jit(device=True)
        def of_unit(sc, r, i, j, k, l):
            return four_products(sc, (i[r], j[r], k[r], l[r]))

    @cuda.jit(device=True)
    def row(acc, r, i, j, k, l, words, x):
        a, b = numbers(words[:2]), numbers(words[2:4])
        total = add32(of_unit(a, r, i, j, k, l), of_unit(b, r + 2, i, j, k, l))
        return fma_rn(float32(sar32(total, shift) if shift else total), mul_rn(f16_to_f32(words[4]), x), acc)

    @cuda.jit(device=True)
    def plain(acc, i, j, k, l, first, second, at):
        x = as_f32(load_x(at[1])[0])
        return row(acc[0], 0, i, j, k, l, first, x), row(acc[1], 1, i, j, k, l, second, x)

    @cuda.jit(device=True)
    def minimum(acc, total, words, x):
        return fma_rn(float32(total), mul_rn(f16_to_f32(shr32(words[4], 16)), -x), acc)

    @cuda.jit(device=True)
    def with_minima(acc, i, j, k, l, first, second, at, minima):
        x = as_f32(load_x(at[1])[0])
        one, two = row(acc[0], 0, i, j, k, l, first, x), row(acc[1], 1, i, j, k, l, second, x)
        return minimum(one, minima[0], first, x), minimum(two, minima[1], second, x)

    return with_minima if coding.has_minimum else plain


def _minima_of(coding, pair):
    """(words of scales, activations, lane) -> sums of minima times activations, of a block and two rows.

    A matrix whose columns are a minimum wherever its sub-block is: then one sum may hold both units.
    """
    nothing = zeros_of(4)

    @cuda.jit(device=True)
    def of_row(word, other, lane):
        """The lane's row has it, for its unit."""
        source = int32((lane & 28) + pair)
        a, b = cuda.shfl_sync(WHOLE_WARP, word, source), cuda.shfl_sync(WHOLE_WARP, other, source)
        return b if lane & 1 else a

    @cuda.jit(device=True)
    def add(total, q, first, second):
        return mma_s8((q[0], q[1], q[2], q[3]), (first, second), total)

    @cuda.jit(device=True)
    def of_rows(total):
        """Words 0 and 2 of activations stand in the upper half of the 16 rows, 1 and 3 in the lower one."""
        return add32(total[0], total[2]), add32(total[1], total[3])

    if coding.scales == "16 sc mn":

        @cuda.jit(device=True)
        def minima(scales, q, lane):
            mask = 0x0F0F0F0F
            m = and32(shr32(of_row(scales[0], scales[2], lane), 4), mask)
            n = and32(shr32(of_row(scales[1], scales[3], lane), 4), mask)
            total = add(nothing(), q[:4], permute_bytes(m, m, 0x0000), permute_bytes(m, m, 0x1111))
            total = add(total, q[4:8], permute_bytes(m, m, 0x2222), permute_bytes(m, m, 0x3333))
            total = add(total, q[8:12], permute_bytes(n, n, 0x0000), permute_bytes(n, n, 0x1111))
            total = add(total, q[12:], permute_bytes(n, n, 0x2222), permute_bytes(n, n, 0x3333))
            return of_rows(total)

    else:

        @cuda.jit(device=True)
        def minima(scales, q, lane):
            mn = of_row(scales[1], scales[3], lane)
            a, b = permute_bytes(mn, mn, 0x0000), permute_bytes(mn, mn, 0x1111)
            c, d = permute_bytes(mn, mn, 0x2222), permute_bytes(mn, mn, 0x3333)
            total = add(add(nothing(), q[:4], a, a), q[4:8], b, b)
            return of_rows(add(add(total, q[8:12], c, c), q[12:], d, d))

    return minima


@cache
def _pair_of(coding, pair):
    """(chains, words of codes, words of scales, addresses of activations, lane) -> chains"""
    codes, sums, n_scales = _codes_of(coding), _sums_of(coding), _scales_of(coding)[1]
    chain, of_lane = (_chain_256 if coding.is_256 else _chain_32)(coding, pair), _of_lanes(n_scales)
    if coding.low_bits == 8:
        load_q = loads_at("ld.global.v4.u32", 4, 4, 256, 32 * pair)
    else:
        load_q = loads_at("ld.global.v2.u32", 2, 8, 128, 32 * pair)

    minima = _minima_of(coding, pair)

    @cuda.jit(device=True)
    def parts(words, scales, q, t, even, odd):
        """Sums of four sub-blocks, and the scales of both rows: lane 4g + pair has those of row g."""
        a, b, c, d = codes(t >> 1, words)
        source = int32(8 * t + pair)
        return (
            sums(a, q[:4], even, odd), sums(b, q[4:8], even, odd),
            sums(c, q[8:12], even, odd), sums(d, q[12:], even, odd),
            of_lane(scales, source), of_lane(scales, int32(source + 4)),
        )  # fmt: skip

    if coding.is_256 and coding.has_minimum:

        @cuda.jit(device=True)
        def turn(acc, words, scales, at, t, even, odd):
            q = load_q(at[0])
            i, j, k, l, first, second = parts(words, scales, q, t, even, odd)
            m = minima(scales, q, int32(cuda.threadIdx.x & 31))
            return chain(acc, i, j, k, l, first, second, at, m)

    else:

        @cuda.jit(device=True)
        def turn(acc, words, scales, at, t, even, odd):
            i, j, k, l, first, second = parts(words, scales, load_q(at[0]), t, even, odd)
            return chain(acc, i, j, k, l, first, second, at)

    return turn


# -- tiles


def _tile(coding, ready):
    """ready: what has to be called before anything is read that an earlier kernel wrote."""
    start, next = _places(coding)
    load_0, load_1, load_2, load_3 = (_load_of(coding, pair) for pair in range(PAIRS))
    turn_0, turn_1, turn_2, turn_3 = (_pair_of(coding, pair) for pair in range(PAIRS))
    load_scales, n_scales = _scales_of(coding)
    n_words = sum({8: 16, 4: 8, 2: 8, 1: 4, 0: 0}[bits] for bits in (coding.low_bits, coding.high_bits))
    no_words, no_scales = zeros_of(n_words), zeros_of(n_scales)
    is_256, x_step = coding.is_256, 16 if coding.is_256 else 128
    q_piece, x_piece, s_piece = piece_of(4), piece_of(4), piece_of(4)
    q_half = 128 if coding.low_bits == 8 else 8

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, slots, share, out):
        lane = int32(cuda.threadIdx.x & 31)
        g, t = lane >> 2, lane & 3
        half, row = t >> 1, g & 3
        M, n_units = out.shape[1], int32(scale.shape[1] * 2 if is_256 else scale.shape[1] >> 2)
        tiles = int32((M + ROWS - 1) // ROWS)
        first = int32((tile * WARPS + (cuda.threadIdx.x >> 5)) * TILES_OF_WARP)
        mine = int32(min(first + (g >> 2), tiles - 1))
        at, left = start((low, high, sub, block), mine, n_units, row, t), n_units
        scales = load_scales(at, left, row, t, no_scales())
        a, b = load_0(at, left, row, half, no_words()), load_1(at, left, row, half, no_words())
        c, d = load_2(at, left, row, half, no_words()), load_3(at, left, row, half, no_words())
        ready()
        if first >= tiles:
            return
        n = int32(min(TOKENS, out.shape[0] - y * TOKENS))
        token = int32(y * TOKENS + min(g, n - 1))
        q_at = q_piece(q, mul32(token, int32(q.shape[1]))) + int64(16 * (t & 1) + q_half * half)
        x_at = x_piece(scale, mul32(token, int32(scale.shape[1])))
        s_at = s_piece(sums, mul32(token, int32(sums.shape[1])))
        odd = int32(-(t & 1))
        even = int32(~odd)
        acc = float32(0), float32(0)
        while left > 0:
            at, after, x = next(at), int32(left - UNITS), (q_at, x_at, s_at)
            next_scales = load_scales(at, after, row, t, scales)
            acc = turn_0(acc, a, scales, x, t, even, odd)
            a = load_0(at, after, row, half, a)
            if left > 2:
                acc = turn_1(acc, b, scales, x, t, even, odd)
                b = load_1(at, after, row, half, b)
            if left > 4:
                acc = turn_2(acc, c, scales, x, t, even, odd)
                c = load_2(at, after, row, half, c)
            if left > 6:
                acc = turn_3(acc, d, scales, x, t, even, odd)
                d = load_3(at, after, row, half, d)
            scales, left = next_scales, after
            q_at, x_at, s_at = q_at + 1024, x_at + x_step, s_at + 256
        m = int32(first * ROWS + 2 * t)
        if g < n and m < M:
            out[token, m] = acc[0]
            if m + 1 < M:
                out[token, m + 1] = acc[1]

    return product


# of 16 rows, by a block: (tile, y of the grid, blocks of a matrix, what the kernel is given)
INTEGER = {name: coding for name, coding in CODINGS.items() if not coding.is_plain}
TILES = {name: _tile(coding, at_once) for name, coding in INTEGER.items()}
EARLY_TILES = {name: _tile(coding, when_previous_ended) for name, coding in INTEGER.items()}


def _function(tile):
    def kernel(low, high, sub, block, q, scale, sums, slots, share, out):
        x, y, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        tile(x, y, n, low, high, sub, block, q, scale, sums, slots, share, out)

    return kernel


def _product(name):
    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32[:, ::1], int32, float32[:, ::1],
    )  # fmt: skip
    return Kernel(
        _function(TILES[name]), signature, ("IMMA", "LDG.E.NA", "FFMA"),
        registers=168, bounds=(THREADS, 6), name=f"some_{name.lower()}", early=_function(EARLY_TILES[name]),
    )  # fmt: skip


PRODUCTS = {name: _product(name) for name in INTEGER}
KERNELS = tuple(PRODUCTS.values())
