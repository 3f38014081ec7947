"""Vector values for products with 16 rows of a weight: table lookup, int8 dot products, transposing loads.

More intrinsics like those of simd.py, and the functions that build them.  `dot_u8s8` and `look_up` take a
special instruction where there is one (machine.py), and plain LLVM IR elsewhere; the results are the same
integers.
"""

from llvmlite import ir
from numba import types

from fastpath.cpu import machine
from fastpath.cpu.simd import (
    I8,
    I16,
    I32,
    I64,
    PTR,
    define,
    f32x16,
    i8x64,
    i32s,
    i32x16,
    invoke,
    pointer,
    same,
    splat,
    undefined,
)

# -- bytes through a table


def look_up(b, index, table):
    """Each byte -> table[byte], for bytes below 16 and one constant table."""
    levels = [value - 256 if value > 127 else value for value in table]

    def pieces(symbol, lanes):
        kind = ir.VectorType(I8, lanes)
        entries = ir.Constant(kind, levels * (lanes // 16))
        parts = [
            invoke(
                b,
                symbol,
                kind,
                [entries, b.shuffle_vector(index, undefined(index.type), i32s(range(i, i + lanes)))],
            )
            for i in range(0, 64, lanes)
        ]
        while len(parts) > 1:
            joined = i32s(range(2 * parts[0].type.count))
            parts = [b.shuffle_vector(x, y, joined) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    if machine.IS_AARCH64:
        return pieces("llvm.aarch64.neon.tbl1.v16i8", 16)
    for feature, symbol, lanes in (
        ("avx512bw", "llvm.x86.avx512.pshuf.b.512", 64),
        ("avx2", "llvm.x86.avx2.pshuf.b", 32),
        ("ssse3", "llvm.x86.ssse3.pshuf.b.128", 16),
    ):
        if machine.IS_X86 and feature in machine.FEATURES:
            return pieces(symbol, lanes)
    result = same(i8x64, levels[0])
    for code in range(1, 16):
        hit = b.icmp_unsigned("==", index, same(i8x64, code))
        result = b.select(hit, same(i8x64, levels[code]), result)
    return result


# -- int8 dot products


def _dot_words(b, acc, u, s):
    """The portable form: even and odd bytes as 16-bit words, exact on every target."""
    words = ir.VectorType(I16, 32)

    def words_of(value):
        return ir.Constant(words, [value] * 32)

    def half(value, odd):
        picked = b.shuffle_vector(value, undefined(words), i32s(range(odd, 32, 2)))
        return b.sext(picked, i32x16.ir)

    u, s = b.bitcast(u, words), b.bitcast(s, words)
    even = b.and_(u, words_of(255)), b.ashr(b.shl(s, words_of(8)), words_of(8))
    odd = b.lshr(u, words_of(8)), b.ashr(s, words_of(8))
    for x, y in (even, odd):
        acc = b.add(acc, b.add(b.mul(half(x, 0), half(y, 0)), b.mul(half(x, 1), half(y, 1))))
    return acc


def _vnni(b, name, element, acc, x, y):
    """One VNNI instruction on vectors of 512 or 256 bits."""
    lanes = acc.type.count
    parts = ir.VectorType(element, 32 * lanes // element.width) if machine.vnni_takes_bytes() else acc.type
    symbol = f"llvm.x86.avx512.{name}.{32 * lanes}"
    return invoke(b, symbol, acc.type, [acc, b.bitcast(x, parts), b.bitcast(y, parts)])


def _in_halves(b, step, acc, x, y):
    """step(acc, x, y) on vectors of 256 bits, for CPUs that have no longer ones."""
    x, y = b.bitcast(x, i32x16.ir), b.bitcast(y, i32x16.ir)
    halves = [i32s(range(8)), i32s(range(8, 16))]
    parts = [step(*(b.shuffle_vector(v, undefined(v.type), half) for v in (acc, x, y))) for half in halves]
    return b.shuffle_vector(*parts, i32s(range(16)))


def _madd(b, acc, u, s, is_small):
    """AVX2: sums of two products, which saturate at 16 bits, so that u has to be below 128 or exactly 128."""
    as_bytes, as_words = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    u, s = b.bitcast(u, as_bytes), b.bitcast(s, as_bytes)
    parts = [u] if is_small else [b.and_(u, ir.Constant(as_bytes, [mask] * 32)) for mask in (0x7F, -0x80)]
    for part in parts:
        pairs = invoke(b, "llvm.x86.avx2.pmadd.ub.sw", as_words, [part, s])
        ones = ir.Constant(as_words, [1] * 16)
        acc = b.add(acc, invoke(b, "llvm.x86.avx2.pmadd.wd", acc.type, [pairs, ones]))
    return acc


def dot_u8s8(b, acc, u, s, is_small=False):
    """acc[l] += sum over j < 4 of u8[4l + j] * s8[4l + j]; is_small: all u are below 128"""
    if machine.DOT == "avx512vnni":
        return _vnni(b, "vpdpbusd", I8, acc, u, s)
    if machine.DOT == "avxvnni":
        return _in_halves(b, lambda *v: _vnni(b, "vpdpbusd", I8, *v), acc, u, s)
    if machine.IS_X86 and "avx2" in machine.FEATURES:
        return _in_halves(b, lambda *v: _madd(b, *v, is_small), acc, u, s)
    return _dot_words(b, acc, u, s)


def dot_pairs(b, acc, x, y):
    """acc[l] += x16[2l] * y16[2l] + x16[2l + 1] * y16[2l + 1], signed numbers of 16 bits"""
    if machine.DOT == "avx512vnni":
        return _vnni(b, "vpdpwssd", I16, acc, x, y)
    if machine.DOT == "avxvnni":
        return _in_halves(b, lambda *v: _vnni(b, "vpdpwssd", I16, *v), acc, x, y)
    if machine.IS_X86 and "avx2" in machine.FEATURES:
        words = ir.VectorType(I16, 16)
        return _in_halves(
            b,
            lambda acc, *v: b.add(
                acc, invoke(b, "llvm.x86.avx2.pmadd.wd", acc.type, [b.bitcast(part, words) for part in v])
            ),
            acc, x, y,
        )  # fmt: skip
    x, y = b.bitcast(x, i32x16.ir), b.bitcast(y, i32x16.ir)
    up = ir.Constant(i32x16.ir, [16] * 16)
    low = b.mul(b.ashr(b.shl(x, up), up), b.ashr(b.shl(y, up), up))
    return b.add(acc, b.add(low, b.mul(b.ashr(x, up), b.ashr(y, up))))


def dot_spread_at(b, acc, u, address):
    """acc[l] += sum over j < 4 of u8[4l + j] * s8 at (address + j): 4 activations against 16 weight rows."""
    word = splat(b, b.load(pointer(b, address), typ=I32, align=1), 16)
    return dot_u8s8(b, acc, u, b.bitcast(word, i8x64.ir))


dot_spread = define(i32x16(i32x16, i8x64, types.intp), dot_spread_at)


# -- 16 rows at once


SECOND_LEVEL, FIRST_LEVEL = 2, 3  # caches to prefetch into


def prefetch(b, address, level=SECOND_LEVEL):
    invoke(b, "llvm.prefetch.p0", ir.VoidType(), [pointer(b, address), I32(0), I32(level), I32(1)])


def row_address(b, source, stride, last, r):
    """Address of row min(r, last): the last group of a matrix may have fewer than 16 rows."""
    row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
    return b.inttoptr(b.add(source, b.mul(stride, row)), PTR)


def rows_of_tile(b, source, stride, last):
    """16 bytes of each of 16 rows -> 4 vectors: lane r of vector j has bytes 4j .. 4j+3 of row r.

    Four quarters of each vector come from rows 4 apart, so that interleaving dwords and then pairs of dwords
    inside the quarters, which every SIMD instruction set can do, gives the right order.

    The same place of the next 16 rows is prefetched: 4 rows per call, in turn, as four calls use up a cache
    line.  Behind the last row this asks for memory that may not exist, which is harmless.
    """
    quarter = ir.VectorType(I32, 4)
    turn = b.and_(b.lshr(source, I64(2)), I64(12))
    for r in range(16, 20):
        prefetch(b, b.add(source, b.mul(stride, b.add(turn, I64(r)))))
    rows = [b.load(row_address(b, source, stride, last, r), typ=quarter, align=1) for r in range(16)]
    spread = []
    for g in range(4):
        x = b.shuffle_vector(rows[g], rows[g + 4], i32s(range(8)))
        y = b.shuffle_vector(rows[g + 8], rows[g + 12], i32s(range(8)))
        spread.append(b.shuffle_vector(x, y, i32s(range(16))))

    def interleave(x, y, order):
        return b.shuffle_vector(x, y, i32s([4 * lane + i for lane in range(4) for i in order]))

    low, high = (0, 16, 1, 17), (2, 18, 3, 19)
    low_pair, high_pair = (0, 1, 16, 17), (2, 3, 18, 19)
    vectors = []
    for order in (low, high):
        x, y = interleave(spread[0], spread[1], order), interleave(spread[2], spread[3], order)
        vectors += [interleave(x, y, pair) for pair in (low_pair, high_pair)]
    return vectors


def _tile(b, source, stride, last, target):
    """The four vectors of `rows_of_tile` at `target`."""
    for j, vector in enumerate(rows_of_tile(b, source, stride, last)):
        b.store(vector, pointer(b, target, 64 * j), align=1)


def _column(b, source, stride, last):
    """4 bytes of each of 16 rows as one vector of int32."""
    result = undefined(i32x16.ir)
    for r in range(16):
        word = b.load(row_address(b, source, stride, last, r), typ=I32, align=1)
        result = b.insert_element(result, word, I32(r))
    return result


def sums_of_vectors(b, address):
    """16 vectors in memory -> their 16 sums, each added in the order of `sum_f32`."""
    rows = [b.load(pointer(b, address, 64 * r), typ=f32x16.ir, align=1) for r in range(16)]
    width = 16  # lanes that still belong to one row
    while width > 1:
        width //= 2
        starts = [start + i for start in range(0, 32, 2 * width) for i in range(width)]
        first, second = i32s(starts), i32s([lane + width for lane in starts])
        rows = [
            b.fadd(b.shuffle_vector(x, y, first), b.shuffle_vector(x, y, second))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]


sums_f32 = define(f32x16(types.intp), sums_of_vectors)
tile = define(types.void(types.intp, types.intp, types.intp, types.intp), _tile)
column = define(i32x16(types.intp, types.intp, types.intp), _column)
