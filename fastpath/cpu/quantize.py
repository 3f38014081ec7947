"""Activations rounded to int8, for integer dot products.        definition: refimpl/ops/integer.py

Beside the bytes there are sums of them, because weights are unpacked to unsigned bytes with an offset:
sum (u - offset) q = sum u q - offset sum q.

    work item   a chunk of a row: 512 columns in blocks of 32, or one block of 256
    arithmetic  16 blocks of 32 side by side: a lane has a block's maximum, its scale, its sum
    traffic     x is read twice, the second time from the first-level cache

`quantize` keeps rows as they are, for products with few of them:

    q     i8[T, C]        scale  f32[T, C / block]
    sums  i32[T, C / 32] for blocks of 32, i32[T, C / 16] for blocks of 256

activations.py puts the same numbers into the order in which products with many rows read them.
"""

from llvmlite import ir
from numba import types

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.simd import (
    I8,
    I64,
    abs_bits,
    define,
    f32x16,
    i8x64,
    i32s,
    i32x16,
    invoke,
    ld_f32,
    ld_i64,
    load_f32,
    max_i32,
    pointer,
    same,
    splat,
    splat_i32,
    st_f32,
    store_f32,
    store_first_f32,
    store_i32,
    top_i32,
)
from fastpath.cpu.simd_dot import dot_u8s8

CHUNK = 512  # columns in blocks of 32
CHUNKS_PER_PIECE = 16  # below that a second thread does not pay
INFINITY_BITS = 0x7F800000


# -- 16 vectors of 16 lanes


def _joined(b, rows, step):
    """Half as many vectors: two neighbouring lanes become one."""
    even, odd = i32s(range(0, 32, 2)), i32s(range(1, 32, 2))
    return [
        step(b.shuffle_vector(x, y, even), b.shuffle_vector(x, y, odd))
        for x, y in zip(rows[::2], rows[1::2], strict=True)
    ]


def _tops(b, x, last):
    """Bits of the largest magnitude of 16 blocks of 32; block `last` stands for those behind it."""

    def larger(u, v):
        return invoke(b, "llvm.smax.v16i32", i32x16.ir, [u, v])

    tops = []
    for block in range(16):
        number = b.select(b.icmp_signed("<", I64(block), last), I64(block), last)
        at = b.add(x, b.shl(number, I64(7)))
        halves = [b.load(pointer(b, at, 64 * i), typ=i32x16.ir, align=1) for i in range(2)]
        # as integers the bits of |x| are ordered like the floats, NaN above all
        tops.append(larger(*(b.and_(half, same(i32x16, 0x7FFFFFFF)) for half in halves)))
    while len(tops) > 1:
        tops = _joined(b, tops, larger)
    return tops[0]


def _sums_of_4(b, q, n):
    """n vectors of int8 -> sums of 4 neighbours."""
    ones, zero = same(i8x64, 1), same(i32x16, 0)
    vectors = [b.load(pointer(b, q, 64 * i), typ=i8x64.ir, align=1) for i in range(n)]
    return [dot_u8s8(b, zero, ones, vector) for vector in vectors]


def _sums_of_32(b, q):
    """int8[512] -> 16 sums."""
    sums = _sums_of_4(b, q, 8)
    while len(sums) > 1:
        sums = _joined(b, sums, b.add)
    return sums[0]


def _sums_of_8_and_16(b, q, eights, sixteens):
    """int8[256] -> i32[32] and i32[16] in memory."""
    sums = _joined(b, _sums_of_4(b, q, 4), b.add)
    for i, eight in enumerate(sums):
        b.store(eight, pointer(b, eights, 64 * i), align=1)
    b.store(*_joined(b, sums, b.add), pointer(b, sixteens), align=1)


tops_of_32 = define(i32x16(types.intp, types.int64), _tops)
sums_of_32 = define(i32x16(types.intp), _sums_of_32)
sums_of_8_and_16 = define(types.void(types.intp, types.intp, types.intp), _sums_of_8_and_16)


# -- rounding


def _scale(b, tops):
    """amax / 127, and 0 for a block that is next to nothing."""
    top = b.bitcast(tops, f32x16.ir)
    is_tiny = b.fcmp_ordered("<", top, same(f32x16, 1e-30))
    return b.select(is_tiny, same(f32x16, 0.0), b.fdiv(top, same(f32x16, 127.0)))


