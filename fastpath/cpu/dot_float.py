"""Matrix products on plain numbers: F32, F16, BF16, and rows dequantised before.

    work item   16 weight rows of one matrix, four at a time, against all activation rows that use this matrix
    arithmetic  16 lanes per output, acc[l] = fma(w[16j + l], x[16j + l], acc[l]), j ascending; then the lanes
                l and l + 8 are added, l and l + 4, l and l + 2, l and l + 1.  What is missing in the last 16
                columns counts as zero.

Four weight rows by two activation rows are computed together, to use each loaded vector more than once; the
chain of an output is its own.  Arguments as in dot.py, but `q` is x f32[T, C].
"""

import numba

from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.simd import (
    fma_f32,
    ld_i64,
    ld_u16,
    load_f32,
    load_first_f32,
    load_u16,
    low_bf16,
    low_f16,
    splat_f32,
    st_f32,
    st_u16,
    store_f32,
    sum_f32,
)

F32 = numba.float32


def scratch_bytes(n_cols):
    """Four widened rows and room for the last part of one."""
    return 4 * row_pitch(n_cols) + 64


@helper
def _pitch(n_cols):
    return (n_cols + 15) // 16 * 64


row_pitch = _pitch.py_func


@helper
def widen_f16(source, n_cols, target, spare):
    for c in range(0, n_cols // 16 * 16, 16):
        store_f32(target + 4 * c, low_f16(load_u16(source + 2 * c)))
    rest = n_cols % 16
    if rest:
        for l in range(16):
            st_u16(spare + 2 * l, ld_u16(source + 2 * (n_cols - rest + l)) if l < rest else 0)
        store_f32(target + 4 * (n_cols - rest), low_f16(load_u16(spare)))


@helper
def widen_bf16(source, n_cols, target, spare):
    for c in range(0, n_cols // 16 * 16, 16):
        store_f32(target + 4 * c, low_bf16(load_u16(source + 2 * c)))
    rest = n_cols % 16
    if rest:
        for l in range(16):
            st_u16(spare + 2 * l, ld_u16(source + 2 * (n_cols - rest + l)) if l < rest else 0)
        store_f32(target + 4 * (n_cols - rest), low_bf16(load_u16(spare)))


@helper
def copy_f32(source, n_cols, target, spare):
    for c in range(0, n_cols // 16 * 16, 16):
        store_f32(target + 4 * c, load_f32(source + 4 * c))
    rest = n_cols % 16
    if rest:
        store_f32(target + 4 * (n_cols - rest), load_first_f32(source + 4 * (n_cols - rest), rest))


@helper
def _tile(w, pitch, x0, x1, n_cols, y0, y1, n):
    """Four rows at w against two rows of x; the first n outputs are stored."""
    zero = splat_f32(F32(0.0))
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    w1, w2, w3 = w + pitch, w + 2 * pitch, w + 3 * pitch
    whole = n_cols // 16 * 64
    for c in range(0, whole, 64):
        u, v = load_f32(x0 + c), load_f32(x1 + c)
        k = load_f32(w + c)
        a0, b0 = fma_f32(k, u, a0), fma_f32(k, v, b0)
        k = load_f32(w1 + c)
        a1, b1 = fma_f32(k, u, a1), fma_f32(k, v, b1)
        k = load_f32(w2 + c)
        a2, b2 = fma_f32(k, u, a2), fma_f32(k, v, b2)
        k = load_f32(w3 + c)
        a3, b3 = fma_f32(k, u, a3), fma_f32(k, v, b3)
    rest = n_cols % 16
    if rest:
        u, v = load_first_f32(x0 + whole, rest), load_first_f32(x1 + whole, rest)
        k = load_f32(w + whole)
        a0, b0 = fma_f32(k, u, a0), fma_f32(k, v, b0)
        k = load_f32(w1 + whole)
        a1, b1 = fma_f32(k, u, a1), fma_f32(k, v, b1)
        k = load_f32(w2 + whole)
        a2, b2 = fma_f32(k, u, a2), fma_f32(k, v, b2)
        k = load_f32(w3 + whole)
        a3, b3 = fma_f32(k, u, a3), fma_f32(k, v, b3)
    st_f32(y0, sum_f32(a0))
    st_f32(y1, sum_f32(b0))
    if n > 1:
        st_f32(y0 + 4, sum_f32(a1))
        st_f32(y1 + 4, sum_f32(b1))
    if n > 2:
        st_f32(y0 + 8, sum_f32(a2))
        st_f32(y1 + 8, sum_f32(b2))
    if n > 3:
        st_f32(y0 + 12, sum_f32(a3))
        st_f32(y1 + 12, sum_f32(b3))


@inlined
def rows_of_numbers(args, lo, hi, thread, widen):
    weights, matrix_bytes, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_cols, x = ld_i64(args + 24), ld_i64(args + 32), ld_i64(args + 40)
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    work = ld_i64(args + 120) + thread * ld_i64(args + 128)
    n_groups, pitch = (n_rows + 15) // 16, _pitch(n_cols)
    spare = work + 4 * pitch
    for item in range(lo, hi):
        used, group = item // n_groups, item % n_groups
        entry, stop = ld_i64(starts + 8 * used), ld_i64(starts + 8 * used + 8)
        matrix = weights + ld_i64(matrices + 8 * used) * matrix_bytes
        for first in range(16 * group, min(16 * group + 16, n_rows), 4):
            n = min(4, n_rows - first)
            for r in range(4):
                widen(matrix + (first + min(r, n - 1)) * row_bytes, n_cols, work + r * pitch, spare)
            for e in range(entry, stop, 2):
                also = min(e + 1, stop - 1)  # an odd last row is computed twice, to the same bytes
                _tile(
                    work, pitch,
                    x + ld_i64(x_rows + 8 * e) * n_cols * 4,
                    x + ld_i64(x_rows + 8 * also) * n_cols * 4, n_cols,
                    y + ld_i64(out_rows + 8 * e) * y_stride + 4 * first,
                    y + ld_i64(out_rows + 8 * also) * y_stride + 4 * first, n,
                )  # fmt: skip


@kernel
def linear_f32(args, lo, hi, thread):
    rows_of_numbers(args, lo, hi, thread, copy_f32)


@kernel
def linear_f16(args, lo, hi, thread):
    rows_of_numbers(args, lo, hi, thread, widen_f16)


@kernel
def linear_bf16(args, lo, hi, thread):
    rows_of_numbers(args, lo, hi, thread, widen_bf16)
