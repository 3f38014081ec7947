"""GELU with a gate, the soft cap, SiLU, its gate, clipping.     definition: refimpl/ops/activation.py

work item   up to 1,024 values of a row (soft cap, SiLU, clipping: of all values; the gate of GLU: a row)
arithmetic  gelu(z) = z / (1 + exp(-2y)), which is z/2 * (1 + tanh(y)) without its cancellation for z < 0;
            a sigmoid is 0 where exp() would be beyond float32
traffic     bound by the polynomials of exp(); clipping by memory, every value once in, once out
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
    spread_f32,
    store_f32,
    store_first_f32,
    sub_f32,
)
from fastpath.cpu.vector_math import EXP_HIGH, exp, tanh

F32 = numba.float32
ITEM = 1024  # values
VALUES_PER_PIECE = 1 << 11
MINUS_2_SQRT_2_PI = F32(-1.5957691216057308)
CUBIC = F32(0.044715)


@helper
def _share(z, power):
    """z / (1 + exp(power)), and 0 where that is beyond float32."""
    share = div_f32(z, add_f32(splat_f32(F32(1.0)), exp(power)))
    return less_f32(power, splat_f32(EXP_HIGH), share, mul_f32(z, splat_f32(F32(0.0))))


@helper
def _gelu_times(z, up):
    inner = fma_f32(mul_f32(mul_f32(z, z), z), splat_f32(CUBIC), z)
    return mul_f32(_share(z, mul_f32(inner, splat_f32(MINUS_2_SQRT_2_PI))), up)


@helper
def _silu(x):
    return _share(x, sub_f32(splat_f32(F32(0.0)), x))


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


@kernel
def _silu_kernel(args, lo, hi, thread):
    x, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    last = min(ITEM * hi, n)
    for i in range(ITEM * lo, last, 16):
        rest = min(16, last - i)
        store_first_f32(out + 4 * i, rest, _silu(load_first_f32(x + 4 * i, rest)))


@kernel
def _glu_kernel(args, lo, hi, thread):
    x, out, width = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    for row in range(lo, hi):
        first, gate, target = x + 8 * width * row, x + 8 * width * row + 4 * width, out + 4 * width * row
        for c in range(0, width, 16):
            rest = min(16, width - c)
            power = sub_f32(splat_f32(F32(0.0)), load_first_f32(gate + 4 * c, rest))
            store_first_f32(target + 4 * c, rest, _share(load_first_f32(first + 4 * c, rest), power))


@kernel
def _clip_kernel(args, lo, hi, thread):
    x, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    low, high = spread_f32(args + 24), spread_f32(args + 32)
    last = min(ITEM * hi, n)
    for i in range(ITEM * lo, last, 16):
        rest = min(16, last - i)
        v = load_first_f32(x + 4 * i, rest)
        v = less_f32(v, low, low, v)  # NaN is not less, and stays
        store_first_f32(out + 4 * i, rest, less_f32(high, v, high, v))


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


def silu(x, *, out=None):
    x = floats(x, "silu: x")
    out = output(out, x.shape, "silu")
    args = (address(x), address(out), x.size)
    threads.run(_silu_kernel, args, -(-x.size // ITEM), VALUES_PER_PIECE // ITEM)
    return out


def glu(x, *, out=None):
    x = floats(x, "glu: x")
    T, width = x.shape
    if width % 2:
        raise ValueError(f"glu: x {x.shape}, expected an even width, the gates in the second half")
    out = output(out, (T, width // 2), "glu")
    args = (address(x), address(out), width // 2)
    threads.run(_glu_kernel, args, T, VALUES_PER_PIECE // max(1, width))
    return out


def clip(x, low, high, *, out=None):
    x = floats(x, "clip: x")
    out = output(out, x.shape, "clip")
    with np.errstate(over="ignore"):  # a bound beyond float32 is no bound
        bounds = (f32_word(np.float32(bound)) for bound in (low, high))
    args = (address(x), address(out), x.size, *bounds)
    threads.run(_clip_kernel, args, -(-x.size // ITEM), 8 * VALUES_PER_PIECE // ITEM)
    return out
