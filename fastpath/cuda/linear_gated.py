"""Two products of one row, their gate, its rounding.    definition: refimpl/ops, linear, activation, integer

What `linear` twice, `geglu` and the rounding for the next product compute, in one launch; fuse.py puts it in
their place for a single token.

grid       blocks of 32 rows of either matrix
block      4 warps: a warp has a tile of 4 rows of the one matrix and of the other, twice (linear_single.py).
           More warps would not all find room at once, and the last ones would run with few others
shared     the 32 rows' products; then the first warp gates and rounds them, a row to a lane
start      the first weights are loaded before the wait for the kernel before
"""

from functools import cache

from numba import cuda, float32, int8, int32, uint16

from fastpath.cuda import linear
from fastpath.cuda.activation import geglu_of
from fastpath.cuda.intrinsics import mul32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS
from fastpath.cuda.linear_single import activations_of, walk_of
from fastpath.cuda.quantize import BLOCKS
from fastpath.cuda.ready import at_once, when_previous_ended
from fastpath.cuda.unit import loads_of

BLOCK = 32  # rows of a thread block: values that are rounded together
TURNS = 2  # tiles of a warp
WARPS = BLOCK // ROWS // TURNS
THREADS = 32 * WARPS
BOTH = 2 * BLOCK


def _function(coding, ready):
    walk, load, activations = walk_of(coding), loads_of(coding).load, activations_of(coding)
    round_by_warp = BLOCKS[BLOCK]

    def kernel(
        low, high, sub, block, low2, high2, sub2, block2, q, scale, sums, M, q_out, scale_out, sums_out
    ):
        """The first four planes are the gate's."""
        values = cuda.shared.array(BOTH, float32)
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        row, u = int32(lane >> 3), int32(lane & 7)
        gate, up, x = (low, high, sub, block), (low2, high2, sub2, block2), activations(q, scale, sums)
        n_tiles, n_units = int32((M + ROWS - 1) // ROWS), x[3]
        tile, place = int32(cuda.blockIdx.x * (WARPS * TURNS) + warp), int32(warp * ROWS + row)
        unit = mul32(min(tile, int32(n_tiles - 1)), n_units)
        words = load(gate, unit, n_units, row, u)
        ready()
        for turn in range(int32(TURNS)):
            tile = int32(tile + WARPS)
            following = mul32(min(tile, int32(n_tiles - 1)), n_units)
            left = n_units if turn < TURNS - 1 else int32(0)
            words, of_gate = walk(words, gate, unit, int32(0), x, row, u, (up, unit, n_units))
            words, of_up = walk(words, up, unit, int32(0), x, row, u, (gate, following, left))
            if u == 0:
                values[place] = of_gate
                values[BLOCK + place] = of_up
            unit, place = following, int32(place + WARPS * ROWS)
        cuda.syncthreads()
        if warp == 0:
            first = cuda.blockIdx.x * BLOCK
            values[lane] = geglu_of(values[lane], values[BLOCK + lane])
            round_by_warp(values, -first, M, 0, cuda.blockIdx.x, q_out, scale_out, sums_out)

    return kernel


@cache
def kernel_of(name):
    """For weights of a format."""
    coding, product, half = CODINGS[name], linear.PRODUCTS[name], uint16[::1]
    planes = int32[::1], int32[::1], half, half
    rounded = float32[:, ::1], int32[:, ::1]
    signature = (*planes, *planes, int32[:, ::1], *rounded, int32, int8[:, ::1], *rounded)
    return Kernel(
        _function(coding, at_once), signature, (*product.wants, "MUFU.EX2"), registers=product.registers,
        bounds=(THREADS, 4), name=f"fused_2_{product.name}_geglu_round_32",
        writes=("q_out", "scale_out", "sums_out"), early=_function(coding, when_previous_ended),
    )  # fmt: skip
