"""The number types of keys and values in memory: float32, float16, bfloat16.

Widened on loading, which is exact; rounded to nearest even on storing (`narrow`), by integer steps that every
CPU does alike.  A bfloat16 lies in a uint16.
"""

from dataclasses import dataclass

import numba
import numpy as np
from llvmlite import ir

from fastpath.cpu import machine
from fastpath.cpu.simd import _f16_to_f32, define, f32x16, i16x16, i32x16, pointer, same

_HALVES = ir.VectorType(ir.HalfType(), 16)


@dataclass(frozen=True)
class KVType:
    """How 16 neighbours are read; `code` is what kernels know the type by."""

    name: str
    code: int
    dtype: np.dtype

    @property
    def size(self):
        return self.dtype.itemsize

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


F32 = KVType("f32", 0, np.dtype(np.float32))
F16 = KVType("f16", 1, np.dtype(np.float16))
BF16 = KVType("bf16", 2, np.dtype(np.uint16))
KINDS = (F32, F16, BF16)
TYPES = {kind.dtype: kind for kind in KINDS}


def of(array, where):
    """The KVType of a cache array."""
    kind = TYPES.get(array.dtype)
    if kind is None or not array.flags.c_contiguous:
        raise ValueError(
            f"{where}: got {array.dtype}, expected contiguous float32, float16 or uint16 (bfloat16). "
            "Make the cache with one of these types"
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
store_u16 = define(  # the low halves of 16 lanes
    numba.types.void(numba.types.intp, i32x16),
    lambda b, p, v: b.store(b.trunc(v, i16x16.ir), pointer(b, p), align=1) and None,
)
