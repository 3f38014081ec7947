"""What a product does while the kernel before it still runs: it asks for the first of its weights.

They come to the second-level cache; nobody writes weights, so nothing depends on when.  One thread of a block
asks, with an instruction for each plane: what a tile has in a plane lies there without gaps (layout.py).
Experts are not chosen yet, so theirs are not asked for.
"""

from numba import cuda, int32, int64

from fastpath.cuda.intrinsics import prefetch_bytes
from fastpath.cuda.layout import LANES

STEPS = 16  # two of each of a block's 8 warps: what they load before they need the first


def of_step(coding):
    """(words of low, words of high, halves of sub) that a step of a warp has."""
    halves = 0 if coding.is_plain else LANES * (2 if coding.scales == "d m" else 1)
    return coding.low_bits * LANES, coding.high_bits * LANES, halves


def ahead_of(coding, is_float):
    """(tile, the arguments of a product): a device function.

    is_float  of linear_float.py, whose activations are numbers; else of linear.py
    """
    words_low, words_high, halves = of_step(coding)

    @cuda.jit(device=True)
    def of_tile(tile, steps, low, high, sub, share):
        if share != 0 or cuda.threadIdx.x != 0:
            return
        first, n = int64(tile) * steps, int32(min(steps, STEPS))
        prefetch_bytes(low, first * words_low, n * int32(4 * words_low))
        if words_high:
            prefetch_bytes(high, first * words_high, n * int32(4 * words_high))
        if halves:
            prefetch_bytes(sub, first * halves, n * int32(2 * halves))

    if is_float:

        @cuda.jit(device=True)
        def ahead(tile, low, high, sub, block, x, slots, share, out):
            of_tile(tile, x.shape[1] >> 8, low, high, sub, share)

    else:

        @cuda.jit(device=True)
        def ahead(tile, low, high, sub, block, q, scale, sums, n_blocks, slots, share, out):
            of_tile(tile, q.shape[1] >> 6, low, high, sub, share)

    return ahead
