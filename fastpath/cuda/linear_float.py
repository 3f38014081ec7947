"""Products of float32 activations with weights of any format on CUDA.     definition: refimpl/ops/linear.py

grid       tiles of 4 weight rows; groups of 4 tokens, or slots of experts (grouping.py)
block      8 warps.  A warp's step is 4 rows times 256 columns (layout.py), step w, w + 8, ... of the tile
arithmetic weights become float32 as their format says; one fma per product, columns of a lane ascending; 8
           lanes are added up, then the warps, ascending
traffic    weights are read once for 4 tokens, 16 bytes per lane and load; activations are laid out first
           as lanes read them, and come from the caches

The result of a row does not depend on other rows or other tokens.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.grouping import TOKENS, entries_of, entry_of
from fastpath.cuda.intrinsics import as_f32, load_v4
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, COLUMNS, ROWS, padded_columns
from fastpath.cuda.values import values_of
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 8
THREADS = 32 * WARPS
SUMS = WARPS * TOKENS * ROWS
ACCUMULATORS = TOKENS


def multiply(x, weight, slots, share, out):
    """x f32[rows, C]; weight layout.DeviceMatrix; out f32[rows, M]; for slots and share see grouping.py."""
    T, C = x.shape
    padded = padded_columns(C)
    laid = device.current().empty((T, padded), np.float32)
    device.current().launch(SPREAD, (padded // COLUMNS, T), COLUMNS, x, laid)
    n = len(slots) if share else -(-T // TOKENS)
    grid = weight.n_tiles, n
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, laid, slots, np.int32(share), out)


@cuda.jit(device=True)
def column_of(place):
    """Piece i of 4 columns of sub-block j of 256 columns goes to place 8i + j."""
    i = place & (COLUMNS - 1)
    return place - i + (i >> 2 & 7) * 32 + (i >> 5) * 4 + (i & 3)


def _spread_kernel(x, out):
    """Zeros behind the last column."""
    t, C, place = cuda.blockIdx.y, x.shape[1], cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x
    c = column_of(place)
    out[t, place] = x[t, c] if c < C else float32(0)


def _product(coding):
    load, four = values_of(coding)

    @cuda.jit(device=True)
    def product(tile, y, n_tiles, low, high, sub, block, x, slots, share, out):
        sums = cuda.shared.array(SUMS, float32)
        matrix, n_tokens, r0, r1, r2, r3 = entries_of(slots, share, out.shape[0], y)
        if matrix < 0:
            return
        rows = (r0, r1, r2, r3)
        steps = x.shape[1] // COLUMNS
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        base = (int64(matrix) * n_tiles + tile) * steps
        acc = cuda.local.array(ACCUMULATORS, float32)
        for t in range(TOKENS):
            acc[t] = float32(0)
        for step in range(warp, steps, WARPS):
            loaded = load(low, high, sub, block, base + step, lane)
            for i in range(8):
                w = four(loaded, i)
                for t in range(TOKENS):
                    if t < n_tokens:
                        at = int64(rows[t]) * x.shape[1] + step * COLUMNS + i * 32 + (lane & 7) * 4
                        v = load_v4(x, at)
                        acc[t] += w[0] * as_f32(v[0])
                        acc[t] += w[1] * as_f32(v[1])
                        acc[t] += w[2] * as_f32(v[2])
                        acc[t] += w[3] * as_f32(v[3])
        for t in range(TOKENS):
            total = acc[t]
            for distance in (4, 2, 1):
                total += cuda.shfl_xor_sync(WHOLE_WARP, total, distance)
            if lane & 7 == t:
                sums[warp * TOKENS * ROWS + t * ROWS + (lane >> 3)] = total
        cuda.syncthreads()
        t, m = cuda.threadIdx.x >> 2, tile * ROWS + (cuda.threadIdx.x & 3)
        if t < n_tokens and m < out.shape[1]:
            total = float32(0)
            for w in range(WARPS):
                total += sums[w * TOKENS * ROWS + cuda.threadIdx.x]
            out[entry_of(slots, share, t, y), m] = total

    return product


TILES = {name: _product(coding) for name, coding in CODINGS.items()}  # as in linear.py


def _kernel(name, coding):
    tile = TILES[name]

    def kernel(low, high, sub, block, x, slots, share, out):
        tile(cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x, low, high, sub, block, x, slots, share, out)

    half, rows = uint16[::1], float32[:, ::1]
    signature = int32[::1], int32[::1], half, half, rows, int32[:, ::1], int32, rows
    load = "LDG.E.NA.64" if coding.low_bits == 2 else "LDG.E.NA.128"
    return Kernel(kernel, signature, (load, "FFMA"), registers=128, name=f"float_{name.lower()}")


_ROWS = float32[:, ::1]
SPREAD = Kernel(_spread_kernel, (_ROWS, _ROWS))
PRODUCTS = {name: _kernel(name, coding) for name, coding in CODINGS.items()}
KERNELS = (SPREAD, *PRODUCTS.values())
