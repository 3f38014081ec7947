"""Rows of float32 times 32 columns of keys or values: the one product of attention.

    C[r, c] += sum over k of A[r, k] * B[k, c]      c < 32, k in one segment of 128

    scores   A: queries, k: components;          B: a block of keys, [H][32 positions]
    values   A: exp(score - max), k: positions;  B: a column of values, [32 positions][32 components]

    arithmetic  one fma chain over k, ascending, from zero; its result is added to C.  Whoever goes through
                the segments of k in order gets the same bytes, whatever rows are computed together.
    registers   8 rows by 2 vectors with AVX-512, 4 rows by 1 vector elsewhere: a number of B is read once for
                all of these rows, a number of A once for all of these columns.

B is read as it lies in the cache, and what comes `ahead` bytes later is prefetched (`product_f16`, ...); or
it is float32 that was widened before (`product_panel`).  Its rows lie one behind the other.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastpath.cpu import kv_types, machine
from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import F32, I32, I64, f32x16, invoke, pointer, same, splat
from refimpl.kv_types import COLUMNS

SEGMENT = 128  # of the summed index, counted from 0
_WIDE = "avx512f" in machine.FEATURES
_TILE_ROWS, _TILE_VECTORS = (8, 2) if _WIDE else (4, 1)


def _tile(kind, n_rows, is_panel):
    """An intrinsic for n_rows rows: in tiles that fit the registers.

    Its arguments: a and bytes between its rows; b; n, the length of the sum; ahead; c and bytes between its
    rows; is_first: C is the sum, and not what it is added to.
    """

    @intrinsic
    def product(typingctx, a, a_stride, b, n, ahead, c, c_stride, is_first):
        def codegen(context, builder, signature, args):
            for r in range(0, n_rows, _TILE_ROWS):
                for v in range(0, COLUMNS // 16, _TILE_VECTORS):
                    rows = range(r, min(r + _TILE_ROWS, n_rows))
                    _chains(builder, kind, rows, range(v, v + _TILE_VECTORS), is_panel, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, types.boolean), codegen

    return product


def _chains(b, kind, rows, vectors, is_panel, a, a_stride, source, n, ahead, c, c_stride, is_first):
    cells = [(r, v) for r in rows for v in vectors]
    lines = {r: pointer(b, b.add(a, b.mul(a_stride, I64(r)))) for r in rows}
    before, loop, after = b.block, b.append_basic_block("chain"), b.append_basic_block("sums")
    b.branch(loop)

    b.position_at_end(loop)
    k, at = b.phi(I64), b.phi(I64)
    sums = {cell: b.phi(f32x16.ir) for cell in cells}
    if not is_panel and vectors[0] == 0:
        for line in range(0, COLUMNS * kind.size, 64):
            asked = pointer(b, b.add(at, ahead), line)
            invoke(b, "llvm.prefetch.p0", ir.VoidType(), [asked, I32(0), I32(2), I32(1)])
    columns = {v: kind.load(b, b.add(at, I64(16 * v * kind.size))) for v in vectors}
    new = {}
    for r in rows:
        number = splat(b, b.load(b.gep(lines[r], [k], source_etype=F32), typ=F32, align=4), 16)
        for v in vectors:
            new[r, v] = invoke(b, "llvm.fma.v16f32", f32x16.ir, [number, columns[v], sums[r, v]])
    next_k, next_at = b.add(k, I64(1)), b.add(at, I64(COLUMNS * kind.size))
    b.cbranch(b.icmp_signed("<", next_k, n), loop, after)
    for phi, start, then in [
        (k, I64(0), next_k), (at, source, next_at), *((sums[x], same(f32x16, 0.0), new[x]) for x in cells),
    ]:  # fmt: skip
        phi.add_incoming(start, before)
        phi.add_incoming(then, loop)

    b.position_at_end(after)
    for r, v in cells:
        target = pointer(b, b.add(b.add(c, b.mul(c_stride, I64(r))), I64(64 * v)))
        old = b.select(is_first, same(f32x16, 0.0), b.load(target, typ=f32x16.ir, align=4))
        b.store(b.fadd(old, new[r, v]), target, align=4)  # 0 + -0 is 0: no sign of how it was computed


def _product(kind, is_panel=False):
    eight, four, two, one = (_tile(kind, n_rows, is_panel) for n_rows in (8, 4, 2, 1))

    @helper
    def product(n_rows, a, a_stride, b, n, ahead, c, c_stride, is_first):
        while n_rows >= 8:
            eight(a, a_stride, b, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 8 * a_stride, c + 8 * c_stride, n_rows - 8
        if n_rows >= 4:
            four(a, a_stride, b, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 4 * a_stride, c + 4 * c_stride, n_rows - 4
        if n_rows >= 2:
            two(a, a_stride, b, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 2 * a_stride, c + 2 * c_stride, n_rows - 2
        if n_rows:
            one(a, a_stride, b, n, ahead, c, c_stride, is_first)

    return product


product_f32, product_f16, product_bf16 = (_product(kind) for kind in kv_types.KINDS)
product_panel = _product(kv_types.F32, is_panel=True)
