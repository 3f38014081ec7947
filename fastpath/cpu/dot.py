"""Matrix products on GGUF blocks, as they lie in the file.       definition: refimpl/ops/integer.py

    work item   16 weight rows of one matrix, against all activation rows that use this matrix
    chunk       256 columns of these 16 rows at a time:
                  unpack  (unpack.py) to 64 vectors of 16 rows x 4 columns: a lane is a weight row; the
                          4 KiB stay in the first-level cache
                  dot     per activation row, 4 columns by 16 weight rows in one instruction
                  chain   one rounding sequence per output, carried from chunk to chunk in `acc`
    traffic     weights are read and unpacked once, however many rows of activations there are; the load of
                some bytes prefetches those of the next 16 rows

Each output is one chain over its own weight row and its own activations, so its bits do not depend on other
rows, on the number of threads or on the cut into items.  Four activation rows share each weight vector while
it is in a register; the arithmetic per row is that of one row.

Arguments, int64 words:
    matrices     weights, matrix_bytes, row_bytes, n_rows, n_cols
    activations  q, scale, sums
    output       y, row stride in bytes
    routing      n_matrices; of the used matrices: their numbers, and where each one's entries start (n + 1);
                 of the entries: activation row, output row
    scratch      address, bytes per thread
For a plain `linear` there is one matrix, and entry t is row t.
"""

import numba

from fastpath.cpu.kernel import helper, inlined
from fastpath.cpu.simd import (
    add_i32,
    fma_f32,
    i32_to_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32,
    load_i8,
    load_i32,
    mul_f32,
    mul_i32,
    splat_f32,
    splat_i32,
    spread_f32,
    store_f32,
    store_first_f32,
)
from fastpath.cpu.simd_dot import dot_spread
from fastpath.cpu.unpack import MINIMA

F32, I64 = numba.float32, numba.int64

# layout of a thread's scratch, in bytes
PANEL = 0  # u8[64][16][4] of a chunk, then room for transposed raw bytes
SCALES = 8192  # f32[8][16], then minima f32[8][16]
SUB_SCALES = 9216  # i32[16][16], then minima i32[16][16]
SUB_MINIMA = 10240
ACC = 11264  # f32[T][16]


def scratch_bytes(n_entries):
    return ACC + 64 * max(1, n_entries)


@helper
def _clear(acc, n_entries):
    for e in range(n_entries):
        store_f32(acc + 64 * e, splat_f32(F32(0.0)))


@helper
def _put(acc, n_entries, out_rows, y, y_stride, first_row, n):
    for e in range(n_entries):
        target = y + ld_i64(out_rows + 8 * e) * y_stride + 4 * first_row
        if n == 16:
            store_f32(target, load_f32(acc + 64 * e))
        else:
            store_first_f32(target, n, load_f32(acc + 64 * e))


@inlined
def _chain(acc, dot, scale, x_scale):
    return fma_f32(i32_to_f32(dot), mul_f32(scale, x_scale), acc)


# -- blocks of 32


@helper
def _one_row_32(work, acc, q, scale, sums, n_blocks, offset, has_min):
    a = load_f32(acc)
    for b in range(n_blocks):
        panel, total = work + PANEL + 512 * b, ld_i32(sums + 4 * b)
        dot = splat_i32(-offset * total)
        for j in range(8):
            dot = dot_spread(dot, load_i8(panel + 64 * j), q + 32 * b + 4 * j)
        x_scale = spread_f32(scale + 4 * b)
        a = _chain(a, dot, load_f32(work + SCALES + 64 * b), x_scale)
        if has_min:
            minimum = load_f32(work + SCALES + MINIMA + 64 * b)
            a = fma_f32(splat_f32(F32(total)), mul_f32(minimum, x_scale), a)
    store_f32(acc, a)


