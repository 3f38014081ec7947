"""Products with the experts of a token, and their weighted sum.    definition: refimpl/ops/linear.py, moe.py

What `expert_linear` and `expert_sum` compute, in one launch; fuse.py puts it in their place where few tokens
want it.  Their results lie apart no more, and nobody has to read them with one block.

grid       tiles of 4 weight rows; tokens
block      a warp for each expert of the token: it has a tile of that one's matrix (linear_single.py)
shared     4 rows of each expert; then one thread per row adds them up, in the order of `expert_sum`
traffic    weights that two tokens want are read twice
"""

from functools import cache

from numba import cuda, float32, int32, uint16

from fastpath.cuda import linear
from fastpath.cuda.intrinsics import add32, fma_rn, mul32, mul_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS
from fastpath.cuda.linear_single import activations_of, walk_of
from fastpath.cuda.unit import loads_of

MOST_EXPERTS = 8  # of a token: a warp each
MOST_TOKENS = 2
SUMS = MOST_EXPERTS * ROWS


def fits(n_tokens, n_active):
    return n_tokens <= MOST_TOKENS and n_active <= MOST_EXPERTS


@cache
def kernel_of(name):
    """For weights of a format.  low to sums and share: as the product has them; weights: as the sum."""
    coding = CODINGS[name]
    walk, load, activations = walk_of(coding), loads_of(coding).load, activations_of(coding)

    def kernel(low, high, sub, block, q, scale, sums, ids, share, weights, out):
        parts = cuda.shared.array(SUMS, float32)
        tile, t, M, A = int32(cuda.blockIdx.x), cuda.blockIdx.y, out.shape[1], int32(weights.shape[1])
        a, row, u = (
            int32(cuda.threadIdx.x >> 5),
            int32(cuda.threadIdx.x >> 3 & 3),
            int32(cuda.threadIdx.x & 7),
        )
        x, planes = activations(q, scale, sums), (low, high, sub, block)
        entry, tiles = int32(t * A + a), int32((M + ROWS - 1) // ROWS)
        unit = mul32(add32(mul32(ids[entry], tiles), tile), x[3])
        words, r = load(planes, unit, x[3], row, u), entry if share == 1 else int32(t)
        _, value = walk(words, planes, unit, r, x, row, u, (planes, unit, int32(0)))
        if u == 0:
            parts[a * ROWS + row] = value
        cuda.syncthreads()
        m = tile * ROWS + cuda.threadIdx.x
        if cuda.threadIdx.x < ROWS and m < M:
            total = mul_rn(parts[cuda.threadIdx.x], weights[t, 0])
            for a in range(1, A):
                total = fma_rn(parts[a * ROWS + cuda.threadIdx.x], weights[t, a], total)
            out[t, m] = total

    half, rows = uint16[::1], float32[:, ::1]
    signature = (
        int32[::1], int32[::1], half, half, int32[:, ::1], rows, int32[:, ::1],
        int32[::1], int32, rows, rows,
    )  # fmt: skip
    product = linear.PRODUCTS[name]
    return Kernel(
        kernel, signature, product.wants, registers=product.registers, bounds=(32 * MOST_EXPERTS, 2),
        name=f"fused_{product.name}_expert_sum",
    )  # fmt: skip
