"""Sums of integers that products of few and of some tokens have in common."""

from numba import cuda

from fastpath.cuda.intrinsics import add32, mul32


@cuda.jit(device=True)
def by_pairs(s):
    """Sums of 16 -> of 32."""
    return add32(s[0], s[1]), add32(s[2], s[3]), add32(s[4], s[5]), add32(s[6], s[7])


@cuda.jit(device=True)
def four_products(a, b):
    total = add32(add32(mul32(a[0], b[0]), mul32(a[1], b[1])), mul32(a[2], b[2]))
    return add32(total, mul32(a[3], b[3]))


@cuda.jit(device=True)
def eight_products(a, b):
    return add32(four_products(a[:4], b[:4]), four_products(a[4:8], b[4:8]))
