"""One to four rows of activations against packed weights.        definition: refimpl/ops/integer.py

    work item   a group of 16 weight rows of one matrix, against the rows that use this matrix
    arithmetic  that of matmul.py: exact integers per block, one rounding chain per output; a lane is a weight
                row, each unpacked register is multiplied as it is made, accumulators stay in registers
    traffic     weights are read once and never stored; activations come from the caches.  A core waits for
                memory and computes in turn unless it asks for bytes early: each block prefetches bytes far
                ahead of it, also those of the next group, into the second-level cache and near ones into
                the first, so that reading never stops

Arguments, int64 words:
    matrices     weights, bytes of a matrix, bytes of a row, n_rows, n_cols
    activations  q, scale, sums (quantize.py)
    output       y, row stride in bytes
    routing      number of matrices in use, their numbers, where each one's entries start (n + 1);
                 of the entries: activation row, output row
"""

from functools import reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath.cpu import unpack
from fastpath.cpu.kernel import inlined, kernel
from fastpath.cpu.lanes import PackedBlock
from fastpath.cpu.simd import (
    F32,
    I32,
    I64,
    f32x16,
    i32x16,
    invoke,
    ld_i64,
    pointer,
    same,
    splat,
)
from fastpath.cpu.simd_dot import FIRST_LEVEL, dot_pairs, dot_spread_at, prefetch

MATVEC_ROWS = 4  # of experts; of one matrix fewer (matvec_few.py). With more, panels are as fast, or faster
FAR, NEAR = 8192, 2048  # bytes between what is in work and what is asked for, into which cache
ONE, TWO, FOUR = (0,), (0, 0), (0, 0, 0, 0)  # types carry a number of activation rows: by their lengths


# -- pieces of kernels; `rows` tuples have one value per activation row, and say how many there are


def tuple_of(b, kind, values):
    result = ir.Constant(kind, ir.Undefined)
    for t, value in enumerate(values):
        result = b.insert_value(result, value, t)
    return result


def values_of(b, value):
    return [b.extract_value(value, t) for t in range(value.type.count)]


def _at(b, addresses, offset):
    return [b.add(address, offset) for address in addresses]


def _load(b, address, kind, offset=0):
    return b.load(pointer(b, address, offset), typ=kind, align=1)


def _float(b, lanes):
    return b.sitofp(lanes, f32x16.ir)


def fma(b, x, y, z):
    return invoke(b, "llvm.fma.v16f32", f32x16.ir, [x, y, z])


def ask_for(b, block, n_bytes):
    """Of the next blocks, as many bytes as are read now: far ones from memory, near ones from that cache."""
    for line in range(0, n_bytes, 64):
        prefetch(b, b.add(block, I64(FAR + line)))
        prefetch(b, b.add(block, I64(NEAR + line)), FIRST_LEVEL)


@intrinsic
def addresses(typingctx, rows, n, base, stride, count):
    """base + stride * row for the n row numbers i64[n] at `rows`: as many as `count`, the last may repeat."""
    kind = types.UniTuple(types.intp, len(count))

    def codegen(context, b, signature, args):
        rows, n, base, stride, _ = args
        last, values = b.sub(n, I64(1)), []
        for t in range(kind.count):
            entry = b.select(b.icmp_signed("<", I64(t), last), I64(t), last)
            row = _load(b, b.add(rows, b.shl(entry, I64(3))), I64)
            values.append(b.add(base, b.mul(row, stride)))
        return tuple_of(b, context.get_value_type(kind), values)

    return kind(types.intp, types.intp, types.intp, types.intp, count), codegen


@intrinsic
def zeros(typingctx, rows):
    """f32[16] zeros, as many as `rows` has values."""
    kind = types.UniTuple(f32x16, len(rows))

    def codegen(context, b, signature, args):
        return ir.Constant(context.get_value_type(kind), None)

    return kind(rows), codegen


