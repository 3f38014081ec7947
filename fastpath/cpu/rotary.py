"""Rotary position embedding.        definition: refimpl/ops/rotary.py

work item   one token: all its heads
arithmetic  two products and a sum per component, each rounded, as in the reference
"""

import numpy as np

from fastpath.cpu import recording, threads
from fastpath.cpu.buffers import address, floats, output, rounded
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import (
    add_f32,
    ld_i64,
    load_f32,
    load_first_f32,
    mul_f32,
    store_f32,
    store_first_f32,
    sub_f32,
)

VALUES_PER_PIECE = 1 << 13


@kernel
def _rope_kernel(args, lo, hi, thread):
    x, cos, sin, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_heads, pairs = ld_i64(args + 32), ld_i64(args + 40)
    whole, rest = pairs // 16 * 64, pairs % 16
    for t in range(lo, hi):
        turn_cos, turn_sin = cos + 4 * pairs * t, sin + 4 * pairs * t
        for n in range(n_heads):
            at = 8 * pairs * (t * n_heads + n)
            first, second = x + at, x + at + 4 * pairs
            for c in range(0, whole, 64):
                a, b = load_f32(first + c), load_f32(second + c)
                co, si = load_f32(turn_cos + c), load_f32(turn_sin + c)
                store_f32(out + at + c, sub_f32(mul_f32(a, co), mul_f32(b, si)))
                store_f32(out + at + 4 * pairs + c, add_f32(mul_f32(b, co), mul_f32(a, si)))
            if rest:
                a, b = load_first_f32(first + whole, rest), load_first_f32(second + whole, rest)
                co, si = load_first_f32(turn_cos + whole, rest), load_first_f32(turn_sin + whole, rest)
                store_first_f32(out + at + whole, rest, sub_f32(mul_f32(a, co), mul_f32(b, si)))
                store_first_f32(out + at + 4 * pairs + whole, rest, add_f32(mul_f32(b, co), mul_f32(a, si)))


def rope_table(positions, inv_freq, *, out=None):
    cos, sin = (None, None) if out is None else out
    shape = (len(positions), len(inv_freq))
    cos = output(cos, shape, "rope_table: cos", of_host=True)
    sin = output(sin, shape, "rope_table: sin", of_host=True)

    def fill():
        angles = np.asarray(positions, np.float64)[:, None] * inv_freq
        cos[...] = np.cos(angles)
        sin[...] = np.sin(angles)

    recording.host(fill)
    return cos, sin


def rope(x, cos, sin, *, out=None):
    T, N, H = x.shape
    if H % 2 or cos.shape != (T, H // 2) or sin.shape != (T, H // 2):
        raise ValueError(
            f"rope: x {x.shape}, cos {cos.shape}, sin {sin.shape}; expected [T, N, H] and [T, H/2]"
        )
    x, cos, sin = floats(x, "rope: x"), rounded(cos, "rope: cos"), rounded(sin, "rope: sin")
    out = output(out, x.shape, "rope")
    args = (address(x), address(cos), address(sin), address(out), N, H // 2)
    threads.run(_rope_kernel, args, T, VALUES_PER_PIECE // max(N * H, 1))
    return out
