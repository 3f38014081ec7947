"""Products of many rows with plain numbers: F32, F16, BF16.        part of linear.py

work item   a slab of SLAB weight rows against BLOCK activation rows
arithmetic  that of dot_float.py: 16 lanes per output, one fma chain each, columns ascending; the lanes are
            joined in the order of simd.sum_f32.  The same bytes as there
registers   4 weight rows by 6 activation rows with AVX-512 (2 by 3 elsewhere): 10 loads for 24 fma, of
            which a core begins two at a time
traffic     a part of COLUMNS columns of a slab is widened to float32 once per item and read from the
            second-level cache; 6 activation rows of as many columns stay in the first one.  Between the
            parts sums wait in scratch memory: 2 accesses per COLUMNS / 16 fma
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath.cpu import kv_types, machine, threads
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.dot_float import _from_bf16, _load
from fastpath.cpu.kernel import helper, kernel
from fastpath.cpu.lanes import widened
from fastpath.cpu.simd import (
    F32,
    I16,
    I32,
    I64,
    define,
    f32x16,
    i32s,
    invoke,
    ld_i64,
    load_f32,
    pointer,
    same,
    splat,
    store_f32,
    store_first_f32,
)
from fastpath.cpu.simd_dot import sums_f32

MANY = 12  # rows from which on this is faster than dot_float.py
SLAB, BLOCK, COLUMNS = 64, 96, 768
GROUP = 16  # weight rows whose sums become one vector
TILE_WEIGHTS, TILE_ROWS = (4, 6) if "avx512f" in machine.FEATURES else (2, 3)
CODES = {kind.name.upper(): kind.code for kind in kv_types.KINDS}
SIZES = {kind.code: kind.size for kind in kv_types.KINDS}
F16, BF16 = kv_types.F16.code, kv_types.BF16.code


def _mask_of(b, count):
    return b.icmp_signed("<", i32s(range(16)), splat(b, b.trunc(count, I32), 16))


def _loads_first(element, widen):
    """The first numbers of 16; the others are zero, and no memory of theirs is touched."""
    kind = ir.VectorType(element, 16)
    return define(
        f32x16(types.intp, types.int64), lambda b, at, n: widen(b, _load(b, at, kind, _mask_of(b, n)))
    )


_first_f32 = _loads_first(F32, lambda b, numbers: numbers)
_first_f16, _first_bf16 = _loads_first(I16, widened), _loads_first(I16, _from_bf16)


def _tile(R):
    """Adds to the sums of TILE_WEIGHTS weight rows and R activation rows, lane by lane.

    Arguments: widened weights; activations and bytes between their rows; whole columns, a multiple of 16, and
    columns behind them; where the sums lie, [R][GROUP][16]; is_first: they are zero.
    """

    @intrinsic
    def product(typingctx, w, x, x_stride, whole, rest, sums, is_first):
        def codegen(context, b, signature, args):
            w, x, x_stride, whole, rest, sums, is_first = args
            cells = [(r, i) for r in range(R) for i in range(TILE_WEIGHTS)]
            rows = [b.add(x, b.mul(x_stride, I64(r))) for r in range(R)]
            places = {(r, i): pointer(b, sums, 64 * (GROUP * r + i)) for r, i in cells}
            slots = {cell: cgutils.alloca_once(b, f32x16.ir) for cell in cells}

            def step(at, mask):
                here = b.shl(at, I64(2))
                weights = [
                    b.load(
                        pointer(b, b.add(w, b.mul(here, I64(TILE_WEIGHTS))), 64 * i), typ=f32x16.ir, align=64
                    )
                    for i in range(TILE_WEIGHTS)
                ]
                for r, row in enumerate(rows):
                    number = _load(b, b.add(row, here), f32x16.ir, mask)
                    for i, weight in enumerate(weights):
                        slot = slots[r, i]
                        new = invoke(b, "llvm.fma.v16f32", f32x16.ir, [weight, number, b.load(slot)])
                        b.store(new, slot)

            with b.if_else(is_first) as (then, otherwise):
                with then:
                    for cell in cells:
                        b.store(same(f32x16, 0.0), slots[cell])
                with otherwise:
                    for cell in cells:
                        b.store(b.load(places[cell], typ=f32x16.ir, align=64), slots[cell])
            with cgutils.for_range_slice(b, I64(0), whole, I64(16), intp=I64) as (at, _):
                step(at, None)
            with b.if_then(b.icmp_signed(">", rest, I64(0)), likely=False):
                step(whole, _mask_of(b, rest))
            for cell in cells:
                b.store(b.load(slots[cell]), places[cell], align=64)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, types.boolean), codegen

    return product


def _up_to(R):
    these, fewer = _tile(R), _up_to(R - 1) if R > 1 else None

    @helper
    def choose(n, w, x, x_stride, whole, rest, sums, is_first):
        if fewer is None or n == R:
            these(w, x, x_stride, whole, rest, sums, is_first)
        else:
            fewer(n, w, x, x_stride, whole, rest, sums, is_first)

    return choose


_product = _up_to(TILE_ROWS)


@helper
def _widen(source, n, code, target):
    """n numbers of a row as float32, with zeros up to a multiple of 16: 16 of them, then as many of each
    other row of a tile."""
    whole = n // 16 * 16
    for c in range(0, whole, 16):
        if code == F16:
            v = kv_types.load_f16(source + 2 * c)
        elif code == BF16:
            v = kv_types.load_bf16(source + 2 * c)
        else:
            v = load_f32(source + 4 * c)
        store_f32(target + 4 * TILE_WEIGHTS * c, v)
    if n > whole:
        if code == F16:
            v = _first_f16(source + 2 * whole, n - whole)
        elif code == BF16:
            v = _first_bf16(source + 2 * whole, n - whole)
        else:
            v = _first_f32(source + 4 * whole, n - whole)
        store_f32(target + 4 * TILE_WEIGHTS * whole, v)


@helper
def _place(i, n):
    """Where row i lies in a panel of n columns, in bytes."""
    return 4 * (i // TILE_WEIGHTS * TILE_WEIGHTS) * ((n + 15) // 16 * 16) + 64 * (i % TILE_WEIGHTS)


@kernel
def matmul_float(args, lo, hi, thread):
    weight, row_bytes, code, size = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_out, n_cols, x, n_rows = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    out, out_stride, part = ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80)
    panel = ld_i64(args + 88) + thread * ld_i64(args + 96)
    sums = panel + 4 * SLAB * COLUMNS
    n_slabs = (n_out + SLAB - 1) // SLAB
    # in one part only, the sums of a group are joined at once, and the next group's lie in the same place
    group_bytes = 64 * GROUP * TILE_ROWS if n_cols > part else 0
    for item in range(lo, hi):
        first, row = item % n_slabs * SLAB, item // n_slabs * BLOCK
        n_slab, stop = min(SLAB, n_out - first), min(row + BLOCK, n_rows)
        for begin in range(0, n_cols, part):
            n = min(part, n_cols - begin)
            for i in range(SLAB):
                source = weight + row_bytes * (first + min(i, n_slab - 1)) + size * begin
                if i < (n_slab + GROUP - 1) // GROUP * GROUP:
                    _widen(source, n, code, panel + _place(i, n))
            place = sums
            for t in range(row, stop, TILE_ROWS):
                n_tile = min(TILE_ROWS, stop - t)
                for group in range(0, n_slab, GROUP):
                    for i in range(0, GROUP, TILE_WEIGHTS):
                        _product(
                            n_tile, panel + _place(group + i, n), x + 4 * (n_cols * t + begin),
                            4 * n_cols, n // 16 * 16, n % 16, place + 64 * i, begin == 0,
                        )  # fmt: skip
                    if begin + n == n_cols:
                        for r in range(n_tile):
                            target = out + out_stride * (t + r) + 4 * (first + group)
                            total = sums_f32(place + 64 * GROUP * r)
                            store_first_f32(target, min(GROUP, n_slab - group), total)
                    place += group_bytes


def multiply(x, weight, memory, out, label):
    """out = x times a matrix in rows of plain numbers; memory: its address, and bytes of a row."""
    (T, C), M, n_threads = x.shape, out.shape[1], threads.num_threads()
    code = CODES[weight.format.name]
    n_parts = -(-C // COLUMNS)
    part = -(-C // (16 * n_parts)) * 16
    n_tiles = -(-min(BLOCK, T) // TILE_ROWS)
    n_sums = TILE_ROWS * GROUP * (n_tiles * (SLAB // GROUP) if n_parts > 1 else 1)
    per_thread = 4 * SLAB * COLUMNS + 64 * n_sums
    args = (
        memory[0], memory[1], code, SIZES[code], M, C, address(x), T, address(out), 4 * M, part,
        workspace(per_thread * n_threads, "matmul_float"), per_thread,
    )  # fmt: skip
    threads.run(matmul_float, args, -(-M // SLAB) * -(-T // BLOCK), 1, n_threads, label=label)
