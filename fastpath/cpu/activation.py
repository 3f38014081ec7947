"""GELU with a gate, and the soft cap.        definition: refimpl/ops/activation.py

work item   up to 1,024 values of a row (soft cap: of all values)
arithmetic  gelu(z) = z / (1 + exp(-2y)), which is z/2 * (1 + tanh(y)) without its cancellation for z < 0
"""

import numba
import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, floats, output, shaped
from fastpath.cpu.kernel import f32_word, helper, kernel
from fastpath.cpu.simd import (
    add_f32,
    div_f32,
    fma_f32,
    ld_f32,
    ld_i64,
    less_f32,
    load_f32,
    load_first_f32,
    mul_f32,
    splat_f32,
    store_f32,
    store_first_f32,
)
from fastpath.cpu.vector_math import EXP_HIGH, exp, tanh

F32 = numba.float32
ITEM = 1024  # values
VALUES_PER_PIECE = 1 << 11
MINUS_2_SQRT_2_PI = F32(-1.5957691216057308)
CUBIC = F32(0.044715)


@helper
def _gelu_times(z, up):
    inner = fma_f32(mul_f32(mul_f32(z, z), z), splat_f32(CUBIC), z)
    power = mul_f32(inner, splat_f32(MINUS_2_SQRT_2_PI))
    share = div_f32(z, add_f32(splat_f32(F32(1.0)), exp(power)))
    gone = mul_f32(z, splat_f32(F32(0.0)))
    return mul_f32(less_f32(power, splat_f32(EXP_HIGH), share, gone), up)


@kernel
def _geglu_kernel(args, lo, hi, thread):
    gates, ups, outs, width = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    up_stride = ld_i64(args + 32)
    per_row = (width + ITEM - 1) // ITEM
    for item in range(lo, hi):
        row, first = item // per_row, item % per_row * ITEM
        last = min(first + ITEM, width)
        gate, up, out = gates + 4 * width * row, ups + up_stride * row, outs + 4 * width * row
        for i in range(first, last - 15, 16):
            store_f32(out + 4 * i, _gelu_times(load_f32(gate + 4 * i), load_f32(up + 4 * i)))
        rest = (last - first) % 16
        if rest:
            at = 4 * (last - rest)
            value = _gelu_times(load_first_f32(gate + at, rest), load_first_f32(up + at, rest))
            store_first_f32(out + at, rest, value)


@kernel
def _softcap_kernel(args, lo, hi, thread):
    x, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    cap = splat_f32(ld_f32(args + 24))
    first, last = ITEM * lo, min(ITEM * hi, n)
    for i in range(first, last - 15, 16):
        store_f32(out + 4 * i, mul_f32(cap, tanh(div_f32(load_f32(x + 4 * i), cap))))
    rest = (last - first) % 16
    if rest:
        at = 4 * (last - rest)
        store_first_f32(out + at, rest, mul_f32(cap, tanh(div_f32(load_first_f32(x + at, rest), cap))))


def geglu(gate, up, *, out=None):
    gate = floats(gate, "geglu: gate")
    width = gate.shape[-1] if gate.ndim else 1
    if not _is_rows(up, gate.shape):  # the per-layer inputs lie [T, L, P]: rows with gaps
        up = shaped(up, gate.shape, "geglu: up")
    up_stride = up.strides[0] if up.ndim == 2 else 4 * width
    out = output(out, gate.shape, "geglu")
    args = (address(gate), address(up), address(out), width, up_stride)
    n_rows, per_row = gate.size // max(1, width), -(-width // ITEM)
    threads.run(_geglu_kernel, args, n_rows * per_row, VALUES_PER_PIECE // max(1, min(width, ITEM)))
    return out


def _is_rows(x, shape):
    """float32[T, C] whose rows are contiguous, with any distance between them."""
    return x.dtype == np.float32 and x.ndim == 2 and x.shape == shape and x.strides[1] == 4


def softcap(x, cap, *, out=None):
    x = floats(x, "softcap: x")
    out = output(out, x.shape, "softcap")
    args = (address(x), address(out), x.size, f32_word(cap))
    threads.run(_softcap_kernel, args, -(-x.size // ITEM), VALUES_PER_PIECE // ITEM)
    return out
