"""Sums over a warp and over a block, in one order."""

from numba import cuda, float32

from fastpath.cuda.intrinsics import add32

WHOLE_WARP = 0xFFFFFFFF
MAX_WARPS = 32


@cuda.jit(device=True)
def warp_sum(x):
    """Of a float32 of every lane: halves are added to halves, 16 lanes apart first."""
    x += cuda.shfl_xor_sync(WHOLE_WARP, x, 16)  # a loop over distances stays one, of 30 instructions a turn
    x += cuda.shfl_xor_sync(WHOLE_WARP, x, 8)
    x += cuda.shfl_xor_sync(WHOLE_WARP, x, 4)
    x += cuda.shfl_xor_sync(WHOLE_WARP, x, 2)
    return x + cuda.shfl_xor_sync(WHOLE_WARP, x, 1)


@cuda.jit(device=True)
def warp_max(x):
    """Of a number of every lane; all of them get it."""
    x = max(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 16))
    x = max(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 8))
    x = max(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 4))
    x = max(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 2))
    return max(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 1))


@cuda.jit(device=True)
def block_sum(x, partial):
    """Of a float32 of every thread; warps are added in ascending order.  partial: shared, f32[MAX_WARPS]."""
    return sum_of_warps(x, partial, cuda.blockDim.x >> 5)


@cuda.jit(device=True)
def sum_of_warps(x, partial, n_warps):
    """The same over the first warps of a block, for all of it."""
    x = warp_sum(x)
    if cuda.threadIdx.x & 31 == 0:
        partial[cuda.threadIdx.x >> 5] = x
    cuda.syncthreads()
    total = float32(0)
    for warp in range(n_warps):
        total += partial[warp]
    cuda.syncthreads()
    return total


@cuda.jit(device=True)
def sum_of_8(x):
    """Of an int32 of each of 8 lanes side by side; all of them get it."""
    x = add32(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 1))
    x = add32(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 2))
    return add32(x, cuda.shfl_xor_sync(WHOLE_WARP, x, 4))