@helper
def _four_rows_32(work, acc, q0, q1, q2, q3, s0, s1, s2, s3, t0, t1, t2, t3, n_blocks, offset, has_min):
    a0, a1, a2, a3 = load_f32(acc), load_f32(acc + 64), load_f32(acc + 128), load_f32(acc + 192)
    for b in range(n_blocks):
        panel, c, at = work + PANEL + 512 * b, 32 * b, 4 * b
        n0, n1, n2, n3 = ld_i32(t0 + at), ld_i32(t1 + at), ld_i32(t2 + at), ld_i32(t3 + at)
        d0, d1 = splat_i32(-offset * n0), splat_i32(-offset * n1)
        d2, d3 = splat_i32(-offset * n2), splat_i32(-offset * n3)
        for j in range(8):
            w = load_i8(panel + 64 * j)
            d0 = dot_spread(d0, w, q0 + c + 4 * j)
            d1 = dot_spread(d1, w, q1 + c + 4 * j)
            d2 = dot_spread(d2, w, q2 + c + 4 * j)
            d3 = dot_spread(d3, w, q3 + c + 4 * j)
        x0, x1, x2, x3 = spread_f32(s0 + at), spread_f32(s1 + at), spread_f32(s2 + at), spread_f32(s3 + at)
        w_scale = load_f32(work + SCALES + 64 * b)
        a0, a1 = _chain(a0, d0, w_scale, x0), _chain(a1, d1, w_scale, x1)
        a2, a3 = _chain(a2, d2, w_scale, x2), _chain(a3, d3, w_scale, x3)
        if has_min:
            w_min = load_f32(work + SCALES + MINIMA + 64 * b)
            a0 = fma_f32(splat_f32(F32(n0)), mul_f32(w_min, x0), a0)
            a1 = fma_f32(splat_f32(F32(n1)), mul_f32(w_min, x1), a1)
            a2 = fma_f32(splat_f32(F32(n2)), mul_f32(w_min, x2), a2)
            a3 = fma_f32(splat_f32(F32(n3)), mul_f32(w_min, x3), a3)
    store_f32(acc, a0)
    store_f32(acc + 64, a1)
    store_f32(acc + 128, a2)
    store_f32(acc + 192, a3)


@helper
def _all_rows_32(work, q, scale, sums, n_cols, x_rows, n_entries, n_blocks, offset, has_min):
    """A chunk against all its activation rows; q, scale and sums already point to the chunk's columns."""
    by = n_cols // 8  # bytes of a row of scales, and of sums
    e = 0
    while e + 4 <= n_entries:
        i0, i1 = ld_i64(x_rows + 8 * e), ld_i64(x_rows + 8 * e + 8)
        i2, i3 = ld_i64(x_rows + 8 * e + 16), ld_i64(x_rows + 8 * e + 24)
        _four_rows_32(
            work, work + ACC + 64 * e,
            q + i0 * n_cols, q + i1 * n_cols, q + i2 * n_cols, q + i3 * n_cols,
            scale + i0 * by, scale + i1 * by, scale + i2 * by, scale + i3 * by,
            sums + i0 * by, sums + i1 * by, sums + i2 * by, sums + i3 * by,
            n_blocks, offset, has_min,
        )  # fmt: skip
        e += 4
    while e < n_entries:
        i = ld_i64(x_rows + 8 * e)
        at = i * by
        _one_row_32(
            work, work + ACC + 64 * e, q + i * n_cols, scale + at, sums + at, n_blocks, offset, has_min
        )
        e += 1


