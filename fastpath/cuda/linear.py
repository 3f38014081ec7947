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

The result of a row does not depend on other rows or other tokens.  Where columns are padded, or the last step
has fewer than 8 units, fma adds 0 * 0, which changes nothing: a sum is never -0.
"""

import numpy as np
from numba import cuda, float32, int32, uint16

from fastpath.cuda import device, linear_float, linear_many
from fastpath.cuda.grouping import MAX_EXPERTS, TOKENS, entry_of, no_slots, row_of_lane, slots_of
from fastpath.cuda.intrinsics import (
    add32,
    as_f32,
    dp4a_s8,
    fma_rn,
    loads_at,
    mul32,
    mul_rn,
    of_lane_in_8,
    piece_of,
    sar32,
    shr32,
    sub32,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, UNITS, on_device
from fastpath.cuda.quantize import round_activations
from fastpath.cuda.ready import at_once, when_previous_ended
from fastpath.cuda.tiles import tiles_of
from fastpath.cuda.unit import blocks_of, codes_of, loads_of, scales_of
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 2
# tokens from which tensor cores compute the same: fewer leave most of a tile empty
MANY = 17
MANY_OF_EXPERT = 8  # the same for entries of an expert, on average
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
    ids, share = device.put(expert_ids, np.int32), A if len(x.shape) == 2 else 1
    if T * A >= MANY_OF_EXPERT * E and activations == "int8" and not weight.coding.is_plain:
        rounded = round_activations(x.reshape(-1, C), 256 if weight.coding.is_256 else 32)
        linear_many.multiply_experts(weight, rounded, *tiles_of(ids, E), share, out.reshape(-1, M))
        return out
    _multiply(x.reshape(-1, C), weight, activations, slots_of(ids, E), share, out.reshape(-1, M))
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
    def plain(codes, d, at):
        dots, x = _dots(codes, _load_q(at[0])), _load_four(at[1])
        return (
            number(dots[0]), mul_rn(d[0], as_f32(x[0])), number(dots[1]), mul_rn(d[1], as_f32(x[1])),
            number(dots[2]), mul_rn(d[2], as_f32(x[2])), number(dots[3]), mul_rn(d[3], as_f32(x[3])),
        )  # fmt: skip

    @cuda.jit(device=True)
    def with_minima(codes, d, at):
        a, b, c, e, f, g, h, i = plain(codes, d, at)
        s, x = _by_pairs(_load_sums(at[2])), _load_four(at[1])
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
        def total_of(codes, sc, at):
            return _eight_products(sc, _dots_of_16(codes, _load_q(at[0])))

        @cuda.jit(device=True)
        def minima_of(sc, at):
            return _eight_products(sc[8:], _load_sums(at[2]))

    else:

        @cuda.jit(device=True)
        def total_of(codes, sc, at):
            return _four_products(sc, _dots(codes, _load_q(at[0])))

        @cuda.jit(device=True)
        def minima_of(sc, at):
            return _four_products(sc[4:], _by_pairs(_load_sums(at[2])))

    @cuda.jit(device=True)
    def plain(codes, scales, at):
        sc, d = scales
        total = _of_both(total_of(codes, sc, at))
        return float32(sar32(total, shift) if shift else total), mul_rn(d[0], as_f32(_load_one(at[1])[0]))

    @cuda.jit(device=True)
    def with_minima(codes, scales, at):
        sc, d = scales
        total, minima = _of_both(total_of(codes, sc, at)), _of_both(minima_of(sc, at))
        x = as_f32(_load_one(at[1])[0])
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
    """(acc of a token, its terms of this lane, ...) -> acc behind all 8 lanes, for one and for two tokens.

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

    return one, two


def _steps(coding):
    """A step of one token in two parts, so that loads can begin between them, and one of several tokens.

    terms_of_one  (row of x, codes, scales, activations, first unit of the step, the lane's in it) -> terms
    one           (sum, terms) -> sum
    of_many       (n, row of the lane's token, its sum, codes and the rest as above) -> sum.  Lane k keeps row
                  and sum of token k for all.  Two tokens at a time: each mostly waits for its chain
    """
    pairs = (2 if coding.has_minimum else 1) * (1 if coding.is_256 else 4)
    terms_of = _terms_256(coding) if coding.is_256 else _terms_32(coding)
    # terms of two tokens fit into registers, or they do not: many terms, or a table beside them
    one_by_one = pairs > 4 or (pairs == 4 and coding.levels is not None)
    (one, two), places = _chains(pairs, 2 if coding.is_256 else 1), _places(coding)

    @cuda.jit(device=True)
    def terms(k, row, codes, scales, x, first, u):
        return terms_of(codes, scales, places(x, of_lane_in_8(row, k), first, u))

    @cuda.jit(device=True)
    def terms_of_one(row, codes, scales, x, first, u):
        return terms_of(codes, scales, places(x, row, first, u))

    @cuda.jit(device=True)
    def of_many(n, row, acc, codes, scales, x, first, u):
        k, mine = int32(0), int32(cuda.threadIdx.x & 7)
        while k < n:
            if one_by_one or add32(k, 1) == n:
                a = one(of_lane_in_8(acc, k), terms(k, row, codes, scales, x, first, u))
                acc = a if mine == k else acc
                k = add32(k, 1)
            else:
                next = add32(k, 1)
                s = terms(k, row, codes, scales, x, first, u)
                cuda.syncwarp()  # holds back the other's loads, which would take registers
                t = terms(next, row, codes, scales, x, first, u)
                a, b = two(of_lane_in_8(acc, k), s, of_lane_in_8(acc, next), t)
                acc = a if mine == k else b if mine == next else acc
                k = add32(k, 2)
        return acc

    return terms_of_one, one, of_many


