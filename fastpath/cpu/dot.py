"""Matrix products on GGUF blocks, as they lie in the file.       definition: refimpl/ops/integer.py

    work item   16 weight rows of one matrix, against all activation rows that use this matrix
    chunk       256 columns of these 16 rows at a time:
                  unpack     each row's blocks to bytes, row by row                        4 KiB, first-level cache
                  transpose  to 64 vectors of 16 rows x 4 columns: a lane is a weight row   4 KiB
                  dot        per activation row, 4 columns by 16 rows in one instruction
                  chain      one rounding sequence per output, carried from chunk to chunk in `acc`
    traffic     weights are read and unpacked once, however many rows of activations there are

Each output is one chain over its own weight row and its own activations, so its bits do not depend on the other
rows, the number of threads or the cut into items.  Four activation rows share each weight vector while it is in a
register; the arithmetic per row is that of one row.

Arguments, int64 words:  the matrices  weights, matrix_bytes, row_bytes, n_rows, n_cols
                         activations   q, scale, sums
                         output        y, row stride in bytes
                         routing       n_matrices; per used matrix: its number, first entry of its rows (n + 1);
                                       per entry: activation row, output row
                         scratch       address, bytes per thread
For a plain `linear` there is one matrix and entry t is row t.
"""

import numba
from numba import njit

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import (
    add_i32,
    dot_spread,
    f16_to_f32,
    fma_f32,
    i32_to_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    ld_u8,
    ld_u16,
    load_f32,
    load_i8x64,
    load_i16,
    load_i32,
    mul_f32,
    mul_i32,
    prefetch,
    splat_f32,
    splat_i32,
    spread_f32,
    st_i32,
    st_u16,
    store_f32,
    store_first_f32,
    transpose,
)

F32 = numba.float32

# layout of a thread's scratch, in bytes
PANEL = 4096  # after the unpacked rows, 16 x 256
HALVES = 8192  # scales as they come: u16[8][16], then minima u16[8][16]
SCALES = 8704  # f32[8][16], then minima f32[8][16]
SUB_SCALES = 9728  # i32[16][16], then minima i32[16][16]
ACC = 11776  # f32[T][16]


def scratch_bytes(n_entries):
    return ACC + 64 * max(1, n_entries)


inlined = njit(inline="always", error_model="numpy")


@helper
def _prefetch_part(start, n_bytes, part, n_parts):
    """Fetch one part of the next item's weights: without it unpacking waits for memory."""
    lo, hi = n_bytes * part // n_parts // 64, n_bytes * (part + 1) // n_parts // 64
    for line in range(lo, hi):
        prefetch(start + 64 * line)


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


@helper
def _widen(halves, scales, n_vectors):
    for i in range(n_vectors):
        store_f32(scales + 64 * i, f16_to_f32(load_i16(halves + 32 * i)))


@helper
def _widen_exponents(halves, scales, n_vectors):
    """MXFP4: 2 ** (e - 128); the two smallest are denormal."""
    for i in range(16 * n_vectors):
        e = ld_u16(halves + 2 * i)
        st_i32(scales + 4 * i, (e - 1) << 23 if e > 1 else 0x00200000 << e)


# -- blocks of 32


@inlined
def _chain1(acc, dot, scale, x_scale):
    return fma_f32(i32_to_f32(dot), mul_f32(scale, x_scale), acc)


@inlined
def one_row_32(work, acc, q, scale, sums, n_blocks, offset, has_min):
    a = load_f32(acc)
    for b in range(n_blocks):
        panel, total = work + PANEL + 512 * b, ld_i32(sums + 4 * b)
        dot = splat_i32(-offset * total)
        for j in range(8):
            dot = dot_spread(dot, load_i8x64(panel + 64 * j), q + 32 * b + 4 * j)
        x_scale = spread_f32(scale + 4 * b)
        a = _chain1(a, dot, load_f32(work + SCALES + 64 * b), x_scale)
        if has_min:
            a = fma_f32(splat_f32(F32(total)), mul_f32(load_f32(work + SCALES + 512 + 64 * b), x_scale), a)
    store_f32(acc, a)