@inlined
def blocks_of_32(args, lo, hi, thread, unpack, block_bytes, offset, has_min):
    """The items lo .. hi-1 for a 32-value format.

    I64() makes numbers of constants: the dot products are compiled once and not for each pair of constants.
    """
    weights, matrix_bytes, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_cols = ld_i64(args + 24), ld_i64(args + 32)
    q, scale, sums = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    work = ld_i64(args + 120) + thread * ld_i64(args + 128)
    n_groups, n_blocks = (n_rows + 15) // 16, n_cols // 32
    for item in range(lo, hi):
        used, first = item // n_groups, 16 * (item % n_groups)
        entry = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - entry
        n = min(16, n_rows - first)
        base = weights + ld_i64(matrices + 8 * used) * matrix_bytes + first * row_bytes
        _clear(work + ACC, n_entries)
        for b0 in range(0, n_blocks, 8):
            nb = min(8, n_blocks - b0)
            for b in range(nb):
                source = base + (b0 + b) * block_bytes
                unpack(source, row_bytes, n - 1, work + PANEL + 512 * b, work + SCALES + 64 * b)
            at = 4 * b0
            rows = x_rows + 8 * entry
            _all_rows_32(
                work,
                q + 8 * at,
                scale + at,
                sums + at,
                n_cols,
                rows,
                n_entries,
                nb,
                I64(offset),
                I64(has_min),
            )
        _put(work + ACC, n_entries, out_rows + 8 * entry, y, y_stride, first, n)


# -- blocks of 256


@helper
def _one_row_256(work, acc, q, scale, sums, n_sub, offset, has_min):
    width = 64 // n_sub  # vectors of a sub-block
    whole, mins = splat_i32(0), splat_i32(0)
    for j in range(n_sub):
        total = ld_i32(sums + 4 * j) if n_sub == 16 else ld_i32(sums + 8 * j) + ld_i32(sums + 8 * j + 4)
        dot = splat_i32(-offset * total)
        for at in range(j * width, (j + 1) * width):
            dot = dot_spread(dot, load_i8(work + PANEL + 64 * at), q + 4 * at)
        whole = add_i32(whole, mul_i32(dot, load_i32(work + SUB_SCALES + 64 * j)))
        if has_min:
            mins = add_i32(mins, mul_i32(splat_i32(total), load_i32(work + SUB_MINIMA + 64 * j)))
    x_scale = ld_f32(scale)
    a = _chain(load_f32(acc), whole, load_f32(work + SCALES), splat_f32(x_scale))
    if has_min:
        a = _chain(a, mins, load_f32(work + SCALES + MINIMA), splat_f32(-x_scale))
    store_f32(acc, a)


@inlined
def _sum_of(sums, j, n_sub):
    """Sum of the activations of sub-block j; `sums` holds one number per 16."""
    return ld_i32(sums + 4 * j) if n_sub == 16 else ld_i32(sums + 8 * j) + ld_i32(sums + 8 * j + 4)


@helper
def _four_rows_256(work, acc, q0, q1, q2, q3, s0, s1, s2, s3, t0, t1, t2, t3, n_sub, offset, has_min):
    width = 64 // n_sub
    w0, w1, w2, w3 = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    m0, m1, m2, m3 = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    for j in range(n_sub):
        n0, n1 = _sum_of(t0, j, n_sub), _sum_of(t1, j, n_sub)
        n2, n3 = _sum_of(t2, j, n_sub), _sum_of(t3, j, n_sub)
        d0, d1 = splat_i32(-offset * n0), splat_i32(-offset * n1)
        d2, d3 = splat_i32(-offset * n2), splat_i32(-offset * n3)
        for at in range(j * width, (j + 1) * width):
            w = load_i8(work + PANEL + 64 * at)
            d0 = dot_spread(d0, w, q0 + 4 * at)
            d1 = dot_spread(d1, w, q1 + 4 * at)
            d2 = dot_spread(d2, w, q2 + 4 * at)
            d3 = dot_spread(d3, w, q3 + 4 * at)
        sub = load_i32(work + SUB_SCALES + 64 * j)
        w0, w1 = add_i32(w0, mul_i32(d0, sub)), add_i32(w1, mul_i32(d1, sub))
        w2, w3 = add_i32(w2, mul_i32(d2, sub)), add_i32(w3, mul_i32(d3, sub))
        if has_min:
            sub = load_i32(work + SUB_MINIMA + 64 * j)
            m0, m1 = add_i32(m0, mul_i32(splat_i32(n0), sub)), add_i32(m1, mul_i32(splat_i32(n1), sub))
            m2, m3 = add_i32(m2, mul_i32(splat_i32(n2), sub)), add_i32(m3, mul_i32(splat_i32(n3), sub))
    scale = load_f32(work + SCALES)
    x0, x1, x2, x3 = ld_f32(s0), ld_f32(s1), ld_f32(s2), ld_f32(s3)
    a0 = _chain(load_f32(acc), w0, scale, splat_f32(x0))
    a1 = _chain(load_f32(acc + 64), w1, scale, splat_f32(x1))
    a2 = _chain(load_f32(acc + 128), w2, scale, splat_f32(x2))
    a3 = _chain(load_f32(acc + 192), w3, scale, splat_f32(x3))
    if has_min:
        scale = load_f32(work + SCALES + MINIMA)
        a0, a1 = _chain(a0, m0, scale, splat_f32(-x0)), _chain(a1, m1, scale, splat_f32(-x1))
        a2, a3 = _chain(a2, m2, scale, splat_f32(-x2)), _chain(a3, m3, scale, splat_f32(-x3))
    store_f32(acc, a0)
    store_f32(acc + 64, a1)
    store_f32(acc + 128, a2)
    store_f32(acc + 192, a3)