def _places(coding):
    """(activations, row, first unit of a step, the lane's in it) -> addresses in q, scale and sums."""
    q_piece, sums_piece = piece_of(16), piece_of(32)
    scale_piece, shift = (piece_of(4), 1) if coding.is_256 else (piece_of(16), 0)

    @cuda.jit(device=True)
    def places(x, row, first, u):
        q, scale, sums, n_units, n_pieces = x
        unit = add32(mul32(row, n_units), add32(first, u))
        piece = add32(mul32(row, n_pieces), add32(mul32(first, int32(UNITS)), u))
        return (
            q_piece(q, piece),
            scale_piece(scale, shr32(unit, shift) if shift else unit),
            sums_piece(sums, unit),
        )

    return places


def _scales(coding):
    """(words of a unit) -> what the terms want."""
    scales, blocks = scales_of(coding), blocks_of(coding)
    if not coding.is_256:
        return scales

    @cuda.jit(device=True)
    def both(words):
        return scales(words), blocks(words)

    return both


def _tile(coding, ready):
    """ready: what has to be called before anything is read that an earlier kernel wrote."""
    load = loads_of(coding).load
    codes_of_unit, scales, (terms, chain, of_many) = codes_of(coding).of_unit, _scales(coding), _steps(coding)
    is_256, is_kept = coding.is_256, coding.low_bits == 8

    @cuda.jit(device=True)
    def load_step(planes, before, first, n_units, row, u):
        return load(planes, add32(before, first), sub32(n_units, first), row, u)

    @cuda.jit(device=True)
    def last(first, n_units, u):
        """The lane's unit of a step, or the last one there is."""
        return min(u, sub32(sub32(n_units, first), 1))

    @cuda.jit(device=True)
    def turn_of_one(words, planes, before, first, row, u, r, acc, x):
        """A step, whose words are here; then its registers wait for those of the step after the next."""
        found = terms(r, codes_of_unit(words), scales(words), x, first, last(first, x[3], u))
        words = load_step(planes, before, add32(first, 2 * UNITS), x[3], row, u)
        return words, chain(acc, found)

    @cuda.jit(device=True)
    def turn_of_many(words, planes, before, first, row, u, n, r, acc, x):
        """The same, but then they wait for those of the next step."""
        n_units, after = x[3], add32(first, UNITS)
        codes, numbers = codes_of_unit(words), scales(words)
        if not is_kept:
            words = load_step(planes, before, after, n_units, row, u)
        acc = of_many(n, r, acc, codes, numbers, x, first, last(first, n_units, u))
        if is_kept:
            words = load_step(planes, before, after, n_units, row, u)
        return words, acc

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, slots, share, out):
        if share != 0:
            ready()
        matrix, n, r = row_of_lane(slots, share, out.shape[0], y)
        M, n_units = out.shape[1], int32(scale.shape[1] * 2 if is_256 else scale.shape[1] >> 2)
        row, u = int32(cuda.threadIdx.x >> 3 & 3), int32(cuda.threadIdx.x & 7)
        tiles, mine = int32((M + ROWS - 1) // ROWS), int32(tile * WARPS + (cuda.threadIdx.x >> 5))
        planes, x = (low, high, sub, block), (q, scale, sums, n_units, int32(q.shape[1] >> 2))
        before = mul32(int32(max(matrix, 0) * tiles + min(mine, tiles - 1)), n_units)
        words = load_step(planes, before, int32(0), n_units, row, u)
        more = words
        if n == 1:
            more = load_step(planes, before, int32(UNITS), n_units, row, u)
        ready()  # whoever has waited before waits no more
        if matrix < 0 or mine >= tiles:
            return
        acc, first = float32(0), int32(0)
        if n == 1:
            while first < n_units:
                words, acc = turn_of_one(words, planes, before, first, row, u, r, acc, x)
                first = add32(first, UNITS)
                if first < n_units:
                    more, acc = turn_of_one(more, planes, before, first, row, u, r, acc, x)
                    first = add32(first, UNITS)
        else:
            while first < n_units:
                words, acc = turn_of_many(words, planes, before, first, row, u, n, r, acc, x)
                first = add32(first, UNITS)
        m = mine * ROWS + row
        if u < n and m < M:
            out[entry_of(slots, share, u, y), m] = acc

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