@inlined
def four_rows_32(work, acc, q0, q1, q2, q3, s0, s1, s2, s3, t0, t1, t2, t3, n_blocks, offset, has_min):
    a0, a1, a2, a3 = load_f32(acc), load_f32(acc + 64), load_f32(acc + 128), load_f32(acc + 192)
    for b in range(n_blocks):
        panel, c = work + PANEL + 512 * b, 32 * b
        n0, n1, n2, n3 = ld_i32(t0 + 4 * b), ld_i32(t1 + 4 * b), ld_i32(t2 + 4 * b), ld_i32(t3 + 4 * b)
        d0, d1, d2, d3 = splat_i32(-offset * n0), splat_i32(-offset * n1), splat_i32(-offset * n2), splat_i32(-offset * n3)
        for j in range(8):
            w = load_i8x64(panel + 64 * j)
            d0 = dot_spread(d0, w, q0 + c + 4 * j)
            d1 = dot_spread(d1, w, q1 + c + 4 * j)
            d2 = dot_spread(d2, w, q2 + c + 4 * j)
            d3 = dot_spread(d3, w, q3 + c + 4 * j)
        w_scale = load_f32(work + SCALES + 64 * b)
        x0, x1, x2, x3 = spread_f32(s0 + 4 * b), spread_f32(s1 + 4 * b), spread_f32(s2 + 4 * b), spread_f32(s3 + 4 * b)
        a0 = _chain1(a0, d0, w_scale, x0)
        a1 = _chain1(a1, d1, w_scale, x1)
        a2 = _chain1(a2, d2, w_scale, x2)
        a3 = _chain1(a3, d3, w_scale, x3)
        if has_min:
            w_min = load_f32(work + SCALES + 512 + 64 * b)
            a0 = fma_f32(splat_f32(F32(n0)), mul_f32(w_min, x0), a0)
            a1 = fma_f32(splat_f32(F32(n1)), mul_f32(w_min, x1), a1)
            a2 = fma_f32(splat_f32(F32(n2)), mul_f32(w_min, x2), a2)
            a3 = fma_f32(splat_f32(F32(n3)), mul_f32(w_min, x3), a3)
    store_f32(acc, a0)
    store_f32(acc + 64, a1)
    store_f32(acc + 128, a2)
    store_f32(acc + 192, a3)


@inlined
def blocks_of_32(args, lo, hi, thread, unpack, block_bytes, offset, min_at, is_exponent):
    """The items lo .. hi-1 for a 32-value format; min_at: where a block's minimum is, 0 for none."""
    weights, matrix_bytes, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_cols = ld_i64(args + 24), ld_i64(args + 32)
    q, scale, sums = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    work = ld_i64(args + 120) + thread * ld_i64(args + 128)
    n_groups, n_blocks = (n_rows + 15) // 16, n_cols // 32
    has_min = min_at > 0
    acc = work + ACC
    for item in range(lo, hi):
        used, group = item // n_groups, item % n_groups
        entry = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - entry
        first = 16 * group
        n = min(16, n_rows - first)
        base = weights + ld_i64(matrices + 8 * used) * matrix_bytes + first * row_bytes
        _clear(acc, n_entries)
        for b0 in range(0, n_blocks, 8):
            nb = min(8, n_blocks - b0)
            if group + 1 < n_groups:
                ahead = min(16, n_rows - first - 16) * row_bytes
                _prefetch_part(base + 16 * row_bytes, ahead, b0, n_blocks)
            for r in range(16):
                source = base + min(r, n - 1) * row_bytes + b0 * block_bytes
                for b in range(nb):
                    unpack(source, work + 256 * r + 32 * b)
                    half = work + HALVES + 32 * b + 2 * r
                    st_u16(half, ld_u8(source) if is_exponent else ld_u16(source))
                    if has_min:
                        st_u16(half + 256, ld_u16(source + min_at))
                    source += block_bytes
            for b in range(0, nb, 2):
                transpose(work + 32 * b, 256, work + PANEL + 512 * b)
            if is_exponent:
                _widen_exponents(work + HALVES, work + SCALES, nb)
            else:
                _widen(work + HALVES, work + SCALES, 16 if has_min else nb)
            e = 0
            while e + 4 <= n_entries:
                rows = x_rows + 8 * (entry + e)
                i0, i1, i2, i3 = ld_i64(rows), ld_i64(rows + 8), ld_i64(rows + 16), ld_i64(rows + 24)
                p, s = q + 32 * b0, scale + 4 * b0
                t, by = sums + 4 * b0, 4 * n_blocks
                four_rows_32(
                    work, acc + 64 * e,
                    p + i0 * n_cols, p + i1 * n_cols, p + i2 * n_cols, p + i3 * n_cols,
                    s + i0 * by, s + i1 * by, s + i2 * by, s + i3 * by,
                    t + i0 * by, t + i1 * by, t + i2 * by, t + i3 * by,
                    nb, offset, has_min,
                )  # fmt: skip
                e += 4
            while e < n_entries:
                i = ld_i64(x_rows + 8 * (entry + e))
                at = 4 * (i * n_blocks + b0)
                one_row_32(work, acc + 64 * e, q + i * n_cols + 32 * b0, scale + at, sums + at, nb, offset, has_min)
                e += 1
        _put(acc, n_entries, out_rows + 8 * entry, y, y_stride, first, n)


