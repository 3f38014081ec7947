"""Vector values for Numba: the 16-lane registers that the kernels compute with.

A `Vec` is a Numba type whose data model is an LLVM vector.  Such values live in registers, and every
function here is an intrinsic that adds a few LLVM instructions where it is called.  They are plain LLVM IR,
so that each kernel compiles for any CPU.  simd_dot.py has more of them, for products with 16 rows at once.

Memory is addressed by integers (bytes), because the weights are bytes of a mapped file with their own
layout.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

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


def invoke(builder, name, result, args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def i32s(values):
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


def undefined(kind):
    return ir.Constant(kind, ir.Undefined)


def splat(builder, scalar, lanes):
    vector = builder.insert_element(undefined(ir.VectorType(scalar.type, lanes)), scalar, I32(0))
    return builder.shuffle_vector(vector, undefined(vector.type), i32s([0] * lanes))


def same(vec, value):
    return ir.Constant(vec.ir, [value] * vec.lanes)


def pointer(builder, address, offset=0):
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
    return define(vec(types.intp), lambda b, p: b.load(pointer(b, p), typ=vec.ir, align=1))


def _stores(vec):
    return define(types.void(types.intp, vec), lambda b, p, v: b.store(v, pointer(b, p), align=1) and None)


def _binary(vec, operation):
    return define(vec(vec, vec), lambda b, x, y: getattr(b, operation)(x, y))


def _converts(source, target, operation):
    return define(target(source), lambda b, x: getattr(b, operation)(x, target.ir))


def _llvm(vec, name, arity):
    symbol = f"llvm.{name}.v{vec.lanes}{vec.element}"
    return define(vec(*[vec] * arity), lambda b, *args: invoke(b, symbol, vec.ir, list(args)))


def _reduction(vec, scalar, step):
    """Lanes (l, l+8), then (l, l+4), (l, l+2), (l, l+1): one order, everywhere."""

    def build(b, v):
        half = vec.lanes // 2
        while half:
            other = b.shuffle_vector(
                v, undefined(v.type), i32s([(l + half) % vec.lanes for l in range(vec.lanes)])
            )
            v = step(b, v, other)
            half //= 2
        return b.extract_element(v, I32(0))

    return define(scalar(vec), build)


# -- memory

load_i8 = _loads(i8x64)
load_i32, load_f32 = _loads(i32x16), _loads(f32x16)
load_u16 = define(
    i32x16(types.intp), lambda b, p: b.zext(b.load(pointer(b, p), typ=i16x16.ir, align=1), i32x16.ir)
)
store_i8x16, store_i8 = _stores(i8x16), _stores(i8x64)
store_i32, store_f32 = _stores(i32x16), _stores(f32x16)


def _mask(b, count):
    """i1[16]: lane < count."""
    return b.icmp_signed("<", i32s(range(16)), splat(b, b.trunc(count, I32), 16))


def _load_first(b, address, count):
    args = [pointer(b, address), I32(4), _mask(b, count), same(f32x16, 0.0)]
    return invoke(b, "llvm.masked.load.v16f32.p0", f32x16.ir, args)


def _store_first(b, address, count, value):
    invoke(
        b,
        "llvm.masked.store.v16f32.p0",
        ir.VoidType(),
        [value, pointer(b, address), I32(4), _mask(b, count)],
    )


load_first_f32 = define(
    f32x16(types.intp, types.intp), _load_first
)  # lanes >= count read 0.0 and touch no memory
store_first_f32 = define(types.void(types.intp, types.intp, f32x16), _store_first)


def _loads_scalar(scalar, kind, extend=None):
    def build(b, p):
        value = b.load(pointer(b, p), typ=kind, align=1)
        return getattr(b, extend)(value, I64) if extend else value

    return define(scalar(types.intp), build)


def _stores_scalar(scalar, kind):
    def build(b, p, value):
        b.store(value if value.type == kind else b.trunc(value, kind), pointer(b, p), align=1)

    return define(types.void(types.intp, scalar), build)


ld_u8 = _loads_scalar(types.int64, I8, "zext")
ld_u16, ld_i32 = _loads_scalar(types.int64, I16, "zext"), _loads_scalar(types.int64, I32, "sext")
ld_i64 = _loads_scalar(types.int64, I64)
ld_f32 = _loads_scalar(types.float32, F32)
st_u8, st_u16 = _stores_scalar(types.int64, I8), _stores_scalar(types.int64, I16)
st_i32, st_f32 = _stores_scalar(types.int64, I32), _stores_scalar(types.float32, F32)
st_i64 = _stores_scalar(types.int64, I64)

# -- arithmetic; every float operation is one IEEE rounding

splat_i32 = define(i32x16(types.int64), lambda b, x: splat(b, b.trunc(x, I32), 16))
splat_f32 = define(f32x16(types.float32), lambda b, x: splat(b, x, 16))
spread_f32 = define(f32x16(types.intp), lambda b, p: splat(b, b.load(pointer(b, p), typ=F32, align=1), 16))

add_i32 = _binary(i32x16, "add")
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
top_f32 = _reduction(
    f32x16, types.float32, lambda b, x, y: invoke(b, "llvm.maxnum.v16f32", f32x16.ir, [x, y])
)
abs_bits = define(  # the bits of |x|: as integers they are ordered like the floats, NaN above all
    i32x16(f32x16), lambda b, v: b.and_(b.bitcast(v, i32x16.ir), same(i32x16, 0x7FFFFFFF))
)
max_i32 = _llvm(i32x16, "smax", 2)
top_i32 = define(
    types.int64(i32x16), lambda b, v: b.sext(invoke(b, "llvm.vector.reduce.smax.v16i32", I32, [v]), I64)
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
    lambda b, n: b.bitcast(b.shl(b.add(n, same(i32x16, 127)), same(i32x16, 23)), f32x16.ir),
)


def _f16_to_f32(b, wide):
    """IEEE half in the low bits to float by integer steps: right for denormals, inf, NaN; needs no F16C."""
    sign = b.shl(b.and_(wide, same(i32x16, 0x8000)), same(i32x16, 16))
    rest = b.shl(b.and_(wide, same(i32x16, 0x7FFF)), same(i32x16, 13))
    normal = b.add(rest, same(i32x16, 112 << 23))
    # a half denormal is its mantissa on top of 2**-14, minus 2**-14: exact, and no float denormal appears
    base = same(i32x16, 113 << 23)
    tiny = b.fsub(b.bitcast(b.add(rest, base), f32x16.ir), b.bitcast(base, f32x16.ir))
    value = b.select(b.icmp_unsigned("<", rest, same(i32x16, 1 << 23)), b.bitcast(tiny, i32x16.ir), normal)
    special = b.or_(rest, same(i32x16, 0x7F800000))
    value = b.select(b.icmp_unsigned(">=", rest, same(i32x16, 31 << 23)), special, value)
    return b.bitcast(b.or_(value, sign), f32x16.ir)


low_f16 = define(f32x16(i32x16), lambda b, v: _f16_to_f32(b, b.and_(v, same(i32x16, 0xFFFF))))
low_bf16 = define(f32x16(i32x16), lambda b, v: b.bitcast(b.shl(v, same(i32x16, 16)), f32x16.ir))
as_i8 = _converts(i32x16, i8x64, "bitcast")
