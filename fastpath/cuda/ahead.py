"""What a product does while the kernel before it still runs: it asks for the first of its weights.

They come to the second-level cache; nobody writes weights, so nothing depends on when.  One thread of a block
asks, with an instruction for each plane: what a tile has in a plane lies there without gaps (layout.py).
Experts are not chosen yet, so theirs are not asked for.
"""

from numba import cuda, int32, int64

from fastpath.cuda.intrinsics import prefetch_bytes
from fastpath.cuda.layout import ROWS

FIRST = 16  # units of a row: what two steps of a warp load


def ahead_of(coding, is_float):
    """(tile, the arguments of a product): a device function.

    is_float  of linear_float.py, whose activations are numbers; else of linear.py
    """
    words_low, words_high = 4 * ROWS * coding.low_bits, 4 * ROWS * coding.high_bits  # of a unit of all rows
    halves = 0 if coding.is_plain else 4 * ROWS * (2 if coding.scales == "d m" else 1)

    @cuda.jit(device=True)
    def of_tile(tile, n_units, low, high, sub, share):
        if share != 0 or cuda.threadIdx.x != 0:
            return
        first, n = int64(2 * tile) * n_units, int32(min(n_units, FIRST))
        prefetch_bytes(low, first * words_low, n * int32(4 * words_low))
        if words_high:
            prefetch_bytes(high, first * words_high, n * int32(4 * words_high))
        if halves:
            prefetch_bytes(sub, first * halves, n * int32(2 * halves))

    if is_float:

        @cuda.jit(device=True)
        def ahead(tile, low, high, sub, block, x, n_units, slots, share, out):
            of_tile(tile, n_units, low, high, sub, share)

    else:
        per_unit = (2, 1) if coding.is_256 else (1, 4)  # units and scales

        @cuda.jit(device=True)
        def ahead(tile, low, high, sub, block, q, scale, sums, slots, share, out):
            of_tile(tile, scale.shape[1] * per_unit[0] // per_unit[1], low, high, sub, share)

    return ahead