# -- blocks of 256


@inlined
def one_row_256(work, acc, q, scale, sums, n_sub, offset, has_min):
    width = 64 // n_sub  # vectors of a sub-block
    whole, mins = splat_i32(0), splat_i32(0)
    for j in range(n_sub):
        total = ld_i32(sums + 4 * j) if n_sub == 16 else ld_i32(sums + 8 * j) + ld_i32(sums + 8 * j + 4)
        dot = splat_i32(-offset * total)
        for i in range(width):
            at = j * width + i
            dot = dot_spread(dot, load_i8x64(work + PANEL + 64 * at), q + 4 * at)
        whole = add_i32(whole, mul_i32(dot, load_i32(work + SUB_SCALES + 64 * j)))
        if has_min:
            mins = add_i32(mins, mul_i32(splat_i32(total), load_i32(work + SUB_SCALES + 1024 + 64 * j)))
    x_scale = ld_f32(scale)
    a = _chain1(load_f32(acc), whole, load_f32(work + SCALES), splat_f32(x_scale))
    if has_min:
        a = _chain1(a, mins, load_f32(work + SCALES + 512), splat_f32(-x_scale))
    store_f32(acc, a)


@inlined
def four_rows_256(work, acc, q0, q1, q2, q3, s0, s1, s2, s3, t0, t1, t2, t3, n_sub, offset, has_min):
    width = 64 // n_sub
    w0, w1, w2, w3 = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    m0, m1, m2, m3 = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    for j in range(n_sub):
        if n_sub == 16:
            n0, n1, n2, n3 = ld_i32(t0 + 4 * j), ld_i32(t1 + 4 * j), ld_i32(t2 + 4 * j), ld_i32(t3 + 4 * j)
        else:
            n0, n1 = ld_i32(t0 + 8 * j) + ld_i32(t0 + 8 * j + 4), ld_i32(t1 + 8 * j) + ld_i32(t1 + 8 * j + 4)
            n2, n3 = ld_i32(t2 + 8 * j) + ld_i32(t2 + 8 * j + 4), ld_i32(t3 + 8 * j) + ld_i32(t3 + 8 * j + 4)
        d0, d1, d2, d3 = splat_i32(-offset * n0), splat_i32(-offset * n1), splat_i32(-offset * n2), splat_i32(-offset * n3)
        for i in range(width):
            at = j * width + i
            w = load_i8x64(work + PANEL + 64 * at)
            d0 = dot_spread(d0, w, q0 + 4 * at)
            d1 = dot_spread(d1, w, q1 + 4 * at)
            d2 = dot_spread(d2, w, q2 + 4 * at)
            d3 = dot_spread(d3, w, q3 + 4 * at)
        sub = load_i32(work + SUB_SCALES + 64 * j)
        w0, w1 = add_i32(w0, mul_i32(d0, sub)), add_i32(w1, mul_i32(d1, sub))
        w2, w3 = add_i32(w2, mul_i32(d2, sub)), add_i32(w3, mul_i32(d3, sub))
        if has_min:
            sub = load_i32(work + SUB_SCALES + 1024 + 64 * j)
            m0, m1 = add_i32(m0, mul_i32(splat_i32(n0), sub)), add_i32(m1, mul_i32(splat_i32(n1), sub))
            m2, m3 = add_i32(m2, mul_i32(splat_i32(n2), sub)), add_i32(m3, mul_i32(splat_i32(n3), sub))
    scale = load_f32(work + SCALES)
    x0, x1, x2, x3 = ld_f32(s0), ld_f32(s1), ld_f32(s2), ld_f32(s3)
    a0 = _chain1(load_f32(acc), w0, scale, splat_f32(x0))
    a1 = _chain1(load_f32(acc + 64), w1, scale, splat_f32(x1))
    a2 = _chain1(load_f32(acc + 128), w2, scale, splat_f32(x2))
    a3 = _chain1(load_f32(acc + 192), w3, scale, splat_f32(x3))
    if has_min:
        scale = load_f32(work + SCALES + 512)
        a0 = _chain1(a0, m0, scale, splat_f32(-x0))
        a1 = _chain1(a1, m1, scale, splat_f32(-x1))
        a2 = _chain1(a2, m2, scale, splat_f32(-x2))
        a3 = _chain1(a3, m3, scale, splat_f32(-x3))
    store_f32(acc, a0)
    store_f32(acc + 64, a1)
    store_f32(acc + 128, a2)
    store_f32(acc + 192, a3)