@helper
def _all_rows_256(work, q, scale, sums, n_cols, x_rows, n_entries, n_sub, offset, has_min):
    """A chunk against all its activation rows; q, scale and sums already point to the chunk's columns."""
    by, st = n_cols // 64, n_cols // 4  # bytes of a row of scales, of a row of sums
    e = 0
    while e + 4 <= n_entries:
        i0, i1 = ld_i64(x_rows + 8 * e), ld_i64(x_rows + 8 * e + 8)
        i2, i3 = ld_i64(x_rows + 8 * e + 16), ld_i64(x_rows + 8 * e + 24)
        _four_rows_256(
            work, work + ACC + 64 * e,
            q + i0 * n_cols, q + i1 * n_cols, q + i2 * n_cols, q + i3 * n_cols,
            scale + i0 * by, scale + i1 * by, scale + i2 * by, scale + i3 * by,
            sums + i0 * st, sums + i1 * st, sums + i2 * st, sums + i3 * st,
            n_sub, offset, has_min,
        )  # fmt: skip
        e += 4
    while e < n_entries:
        i = ld_i64(x_rows + 8 * e)
        acc = work + ACC + 64 * e
        _one_row_256(work, acc, q + i * n_cols, scale + i * by, sums + i * st, n_sub, offset, has_min)
        e += 1


@inlined
def blocks_of_256(args, lo, hi, thread, unpack, block_bytes, offset, n_sub, has_min):
    """The items lo .. hi-1 for a 256-value format of n_sub sub-blocks."""
    weights, matrix_bytes, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_cols = ld_i64(args + 24), ld_i64(args + 32)
    q, scale, sums = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    work = ld_i64(args + 120) + thread * ld_i64(args + 128)
    n_groups, n_blocks = (n_rows + 15) // 16, n_cols // 256
    for item in range(lo, hi):
        used, first = item // n_groups, 16 * (item % n_groups)
        entry = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - entry
        n = min(16, n_rows - first)
        base = weights + ld_i64(matrices + 8 * used) * matrix_bytes + first * row_bytes
        _clear(work + ACC, n_entries)
        for b in range(n_blocks):
            source = base + b * block_bytes
            unpack(
                source, row_bytes, n - 1,
                work + PANEL, work + SCALES, work + SUB_SCALES, work + SUB_MINIMA,
            )  # fmt: skip
            rows = x_rows + 8 * entry
            _all_rows_256(
                work, q + 256 * b, scale + 4 * b, sums + 64 * b,
                n_cols, rows, n_entries, n_sub, I64(offset), I64(has_min),
            )  # fmt: skip
        _put(work + ACC, n_entries, out_rows + 8 * entry, y, y_stride, first, n)
