"""Products with quantised matrices on CUDA.        definition: refimpl/ops/linear.py, integer.py

grid       tiles of 4 weight rows; groups of 4 tokens, or slots of experts (grouping.py)
block      8 warps.  A warp's step is 4 rows times 256 columns (layout.py), step w, w + 8, ... of the tile
arithmetic dp4a: exact integer sums per block of the format, in any order.  Then the definition's chain of
           float32 roundings: blocks ascending, one fma after the other.  A lane has one row of one token
shared     the numbers of 8 steps that the chain wants, twice: while warp 0 adds up one half, all others fill
           the other; one barrier between
traffic    weights are read once for 4 tokens, 16 bytes per lane and load, the next step's before this one's
           are used; activations come from the caches

The result of a row does not depend on other rows, other tokens or the number of warps.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device, linear_float, linear_many
from fastpath.cuda.codes import codes_of, scales_of
from fastpath.cuda.grouping import MAX_EXPERTS, TOKENS, entries_of, entry_of, no_slots, slots_of
from fastpath.cuda.intrinsics import add32, dp4a_s8, f16_to_f32, fma_rn, load_v2, load_v4, mul32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, SUB_BLOCKS, on_device
from fastpath.cuda.quantize import round_activations
from fastpath.cuda.warp import sum_of_8

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
def _dot(words, q, t, place):
    """32 codes in 8 words times the activations of token t, which lie in two pieces (quantize.Rounded)."""
    first, second = load_v4(q, t * q.shape[1] + place), load_v4(q, t * q.shape[1] + place + 32)
    total = int32(0)
    for i in range(4):
        total = dp4a_s8(words[i], first[i], total)
    for i in range(4):
        total = dp4a_s8(words[i + 4], second[i], total)
    return total


@cuda.jit(device=True)
def _dots_of_16(words, q, t, place):
    """The same for either half."""
    first, second = load_v4(q, t * q.shape[1] + place), load_v4(q, t * q.shape[1] + place + 32)
    low, high = int32(0), int32(0)
    for i in range(4):
        low = dp4a_s8(words[i], first[i], low)
    for i in range(4):
        high = dp4a_s8(words[i + 4], second[i], high)
    return low, high


BLOCKS_32 = WARPS * SUB_BLOCKS  # that a thread block does between two barriers
PLANE_32 = BLOCKS_32 * ROWS + ROWS  # of one token; the padding spreads tokens over the banks
HALF_32 = TOKENS * PLANE_32
SHARED_32 = 2 * HALF_32


def _product_32(coding):
    """For formats of 32 values: every lane's 32 columns are a block with scales of its own."""
    load_codes, load_scales = codes_of(coding), scales_of(coding)
    offset, has_minimum = coding.offset, coding.has_minimum
    shared_m = SHARED_32 if has_minimum else 1

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
        dots, factors = cuda.shared.array(SHARED_32, float32), cuda.shared.array(SHARED_32, float32)
        totals, minima = cuda.shared.array(shared_m, float32), cuda.shared.array(shared_m, float32)
        M = out.shape[1]
        matrix, n_tokens, r0, r1, r2, r3 = entries_of(slots, share, out.shape[0], y)
        if matrix < 0:
            return
        rows = (r0, r1, r2, r3)
        steps = q.shape[1] // 64
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row, j = lane >> 3, lane & 7
        base = (int64(matrix) * n_tiles + tile) * steps
        acc = float32(0)
        half = 0
        codes = load_codes(low, high, base + min(warp, steps - 1), lane)
        for first in range(0, steps, WARPS):
            step = first + warp
            following = load_codes(low, high, base + min(step + WARPS, steps - 1), lane)
            if step < steps:
                d, m = load_scales(sub, base + step, lane)
                b = step * SUB_BLOCKS + j
                place = half + (warp * SUB_BLOCKS + j) * ROWS + row
                for t in range(TOKENS):
                    if t < n_tokens:
                        total = _dot(codes, q, rows[t], step * 64 + j * 4)
                        x_scale = scale[rows[t], b]
                        x0, x1 = load_v2(sums, rows[t] * sums.shape[1] + 2 * b)
                        of_x = add32(x0, x1)
                        if offset:
                            total = add32(total, mul32(of_x, int32(-offset)))
                        dots[place + t * PLANE_32] = float32(total)
                        factors[place + t * PLANE_32] = d * x_scale
                        if has_minimum:
                            totals[place + t * PLANE_32] = float32(of_x)
                            minima[place + t * PLANE_32] = m * x_scale
            cuda.syncthreads()
            if cuda.threadIdx.x < ROWS * TOKENS:
                place = half + (lane >> 2) * PLANE_32 + (lane & 3)
                for _ in range(min(BLOCKS_32, n_blocks - first * SUB_BLOCKS)):
                    acc = fma_rn(dots[place], factors[place], acc)
                    if has_minimum:
                        acc = fma_rn(totals[place], minima[place], acc)
                    place += ROWS
            half = HALF_32 - half
            codes = following
        m = tile * ROWS + (lane & 3)
        if cuda.threadIdx.x < ROWS * TOKENS and lane >> 2 < n_tokens and m < M:
            out[entry_of(slots, share, lane >> 2, y), m] = acc

    return product


