"""Which tokens meet which expert, for products of many: entries expert after expert, and tiles of up to 64.

Entry t * A + a is what token t asks of its expert number a (as in grouping.py, whose slots of eight are for
few tokens).

grid       one block of 16 warps; a warp has as many entries as any other, one after the other
arithmetic lanes with equal experts find each other (match), so that a warp counts 32 entries at a time; from
           the counts of all warps and experts follows where each begins, and a second pass puts the entries
           there.  Nothing hangs on who comes first: entries of an expert ascend
traffic    all choices, twice
"""

from numba import cuda, int32

from fastpath.cuda import device
from fastpath.cuda.intrinsics import add32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import WHOLE_WARP

ENTRIES = 64  # of a tile
MAX_EXPERTS = 256
WARPS = 16
COUNTS = WARPS * MAX_EXPERTS
OF_EXPERTS = MAX_EXPERTS // 32  # warps that have an expert per lane


def tiles_of(expert_ids, n_experts):
    """expert_ids i32[T, A] -> tiles i32[n, 3], entries i32[T * A].

    A tile is (expert, its first place in `entries`, how many); those that are not needed have expert -1 and
    come last.
    """
    n, new = expert_ids.size, device.current().empty
    tiles, entries = new((min(n, n_experts + n // ENTRIES), 3), "int32"), new((n,), "int32")
    device.current().launch(TILES, 1, 32 * WARPS, expert_ids.reshape(-1), tiles, entries)
    return tiles, entries


def no_tiles():
    """For products with one matrix."""
    new = device.current().empty
    return new((1, 3), "int32"), new((1,), "int32")


@cuda.jit(device=True)
def _expert_of(ids, i):
    return ids[i] if i < ids.size else int32(-1)


@cuda.jit(device=True)
def _before_mine(x, lane, of_warps):
    """Sum of x over the threads before this one, of the first OF_EXPERTS warps; x is an int32."""
    total = x
    for distance in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(WHOLE_WARP, total, distance)
        if lane >= distance:
            total = add32(total, other)
    if lane == 31:
        of_warps[cuda.threadIdx.x >> 5] = total
    cuda.syncthreads()
    for warp in range(OF_EXPERTS):
        if warp < cuda.threadIdx.x >> 5:
            total = add32(total, of_warps[warp])
    return int32(total - x)


def _tiles_kernel(ids, tiles, entries):
    counts = cuda.shared.array(COUNTS, int32)
    of_warps = cuda.shared.array(WARPS, int32)
    tiles_of_warps = cuda.shared.array(WARPS, int32)
    thread, warp, lane = cuda.threadIdx.x, cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    mine, before = warp * MAX_EXPERTS, (1 << lane) - 1
    each = -(-ids.size // (32 * WARPS)) * 32
    start, end = warp * each, min(warp * each + each, ids.size)
    for e in range(lane, MAX_EXPERTS, 32):
        counts[mine + e] = 0
    cuda.syncwarp(WHOLE_WARP)
    for i in range(start, end, 32):
        e = _expert_of(ids, i + lane)
        same = cuda.match_any_sync(WHOLE_WARP, e)
        if e >= 0 and same & before == 0:
            counts[mine + e] += cuda.popc(same)
        cuda.syncwarp(WHOLE_WARP)
    cuda.syncthreads()

    n = int32(0)
    if thread < MAX_EXPERTS:
        for w in range(WARPS):
            count = counts[w * MAX_EXPERTS + thread]
            counts[w * MAX_EXPERTS + thread] = n  # those of warps before
            n = add32(n, count)
    n_tiles = int32((n + ENTRIES - 1) // ENTRIES)
    first, tile = _before_mine(n, lane, of_warps), _before_mine(n_tiles, lane, tiles_of_warps)
    if thread < MAX_EXPERTS:
        for w in range(WARPS):
            counts[w * MAX_EXPERTS + thread] += first
        for k in range(n_tiles):
            tiles[tile + k, 0], tiles[tile + k, 1] = thread, first + ENTRIES * k
            tiles[tile + k, 2] = min(ENTRIES, n - ENTRIES * k)
    needed = int32(0)
    for w in range(OF_EXPERTS):
        needed = add32(needed, tiles_of_warps[w])
    for k in range(needed + thread, tiles.shape[0], 32 * WARPS):
        tiles[k, 0] = tiles[k, 1] = tiles[k, 2] = -1
    cuda.syncthreads()

    for i in range(start, end, 32):
        e = _expert_of(ids, i + lane)
        same = cuda.match_any_sync(WHOLE_WARP, e)
        if e >= 0:
            entries[counts[mine + e] + cuda.popc(same & before)] = i + lane
        cuda.syncwarp(WHOLE_WARP)
        if e >= 0 and same & before == 0:
            counts[mine + e] += cuda.popc(same)
        cuda.syncwarp(WHOLE_WARP)


TILES = Kernel(
    _tiles_kernel, (int32[::1], int32[:, ::1], int32[::1]), ("MATCH",), name="tiles_of_experts",
    writes=("tiles", "entries"),
)  # fmt: skip
KERNELS = (TILES,)
