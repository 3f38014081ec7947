"""Activations in the order in which products with many rows read them.

The rows that meet one matrix are cut into tiles of `most` rows; the last one may have fewer, or it is padded
with its last row.  A tile holds one block after the other, and of a block the words of all its rows side by
side, so that a product reads memory from front to back.  For products with vectors:

    blocks of 32     first[R]       i32  -offset * sum of q, where the product begins
                                    f32  sum of q instead, for formats with minima (they have no offset)
                     q[8][R]        4 bytes each
                     scale[R]       f32
    blocks of 256    first[n][R]    i32  -offset * sum of q, for each run of columns (panels.py), if any
                     q[64][R]
                     pairs[p][R]    i16  sums of two sub-blocks, for formats with minima
                     scale[R]

For products with tiles, 16 rows:

    blocks of 32     q[16][32]      the rows of a tile
                     scale[16]      f32
                     sum[16]        f32, for formats with minima
    blocks of 256    q[4][16][64]   four tiles
                     low[16][s]     for formats with minima: the sums of q of s sub-blocks are 64 high + low,
                     high[16][s]    in int8
                     scale[16]

    work item   PIECE columns of every n-th tile of one matrix
    traffic     x is read once per entry; what is written is 1.25 bytes per value

Arguments, int64 words:
    x, n_cols
    routing      starts, x_rows (matmul.py)
    tiles        n (that many items share the tiles of a matrix), most rows of a tile, are they padded
    target       address, bytes of a row; scratch, SPARE bytes per thread
    block        offset and whether there are minima (32); n, p, offset (256)
"""

import numba

from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.quantize import (
    CHUNK,
    round_block_of_256,
    round_blocks_of_32,
    sums_of_8_and_16,
    sums_of_32,
)
from fastpath.cpu.simd import ld_f32, ld_i32, ld_i64, st_f32, st_i32, st_i64, st_u8, store_i32

F32 = numba.float32
PIECE = 1024  # columns, a multiple of CHUNK

# scratch of a thread: i8[512], f32[16] scales and inverses, i32[16] or i32[32] sums, i32[16] sums of 16
Q, SCALES, INVERSES, SUMS, SUMS_OF_16, SPARE = 0, 512, 576, 640, 768, 832


def words_of_block(shape):
    """Words per row and block; see above."""
    if shape.is_32:
        return 10
    n, p = firsts_and_pairs(shape)
    return n + 64 + p + 1


