"""Products on plain numbers: F32, F16, BF16, and rows dequantised before.

    work item   16 weight rows of one matrix, four at a time, against up to four activation rows at a time
    arithmetic  16 lanes per output, acc[l] = fma(w[16j + l], x[16j + l], acc[l]), j ascending; then the lanes
                l and l + 8 are added, l and l + 4, l and l + 2, l and l + 1.  What is missing in the last 16
                columns counts as zero.
    traffic     the first activation rows read the weights from memory, others find them in the caches; while
                four rows are in work, the same columns of the next four are asked for

Arguments as in matvec.py, with x f32[T, C] for q.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath.cpu.kernel import inlined, kernel
from fastpath.cpu.lanes import widened
from fastpath.cpu.matvec import addresses, each_group, tuple_of, values_of
from fastpath.cpu.simd import F32, I16, I32, I64, f32x16, i32s, i32x16, invoke, pointer, same, splat
from fastpath.cpu.simd_dot import FIRST_LEVEL, prefetch, row_address, sums_of_vectors

QUAD = 4  # weight rows at a time
NEAR = 512  # bytes ahead in each row


def _from_bf16(b, bits):
    return b.bitcast(b.shl(b.zext(bits, i32x16.ir), same(i32x16, 16)), f32x16.ir)


def _as_it_is(b, numbers):
    return numbers


def rows_product(element, widen):
    """Address of up to 16 rows, bytes of a row, their number, rows of x, columns -> f32[16] per row of x."""
    kind = ir.VectorType(element, 16)
    size = 2 if element is I16 else 4

    def loads(b, rows, xs, at, mask):
        """16 columns of four weight rows and of the rows of x."""
        w = [widen(b, _load(b, b.add(row, b.mul(at, I64(size))), kind, mask)) for row in rows]
        return w, [_load(b, b.add(x, b.shl(at, I64(2))), f32x16.ir, mask) for x in xs]

    def step(b, slots, w, x):
        for i, row in enumerate(w):
            for t, column in enumerate(x):
                slot = slots[i][t]
                b.store(invoke(b, "llvm.fma.v16f32", f32x16.ir, [row, column, b.load(slot)]), slot)

    def quad(b, base, row_bytes, last, first, xs, n_cols, stack):
        """The sums of rows first .. first + 3, lane by lane, on the stack: [T][16] vectors."""
        source = b.add(base, b.mul(first, row_bytes))
        rows = [
            b.ptrtoint(row_address(b, source, row_bytes, b.sub(last, first), i), I64) for i in range(QUAD)
        ]
        slots = [[cgutils.alloca_once(b, f32x16.ir) for _ in xs] for _ in rows]
        for slot in (slot for row in slots for slot in row):
            b.store(same(f32x16, 0.0), slot)
        with cgutils.for_range_slice(b, I64(0), b.and_(n_cols, I64(-16)), I64(16), intp=I64) as (at, _):
            for row in rows:
                here = b.add(row, b.mul(at, I64(size)))
                prefetch(b, b.add(here, b.shl(row_bytes, I64(2))))
                prefetch(b, b.add(here, I64(NEAR)), FIRST_LEVEL)
            step(b, slots, *loads(b, rows, xs, at, None))
        rest = b.and_(n_cols, I64(15))
        with b.if_then(b.icmp_signed(">", rest, I64(0)), likely=False):
            mask = b.icmp_signed("<", i32s(range(16)), splat(b, b.trunc(rest, I32), 16))
            step(b, slots, *loads(b, rows, xs, b.sub(n_cols, rest), mask))
        for i, row in enumerate(slots):
            for t, slot in enumerate(row):
                place = b.add(b.add(stack, I64(1024 * t + 64 * i)), b.shl(first, I64(6)))
                b.store(b.load(slot), pointer(b, place), align=1)

    def codegen(context, b, signature, args):
        base, row_bytes, n, xs, n_cols = args
        xs = values_of(b, xs)
        stack = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(f32x16.ir, 16 * len(xs))), I64)
        with cgutils.for_range_slice(b, I64(0), n, I64(QUAD), intp=I64) as (first, _):
            quad(b, base, row_bytes, b.sub(n, I64(1)), first, xs, n_cols, stack)
        sums = [sums_of_vectors(b, b.add(stack, I64(1024 * t))) for t in range(len(xs))]
        return tuple_of(b, context.get_value_type(signature.return_type), sums)

    @intrinsic
    def product(typingctx, base, row_bytes, n, xs, n_cols):
        kind = types.UniTuple(f32x16, len(xs))
        return kind(types.intp, types.intp, types.intp, xs, types.intp), codegen

    return product


def _load(b, address, kind, mask):
    """16 numbers; with a mask the others are zero, and no memory of theirs is touched."""
    if mask is None:
        return b.load(pointer(b, address), typ=kind, align=1)
    name = {F32: "f32", I16: "i16"}[kind.element]
    args = [pointer(b, address), I32(1), mask, ir.Constant(kind, None)]
    return invoke(b, f"llvm.masked.load.v16{name}.p0", kind, args)


@inlined
def _group(product, count, base, n_cols, block_size, block_bytes, n, x, rows, n_rows):
    return product(base, n_cols * block_bytes, n, addresses(rows, n_rows, x[0], 4 * n_cols, count), n_cols)


_f32, _f16, _bf16 = rows_product(F32, _as_it_is), rows_product(I16, widened), rows_product(I16, _from_bf16)


@kernel
def linear_f32(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _f32, 1, 4)


@kernel
def linear_f16(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _f16, 1, 2)


@kernel
def linear_bf16(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _bf16, 1, 2)


KERNELS = {"F32": linear_f32, "F16": linear_f16, "BF16": linear_bf16}