def _inverse(b, tops):
    """127 / amax, and 0 for a block that is next to nothing or has an infinity or a NaN."""
    top, unit = b.bitcast(tops, f32x16.ir), same(f32x16, 127.0)
    is_usable = b.and_(
        b.fcmp_ordered(">=", top, same(f32x16, 1e-30)), b.icmp_signed("<", tops, same(i32x16, INFINITY_BITS))
    )
    return b.select(is_usable, b.fdiv(unit, b.select(is_usable, top, unit)), same(f32x16, 0.0))


def _round_32(b, x, q, inverse):
    """32 floats to int8; a zero inverse gives zeros, whatever x holds."""
    by = splat(b, inverse, 16)
    is_usable = b.fcmp_ordered("!=", by, same(f32x16, 0.0))
    for i in range(2):
        value = b.load(pointer(b, x, 64 * i), typ=f32x16.ir, align=1)
        value = b.fmul(b.select(is_usable, value, same(f32x16, 0.0)), by)
        value = invoke(b, "llvm.roundeven.v16f32", f32x16.ir, [value])
        value = b.trunc(b.fptosi(value, i32x16.ir), ir.VectorType(I8, 16))
        b.store(value, pointer(b, q, 16 * i), align=1)


scale_of, inverse_of = define(f32x16(i32x16), _scale), define(f32x16(i32x16), _inverse)
round_32 = define(types.void(types.intp, types.intp, types.float32), _round_32)


@helper
def round_blocks_of_32(x, n_blocks, q, scales, inverses):
    """Up to 16 blocks; scales and inverses: f32[16], all written."""
    tops = tops_of_32(x, n_blocks - 1)
    store_f32(scales, scale_of(tops))
    store_f32(inverses, inverse_of(tops))
    for block in range(n_blocks):
        round_32(x + 128 * block, q + 32 * block, ld_f32(inverses + 4 * block))


@helper
def round_block_of_256(x, q, scale, inverse):
    """scale and inverse: f32[16], all written with the same number."""
    bits = splat_i32(0)
    for i in range(0, 1024, 64):
        bits = max_i32(bits, abs_bits(load_f32(x + i)))
    tops = splat_i32(top_i32(bits))
    store_f32(scale, scale_of(tops))
    store_f32(inverse, inverse_of(tops))
    for i in range(0, 256, 32):
        round_32(x + 4 * i, q + i, ld_f32(inverse))


# -- rows as they are

SPARE = 256  # bytes of a thread's scratch


@kernel
def quantize_32(args, lo, hi, thread):
    x, n_cols, q = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    scales, sums = ld_i64(args + 24), ld_i64(args + 32)
    spare = ld_i64(args + 40) + SPARE * thread
    n_blocks, per_row = n_cols // 32, (n_cols + CHUNK - 1) // CHUNK
    for item in range(lo, hi):
        first = item // per_row * n_blocks + 16 * (item % per_row)
        n = min(16, n_blocks - 16 * (item % per_row))
        round_blocks_of_32(x + 128 * first, n, q + 32 * first, spare, spare + 64)
        store_first_f32(scales + 4 * first, n, load_f32(spare))
        store_i32(spare + 64, sums_of_32(q + 32 * first))
        store_first_f32(sums + 4 * first, n, load_f32(spare + 64))


@kernel
def quantize_256(args, lo, hi, thread):
    x, q, scales, sums = ld_i64(args), ld_i64(args + 16), ld_i64(args + 24), ld_i64(args + 32)
    spare = ld_i64(args + 40) + SPARE * thread
    for block in range(lo, hi):
        round_block_of_256(x + 1024 * block, q + 256 * block, spare, spare + 64)
        st_f32(scales + 4 * block, ld_f32(spare))
        sums_of_8_and_16(q + 256 * block, spare, sums + 64 * block)


def quantize(x, block_size):
    """Round the rows of x f32[T, C]; returns the addresses of (q, scale, sums), valid until the next call."""
    T, C = x.shape
    n_bytes = T * C
    n_threads = threads.num_threads()
    # scale and sums together take at most half of q; whole vectors are read behind a last chunk
    space = workspace(SPARE * n_threads + n_bytes * 2 + 256 + CHUNK, "activations")
    q = space + SPARE * n_threads
    scales = q + -(-n_bytes // 64) * 64
    sums = scales + -(-T * (C // block_size) * 4 // 64) * 64
    run, n = (quantize_256, n_bytes // 256) if block_size == 256 else (quantize_32, T * -(-C // CHUNK))
    grain = CHUNKS_PER_PIECE * (2 if block_size == 256 else 1)
    threads.run(run, (address(x), C, q, scales, sums, space), n, grain, n_threads, label="quantize")
    return q, scales, sums
