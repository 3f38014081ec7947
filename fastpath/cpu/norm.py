"""RMSNorm and LayerNorm.        definition: refimpl/ops/norm.py

work item   one row
arithmetic  sums, and sums of squares, in 16 lanes, added in the fixed order of simd.sum_f32; what the
            sum of thousands of large numbers lost of a mean, the sum of the centred ones finds: pixels of
            a smooth patch differ by little
traffic     a row is read once from memory, then from the caches
"""

import numba

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, output, shaped
from fastpath.cpu.kernel import f32_word, kernel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    fma_f32,
    keep_f32,
    ld_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    mul_f32,
    splat_f32,
    sqrt_f32,
    store_f32,
    store_first_f32,
    sub_f32,
    sum_f32,
)

F32 = numba.float32
VALUES_PER_PIECE = 1 << 13


@kernel
def _rms_norm_kernel(args, lo, hi, thread):
    x, weight, out, width, eps = (
        ld_i64(args),
        ld_i64(args + 8),
        ld_i64(args + 16),
        ld_i64(args + 24),
        args + 32,
    )
    whole = width // 16 * 64
    rest = width % 16
    for row in range(lo, hi):
        source, target = x + 4 * width * row, out + 4 * width * row
        squares = splat_f32(F32(0.0))
        for c in range(0, whole, 64):
            v = load_f32(source + c)
            squares = fma_f32(v, v, squares)
        if rest:
            v = load_first_f32(source + whole, rest)
            squares = fma_f32(v, v, squares)
        mean = sum_f32(squares) / F32(width)
        rms = sqrt_f32(add_f32(splat_f32(mean), splat_f32(ld_f32(eps))))
        factor = div_f32(splat_f32(F32(1.0)), rms)
        for c in range(0, whole, 64):
            v = mul_f32(load_f32(source + c), factor)
            if weight:
                v = mul_f32(v, load_f32(weight + c))
            store_f32(target + c, v)
        if rest:
            v = mul_f32(load_first_f32(source + whole, rest), factor)
            if weight:
                v = mul_f32(v, load_first_f32(weight + whole, rest))
            store_first_f32(target + whole, rest, v)


@kernel
def _layer_norm_kernel(args, lo, hi, thread):
    x, weight, bias, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    width, eps = ld_i64(args + 32), ld_f32(args + 40)
    zero, one = splat_f32(F32(0.0)), splat_f32(F32(1.0))
    for row in range(lo, hi):
        source, target = x + 4 * width * row, out + 4 * width * row
        total, left, squares = zero, zero, zero
        for c in range(0, width, 16):
            total = add_f32(total, load_first_f32(source + 4 * c, min(16, width - c)))
        mean = splat_f32(sum_f32(total) / F32(width))
        for c in range(0, width, 16):
            v = sub_f32(load_first_f32(source + 4 * c, min(16, width - c)), mean)
            v = keep_f32(v, 0, width - c, zero)
            left = add_f32(left, v)
            squares = fma_f32(v, v, squares)
        lost = splat_f32(sum_f32(left) / F32(width))
        deviation = sqrt_f32(splat_f32(sum_f32(squares) / F32(width) + eps))
        factor = div_f32(one, deviation)
        for c in range(0, width, 16):
            n = min(16, width - c)
            v = sub_f32(sub_f32(load_first_f32(source + 4 * c, n), mean), lost)
            v = mul_f32(v, factor)
            v = mul_f32(v, load_first_f32(weight + 4 * c, n))
            if bias:
                v = add_f32(v, load_first_f32(bias + 4 * c, n))
            store_first_f32(target + 4 * c, n, v)


def rms_norm(x, weight, eps, *, out=None):
    x = floats(x, "rms_norm: x")
    D = x.shape[-1]
    if weight is not None:
        weight = shaped(weight, (D,), "rms_norm: weight")
    out = output(out, x.shape, "rms_norm")
    args = (address(x), 0 if weight is None else address(weight), address(out), D, f32_word(eps))
    threads.run(_rms_norm_kernel, args, x.size // max(D, 1), VALUES_PER_PIECE // max(D, 1))
    return out


def layer_norm(x, weight, bias, eps, *, out=None):
    x = floats(x, "layer_norm: x")
    D = x.shape[-1]
    weight = shaped(weight, (D,), "layer_norm: weight")
    if bias is not None:
        bias = shaped(bias, (D,), "layer_norm: bias")
    out = output(out, x.shape, "layer_norm")
    args = (
        address(x), address(weight), 0 if bias is None else address(bias), address(out), D, f32_word(eps),
    )  # fmt: skip
    threads.run(_layer_norm_kernel, args, x.size // max(D, 1), VALUES_PER_PIECE // max(D, 1))
    return out