PLANE_256 = WARPS * ROWS + ROWS
HALF_256 = TOKENS * PLANE_256
SHARED_256 = 2 * HALF_256


def _product_256(coding):
    """For formats of 256 values: 8 lanes have the sub-blocks of a block, and add up their integers."""
    load_codes, load_scales = codes_of(coding), scales_of(coding)
    offset, has_minimum, is_16 = coding.offset, coding.has_minimum, coding.scales.startswith("16")
    shared_m = SHARED_256 if has_minimum else 1
    planes = 2 if has_minimum else 1

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
        dots, factors = cuda.shared.array(SHARED_256, float32), cuda.shared.array(SHARED_256, float32)
        totals, minima = cuda.shared.array(shared_m, float32), cuda.shared.array(shared_m, float32)
        M = out.shape[1]
        matrix, n_tokens, r0, r1, r2, r3 = entries_of(slots, share, out.shape[0], y)
        if matrix < 0:
            return
        rows = (r0, r1, r2, r3)
        steps = q.shape[1] // 64
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row, j = lane >> 3, lane & 7
        base = (int64(matrix) * n_tiles + tile) * steps
        acc = float32(0)
        half = 0
        codes = load_codes(low, high, base + min(warp, steps - 1), lane)
        for first in range(0, steps, WARPS):
            step = first + warp
            following = load_codes(low, high, base + min(step + WARPS, steps - 1), lane)
            if step < steps:
                sc0, sc1, mn0, mn1 = load_scales(sub, base + step, lane)
                at = ((base + step) * planes) * ROWS + row
                d = f16_to_f32(int32(block[at]))
                place = half + warp * ROWS + row
                column = step * 16 + 2 * j
                for t in range(TOKENS):
                    if t < n_tokens:
                        x0, x1 = load_v2(sums, rows[t] * sums.shape[1] + column)
                        if is_16:
                            dot0, dot1 = _dots_of_16(codes, q, rows[t], step * 64 + j * 4)
                            if offset:
                                dot0 = add32(dot0, mul32(x0, int32(-offset)))
                                dot1 = add32(dot1, mul32(x1, int32(-offset)))
                            total = add32(mul32(sc0, dot0), mul32(sc1, dot1))
                        else:
                            total = mul32(sc0, _dot(codes, q, rows[t], step * 64 + j * 4))
                        total = sum_of_8(total)
                        x_scale = scale[rows[t], step]
                        if has_minimum:
                            of_minima = sum_of_8(add32(mul32(mn0, x0), mul32(mn1, x1)))
                        if j == 0:
                            dots[place + t * PLANE_256] = float32(total)
                            factors[place + t * PLANE_256] = d * x_scale
                            if has_minimum:
                                dmin = f16_to_f32(int32(block[at + ROWS]))
                                totals[place + t * PLANE_256] = float32(of_minima)
                                minima[place + t * PLANE_256] = dmin * -x_scale
            cuda.syncthreads()
            if cuda.threadIdx.x < ROWS * TOKENS:
                place = half + (lane >> 2) * PLANE_256 + (lane & 3)
                for _ in range(min(WARPS, steps - first)):
                    acc = fma_rn(dots[place], factors[place], acc)
                    if has_minimum:
                        acc = fma_rn(totals[place], minima[place], acc)
                    place += ROWS
            half = HALF_256 - half
            codes = following
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
    return Kernel(kernel, signature, ("IDP.4A", load, "FFMA"), registers=96, name=f"linear_{name.lower()}")


PRODUCTS = {name: _product(name, CODINGS[name]) for name in TILES}
KERNELS = tuple(PRODUCTS.values())
