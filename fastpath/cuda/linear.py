"""Products with quantised matrices on CUDA.        definition: refimpl/ops/linear.py, integer.py

grid       pairs of tiles of 4 weight rows; groups of 8 tokens, or slots of experts (grouping.py)
block      2 warps, which have nothing to do with each other: a warp has a tile and all its columns.  A step
           is 4 rows times 8 units of 128 columns, a unit to a lane (layout.py)
arithmetic dp4a: exact integer sums per block of the format, in any order.  Then the definition's chain of
           float32 roundings, blocks ascending, one fma after the other: it goes through the 8 lanes of a row.
           Each adds its own numbers to what it has, then all take over what lane 0, 1, ... has now
traffic    weights are read once for 8 tokens, 16 bytes per lane and load; the next step of a warp, or the
           next two, are on their way while it computes.  Activations come from the caches, the four rows of a
           warp read the same
start      a kernel may wait for the one before it behind its first loads of weights, which nobody writes

The result of a row does not depend on other rows or other tokens: where a format has units that a row does
not, and where columns are padded, fma adds 0 * 0, which changes nothing (a sum is never -0).
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device, linear_float, linear_many
from fastpath.cuda.grouping import MAX_EXPERTS, TOKENS, entries_of, entry_of, no_slots, slots_of
from fastpath.cuda.intrinsics import (
    add32,
    address_of,
    as_f32,
    dp4a_s8,
    fma_rn,
    loads_at,
    mul32,
    mul_rn,
    of_lane_in_8,
    sar32,
    wide_product,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, UNITS, on_device
from fastpath.cuda.quantize import round_activations
from fastpath.cuda.ready import at_once, when_previous_ended
from fastpath.cuda.unit import blocks_of, codes_of, loads_of, scales_of
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 2
MANY = 17  # tokens from which tensor cores compute the same: fewer leave most of a tile empty
THREADS = 32 * WARPS


def linear(x, weight, activations, *, out=None):
    weight = on_device(weight)
    T, M = len(x), weight.shape[0]
    out = device.current().empty((T, M), np.float32) if out is None else out
    _multiply(x, weight, activations, no_slots(), 0, out)
    return out


def expert_linear(x, weight, expert_ids, activations, *, out=None):
    weight = on_device(weight)
    (T, A), (E, M, C) = expert_ids.shape, weight.shape
    if E > MAX_EXPERTS:
        raise ValueError(
            f"{weight.name or 'expert_linear'}: {E} experts, and a block groups {MAX_EXPERTS}. "
            "Raise MAX_EXPERTS in fastpath/cuda/grouping.py"
        )
    out = device.current().empty((T, A, M), np.float32) if out is None else out
    slots = slots_of(device.put(expert_ids, np.int32), E)
    share = A if len(x.shape) == 2 else 1
    _multiply(x.reshape(-1, C), weight, activations, slots, share, out.reshape(-1, M))
    return out


def _multiply(x, weight, activations, slots, share, out):
    """For slots and share see grouping.py."""
    if activations not in ("int8", "float"):
        raise ValueError(f"activations: got {activations!r}, expected 'int8' or 'float'. Choose one of them")
    if activations == "float" or weight.coding.is_plain:
        linear_float.multiply(x, weight, slots, share, out)
        return
    rounded = round_activations(x, 256 if weight.coding.is_256 else 32)
    if not share and len(x) >= MANY:
        linear_many.multiply(weight, rounded, out)
        return
    grid = -(-weight.n_tiles // WARPS), len(slots) if share else -(-len(x) // TOKENS)
    activation = rounded.q.view(np.int32), rounded.scale, rounded.sums
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, *activation, slots, np.int32(share), out)


# -- sums of integers


_load_q = loads_at("ld.global.v4.u32", 4, 8, 16 * UNITS)  # of a unit: 8 pieces, those of 8 units side by side
_load_sums = loads_at("ld.global.v4.u32", 4, 2, 16)
_load_four = loads_at("ld.global.v4.u32", 4, 1, 16)
_load_one = loads_at("ld.global.u32", 1, 1, 4)


@cuda.jit(device=True)
def _dot_of_16(w, q):
    return dp4a_s8(w[3], q[3], dp4a_s8(w[2], q[2], dp4a_s8(w[1], q[1], dp4a_s8(w[0], q[0], int32(0)))))


@cuda.jit(device=True)
def _dot(w, q):
    """Of a sub-block, whose codes are 8 words."""
    total = _dot_of_16(w[:4], q[:4])
    return dp4a_s8(w[7], q[7], dp4a_s8(w[6], q[6], dp4a_s8(w[5], q[5], dp4a_s8(w[4], q[4], total))))


@cuda.jit(device=True)
def _dots(w, q):
    return _dot(w[:8], q[:8]), _dot(w[8:16], q[8:16]), _dot(w[16:24], q[16:24]), _dot(w[24:], q[24:])


@cuda.jit(device=True)
def _dots_of_16(w, q):
    return (
        _dot_of_16(w[:4], q[:4]), _dot_of_16(w[4:8], q[4:8]),
        _dot_of_16(w[8:12], q[8:12]), _dot_of_16(w[12:16], q[12:16]),
        _dot_of_16(w[16:20], q[16:20]), _dot_of_16(w[20:24], q[20:24]),
        _dot_of_16(w[24:28], q[24:28]), _dot_of_16(w[28:], q[28:]),
    )  # fmt: skip


@cuda.jit(device=True)
def _by_pairs(s):
    """Sums of 16 -> of 32."""
    return add32(s[0], s[1]), add32(s[2], s[3]), add32(s[4], s[5]), add32(s[6], s[7])


@cuda.jit(device=True)
def _four_products(a, b):
    total = add32(add32(mul32(a[0], b[0]), mul32(a[1], b[1])), mul32(a[2], b[2]))
    return add32(total, mul32(a[3], b[3]))


@cuda.jit(device=True)
def _eight_products(a, b):
    return add32(_four_products(a[:4], b[:4]), _four_products(a[4:8], b[4:8]))


# -- what a lane adds to the chain for one token: number, factor, number, factor, ... as float32


def _terms_32(coding):
    """For formats of 32 values: four blocks of a lane."""
    shift, has_minimum = codes_of(coding).shift, coding.has_minimum

    @cuda.jit(device=True)
    def number(total):
        return float32(sar32(total, shift) if shift else total)

    @cuda.jit(device=True)
    def plain(codes, d, q_at, scale_at, sums_at):
        dots, x = _dots(codes, _load_q(q_at)), _load_four(scale_at)
        return (
            number(dots[0]), mul_rn(d[0], as_f32(x[0])), number(dots[1]), mul_rn(d[1], as_f32(x[1])),
            number(dots[2]), mul_rn(d[2], as_f32(x[2])), number(dots[3]), mul_rn(d[3], as_f32(x[3])),
        )  # fmt: skip

    @cuda.jit(device=True)
    def with_minima(codes, d, q_at, scale_at, sums_at):
        a, b, c, e, f, g, h, i = plain(codes, d, q_at, scale_at, sums_at)
        s, x = _by_pairs(_load_sums(sums_at)), _load_four(scale_at)
        return (
            a, b, float32(s[0]), mul_rn(d[4], as_f32(x[0])), c, e, float32(s[1]), mul_rn(d[5], as_f32(x[1])),
            f, g, float32(s[2]), mul_rn(d[6], as_f32(x[2])), h, i, float32(s[3]), mul_rn(d[7], as_f32(x[3])),
        )  # fmt: skip

    return with_minima if has_minimum else plain


@cuda.jit(device=True)
def _of_both(x):
    """The sum of two lanes side by side."""
    return add32(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 1))


def _terms_256(coding):
    """For formats of 256 values: two lanes have a block, and both the same terms."""
    shift, is_16 = codes_of(coding).shift, coding.scales.startswith("16")

    if is_16:

        @cuda.jit(device=True)
        def total_of(codes, sc, q_at):
            return _eight_products(sc, _dots_of_16(codes, _load_q(q_at)))

        @cuda.jit(device=True)
        def minima_of(sc, sums_at):
            return _eight_products(sc[8:], _load_sums(sums_at))

    else:

        @cuda.jit(device=True)
        def total_of(codes, sc, q_at):
            return _four_products(sc, _dots(codes, _load_q(q_at)))

        @cuda.jit(device=True)
        def minima_of(sc, sums_at):
            return _four_products(sc[4:], _by_pairs(_load_sums(sums_at)))

    @cuda.jit(device=True)
    def plain(codes, scales, q_at, scale_at, sums_at):
        sc, d = scales
        total = _of_both(total_of(codes, sc, q_at))
        return float32(sar32(total, shift) if shift else total), mul_rn(d[0], as_f32(_load_one(scale_at)[0]))

    @cuda.jit(device=True)
    def with_minima(codes, scales, q_at, scale_at, sums_at):
        sc, d = scales
        total, minima = _of_both(total_of(codes, sc, q_at)), _of_both(minima_of(sc, sums_at))
        x = as_f32(_load_one(scale_at)[0])
        return float32(total), mul_rn(d[0], x), float32(minima), mul_rn(d[1], -x)

    return with_minima if coding.has_minimum else plain


# -- the chain


def _adder(pairs):
    """(acc, terms) -> acc with so many products added, one fma after the other."""
    if pairs == 1:

        @cuda.jit(device=True)
        def add(acc, terms):
            return fma_rn(terms[0], terms[1], acc)

        return add
    fewer, a, b = _adder(pairs - 1), 2 * pairs - 2, 2 * pairs - 1

    @cuda.jit(device=True)
    def add_more(acc, terms):
        return fma_rn(terms[a], terms[b], fewer(acc, terms))

    return add_more


def _chains(pairs, apart):
    """(acc of a token, its terms of this lane, ...) -> acc behind all 8 lanes, for 1, 2 and 4 tokens.

    apart: lanes from one with terms of its own to the next
    """
    add = _adder(pairs)

    @cuda.jit(device=True)
    def one(a, s):
        for i in range(0, UNITS, apart):
            a = of_lane_in_8(add(a, s), i)
        return a

    @cuda.jit(device=True)
    def two(a, s, b, t):
        for i in range(0, UNITS, apart):
            a, b = of_lane_in_8(add(a, s), i), of_lane_in_8(add(b, t), i)
        return a, b

    @cuda.jit(device=True)
    def four(a, s, b, t, c, v, d, w):
        for i in range(0, UNITS, apart):
            a, b = of_lane_in_8(add(a, s), i), of_lane_in_8(add(b, t), i)
            c, d = of_lane_in_8(add(c, v), i), of_lane_in_8(add(d, w), i)
        return a, b, c, d

    return one, two, four


def _step(coding):
    """A step for up to 8 tokens: (n, their rows, their sums, codes, scales, places, widths) -> sums.

    Terms of four tokens, or of two where these are many, wait for their turn in registers.
    """
    pairs = (2 if coding.has_minimum else 1) * (1 if coding.is_256 else 4)
    terms_of = _terms_256(coding) if coding.is_256 else _terms_32(coding)
    one, two, four = _chains(pairs, 2 if coding.is_256 else 1)

    @cuda.jit(device=True)
    def terms(r, codes, scales, at, wide):
        return terms_of(
            codes, scales, at[0] + wide_product(r, wide[0]), at[1] + wide_product(r, wide[1]),
            at[2] + wide_product(r, wide[2]),
        )  # fmt: skip

    @cuda.jit(device=True)
    def of_two(n, r0, r1, a, b, codes, scales, at, wide):
        s = terms(r0, codes, scales, at, wide)
        if n == 1:
            a = one(a, s)
        else:
            a, b = two(a, s, b, terms(r1, codes, scales, at, wide))
        return a, b

    @cuda.jit(device=True)
    def of_four(n, r0, r1, r2, r3, a, b, c, d, codes, scales, at, wide):
        s = terms(r0, codes, scales, at, wide)
        if n == 1:
            return one(a, s), b, c, d
        t = terms(r1, codes, scales, at, wide)
        if n == 2:
            a, b = two(a, s, b, t)
            return a, b, c, d
        v, w = terms(r2, codes, scales, at, wide), terms(r3, codes, scales, at, wide)
        return four(a, s, b, t, c, v, d, w)

    @cuda.jit(device=True)
    def by_twos(n, r, acc, codes, scales, at, wide):
        a, b, c, d, e, f, g, h = acc
        a, b = of_two(n, r[0], r[1], a, b, codes, scales, at, wide)
        if n > 2:
            c, d = of_two(n - 2, r[2], r[3], c, d, codes, scales, at, wide)
            if n > 4:
                e, f = of_two(n - 4, r[4], r[5], e, f, codes, scales, at, wide)
                if n > 6:
                    g, h = of_two(n - 6, r[6], r[7], g, h, codes, scales, at, wide)
        return a, b, c, d, e, f, g, h

    @cuda.jit(device=True)
    def by_fours(n, r, acc, codes, scales, at, wide):
        a, b, c, d, e, f, g, h = acc
        a, b, c, d = of_four(n, r[0], r[1], r[2], r[3], a, b, c, d, codes, scales, at, wide)
        if n > 4:
            e, f, g, h = of_four(n - 4, r[4], r[5], r[6], r[7], e, f, g, h, codes, scales, at, wide)
        return a, b, c, d, e, f, g, h

    return by_twos if pairs > 4 or coding.low_bits == 8 else by_fours


def _scales(coding):
    """(words of a unit) -> what the terms want."""
    scales, blocks = scales_of(coding), blocks_of(coding)
    if not coding.is_256:
        return scales

    @cuda.jit(device=True)
    def both(words):
        return scales(words), blocks(words)

    return both


def _places(coding):
    """Of a lane in activations, and bytes from one of their rows to the next.

    begin  (q, scale, sums, unit) -> ((address in q, scale, sums), (bytes of their rows))
    near   (places, units that are left, unit) -> places of the last unit, where a lane's own is not there
    on     (places) -> those of the next step
    """
    of_scales, shift = (4, 1) if coding.is_256 else (16, 0)  # bytes, for so many units

    @cuda.jit(device=True)
    def begin(q, scale, sums, u):
        places = (
            address_of(q, 0) + u * 16, address_of(scale, 0) + (u >> shift) * of_scales,
            address_of(sums, 0) + u * 32,
        )  # fmt: skip
        return places, (int32(q.shape[1] * 4), int32(scale.shape[1] * 4), int32(sums.shape[1] * 4))

    @cuda.jit(device=True)
    def near(places, left, u):
        last = min(u, int32(left - 1))
        return (
            places[0] - (u - last) * 16, places[1] - ((u >> shift) - (last >> shift)) * of_scales,
            places[2] - (u - last) * 32,
        )  # fmt: skip

    @cuda.jit(device=True)
    def on(places):
        return (
            places[0] + UNITS * 128, places[1] + (UNITS >> shift) * of_scales, places[2] + UNITS * 32
        )  # fmt: skip

    return begin, near, on


@cuda.jit(device=True)
def _of_token(acc, k):
    """acc[k] of eight."""
    a, b, c, d, e, f, g, h = acc
    if k & 1:
        a, c, e, g = b, d, f, h
    if k & 2:
        a, e = c, g
    return e if k & 4 else a


def _tile(coding, ready):
    """ready: what has to be called before anything is read that an earlier kernel wrote."""
    weights, (begin, near, on) = loads_of(coding), _places(coding)
    weights_begin, weights_load, weights_on = weights.begin, weights.load, weights.on
    codes_of_unit, scales, step = codes_of(coding).of_unit, _scales(coding), _step(coding)
    is_256, is_far = coding.is_256, coding.low_bits < 8

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, slots, share, out):
        if share != 0:
            ready()
        entries = entries_of(slots, share, out.shape[0], y)
        matrix, n, rows = entries[0], entries[1], entries[2:]
        if matrix < 0:
            return
        M, left = out.shape[1], int32(scale.shape[1] * 2 if is_256 else scale.shape[1] >> 2)
        row, u = int32(cuda.threadIdx.x >> 3 & 3), int32(cuda.threadIdx.x & 7)
        tiles, mine = int32((M + ROWS - 1) // ROWS), int32(tile * WARPS + (cuda.threadIdx.x >> 5))
        first = int64(matrix) * tiles + min(mine, tiles - 1)
        ahead = weights_begin(low, high, sub, block, first, left, row, u)
        words = weights_load(ahead, left, row, u)
        more = words
        if is_far:
            ahead = weights_on(ahead)
            more = weights_load(ahead, int32(left - UNITS), row, u)
        if share == 0:
            ready()
        if mine >= tiles:
            return
        places, wide = begin(q, scale, sums, u)
        zero = float32(0)
        acc = (zero, zero, zero, zero, zero, zero, zero, zero)
        while left > 0:
            codes, numbers = codes_of_unit(words), scales(words)
            ahead = weights_on(ahead)
            if is_far:
                words = more
                more = weights_load(ahead, int32(left - 2 * UNITS), row, u)
            else:
                words = weights_load(ahead, int32(left - UNITS), row, u)
            if left < UNITS:
                places = near(places, left, u)
            acc = step(n, rows, acc, codes, numbers, places, wide)
            places = on(places)
            left = int32(left - UNITS)
        m = mine * ROWS + row
        if u < n and m < M:
            out[entry_of(slots, share, u, y), m] = _of_token(acc, u)

    return product


# of two tiles, by a block: (tile, y of the grid, blocks of a matrix, what the kernel is given)
INTEGER = {name: coding for name, coding in CODINGS.items() if not coding.is_plain}
TILES = {name: _tile(coding, at_once) for name, coding in INTEGER.items()}
EARLY_TILES = {name: _tile(coding, when_previous_ended) for name, coding in INTEGER.items()}


def _function(tile):
    def kernel(low, high, sub, block, q, scale, sums, slots, share, out):
        x, y, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        tile(x, y, n, low, high, sub, block, q, scale, sums, slots, share, out)

    return kernel


def _product(name, coding):
    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32[:, ::1], int32, float32[:, ::1],
    )  # fmt: skip
    return Kernel(
        _function(TILES[name]), signature, ("IDP.4A", "LDG.E.NA.128", "FFMA", "SHFL"),
        registers=128, bounds=(THREADS, 8), name=f"linear_{name.lower()}", early=_function(EARLY_TILES[name]),
    )  # fmt: skip


PRODUCTS = {name: _product(name, coding) for name, coding in INTEGER.items()}
KERNELS = tuple(PRODUCTS.values())