@intrinsic
def put(typingctx, acc, targets, n):
    """The first n lanes of each accumulator to its address."""

    def codegen(context, b, signature, args):
        acc, targets, n = args
        for value, target in zip(values_of(b, acc), values_of(b, targets), strict=True):
            whole = b.icmp_signed("==", n, I64(16))
            with b.if_else(whole) as (then, otherwise):
                with then:
                    b.store(value, pointer(b, target), align=1)
                with otherwise:
                    mask = b.icmp_signed("<", _lane_numbers(), splat(b, b.trunc(n, I32), 16))
                    arguments = [value, pointer(b, target), I32(4), mask]
                    invoke(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(acc, targets, n), codegen


def _lane_numbers():
    return ir.Constant(i32x16.ir, list(range(16)))


def product_32(form, block_bytes):
    """acc, address of a packed block, block number, rows of (q, scale, sums) -> acc with the block added."""

    def codegen(context, b, signature, args):
        acc, block, number, q, scales, sums = args
        acc, q, scales, sums = (values_of(b, value) for value in (acc, q, scales, sums))
        ask_for(b, block, 16 * block_bytes)
        q, at = _at(b, q, b.shl(number, I64(5))), b.shl(number, I64(2))
        totals = [_load(b, total, I32) for total in _at(b, sums, at)]
        # two sums per row, so that an instruction need not wait for the one before it
        dots = [[splat(b, b.mul(total, I32(-form.offset)), 16), same(i32x16, 0)] for total in totals]
        packed = PackedBlock(b, block)
        for i, (g, u) in enumerate(form.columns(packed)):
            for dot, row in zip(dots, q, strict=True):
                dot[i % 2] = dot_spread_at(b, dot[i % 2], u.value, b.add(row, I64(4 * g)))
        scale = form.scale(packed).value
        minimum = form.minimum(packed).value if form.minimum else None
        for t, address in enumerate(_at(b, scales, at)):
            x_scale = splat(b, _load(b, address, F32), 16)
            acc[t] = fma(b, _float(b, b.add(*dots[t])), b.fmul(scale, x_scale), acc[t])
            if minimum is not None:
                total = splat(b, b.sitofp(totals[t], F32), 16)
                acc[t] = fma(b, total, b.fmul(minimum, x_scale), acc[t])
        return tuple_of(b, args[0].type, acc)

    @intrinsic
    def product(typingctx, acc, block, number, q, scales, sums):
        return acc(acc, types.intp, types.intp, q, scales, sums), codegen

    return product


def _sub_sum(b, sums, form, j):
    """Sum of the activations of sub-block j, an LLVM value; `sums` has one number per 16."""
    if form.n_sub == 16:
        return _load(b, b.add(sums, b.shl(j, I64(2))), I32)
    first = b.add(sums, b.shl(j, I64(3)))
    return b.add(_load(b, first, I32), _load(b, first, I32, 4))


def _store_scales(b, form, sc, stack):
    """Sub-scales i32[n_sub][16] on the stack; where dot products are short, two to a word."""
    values = [sc.pair(i) for i in range(form.n_sub // 2)] if form.is_short else sc
    for j, lanes in enumerate(values):
        b.store(lanes.value, pointer(b, stack, 64 * j), align=1)


def _minima(b, form, mn, sums):
    """The minima times the sums of the activations of their sub-blocks, i32[16] per row."""
    totals = [same(i32x16, 0) for _ in sums]
    for i in range(form.n_sub // 2):
        j, pair = 4 * (i // 2) + i % 2, mn.pair(i).value
        for t, row in enumerate(sums):
            low, high = (_sub_sum(b, row, form, I64(j + k)) for k in (0, 2))
            two = b.or_(b.and_(low, I32(0xFFFF)), b.shl(high, I32(16)))
            totals[t] = dot_pairs(b, totals[t], pair, splat(b, two, 16))
    return totals


def _dots(b, form, packed, part, q, sums):
    """Numbers of a part's sub-blocks, and for each row their dot products."""
    numbers = [form.sub_block(b, part, s) for s in range(form.n_sub // 4)]
    starts = [_at(b, q, b.mul(j, I64(4 * form.width))) for j in numbers]
    # for one row two sums each, so that an instruction need not wait for the one before it
    n_sums = 2 if len(q) == 1 and form.width == 8 else 1
    dots = [[[same(i32x16, 0)] * n_sums for _ in numbers] for _ in q]
    if form.offset:
        for dot, row in zip(dots, sums, strict=True):
            for sub, j in zip(dot, numbers, strict=True):
                sub[0] = splat(b, b.mul(_sub_sum(b, row, form, j), I32(-form.offset)), 16)
    for s, k, u in form.columns(packed, part):
        for dot, row in zip(dots, starts[s], strict=True):
            i = k % n_sums
            dot[s][i] = dot_spread_at(b, dot[s][i], u.value, b.add(row, I64(4 * k)))
    return numbers, [[reduce(b.add, sub) for sub in dot] for dot in dots]


def _add_part(b, form, whole, packed, part, q, sums, stack):
    """The dot products of a quarter of a block, times the scales of its sub-blocks, on top of `whole`."""
    numbers, dots = _dots(b, form, packed, part, q, sums)
    if form.is_short:  # in pairs as Fours makes them: the part's sub-blocks are two apart
        first = b.sub(numbers[0], b.shl(b.lshr(numbers[0], I64(3)), I64(2)))
        places = [b.add(first, I64(2 * i)) for i in range(2)]
        dots = [[_two(b, *dot[:2]), _two(b, *dot[2:])] for dot in dots]
    else:
        places = numbers
    for i, place in enumerate(places):
        sc = _load(b, b.add(stack, b.shl(place, I64(6))), i32x16.ir)
        for dot, slot in zip(dots, whole, strict=True):
            before = b.load(slot)
            added = dot_pairs(b, before, dot[i], sc) if form.is_short else b.add(before, b.mul(dot[i], sc))
            b.store(added, slot)


def _two(b, low, high):
    """Two numbers of 16 bits in a word."""
    return b.or_(b.and_(low, same(i32x16, 0xFFFF)), b.shl(high, same(i32x16, 16)))


def product_256(form, block_bytes):
    """As `product_32`, for a format with sub-blocks."""

    def codegen(context, b, signature, args):
        acc, block, number, q, scales, sums = args
        acc, q, scales, sums = (values_of(b, value) for value in (acc, q, scales, sums))
        q, sums = _at(b, q, b.shl(number, I64(8))), _at(b, sums, b.shl(number, I64(6)))
        x_scales = [_load(b, address, F32) for address in _at(b, scales, b.shl(number, I64(2)))]
        stack = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(i32x16.ir, form.n_sub)), I64)
        packed = PackedBlock(b, block)
        d, dmin, sc, mn = form.scales(packed)
        _store_scales(b, form, sc, stack)
        minima = _minima(b, form, mn, sums) if form.has_minima else None
        whole = [cgutils.alloca_once_value(b, same(i32x16, 0)) for _ in acc]
        with cgutils.for_range(b, I64(4), intp=I64) as loop:
            quarter = 4 * block_bytes
            ask_for(b, b.add(block, b.mul(loop.index, I64(quarter))), quarter)
            _add_part(b, form, whole, packed, loop.index, q, sums, stack)
        for t, x_scale in enumerate(x_scales):
            scale = b.fmul(d.value, splat(b, x_scale, 16))
            acc[t] = fma(b, _float(b, b.load(whole[t])), scale, acc[t])
            if minima:
                scale = b.fmul(dmin.value, splat(b, b.fneg(x_scale), 16))
                acc[t] = fma(b, _float(b, minima[t]), scale, acc[t])
        return tuple_of(b, args[0].type, acc)

    @intrinsic
    def product(typingctx, acc, block, number, q, scales, sums):
        return acc(acc, types.intp, types.intp, q, scales, sums), codegen

    return product


# -- kernels


@inlined
def _group(product, count, block, n_blocks, block_size, block_bytes, n, x, rows, n_rows):
    """f32[16] for as many rows of activations as `count` has values."""
    q, scales, sums = x
    n_cols = n_blocks * block_size
    q_rows = addresses(rows, n_rows, q, n_cols, count)
    scale_rows = addresses(rows, n_rows, scales, 4 * n_blocks, count)
    sum_rows = addresses(rows, n_rows, sums, n_cols // 8 if block_size == 32 else n_cols // 4, count)
    acc = zeros(q_rows)
    for number in range(n_blocks):
        acc = product(acc, block, number, q_rows, scale_rows, sum_rows)
        block += 16 * block_bytes
    return acc


@inlined
def each_group(args, lo, hi, thread, group, product, block_size, block_bytes):
    """The items lo .. hi-1.  More entries than MATVEC_ROWS take turns; each turn reads the weights again."""
    weights, matrix_bytes = ld_i64(args), ld_i64(args + 8)
    n_rows, nb = ld_i64(args + 24), ld_i64(args + 32) // block_size
    x = (ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56))
    y, y_stride = ld_i64(args + 64), ld_i64(args + 72)
    matrices, starts = ld_i64(args + 88), ld_i64(args + 96)
    x_rows, out_rows = ld_i64(args + 104), ld_i64(args + 112)
    n_groups = (n_rows + 15) // 16
    for item in range(lo, hi):
        used, g = item // n_groups, item % n_groups
        entry, stop = ld_i64(starts + 8 * used), ld_i64(starts + 8 * used + 8)
        n = min(16, n_rows - 16 * g)
        block = weights + ld_i64(matrices + 8 * used) * matrix_bytes + g * nb * 16 * block_bytes
        while entry < stop:
            k = min(MATVEC_ROWS, stop - entry)
            rows, outs, at = x_rows + 8 * entry, out_rows + 8 * entry, y + 64 * g
            if k == 1:
                one = group(product, ONE, block, nb, block_size, block_bytes, n, x, rows, k)
                put(one, addresses(outs, k, at, y_stride, ONE), n)
            elif k == 2:
                two = group(product, TWO, block, nb, block_size, block_bytes, n, x, rows, k)
                put(two, addresses(outs, k, at, y_stride, TWO), n)
            else:
                four = group(product, FOUR, block, nb, block_size, block_bytes, n, x, rows, k)
                put(four, addresses(outs, k, at, y_stride, FOUR), n)
            entry += k


_q4_0 = product_32(unpack.Q4_0, 18)
_q4_1 = product_32(unpack.Q4_1, 20)
_q5_0 = product_32(unpack.Q5_0, 22)
_q5_1 = product_32(unpack.Q5_1, 24)
_q8_0 = product_32(unpack.Q8_0, 34)
_iq4_nl = product_32(unpack.IQ4_NL, 18)
_mxfp4 = product_32(unpack.MXFP4, 17)
_q2_k = product_256(unpack.Q2_K, 84)
_q3_k = product_256(unpack.Q3_K, 110)
_q4_k = product_256(unpack.Q4_K, 144)
_q5_k = product_256(unpack.Q5_K, 176)
_q6_k = product_256(unpack.Q6_K, 210)
_iq4_xs = product_256(unpack.IQ4_XS, 136)


@kernel
def matvec_q4_0(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q4_0, 32, 18)


@kernel
def matvec_q4_1(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q4_1, 32, 20)


@kernel
def matvec_q5_0(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q5_0, 32, 22)


@kernel
def matvec_q5_1(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q5_1, 32, 24)


@kernel
def matvec_q8_0(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q8_0, 32, 34)


@kernel
def matvec_iq4_nl(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _iq4_nl, 32, 18)


@kernel
def matvec_mxfp4(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _mxfp4, 32, 17)


@kernel
def matvec_q2_k(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q2_k, 256, 84)


@kernel
def matvec_q3_k(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q3_k, 256, 110)


@kernel
def matvec_q4_k(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q4_k, 256, 144)


@kernel
def matvec_q5_k(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q5_k, 256, 176)


@kernel
def matvec_q6_k(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _q6_k, 256, 210)


@kernel
def matvec_iq4_xs(args, lo, hi, thread):
    each_group(args, lo, hi, thread, _group, _iq4_xs, 256, 136)


KERNELS = {
    "Q4_0": matvec_q4_0,
    "Q4_1": matvec_q4_1,
    "Q5_0": matvec_q5_0,
    "Q5_1": matvec_q5_1,
    "Q8_0": matvec_q8_0,
    "IQ4_NL": matvec_iq4_nl,
    "MXFP4": matvec_mxfp4,
    "Q2_K": matvec_q2_k,
    "Q3_K": matvec_q3_k,
    "Q4_K": matvec_q4_k,
    "Q5_K": matvec_q5_k,
    "Q6_K": matvec_q6_k,
    "IQ4_XS": matvec_iq4_xs,
}