@inlined
def blocks_of_256(args, lo, hi, thread, unpack, unpack_scales, block_bytes, offset, n_sub, scale_at, min_at):
    """The items lo .. hi-1 for a 256-value format of n_sub sub-blocks; min_at: -1 for a format without minima."""
    weights, matrix_bytes, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_rows, n_cols = ld_i64(args + 24), ld_i64(args + 32)
    q, scale, sums = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    work = ld_i64(args + 120) + thread * ld_i64(args + 128)
    n_groups, n_blocks = (n_rows + 15) // 16, n_cols // 256
    has_min = min_at >= 0
    acc = work + ACC
    for item in range(lo, hi):
        used, group = item // n_groups, item % n_groups
        entry = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - entry
        first = 16 * group
        n = min(16, n_rows - first)
        base = weights + ld_i64(matrices + 8 * used) * matrix_bytes + first * row_bytes
        _clear(acc, n_entries)
        for b in range(n_blocks):
            if group + 1 < n_groups:
                ahead = min(16, n_rows - first - 16) * row_bytes
                _prefetch_part(base + 16 * row_bytes, ahead, b, n_blocks)
            for r in range(16):
                source = base + min(r, n - 1) * row_bytes + b * block_bytes
                unpack(source, work + 256 * r)
                unpack_scales(source, r, work + SUB_SCALES, work + SUB_SCALES + 1024)
                st_u16(work + HALVES + 2 * r, ld_u16(source + scale_at))
                if has_min:
                    st_u16(work + HALVES + 256 + 2 * r, ld_u16(source + min_at))
            for part in range(4):
                transpose(work + 64 * part, 256, work + PANEL + 1024 * part)
            _widen(work + HALVES, work + SCALES, 1)
            if has_min:
                _widen(work + HALVES + 256, work + SCALES + 512, 1)
            e = 0
            while e + 4 <= n_entries:
                rows = x_rows + 8 * (entry + e)
                i0, i1, i2, i3 = ld_i64(rows), ld_i64(rows + 8), ld_i64(rows + 16), ld_i64(rows + 24)
                p, s, t = q + 256 * b, scale + 4 * b, sums + 64 * b
                by, st = 4 * n_blocks, 64 * n_blocks
                four_rows_256(
                    work, acc + 64 * e,
                    p + i0 * n_cols, p + i1 * n_cols, p + i2 * n_cols, p + i3 * n_cols,
                    s + i0 * by, s + i1 * by, s + i2 * by, s + i3 * by,
                    t + i0 * st, t + i1 * st, t + i2 * st, t + i3 * st,
                    n_sub, offset, has_min,
                )  # fmt: skip
                e += 4
            while e < n_entries:
                i = ld_i64(x_rows + 8 * (entry + e))
                at = i * n_blocks + b
                one_row_256(work, acc + 64 * e, q + 256 * at, scale + 4 * at, sums + 64 * at, n_sub, offset, has_min)
                e += 1
        _put(acc, n_entries, out_rows + 8 * entry, y, y_stride, first, n)
