"""exp and tanh of 16 floats.  Polynomials of our own: the same bits on every CPU and in every lane.

Errors measured against float64 (tests/parity/test_vector_math.py): exp 1.0, tanh 1.3 units
in the last place.
"""

import numba

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import (
    abs_f32,
    add_f32,
    copysign_f32,
    div_f32,
    f32_to_i32,
    fma_f32,
    less_f32,
    max_f32,
    mul_f32,
    power_of_two,
    round_f32,
    splat_f32,
    sub_f32,
)

F32 = numba.float32

LOG2_E = F32(1.4426950408889634)
LN2_HIGH = F32(0.693359375)  # few bits: its product with an exponent is exact
LN2_LOW = F32(-2.12194440e-4)
EXP_LOW, EXP_HIGH = F32(-87.0), F32(88.0)  # between these 2**n has a normal exponent
# (exp(r) - 1 - r) / r^2 on |r| < ln(2)/2, and (tanh(z)/z - 1) / z^2 in z^2 on |z| < 0.625
E0, E1, E2 = F32(1.9875691500e-4), F32(1.3981999507e-3), F32(8.3334519073e-3)
E3, E4, E5 = F32(4.1665795894e-2), F32(1.6666665459e-1), F32(5.0000001201e-1)
H0, H1, H2 = F32(-5.70498872745e-3), F32(2.06390887954e-2), F32(-5.37397155531e-2)
H3, H4 = F32(1.33314422036e-1), F32(-3.33332819422e-1)


@helper
def exp(x):
    """e**x for |x| up to 87; beyond that the value at the limit; NaN stays NaN, so that it is noticed."""
    low, high = splat_f32(EXP_LOW), splat_f32(EXP_HIGH)
    x = less_f32(x, low, low, less_f32(high, x, high, x))
    n = round_f32(mul_f32(max_f32(x, low), splat_f32(LOG2_E)))  # of NaN too: an integer needs a number
    r = fma_f32(n, splat_f32(-LN2_HIGH), x)
    r = fma_f32(n, splat_f32(-LN2_LOW), r)
    p = fma_f32(splat_f32(E0), r, splat_f32(E1))
    p = fma_f32(p, r, splat_f32(E2))
    p = fma_f32(p, r, splat_f32(E3))
    p = fma_f32(p, r, splat_f32(E4))
    p = fma_f32(p, r, splat_f32(E5))
    p = add_f32(fma_f32(mul_f32(r, r), p, r), splat_f32(F32(1.0)))
    return mul_f32(p, power_of_two(f32_to_i32(n)))


@helper
def exp_or_zero(x):
    """e**x for x <= 0, and 0 below -87: what softmax needs."""
    return less_f32(x, splat_f32(EXP_LOW), splat_f32(F32(0.0)), exp(x))


@helper
def tanh(x):
    z = abs_f32(x)
    z2 = mul_f32(z, z)
    p = fma_f32(splat_f32(H0), z2, splat_f32(H1))
    p = fma_f32(p, z2, splat_f32(H2))
    p = fma_f32(p, z2, splat_f32(H3))
    p = fma_f32(p, z2, splat_f32(H4))
    small = fma_f32(mul_f32(p, z2), z, z)
    one = splat_f32(F32(1.0))
    large = sub_f32(one, div_f32(splat_f32(F32(2.0)), add_f32(exp(add_f32(z, z)), one)))
    return copysign_f32(less_f32(z, splat_f32(F32(0.625)), small, large), x)
