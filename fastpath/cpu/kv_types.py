"""The types of keys and values in memory: float32, float16, bfloat16, and tiles of q8_0 and q4_0.

Numbers are widened on loading, which is exact; rounded to nearest even on storing, by integer steps that
every CPU does alike.  A bfloat16 lies in a uint16.  Of tiles, a scale times a code is a float32, exactly; how
they are made is kv_quantize.py.
"""

from dataclasses import dataclass

import numba
import numpy as np
from llvmlite import ir

from fastpath.cpu import machine
from fastpath.cpu.simd import I8, I16, _f16_to_f32, define, f32x16, i16x16, i32x16, pointer, same, splat
from refimpl.kv_types import COLUMNS, SCALES, STEP, TILE_BYTES, TILE_TYPES

_HALVES, _BYTES = ir.VectorType(ir.HalfType(), 16), ir.VectorType(I8, 16)


@dataclass(frozen=True)
class KVType:
    """Numbers: how 16 neighbours are read; `code` is what kernels know the type by."""

    name: str
    code: int
    dtype: np.dtype

    @property
    def size(self):
        return self.dtype.itemsize

    @property
    def column_bytes(self):
        """Of 32 positions by 32 components."""
        return STEP * COLUMNS * self.size

    def load(self, b, address):
        """LLVM value f32x16 of the 16 numbers at `address`."""
        kind = f32x16.ir if self.size == 4 else i16x16.ir
        return self.widen(b, b.load(pointer(b, address), typ=kind, align=1))

    def widen(self, b, value):
        if self.name == "f32":
            return value
        if self.name == "bf16":
            return b.bitcast(b.shl(b.zext(value, i32x16.ir), same(i32x16, 16)), f32x16.ir)
        if "f16c" in machine.FEATURES or machine.IS_AARCH64:
            return b.fpext(b.bitcast(value, _HALVES), f32x16.ir)
        return _f16_to_f32(b, b.zext(value, i32x16.ir))


@dataclass(frozen=True)
class TileType:
    """Tiles (refimpl/kv_tiles.py): how their scales and codes are read."""

    name: str
    code: int

    @property
    def column_bytes(self):
        return TILE_BYTES[self.name]

    @property
    def row_bytes(self):
        """Of 32 neighbouring codes."""
        return (TILE_BYTES[self.name] - SCALES) // STEP

    def scales(self, b, tile, half):
        """LLVM value f32x16: the scales of positions 16 * half .. 16 * half + 15."""
        return F16.load(b, b.add(tile, tile.type(32 * half)))

    def scale(self, b, address):
        """LLVM value f32x16: sixteen times the scale at `address`."""
        return F16.widen(b, splat(b, b.load(pointer(b, address), typ=I16, align=1), 16))

    def codes(self, b, row, half):
        """LLVM value f32x16 of codes 16 * half .. 16 * half + 15 of the row of 32 at address `row`."""
        if self.name == "q8_0":
            codes = b.load(pointer(b, row, 16 * half), typ=_BYTES, align=1)
        else:
            pairs = b.load(pointer(b, row), typ=_BYTES, align=1)
            fours = b.lshr(pairs, _same_bytes(4)) if half else b.and_(pairs, _same_bytes(15))
            codes = b.sub(fours, _same_bytes(8))
        return b.sitofp(b.sext(codes, i32x16.ir), f32x16.ir)


def _same_bytes(value):
    return ir.Constant(_BYTES, [value] * 16)


F32 = KVType("f32", 0, np.dtype(np.float32))
F16 = KVType("f16", 1, np.dtype(np.float16))
BF16 = KVType("bf16", 2, np.dtype(np.uint16))
Q8_0, Q4_0 = TileType("q8_0", 3), TileType("q4_0", 4)
KINDS = (F32, F16, BF16)  # of numbers
TILES = (Q8_0, Q4_0)
TYPES = {kind.dtype: kind for kind in KINDS}
_TILE_TYPES = {kind.name: kind for kind in TILES}


def of(array, where):
    """The type of an array of keys or values."""
    kind = TYPES.get(array.dtype)
    if array.dtype == np.uint8:
        kind = _TILE_TYPES.get(TILE_TYPES.get(array.shape[-1]))
    if kind is None:
        raise ValueError(
            f"{where}: got {array.dtype}{list(array.shape)}, expected float32, float16, uint16 (bfloat16) or "
            "uint8 tiles (q8_0, q4_0). Make the cache with one of these types"
        )
    return kind


def _round_f16(b, value):
    """IEEE half, in the low bits of int32: what is too large is infinite, NaN stays NaN."""

    def bits(n):
        return same(i32x16, n)

    word = b.bitcast(value, i32x16.ir)
    sign = b.and_(b.lshr(word, bits(16)), bits(0x8000))
    rest = b.and_(word, bits(0x7FFFFFFF))
    odd = b.and_(b.lshr(rest, bits(13)), bits(1))
    # exponent 127 becomes 15; a carry out of the mantissa goes where it belongs
    normal = b.lshr(b.add(b.add(rest, bits((0xFFF - (112 << 23)) & 0xFFFFFFFF)), odd), bits(13))
    # 0.5 + x has its last bit at 2**-24, the smallest half: the addition rounds
    half = ir.Constant(f32x16.ir, [0.5] * 16)
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(rest, f32x16.ir), half), i32x16.ir), bits(126 << 23))
    out = b.select(b.icmp_unsigned("<", rest, bits(113 << 23)), tiny, normal)
    out = b.select(b.icmp_unsigned(">=", rest, bits(0x477FF000)), bits(0x7C00), out)  # 65520 and more
    out = b.select(b.icmp_unsigned(">", rest, bits(0x7F800000)), bits(0x7E00), out)
    return b.or_(out, sign)


def _round_bf16(b, value):
    """The upper half of a float32, in the low bits of int32; a NaN stays one."""
    word = b.bitcast(value, i32x16.ir)
    upper = b.lshr(word, same(i32x16, 16))
    odd = b.and_(upper, same(i32x16, 1))
    rounded = b.lshr(b.add(b.add(word, same(i32x16, 0x7FFF)), odd), same(i32x16, 16))
    is_nan = b.fcmp_unordered("uno", value, value)
    return b.select(is_nan, b.or_(upper, same(i32x16, 0x40)), rounded)


load_f16, load_bf16 = (
    define(f32x16(numba.types.intp), lambda b, p, kind=kind: kind.load(b, p)) for kind in (F16, BF16)
)
round_f16 = define(i32x16(f32x16), _round_f16)
round_bf16 = define(i32x16(f32x16), _round_bf16)
spread_f16 = define(f32x16(numba.types.intp), Q8_0.scale)
load_codes = {  # (row of codes, half) -> 16 codes
    kind.code: [
        define(f32x16(numba.types.intp), lambda b, row, kind=kind, half=half: kind.codes(b, row, half))
        for half in (0, 1)
    ]
    for kind in TILES
}
store_u16 = define(  # the low halves of 16 lanes
    numba.types.void(numba.types.intp, i32x16),
    lambda b, p, v: b.store(b.trunc(v, i16x16.ir), pointer(b, p), align=1) and None,
)
