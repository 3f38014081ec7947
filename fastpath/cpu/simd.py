"""Vector values for Numba: the 16-lane registers that the kernels compute with.

A `Vec` is a Numba type whose data model is an LLVM vector.  Such values live in registers, and every
function here is an intrinsic that adds a few LLVM instructions where it is called.  They are plain LLVM IR,
so that each kernel compiles for any CPU; two functions, `dot_spread` and those made by `lookup_i8`, take a
special instruction where there is one (machine.py).

Memory is addressed by integers (bytes), because the weights are bytes of a mapped file with their own
layout.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from fastpath.cpu import machine

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
PTR = ir.PointerType()
_ELEMENT = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}


class Vec(types.Type):
    """`lanes` elements in one register; never an object, it only lives inside compiled code."""

    def __init__(self, element, lanes):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vec({element}x{lanes})")

    @property
    def ir(self):
        return ir.VectorType(_ELEMENT[self.element], self.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, vec):
        super().__init__(manager, vec, vec.ir)


i8x16, i8x64 = Vec("i8", 16), Vec("i8", 64)
i16x16 = Vec("i16", 16)
i32x16 = Vec("i32", 16)
f32x16 = Vec("f32", 16)


# -- building blocks of IR


def _call(builder, name, result, args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _lanes(values):
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


def _undefined(kind):
    return ir.Constant(kind, ir.Undefined)


def _splat(builder, scalar, lanes):
    vector = builder.insert_element(_undefined(ir.VectorType(scalar.type, lanes)), scalar, I32(0))
    return builder.shuffle_vector(vector, _undefined(vector.type), _lanes([0] * lanes))


def _same(vec, value):
    return ir.Constant(vec.ir, [value] * vec.lanes)


def _pointer(builder, address, offset=0):
    return builder.inttoptr(builder.add(address, I64(offset)) if offset else address, PTR)


def define(signature, build):
    """An intrinsic with a Numba signature; `build(builder, *args)` returns its LLVM value, or None."""
    arity = len(signature.args)

    def codegen(context, builder, _signature, args):
        value = build(builder, *args)
        return context.get_dummy_value() if value is None else value

    # Numba reads the number of parameters from the function itself
    if arity == 0:

        def typer(typingctx):
            return signature, codegen
    elif arity == 1:

        def typer(typingctx, a):
            return signature, codegen
    elif arity == 2:

        def typer(typingctx, a, b):
            return signature, codegen
    elif arity == 3:

        def typer(typingctx, a, b, c):
            return signature, codegen
    elif arity == 4:

        def typer(typingctx, a, b, c, d):
            return signature, codegen
    else:

        def typer(typingctx, a, b, c, d, e):
            return signature, codegen

    return intrinsic(typer)


def _loads(vec):
    return define(vec(types.intp), lambda b, p: b.load(_pointer(b, p), typ=vec.ir, align=1))


def _stores(vec):
    return define(types.void(types.intp, vec), lambda b, p, v: b.store(v, _pointer(b, p), align=1) and None)


def _binary(vec, operation):
    return define(vec(vec, vec), lambda b, x, y: getattr(b, operation)(x, y))


def _by_constant(vec, operation, value):
    return define(vec(vec), lambda b, x: getattr(b, operation)(x, _same(vec, value)))


def _converts(source, target, operation):
    return define(target(source), lambda b, x: getattr(b, operation)(x, target.ir))


def _llvm(vec, name, arity):
    symbol = f"llvm.{name}.v{vec.lanes}{vec.element}"
    return define(vec(*[vec] * arity), lambda b, *args: _call(b, symbol, vec.ir, list(args)))


def _reduction(vec, scalar, step):
    """Lanes (l, l+8), then (l, l+4), (l, l+2), (l, l+1): one order, everywhere."""

    def build(b, v):
        half = vec.lanes // 2
        while half:
            other = b.shuffle_vector(
                v, _undefined(v.type), _lanes([(l + half) % vec.lanes for l in range(vec.lanes)])
            )
            v = step(b, v, other)
            half //= 2
        return b.extract_element(v, I32(0))

    return define(scalar(vec), build)


# -- memory

load_i8 = _loads(i8x64)
load_i32, load_f32 = _loads(i32x16), _loads(f32x16)
load_u16 = define(
    i32x16(types.intp), lambda b, p: b.zext(b.load(_pointer(b, p), typ=i16x16.ir, align=1), i32x16.ir)
)
store_i8x16, store_i8 = _stores(i8x16), _stores(i8x64)
store_i32, store_f32 = _stores(i32x16), _stores(f32x16)


def _mask(b, count):
    """i1[16]: lane < count."""
    return b.icmp_signed("<", _lanes(range(16)), _splat(b, b.trunc(count, I32), 16))


def _load_first(b, address, count):
    args = [_pointer(b, address), I32(4), _mask(b, count), _same(f32x16, 0.0)]
    return _call(b, "llvm.masked.load.v16f32.p0", f32x16.ir, args)


def _store_first(b, address, count, value):
    _call(
        b,
        "llvm.masked.store.v16f32.p0",
        ir.VoidType(),
        [value, _pointer(b, address), I32(4), _mask(b, count)],
    )


load_first_f32 = define(
    f32x16(types.intp, types.intp), _load_first
)  # lanes >= count read 0.0 and touch no memory
store_first_f32 = define(types.void(types.intp, types.intp, f32x16), _store_first)


def _loads_scalar(scalar, kind, extend=None):
    def build(b, p):
        value = b.load(_pointer(b, p), typ=kind, align=1)
        return getattr(b, extend)(value, I64) if extend else value

    return define(scalar(types.intp), build)


def _stores_scalar(scalar, kind):
    def build(b, p, value):
        b.store(value if value.type == kind else b.trunc(value, kind), _pointer(b, p), align=1)

    return define(types.void(types.intp, scalar), build)


ld_u8 = _loads_scalar(types.int64, I8, "zext")
ld_u16, ld_i32 = _loads_scalar(types.int64, I16, "zext"), _loads_scalar(types.int64, I32, "sext")
ld_i64 = _loads_scalar(types.int64, I64)
ld_f32 = _loads_scalar(types.float32, F32)
st_u8, st_u16 = _stores_scalar(types.int64, I8), _stores_scalar(types.int64, I16)
st_i32, st_f32 = _stores_scalar(types.int64, I32), _stores_scalar(types.float32, F32)


def _prefetch(b, address):
    # read, into the second-level cache (locality 2): the first one holds the panel
    _call(b, "llvm.prefetch.p0", ir.VoidType(), [_pointer(b, address), I32(0), I32(2), I32(1)])


# -- arithmetic; every float operation is one IEEE rounding

splat_i32 = define(i32x16(types.int64), lambda b, x: _splat(b, b.trunc(x, I32), 16))
splat_f32 = define(f32x16(types.float32), lambda b, x: _splat(b, x, 16))
spread_f32 = define(f32x16(types.intp), lambda b, p: _splat(b, b.load(_pointer(b, p), typ=F32, align=1), 16))

add_i32, sub_i32, mul_i32 = _binary(i32x16, "add"), _binary(i32x16, "sub"), _binary(i32x16, "mul")
add_f32, sub_f32 = _binary(f32x16, "fadd"), _binary(f32x16, "fsub")
mul_f32, div_f32 = _binary(f32x16, "fmul"), _binary(f32x16, "fdiv")
max_f32, min_f32 = _llvm(f32x16, "maxnum", 2), _llvm(f32x16, "minnum", 2)
abs_f32, round_f32, sqrt_f32 = (
    _llvm(f32x16, "fabs", 1),
    _llvm(f32x16, "roundeven", 1),
    _llvm(f32x16, "sqrt", 1),
)
copysign_f32 = _llvm(f32x16, "copysign", 2)
fma_f32 = _llvm(f32x16, "fma", 3)
sum_f32 = _reduction(f32x16, types.float32, lambda b, x, y: b.fadd(x, y))
sum_i32 = define(
    types.int64(i32x16), lambda b, v: b.sext(_call(b, "llvm.vector.reduce.add.v16i32", I32, [v]), I64)
)
top_f32 = _reduction(f32x16, types.float32, lambda b, x, y: _call(b, "llvm.maxnum.v16f32", f32x16.ir, [x, y]))
abs_bits = define(  # the bits of |x|: as integers they are ordered like the floats, NaN above all
    i32x16(f32x16), lambda b, v: b.and_(b.bitcast(v, i32x16.ir), _same(i32x16, 0x7FFFFFFF))
)
max_i32 = _llvm(i32x16, "smax", 2)
top_i32 = define(
    types.int64(i32x16), lambda b, v: b.sext(_call(b, "llvm.vector.reduce.smax.v16i32", I32, [v]), I64)
)
bits1_to_f32 = define(types.float32(types.int64), lambda b, n: b.bitcast(b.trunc(n, I32), F32))
keep_f32 = define(  # lanes lo .. hi-1 of v, the others of w
    f32x16(f32x16, types.int64, types.int64, f32x16),
    lambda b, v, lo, hi, w: b.select(b.and_(_mask(b, hi), b.not_(_mask(b, lo))), v, w),
)
less_f32 = define(  # x < y ? a : b, lane by lane
    f32x16(f32x16, f32x16, f32x16, f32x16),
    lambda b, x, y, yes, no: b.select(b.fcmp_ordered("<", x, y), yes, no),
)

i32_to_f32 = _converts(i32x16, f32x16, "sitofp")
f32_to_i32 = _converts(f32x16, i32x16, "fptosi")  # undefined for NaN and beyond int32: clamp first
i32_to_i8 = _converts(i32x16, i8x16, "trunc")
power_of_two = define(  # 2.0 ** n for n in -126 .. 127
    f32x16(i32x16),
    lambda b, n: b.bitcast(b.shl(b.add(n, _same(i32x16, 127)), _same(i32x16, 23)), f32x16.ir),
)


def _f16_to_f32(b, wide):
    """IEEE half in the low bits to float by integer steps: right for denormals, inf, NaN; needs no F16C."""
    sign = b.shl(b.and_(wide, _same(i32x16, 0x8000)), _same(i32x16, 16))
    rest = b.shl(b.and_(wide, _same(i32x16, 0x7FFF)), _same(i32x16, 13))
    normal = b.add(rest, _same(i32x16, 112 << 23))
    # a half denormal is its mantissa on top of 2**-14, minus 2**-14: exact, and no float denormal appears
    base = _same(i32x16, 113 << 23)
    tiny = b.fsub(b.bitcast(b.add(rest, base), f32x16.ir), b.bitcast(base, f32x16.ir))
    value = b.select(b.icmp_unsigned("<", rest, _same(i32x16, 1 << 23)), b.bitcast(tiny, i32x16.ir), normal)
    special = b.or_(rest, _same(i32x16, 0x7F800000))
    value = b.select(b.icmp_unsigned(">=", rest, _same(i32x16, 31 << 23)), special, value)
    return b.bitcast(b.or_(value, sign), f32x16.ir)


low_f16 = define(f32x16(i32x16), lambda b, v: _f16_to_f32(b, b.and_(v, _same(i32x16, 0xFFFF))))
high_f16 = define(f32x16(i32x16), lambda b, v: _f16_to_f32(b, b.lshr(v, _same(i32x16, 16))))
low_bf16 = define(f32x16(i32x16), lambda b, v: b.bitcast(b.shl(v, _same(i32x16, 16)), f32x16.ir))


def _low_e8m0(b, v):
    """2 ** (e - 128) of the exponent in the lowest byte; the two smallest results are denormal."""
    e = b.and_(v, _same(i32x16, 255))
    normal = b.shl(b.sub(e, _same(i32x16, 1)), _same(i32x16, 23))
    denormal = b.shl(_same(i32x16, 0x00200000), b.and_(e, _same(i32x16, 1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", e, _same(i32x16, 2)), denormal, normal), f32x16.ir)


low_e8m0 = define(f32x16(i32x16), _low_e8m0)

# -- bytes and bits; `n` and `mask` are constants of the code

or_i8, or_i32 = _binary(i8x64, "or_"), _binary(i32x16, "or_")
as_i8 = _converts(i32x16, i8x64, "bitcast")


def shr_i8(n):
    return _by_constant(i8x64, "lshr", n)


def shl_i8(n):
    return _by_constant(i8x64, "shl", n)


def and_i8(mask):
    return _by_constant(i8x64, "and_", mask)


def xor_i8(mask):
    return _by_constant(i8x64, "xor", mask)


def and_i32(mask):
    return _by_constant(i32x16, "and_", mask)


def _byte(signed):
    """Byte `at` (0 to 3) of each lane as int32."""

    def build(b, v, at):
        up = b.shl(v, _splat(b, b.trunc(b.sub(I64(24), b.shl(at, I64(3))), I32), 16))
        return (b.ashr if signed else b.lshr)(up, _same(i32x16, 24))

    return define(i32x16(i32x16, types.int64), build)


byte_u8, byte_s8 = _byte(False), _byte(True)
shift_i32 = define(  # each lane >> n
    i32x16(i32x16, types.int64), lambda b, v, n: b.lshr(v, _splat(b, b.trunc(n, I32), 16))
)


def _lookup(table):
    """Each byte -> table[byte], for bytes below 16 and one constant table."""
    levels = [value - 256 if value > 127 else value for value in table]

    def pieces(b, index, symbol, lanes):
        kind = ir.VectorType(I8, lanes)
        entries = ir.Constant(kind, levels * (lanes // 16))
        parts = [
            _call(
                b,
                symbol,
                kind,
                [entries, b.shuffle_vector(index, _undefined(index.type), _lanes(range(i, i + lanes)))],
            )
            for i in range(0, 64, lanes)
        ]
        while len(parts) > 1:
            joined = _lanes(range(2 * parts[0].type.count))
            parts = [b.shuffle_vector(x, y, joined) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def build(b, index):
        if machine.IS_AARCH64:
            return pieces(b, index, "llvm.aarch64.neon.tbl1.v16i8", 16)
        for feature, symbol, lanes in (
            ("avx512bw", "llvm.x86.avx512.pshuf.b.512", 64),
            ("avx2", "llvm.x86.avx2.pshuf.b", 32),
            ("ssse3", "llvm.x86.ssse3.pshuf.b.128", 16),
        ):
            if machine.IS_X86 and feature in machine.FEATURES:
                return pieces(b, index, symbol, lanes)
        result = _same(i8x64, levels[0])
        for code in range(1, 16):
            hit = b.icmp_unsigned("==", index, _same(i8x64, code))
            result = b.select(hit, _same(i8x64, levels[code]), result)
        return result

    return define(i8x64(i8x64), build)


lookup_i8 = _lookup


def _dot_words(b, acc, u, s):
    """The portable form: even and odd bytes as 16-bit words, exact on every target."""
    words = ir.VectorType(I16, 32)

    def same(value):
        return ir.Constant(words, [value] * 32)

    def half(value, odd):
        picked = b.shuffle_vector(value, _undefined(words), _lanes(range(odd, 32, 2)))
        return b.sext(picked, i32x16.ir)

    u, s = b.bitcast(u, words), b.bitcast(s, words)
    even = b.and_(u, same(255)), b.ashr(b.shl(s, same(8)), same(8))
    odd = b.lshr(u, same(8)), b.ashr(s, same(8))
    for x, y in (even, odd):
        acc = b.add(acc, b.add(b.mul(half(x, 0), half(y, 0)), b.mul(half(x, 1), half(y, 1))))
    return acc


def _vnni(b, acc, u, s):
    """One VNNI instruction on vectors of 512 or 256 bits."""
    lanes = acc.type.count
    symbol = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    bytes_or_words = ir.VectorType(I8, 4 * lanes) if machine.vnni_takes_bytes() else acc.type
    return _call(b, symbol, acc.type, [acc, b.bitcast(u, bytes_or_words), b.bitcast(s, bytes_or_words)])


def _dot_halves(b, acc, u, s):
    """As two halves, for CPUs with 256-bit vectors."""
    u, s = b.bitcast(u, i32x16.ir), b.bitcast(s, i32x16.ir)
    halves = [_lanes(range(8)), _lanes(range(8, 16))]
    parts = [
        _vnni(b, *(b.shuffle_vector(v, _undefined(v.type), half) for v in (acc, u, s))) for half in halves
    ]
    return b.shuffle_vector(*parts, _lanes(range(16)))


def _dot_u8s8(b, acc, u, s):
    if machine.DOT == "avx512vnni":
        return _vnni(b, acc, u, s)
    if machine.DOT == "avxvnni":
        return _dot_halves(b, acc, u, s)
    return _dot_words(b, acc, u, s)


def _dot_spread(b, acc, u, address):
    """acc[l] += sum over j < 4 of u8[4l + j] * s8 at (address + j): 4 activations against 16 weight rows."""
    word = _splat(b, b.load(_pointer(b, address), typ=I32, align=1), 16)
    return _dot_u8s8(b, acc, u, b.bitcast(word, i8x64.ir))


dot_spread = define(i32x16(i32x16, i8x64, types.intp), _dot_spread)


# -- 16 rows at once


def _row_address(b, source, stride, last, r):
    """Address of row min(r, last): the last group of a matrix may have fewer than 16 rows."""
    row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
    return b.inttoptr(b.add(source, b.mul(stride, row)), PTR)


def _tile(b, source, stride, last, target):
    """16 bytes of each of 16 rows -> 4 vectors at `target`: lane r of vector j has bytes 4j .. 4j+3 of row r.

    Four quarters of each vector come from rows 4 apart, so that interleaving dwords and then pairs of dwords
    inside the quarters, which every SIMD instruction set can do, gives the right order.

    The same place of the next 16 rows is prefetched: 4 rows per call, in turn, as four calls use up a cache
    line.  Behind the last row this asks for memory that may not exist, which is harmless.
    """
    quarter = ir.VectorType(I32, 4)
    turn = b.and_(b.lshr(source, I64(2)), I64(12))
    for r in range(16, 20):
        _prefetch(b, b.add(source, b.mul(stride, b.add(turn, I64(r)))))
    rows = [b.load(_row_address(b, source, stride, last, r), typ=quarter, align=1) for r in range(16)]
    spread = []
    for g in range(4):
        x = b.shuffle_vector(rows[g], rows[g + 4], _lanes(range(8)))
        y = b.shuffle_vector(rows[g + 8], rows[g + 12], _lanes(range(8)))
        spread.append(b.shuffle_vector(x, y, _lanes(range(16))))

    def interleave(x, y, order):
        return b.shuffle_vector(x, y, _lanes([4 * lane + i for lane in range(4) for i in order]))

    low, high = (0, 16, 1, 17), (2, 18, 3, 19)
    low_pair, high_pair = (0, 1, 16, 17), (2, 3, 18, 19)
    for half, order in enumerate((low, high)):
        x, y = interleave(spread[0], spread[1], order), interleave(spread[2], spread[3], order)
        for j, pair in enumerate((low_pair, high_pair)):
            b.store(interleave(x, y, pair), _pointer(b, target, 64 * (2 * half + j)), align=1)


def _column(b, source, stride, last):
    """4 bytes of each of 16 rows as one vector of int32."""
    result = _undefined(i32x16.ir)
    for r in range(16):
        word = b.load(_row_address(b, source, stride, last, r), typ=I32, align=1)
        result = b.insert_element(result, word, I32(r))
    return result


def _sums(b, address):
    """16 vectors in memory -> their 16 sums, each added in the order of `sum_f32`."""
    rows = [b.load(_pointer(b, address, 64 * r), typ=f32x16.ir, align=1) for r in range(16)]
    width = 16  # lanes that still belong to one row
    while width > 1:
        width //= 2
        starts = [start + i for start in range(0, 32, 2 * width) for i in range(width)]
        first, second = _lanes(starts), _lanes([lane + width for lane in starts])
        rows = [
            b.fadd(b.shuffle_vector(x, y, first), b.shuffle_vector(x, y, second))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]


sums_f32 = define(f32x16(types.intp), _sums)
tile = define(types.void(types.intp, types.intp, types.intp, types.intp), _tile)
column = define(i32x16(types.intp, types.intp, types.intp), _column)


@intrinsic
def call(typingctx, function, args, lo, hi, thread):
    """Call the compiled range function at an address: void(args, lo, hi, thread)."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), codegen
