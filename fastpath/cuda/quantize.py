"""Activations rounded to int8 on CUDA.        definition: refimpl/ops/integer.py, round_activations

grid       blocks of 32 or 256 values, four to a thread block; tokens
block      a warp per block of values; a lane has 1 or 8 of them, 32 apart
traffic    4 bytes read, 1.4 written per value, whole sectors
arithmetic exactly the definition's: the largest magnitude by comparisons, a division, a product, one rounding
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int8, int32

from fastpath.cuda import device
from fastpath.cuda.intrinsics import add32, round_to_int
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import COLUMNS, UNIT, UNITS, padded_columns
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 4


class Rounded(NamedTuple):
    """
    q      i8[T, C"]       C' = C to the next multiple of 256, C" to one of 1024; 0 from C to C', anything
                           behind.  1024 values lie as a warp reads them (layout.py): of 8 units of 128
                           columns the first 16 values of each, the second 16 of each, ...
    scale  f32[T, C'/block size]
    sums   i32[T, C'/16]   of 16 values of q
    """

    q: object
    scale: object
    sums: object


def round_activations(x, block_size):
    """x f32[T, C] -> Rounded."""
    T, C = x.shape
    padded = padded_columns(C)
    new = device.current().empty
    rounded = Rounded(
        new((T, -(-padded // COLUMNS) * COLUMNS), np.int8),
        new((T, padded // block_size), np.float32),
        new((T, padded // 16), np.int32),
    )
    kernel = ROUND_256 if block_size == 256 else ROUND_32
    grid = -(-padded // block_size // WARPS), T
    device.current().launch(kernel, grid, 32 * WARPS, x, *rounded)
    return rounded


@cuda.jit(device=True)
def place_of(c):
    """Where value c of a row lies: 16 values stay together."""
    unit, piece = c // UNIT & (UNITS - 1), c // 16 & (UNIT // 16 - 1)
    return (c & ~(COLUMNS - 1)) + (piece * UNITS + unit) * 16 + (c & 15)


def _block(per_lane):
    @cuda.jit(device=True)
    def block_by_warp(x, x0, C, t, block, q, scale, sums):
        """Block `block` of row t, which is x[x0 : x0 + C]."""
        lane = cuda.threadIdx.x & 31
        values = cuda.local.array(per_lane, float32)
        first = block * 32 * per_lane + lane
        largest = float32(0)
        for i in range(per_lane):
            c = first + 32 * i
            values[i] = x[x0 + c] if c < C else float32(0)
            magnitude = abs(values[i])
            if magnitude > largest or magnitude != magnitude:  # a NaN stays the largest
                largest = magnitude
        for distance in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(WHOLE_WARP, largest, distance)
            if other > largest or other != other:
                largest = other
        block_scale, inverse = float32(0), float32(0)
        if not largest < float32(1e-30):
            block_scale = largest / float32(127)
            if block_scale > float32(0) and largest < float32(np.inf):
                inverse = float32(127) / largest
        for i in range(per_lane):
            code = int32(0)
            if inverse > float32(0):
                code = round_to_int(values[i] * inverse)
            q[t, place_of(first + 32 * i)] = code
            for distance in (8, 4, 2, 1):
                code = add32(code, cuda.shfl_xor_sync(WHOLE_WARP, code, distance))
            if lane & 15 == 0:
                sums[t, (first + 32 * i) >> 4] = code
        if lane == 0:
            scale[t, block] = block_scale

    return block_by_warp


BLOCKS = {32: _block(1), 256: _block(8)}


def _round_kernel(block_size):
    block_by_warp = BLOCKS[block_size]

    def kernel(x, q, scale, sums):
        t, block = cuda.blockIdx.y, cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        if block < scale.shape[1]:
            block_by_warp(x[t], 0, x.shape[1], t, block, q, scale, sums)

    return kernel


_SIGNATURE = (float32[:, ::1], int8[:, ::1], float32[:, ::1], int32[:, ::1])
_WRITES = ("q", "scale", "sums")
ROUND_32 = Kernel(_round_kernel(32), _SIGNATURE, ("SHFL",), name="round_32", writes=_WRITES)
ROUND_256 = Kernel(_round_kernel(256), _SIGNATURE, ("SHFL",), name="round_256", writes=_WRITES)
KERNELS = (ROUND_32, ROUND_256)