def words_of_tile(shape):
    """The same in tiles of 16 rows."""
    if shape.is_32:
        return 10
    return 64 + (shape.form.n_sub // 2 if shape.has_minima else 0) + 1


def firsts_and_pairs(shape):
    """n and p of a block of 256."""
    form = shape.form
    n = 64 // (shape.run or form.width) if form.offset else 0
    return n, form.n_sub // 2 if form.has_minima else 0


@inlined
def n_tiles_of(n_entries, most):
    return (n_entries + most - 1) // most


@inlined
def first_of_tile(tile, n_entries, most):
    return min(tile * most, n_entries)


@helper
def _row_of_32(x, n_cols, tile, r, n, spare, offset, has_minima):
    """A row of x as row r of the n rows of a tile; in tiles of 16, rows from n on are zero."""
    n_blocks, out = n_cols // 32, tile + 4 * r
    for first in range(0, n_blocks, CHUNK // 32):
        count = min(CHUNK // 32, n_blocks - first)
        round_blocks_of_32(x + 128 * first, count, spare + Q, spare + SCALES, spare + INVERSES)
        store_i32(spare + SUMS, sums_of_32(spare + Q))
        for block in range(count):
            total = ld_i32(spare + SUMS + 4 * block)
            if has_minima:
                st_f32(out, F32(total))
            else:
                st_i32(out, -offset * total)
            for word in range(8):
                st_i32(out + 4 * n * (1 + word), ld_i32(spare + Q + 32 * block + 4 * word))
            st_f32(out + 36 * n, ld_f32(spare + SCALES + 4 * block))
            out += 40 * n


@helper
def _row_of_256(x, n_cols, tile, r, n, spare, n_firsts, n_pairs, offset):
    out, step = tile + 4 * r, 4 * n
    for block in range(n_cols // 256):
        round_block_of_256(x + 1024 * block, spare + Q, spare + SCALES, spare + INVERSES)
        sums_of_8_and_16(spare + Q, spare + SUMS, spare + SUMS_OF_16)
        for i in range(n_firsts):
            st_i32(out, -offset * _sum_of(spare, i, n_firsts))
            out += step
        for word in range(64):
            st_i32(out, ld_i32(spare + Q + 4 * word))
            out += step
        for i in range(n_pairs):
            low, high = _sum_of(spare, 2 * i, 2 * n_pairs), _sum_of(spare, 2 * i + 1, 2 * n_pairs)
            st_i32(out, (low & 0xFFFF) | (high << 16))
            out += step
        st_f32(out, ld_f32(spare + SCALES))
        out += step


@inlined
def _sum_of(spare, i, n):
    """The i-th of n equal parts of a block of 256: of 8, 16 or 32 columns."""
    if n == 32:
        return ld_i32(spare + SUMS + 4 * i)
    if n == 16:
        return ld_i32(spare + SUMS_OF_16 + 4 * i)
    return ld_i32(spare + SUMS_OF_16 + 8 * i) + ld_i32(spare + SUMS_OF_16 + 8 * i + 4)


@inlined
def _each_row(args, lo, hi, thread, row, parameters):
    x, n_cols, starts, x_rows = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    per_matrix, most, is_padded = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    target, row_bytes = ld_i64(args + 56), ld_i64(args + 64)
    spare = ld_i64(args + 72) + SPARE * thread
    n_pieces = (n_cols + PIECE - 1) // PIECE
    for item in range(lo, hi):
        used, turn = item // (per_matrix * n_pieces), item // n_pieces % per_matrix
        column = PIECE * (item % n_pieces)
        count, before = min(PIECE, n_cols - column), row_bytes * column // n_cols
        start = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - start
        for tile in range(turn, n_tiles_of(n_entries, most), per_matrix):
            first = first_of_tile(tile, n_entries, most)
            n = first_of_tile(tile + 1, n_entries, most) - first
            rows = most if is_padded else n
            out = target + row_bytes * (start + most * used + first) + before * rows
            for r in range(rows):
                source = x + 4 * (n_cols * ld_i64(x_rows + 8 * (start + first + min(r, n - 1))) + column)
                row(source, count, out, r, rows, spare, *parameters)


@helper
def _row_of_32_in_tiles(x, n_cols, tile, r, n, spare, has_minima):
    n_blocks, out = n_cols // 32, tile + 32 * r
    for first in range(0, n_blocks, CHUNK // 32):
        count = min(CHUNK // 32, n_blocks - first)
        round_blocks_of_32(x + 128 * first, count, spare + Q, spare + SCALES, spare + INVERSES)
        store_i32(spare + SUMS, sums_of_32(spare + Q))
        for block in range(count):
            scales = tile + 512 + 4 * r + 640 * (first + block)
            for word in range(0, 32, 8):
                value = ld_i64(spare + Q + 32 * block + word)
                st_i64(out + 640 * (first + block) + word, value)
            st_f32(scales, ld_f32(spare + SCALES + 4 * block))
            if has_minima:
                st_f32(scales + 64, F32(ld_i32(spare + SUMS + 4 * block)))


@helper
def _row_of_256_in_tiles(x, n_cols, tile, r, n, spare, n_sums):
    for block in range(n_cols // 256):
        round_block_of_256(x + 1024 * block, spare + Q, spare + SCALES, spare + INVERSES)
        sums_of_8_and_16(spare + Q, spare + SUMS, spare + SUMS_OF_16)
        for c in range(4):
            for word in range(0, 64, 8):
                value = ld_i64(spare + Q + 64 * c + word)
                st_i64(tile + 1024 * c + 64 * r + word, value)
        tile += 4096
        for i in range(n_sums):
            total = _sum_of(spare, i, n_sums)
            high = (total + 32) >> 6
            st_u8(tile + n_sums * r + i, total - 64 * high)
            st_u8(tile + n_sums * (16 + r) + i, high)
        tile += 32 * n_sums
        st_f32(tile + 4 * r, ld_f32(spare + SCALES))
        tile += 64


@kernel
def lanes_of_32(args, lo, hi, thread):
    _each_row(args, lo, hi, thread, _row_of_32, (ld_i64(args + 80), ld_i64(args + 88)))


@kernel
def lanes_of_256(args, lo, hi, thread):
    parameters = ld_i64(args + 80), ld_i64(args + 88), ld_i64(args + 96)
    _each_row(args, lo, hi, thread, _row_of_256, parameters)


@kernel
def tiles_of_32(args, lo, hi, thread):
    _each_row(args, lo, hi, thread, _row_of_32_in_tiles, (ld_i64(args + 88),))


@kernel
def tiles_of_256(args, lo, hi, thread):
    _each_row(args, lo, hi, thread, _row_of_256_in_tiles, (2 * ld_i64(args + 88),))
