"""Products with quantised matrices on CUDA.        definition: refimpl/ops/linear.py, integer.py

grid       tiles of 4 weight rows; groups of 4 tokens, or slots of experts (grouping.py)
block      8 warps.  A warp's step is 4 rows times 256 columns (layout.py), step w, w + 8, ... of the tile
arithmetic dp4a: exact integer sums per block of the format, in any order.  Then the definition's chain of
           float32 roundings: blocks ascending, one fma after the other.  A lane has one row of one token
shared     the numbers of 8 steps that the chain wants, twice: while warp 0 adds up one half, all others fill
           the other; one barrier between
traffic    weights are read once for 4 tokens, 16 bytes per lane and load; two steps of a warp are on their
           way at any time, codes and scales, so that four blocks of a multiprocessor keep memory busy;
           activations come from the caches

The result of a row does not depend on other rows, other tokens or the number of warps.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint64

from fastpath.cuda import device, linear_float, linear_many
from fastpath.cuda.codes import scale_words_of, unpacked_of, unpacked_scales_of, words_of
from fastpath.cuda.grouping import MAX_EXPERTS, TOKENS, entries_of, entry_of, no_slots, slots_of
from fastpath.cuda.intrinsics import (
    add32,
    as_f32,
    dp4a_s8,
    f16_to_f32,
    fma_rn,
    load_shared_v4,
    load_v1,
    load_v2,
    load_v4,
    mul32,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, SUB_BLOCKS, on_device
from fastpath.cuda.quantize import round_activations
from fastpath.cuda.warp import WHOLE_WARP, sum_of_8

WARPS = 8
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
    block_size = 256 if weight.coding.is_256 else 32
    rounded = round_activations(x, block_size)
    if not share and len(x) >= MANY:
        linear_many.multiply(weight, rounded, out)
        return
    grid = weight.n_tiles, len(slots) if share else -(-len(x) // TOKENS)
    activation = rounded.q.view(np.int32), rounded.scale, rounded.sums, np.int32(x.shape[1] // block_size)
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, *activation, slots, np.int32(share), out)


@cuda.jit(device=True)
def _dot(words, q, at):
    """32 codes in 8 words times the activations from word `at` on, in two pieces (quantize.Rounded)."""
    low, high = _dots_of_16(words, q, at)
    return add32(low, high)


@cuda.jit(device=True)
def _dots_of_16(words, q, at):
    """The same for either half."""
    first, second = load_v4(q, at), load_v4(q, at + 32)
    low, high = int32(0), int32(0)
    for i in range(4):
        low = dp4a_s8(words[i], first[i], low)
    for i in range(4):
        high = dp4a_s8(words[i + 4], second[i], high)
    return low, high


@cuda.jit(device=True)
def _place(r, width, c):
    """In activations, which are less than 2^31 words (a weight's places take 64 bits): fewer registers."""
    return add32(mul32(int32(r), int32(width)), int32(c))


@cuda.jit(device=True)
def _float_at(array, at):
    return as_f32(load_v1(array, at)[0])


@cuda.jit(device=True)
def _chain(values, factors, at, n, acc):
    """acc + values[at] * factors[at] + ..., one fma after the other, n of them; n < 8 or a multiple of it."""
    for i in range(at, at + (n & ~7), 8):
        x, f = load_shared_v4(values, i), load_shared_v4(factors, i)
        y, g = load_shared_v4(values, i + 4), load_shared_v4(factors, i + 4)
        for k in range(4):
            acc = fma_rn(as_f32(x[k]), as_f32(f[k]), acc)
        for k in range(4):
            acc = fma_rn(as_f32(y[k]), as_f32(g[k]), acc)
    for i in range(at + (n & ~7), at + n):
        acc = fma_rn(values[uint64(i)], factors[uint64(i)], acc)
    return acc


@cuda.jit(device=True)
def _chain_of_two(values, factors, at, apart, n, acc):
    """The same, with a term from `apart` places on behind each."""
    for i in range(at, at + (n & ~3), 4):
        x, f = load_shared_v4(values, i), load_shared_v4(factors, i)
        y, g = load_shared_v4(values, i + apart), load_shared_v4(factors, i + apart)
        for k in range(4):
            acc = fma_rn(as_f32(x[k]), as_f32(f[k]), acc)
            acc = fma_rn(as_f32(y[k]), as_f32(g[k]), acc)
    for i in range(at + (n & ~3), at + n):
        acc = fma_rn(values[uint64(i)], factors[uint64(i)], acc)
        acc = fma_rn(values[uint64(i + apart)], factors[uint64(i + apart)], acc)
    return acc


# Places in shared memory: blocks of a row side by side, for `_chain`.  Rows, tokens and kinds (products,
# minima) are so far apart that neither a warp's stores nor the 16-byte loads of 8 lanes meet in a bank.
BLOCKS_32 = WARPS * SUB_BLOCKS  # that a thread block does between two barriers
ROW_32 = BLOCKS_32 + 8
TOKEN_32 = ROWS * ROW_32 + 4
KIND_32 = TOKENS * TOKEN_32
ROW_256 = WARPS
TOKEN_256 = ROWS * ROW_256 + 4
KIND_256 = TOKENS * TOKEN_256 + 4


def _one_32(coding):
    """What a step gives for one token: its place in shared memory, filled."""
    offset, has_minimum = coding.offset, coding.has_minimum

    @cuda.jit(device=True)
    def one(codes, d, m, q, scale, sums, r, step, j, place, values, factors):
        b = step * SUB_BLOCKS + j
        total = _dot(codes, q, _place(r, q.shape[1], 8 * b - 4 * j))
        x_scale = _float_at(scale, _place(r, scale.shape[1], b))
        if offset or has_minimum:
            x0, x1 = load_v2(sums, _place(r, sums.shape[1], 2 * b))
            of_x = add32(x0, x1)
            if offset:
                total = add32(total, mul32(of_x, int32(-offset)))
            if has_minimum:
                values[uint64(place + KIND_32)] = float32(of_x)
                factors[uint64(place + KIND_32)] = m * x_scale
        values[uint64(place)] = float32(total)
        factors[uint64(place)] = d * x_scale

    return one


def _product_32(coding):
    """For formats of 32 values: every lane's 32 columns are a block with scales of its own."""
    load_codes, unpacked = words_of(coding), unpacked_of(coding)
    load_scales, scales = scale_words_of(coding), unpacked_scales_of(coding)
    one, has_minimum = _one_32(coding), coding.has_minimum
    of_half = KIND_32 * (2 if has_minimum else 1)
    of_shared = 2 * of_half

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
        values = cuda.shared.array(of_shared, float32, alignment=16)
        factors = cuda.shared.array(of_shared, float32, alignment=16)
        M = out.shape[1]
        matrix, n_tokens, r0, r1, r2, r3 = entries_of(slots, share, out.shape[0], y)
        if matrix < 0:
            return
        steps = q.shape[1] // 64
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row, j = lane >> 3, lane & 7
        base = (int64(matrix) * n_tiles + tile) * steps
        acc, half = float32(0), 0
        now = base + min(warp, steps - 1)
        words, of_words = load_codes(low, high, now, lane), load_scales(sub, block, now, lane)
        more, of_more = words, of_words
        if warp + WARPS < steps:
            following = base + warp + WARPS
            more, of_more = load_codes(low, high, following, lane), load_scales(sub, block, following, lane)
        for first in range(0, steps, WARPS):
            step = first + warp
            if step < steps:
                codes = unpacked(words)
                d, m = scales(of_words)
                words, of_words = more, of_more
                if step + 2 * WARPS < steps:
                    following = base + step + 2 * WARPS
                    more, of_more = (
                        load_codes(low, high, following, lane),
                        load_scales(sub, block, following, lane),
                    )
                at = half + row * ROW_32 + warp * SUB_BLOCKS + j
                one(codes, d, m, q, scale, sums, r0, step, j, at, values, factors)
                if n_tokens > 1:
                    one(codes, d, m, q, scale, sums, r1, step, j, at + TOKEN_32, values, factors)
                if n_tokens > 2:
                    one(codes, d, m, q, scale, sums, r2, step, j, at + 2 * TOKEN_32, values, factors)
                if n_tokens > 3:
                    one(codes, d, m, q, scale, sums, r3, step, j, at + 3 * TOKEN_32, values, factors)
            cuda.syncthreads()
            if cuda.threadIdx.x < ROWS * TOKENS and lane >> 2 < n_tokens:
                at = half + (lane >> 2) * TOKEN_32 + (lane & 3) * ROW_32
                n = min(BLOCKS_32, n_blocks - first * SUB_BLOCKS)
                if has_minimum:
                    acc = _chain_of_two(values, factors, at, KIND_32, n, acc)
                else:
                    acc = _chain(values, factors, at, n, acc)
            half = of_half - half
        m = tile * ROWS + (lane & 3)
        if cuda.threadIdx.x < ROWS * TOKENS and lane >> 2 < n_tokens and m < M:
            out[entry_of(slots, share, lane >> 2, y), m] = acc

    return product


@cuda.jit(device=True)
def _sums_of_8(x, y, j):
    """Sums over 8 lanes of x, for lanes of even j, and of y, for those of odd j."""
    is_odd = j & 1 == 1
    mine, others = (y, x) if is_odd else (x, y)
    mine = add32(mine, cuda.shfl_xor_sync(WHOLE_WARP, others, 1))
    mine = add32(mine, cuda.shfl_xor_sync(WHOLE_WARP, mine, 2))
    return add32(mine, cuda.shfl_xor_sync(WHOLE_WARP, mine, 4))


def _one_256(coding):
    offset, has_minimum, is_16 = coding.offset, coding.has_minimum, coding.scales.startswith("16")

    @cuda.jit(device=True)
    def one(codes, parts, d, dmin, q, scale, sums, r, step, j, place, values, factors):
        sc0, sc1, mn0, mn1 = parts
        at = _place(r, q.shape[1], step * 64 + j * 4)
        x_scale = _float_at(scale, _place(r, scale.shape[1], step))
        if offset or has_minimum:
            x0, x1 = load_v2(sums, _place(r, sums.shape[1], step * 16 + 2 * j))
        if is_16:
            dot0, dot1 = _dots_of_16(codes, q, at)
            if offset:
                dot0 = add32(dot0, mul32(x0, int32(-offset)))
                dot1 = add32(dot1, mul32(x1, int32(-offset)))
            total = add32(mul32(sc0, dot0), mul32(sc1, dot1))
        else:
            total = mul32(sc0, _dot(codes, q, at))
        if has_minimum:
            of_minima = add32(mul32(mn0, x0), mul32(mn1, x1)) if is_16 else mul32(mn0, add32(x0, x1))
            total = _sums_of_8(total, of_minima, j)
            if j < 2:  # lane 1 has the minima
                values[uint64(place + j * KIND_256)] = float32(total)
                factors[uint64(place + j * KIND_256)] = d * x_scale if j == 0 else dmin * -x_scale
        else:
            total = sum_of_8(total)
            if j == 0:
                values[uint64(place)] = float32(total)
                factors[uint64(place)] = d * x_scale

    return one


def _product_256(coding):
    """For formats of 256 values: 8 lanes have the sub-blocks of a block, and add up their integers."""
    load_codes, unpacked = words_of(coding), unpacked_of(coding)
    load_scales, scales = scale_words_of(coding), unpacked_scales_of(coding)
    one, has_minimum = _one_256(coding), coding.has_minimum
    of_half = KIND_256 * (2 if has_minimum else 1)
    of_shared = 2 * of_half

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
        values = cuda.shared.array(of_shared, float32, alignment=16)
        factors = cuda.shared.array(of_shared, float32, alignment=16)
        M = out.shape[1]
        matrix, n_tokens, r0, r1, r2, r3 = entries_of(slots, share, out.shape[0], y)
        if matrix < 0:
            return
        steps = q.shape[1] // 64
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row, j = lane >> 3, lane & 7
        base = (int64(matrix) * n_tiles + tile) * steps
        acc, half = float32(0), 0
        now = base + min(warp, steps - 1)
        words, of_words = load_codes(low, high, now, lane), load_scales(sub, block, now, lane)
        more, of_more = words, of_words
        if warp + WARPS < steps:
            following = base + warp + WARPS
            more, of_more = load_codes(low, high, following, lane), load_scales(sub, block, following, lane)
        for first in range(0, steps, WARPS):
            step = first + warp
            if step < steps:
                codes, parts = unpacked(words), scales(of_words)
                d, dmin = f16_to_f32(of_words[1]), f16_to_f32(of_words[2])
                words, of_words = more, of_more
                if step + 2 * WARPS < steps:
                    following = base + step + 2 * WARPS
                    more, of_more = (
                        load_codes(low, high, following, lane),
                        load_scales(sub, block, following, lane),
                    )
                at = half + row * ROW_256 + warp
                one(codes, parts, d, dmin, q, scale, sums, r0, step, j, at, values, factors)
                if n_tokens > 1:
                    one(codes, parts, d, dmin, q, scale, sums, r1, step, j, at + TOKEN_256, values, factors)
                if n_tokens > 2:
                    one(
                        codes,
                        parts,
                        d,
                        dmin,
                        q,
                        scale,
                        sums,
                        r2,
                        step,
                        j,
                        at + 2 * TOKEN_256,
                        values,
                        factors,
                    )
                if n_tokens > 3:
                    one(
                        codes,
                        parts,
                        d,
                        dmin,
                        q,
                        scale,
                        sums,
                        r3,
                        step,
                        j,
                        at + 3 * TOKEN_256,
                        values,
                        factors,
                    )
            cuda.syncthreads()
            if cuda.threadIdx.x < ROWS * TOKENS and lane >> 2 < n_tokens:
                at = half + (lane >> 2) * TOKEN_256 + (lane & 3) * ROW_256
                n = min(WARPS, steps - first)
                if has_minimum:
                    acc = _chain_of_two(values, factors, at, KIND_256, n, acc)
                else:
                    acc = _chain(values, factors, at, n, acc)
            half = of_half - half
        m = tile * ROWS + (lane & 3)
        if cuda.threadIdx.x < ROWS * TOKENS and lane >> 2 < n_tokens and m < M:
            out[entry_of(slots, share, lane >> 2, y), m] = acc

    return product


# of a tile, by a block: (tile, y of the grid, tiles of a matrix, what the kernel is given)
TILES = {
    name: _product_256(coding) if coding.is_256 else _product_32(coding)
    for name, coding in CODINGS.items()
    if not coding.is_plain
}


def _product(name, coding):
    tile = TILES[name]

    def kernel(low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
        x, y, n = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        tile(x, y, n, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out)

    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32, int32[:, ::1], int32, float32[:, ::1],
    )  # fmt: skip
    load = "LDG.E.NA.64" if coding.low_bits == 2 else "LDG.E.NA.128"
    wants, bounds = ("IDP.4A", load, "FFMA"), (THREADS, 4)
    return Kernel(kernel, signature, wants, registers=64, bounds=bounds, name=f"linear_{name.lower()}")


PRODUCTS = {name: _product(name, CODINGS[name]) for name in TILES}
KERNELS = tuple(PRODUCTS.values())
