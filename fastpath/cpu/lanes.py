"""Registers as Python values, for code that is written while a kernel is built.

simd.py has functions that a kernel calls; here are the same LLVM instructions behind operators, so that what
a weight format does to its bits reads as a formula.  `Lanes` is a register of 16 rows by 4 bytes (`u8`) or
16 rows of one number (`i32`, `f32`).  A block of 16 rows is read through one of two classes that answer the
same questions, `PackedBlock` for packed weights (packing.py) and `RowsBlock` for rows as in the file.
"""

from llvmlite import ir

from fastpath.cpu import machine
from fastpath.cpu.simd import (
    I8,
    I16,
    I32,
    I64,
    _f16_to_f32,
    f32x16,
    i8x64,
    i16x16,
    i32s,
    i32x16,
    invoke,
    pointer,
    splat,
    undefined,
)
from fastpath.cpu.simd_dot import look_up, row_address, rows_of_tile

HAS_BIT_MATRIX = machine.IS_X86 and {"gfni", "avx512f", "avx512bw"} <= machine.FEATURES


class Lanes:
    """An LLVM vector with operators; an operand may be a constant, a scalar of LLVM or other lanes."""

    def __init__(self, b, value):
        self.b, self.value = b, value

    def _by(self, operation, other):
        kind = self.value.type
        if isinstance(other, Lanes):
            other = other.value
        elif isinstance(other, int):
            other = ir.Constant(kind, [other] * kind.count)
        else:
            other = splat(self.b, other, kind.count)
        return Lanes(self.b, getattr(self.b, operation)(self.value, other))

    def __and__(self, other):
        return self._by("and_", other)

    def __or__(self, other):
        return self._by("or_", other)

    def __xor__(self, other):
        return self._by("xor", other)

    def __rshift__(self, n):
        return self._by("lshr", n)

    def __lshift__(self, n):
        return self._by("shl", n)

    def __mul__(self, other):
        return self._by("mul", other)

    def __sub__(self, other):
        return self._by("sub", other)

    def field(self, place, n, to=0, above=None):
        """Of each byte the n bits from bit `place` (plus `above`, a value at run time), moved to bit `to`."""
        mask = (1 << n) - 1 << to
        if above is None and place == to:
            return self & mask
        if HAS_BIT_MATRIX:
            return self.gathered({to + i: place + i for i in range(n)}, above)
        moved = self if above is None else (self.words >> self.b.trunc(above, I32)).bytes
        return (moved >> place - to if place > to else moved << to - place) & mask

    def gathered(self, sources, above=None):
        """Bit i of each byte is its bit sources[i] (plus `above`), or 0.  One instruction, HAS_BIT_MATRIX."""
        b = self.b
        rows = I64(sum(1 << 8 * (7 - bit) + source for bit, source in sources.items()))
        rows = rows if above is None else b.shl(rows, above)
        matrix = b.bitcast(splat(b, rows, 8), i8x64.ir)
        args = [self.value, matrix, I8(0)]
        return Lanes(b, invoke(b, "llvm.x86.vgf2p8affineqb.512", i8x64.ir, args))

    def where(self, mask, other):
        """The bits of the mask, and elsewhere those of other lanes."""
        return (self & mask) | (other & ~mask & 0xFF)

    def plus_where(self, bits, value):
        """Bytes plus `value` where the byte of `bits` is not zero."""
        b, kind = self.b, self.value.type
        is_set = b.icmp_unsigned("!=", bits.value, ir.Constant(kind, None))
        return Lanes(b, b.select(is_set, b.add(self.value, ir.Constant(kind, [value] * 64)), self.value))

    def each_byte(self, values):
        """Bytes and, byte by byte, four values that repeat."""
        return Lanes(self.b, self.b.and_(self.value, ir.Constant(self.value.type, values * 16)))

    def spread(self, j):
        """Byte j of each row, four times."""
        places = i32s([4 * (lane // 4) + j for lane in range(64)])
        return Lanes(self.b, self.b.shuffle_vector(self.value, undefined(self.value.type), places))

    @property
    def halves(self):
        """As numbers of 16 bits, two to a row."""
        return Lanes(self.b, self.b.bitcast(self.value, ir.VectorType(I16, 32)))

    @property
    def words(self):
        """The 4 bytes of a row as one number."""
        return Lanes(self.b, self.b.bitcast(self.value, i32x16.ir))

    @property
    def bytes(self):
        return Lanes(self.b, self.b.bitcast(self.value, i8x64.ir))

    def byte(self, j):
        """Byte j of each row's word."""
        return (self >> 8 * j) & 0xFF if j < 3 else self >> 24

    def signed_byte(self, j):
        return (self << 24 - 8 * j)._by("ashr", 24)

    def through(self, table):
        """Each byte, below 16, replaced by the entry of that number."""
        return Lanes(self.b, look_up(self.b, self.value, table))

    def exponent(self):
        """2 ** (e - 128) of bytes e; the two smallest results are denormal."""
        b, e = self.b, self.value
        normal = ((self - 1) << 23).value
        denormal = b.shl(same(0x00200000), b.and_(e, same(1)))
        return Lanes(b, b.bitcast(b.select(b.icmp_unsigned("<", e, same(2)), denormal, normal), f32x16.ir))


class Fours:
    """Small numbers of 16 rows, four to a word: number j is byte j % 4 of word j // 4, less `bias`."""

    def __init__(self, words, bias=0):
        self.fours, self.bias = words, bias

    def __len__(self):
        return 4 * len(self.fours)

    def __getitem__(self, j):
        number = self.fours[j // 4].byte(j % 4)
        return number - self.bias if self.bias else number

    def __iter__(self):
        return (self[j] for j in range(len(self)))

    def pair(self, i):
        """Numbers 4w + side and 4w + side + 2, where i = 2w + side, as halves of a word."""
        two = (self.fours[i // 2] >> 8 * (i % 2)) & 0x00FF00FF
        return two.halves - self.bias if self.bias else two


def same(value):
    return ir.Constant(i32x16.ir, [value] * 16)


def widened(b, halves):
    """float16 to float32, exactly: by the instruction if the CPU has one, by integer steps if not."""
    if "f16c" in machine.FEATURES or machine.IS_AARCH64:
        return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), 16)), f32x16.ir)
    return _f16_to_f32(b, b.zext(halves, i32x16.ir))


class PackedBlock:
    """A packed block: byte `at` of the block's 16 rows begins at 16 * at."""

    def __init__(self, b, address):
        self.b, self.address = b, address

    def moved(self, at):
        """The block seen from byte `at` on, an LLVM value."""
        return PackedBlock(self.b, self.b.add(self.address, self.b.mul(at, I64(16))))

    def _load(self, at, kind):
        return self.b.load(pointer(self.b, self.address, 16 * at), typ=kind, align=1)

    def bytes(self, at, n):
        """n vectors: bytes at .. at+3 of the rows, at+4 .. at+7, ..."""
        return [Lanes(self.b, self._load(at + 4 * i, i8x64.ir)) for i in range(n)]

    def words(self, at):
        return Lanes(self.b, self._load(at, i32x16.ir))

    def numbers(self, at, n):
        """n signed bytes as numbers, packed as units of one byte."""
        eights = [self._load(at + j, ir.VectorType(I8, 16)) for j in range(n)]
        return [Lanes(self.b, self.b.sext(eight, i32x16.ir)) for eight in eights]

    def half(self, at):
        """A float16 as float32."""
        return Lanes(self.b, widened(self.b, self._load(at, i16x16.ir)))

    def short(self, at):
        return Lanes(self.b, self.b.zext(self._load(at, i16x16.ir), i32x16.ir))

    def byte(self, at):
        return Lanes(self.b, self.b.zext(self._load(at, ir.VectorType(I8, 16)), i32x16.ir))


class RowsBlock:
    """The same of 16 rows in the file, `stride` bytes apart; row `last` stands for those behind it."""

    def __init__(self, b, address, stride, last):
        self.b, self.address, self.stride, self.last = b, address, stride, last

    def moved(self, at):
        return RowsBlock(self.b, self.b.add(self.address, at), self.stride, self.last)

    def bytes(self, at, n):
        """By transposing 16 bytes of 16 rows at a time: n is a multiple of 4."""
        tiles = [self._tile(at + 4 * i) for i in range(0, n, 4)]
        return [Lanes(self.b, self.b.bitcast(word, i8x64.ir)) for tile in tiles for word in tile]

    def _tile(self, at):
        source = self.b.add(self.address, I64(at)) if at else self.address
        return rows_of_tile(self.b, source, self.stride, self.last)

    def _gather(self, at, kind):
        source = self.b.add(self.address, I64(at)) if at else self.address
        result = undefined(ir.VectorType(kind, 16))
        for r in range(16):
            value = self.b.load(row_address(self.b, source, self.stride, self.last, r), typ=kind, align=1)
            result = self.b.insert_element(result, value, I32(r))
        return result

    def words(self, at):
        return Lanes(self.b, self._gather(at, I32))

    def numbers(self, at, n):
        return [four.words.signed_byte(j) for four in self.bytes(at, n // 4) for j in range(4)]

    def half(self, at):
        return Lanes(self.b, widened(self.b, self._gather(at, I16)))

    def short(self, at):
        return Lanes(self.b, self.b.zext(self._gather(at, I16), i32x16.ir))

    def byte(self, at):
        return Lanes(self.b, self.b.zext(self._gather(at, I8), i32x16.ir))
