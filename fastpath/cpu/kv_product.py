"""Rows of float32 times 32 columns of keys or values: the one product of attention.

    C[r, c] += sum over k of A[r, k] * B[k, c]      c < 32, k in one segment of 128

    scores   A: queries, k: components;          B: a block of keys, [H][32 positions]
    values   A: exp(score - max), k: positions;  B: a column of values, [32 positions][32 components]

    arithmetic  one fma chain over k, ascending, from zero; its result is added to C.  Whoever goes through
                the segments of k in order gets the same bytes, whatever rows are computed together.
    registers   8 rows by 2 vectors with AVX-512, 4 rows by 1 vector elsewhere: a number of B is read once for
                all of these rows, a number of A once for all of these columns.

B is read as it lies in memory, from its row `first` on, and what comes `ahead` bytes later is prefetched
(`product_f16`, ...); or it is float32 that was widened before (`product_panel`).  Rows of numbers lie one
behind the other.  Those of tiles have scales, of keys one for each column and 32 rows (`keys_q8_0`), of
values one for each row (`values_q8_0`): a scale times a code is B, exactly.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastpath.cpu import kv_types, machine
from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import F32, I32, I64, f32x16, invoke, pointer, same, splat
from refimpl.kv_types import COLUMNS, SCALES, STEP

SEGMENT = 128  # of the summed index, counted from 0
_WIDE = "avx512f" in machine.FEATURES
_TILE_ROWS, _TILE_VECTORS = (8, 2) if _WIDE else (4, 1)


class _Numbers:
    """Rows of 32 numbers; a panel is not prefetched."""

    def __init__(self, kind, is_panel=False):
        self.kind, self.row_bytes, self.is_panel = kind, COLUMNS * kind.size, is_panel

    def loop(self, b, vectors, source, first, n, ahead, step, sums):
        """Emits the loop over n rows; step(k, columns, sums) -> sums. Returns the last sums."""

        def body(k, sums):
            at = b.add(source, b.mul(b.add(first, k), I64(self.row_bytes)))
            if not self.is_panel and vectors[0] == 0:
                for line in range(0, self.row_bytes, 64):
                    _prefetch(b, b.add(b.add(at, ahead), I64(line)))
            columns = {v: self.kind.load(b, b.add(at, I64(16 * v * self.kind.size))) for v in vectors}
            return step(k, columns, sums)

        return _loop(b, I64(0), n, body, sums)


class _ValueTiles:
    """Rows of a tile, each with its scale."""

    def __init__(self, kind):
        self.kind = kind

    def loop(self, b, vectors, source, first, n, ahead, step, sums):
        kind = self.kind

        def body(k, sums):
            row = b.add(first, k)
            if vectors[0] == 0:
                _prefetch(b, b.add(b.add(source, ahead), b.mul(row, I64(kind.column_bytes // STEP))))
            scale = kind.scale(b, b.add(source, b.mul(row, I64(2))))
            at = b.add(source, b.add(b.mul(row, I64(kind.row_bytes)), I64(SCALES)))
            return step(k, {v: b.fmul(scale, kind.codes(b, at, v)) for v in vectors}, sums)

        return _loop(b, I64(0), n, body, sums)


class _KeyTiles:
    """Tiles one behind the other, of 32 rows each; `first` is 0."""

    def __init__(self, kind):
        self.kind = kind

    def loop(self, b, vectors, source, first, n, ahead, step, sums):
        kind = self.kind

        def tile(i, sums):
            at = b.add(source, b.mul(i, I64(kind.column_bytes)))
            scales = {v: kind.scales(b, at, v) for v in vectors}
            begin = b.mul(i, I64(COLUMNS))
            left = b.sub(n, begin)
            count = b.select(b.icmp_signed("<", left, I64(COLUMNS)), left, I64(COLUMNS))

            def body(j, sums):
                if vectors[0] == 0:
                    _prefetch(b, b.add(b.add(at, ahead), b.mul(j, I64(kind.column_bytes // COLUMNS))))
                row = b.add(at, b.add(b.mul(j, I64(kind.row_bytes)), I64(SCALES)))
                columns = {v: b.fmul(scales[v], kind.codes(b, row, v)) for v in vectors}
                return step(b.add(begin, j), columns, sums)

            return _loop(b, I64(0), count, body, sums)

        n_tiles = b.sdiv(b.add(n, I64(COLUMNS - 1)), I64(COLUMNS))
        return _loop(b, I64(0), n_tiles, tile, sums)


def _loop(b, start, stop, body, values):
    """for i in range(start, stop), at least once: values = body(i, values).  Returns the last ones."""
    before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(I64)
    carried = {name: b.phi(value.type) for name, value in values.items()}
    new = body(i, carried)
    next_i, end = b.add(i, I64(1)), b.block
    b.cbranch(b.icmp_signed("<", next_i, stop), loop, after)
    for phi, initial, then in [(i, start, next_i), *((carried[x], values[x], new[x]) for x in values)]:
        phi.add_incoming(initial, before)
        phi.add_incoming(then, end)
    b.position_at_end(after)
    return new


def _prefetch(b, address):
    invoke(b, "llvm.prefetch.p0", ir.VoidType(), [pointer(b, address), I32(0), I32(2), I32(1)])


def _tile(rows_of_b, n_rows):
    """An intrinsic for n_rows rows: in tiles that fit the registers.

    Its arguments: a and bytes between its rows; b, its row `first`, n, the length of the sum; ahead; c and
    bytes between its rows; is_first: C is the sum, and not what it is added to.
    """

    @intrinsic
    def product(typingctx, a, a_stride, b, first, n, ahead, c, c_stride, is_first):
        def codegen(context, builder, signature, args):
            for r in range(0, n_rows, _TILE_ROWS):
                for v in range(0, COLUMNS // 16, _TILE_VECTORS):
                    rows = range(r, min(r + _TILE_ROWS, n_rows))
                    _chains(builder, rows_of_b, rows, range(v, v + _TILE_VECTORS), *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, types.boolean), codegen

    return product


def _chains(b, rows_of_b, rows, vectors, a, a_stride, source, first, n, ahead, c, c_stride, is_first):
    cells = [(r, v) for r in rows for v in vectors]
    lines = {r: pointer(b, b.add(a, b.mul(a_stride, I64(r)))) for r in rows}

    def step(k, columns, sums):
        new = {}
        for r in rows:
            number = splat(b, b.load(b.gep(lines[r], [k], source_etype=F32), typ=F32, align=4), 16)
            for v in vectors:
                new[r, v] = invoke(b, "llvm.fma.v16f32", f32x16.ir, [number, columns[v], sums[r, v]])
        return new

    zeros = {cell: same(f32x16, 0.0) for cell in cells}
    sums = rows_of_b.loop(b, vectors, source, first, n, ahead, step, zeros)
    for r, v in cells:
        target = pointer(b, b.add(b.add(c, b.mul(c_stride, I64(r))), I64(64 * v)))
        old = b.select(is_first, same(f32x16, 0.0), b.load(target, typ=f32x16.ir, align=4))
        b.store(b.fadd(old, sums[r, v]), target, align=4)  # 0 + -0 is 0: no sign of how it was computed


def _product(rows_of_b):
    eight, four, two, one = (_tile(rows_of_b, n_rows) for n_rows in (8, 4, 2, 1))

    @helper
    def product(n_rows, a, a_stride, b, first, n, ahead, c, c_stride, is_first):
        while n_rows >= 8:
            eight(a, a_stride, b, first, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 8 * a_stride, c + 8 * c_stride, n_rows - 8
        if n_rows >= 4:
            four(a, a_stride, b, first, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 4 * a_stride, c + 4 * c_stride, n_rows - 4
        if n_rows >= 2:
            two(a, a_stride, b, first, n, ahead, c, c_stride, is_first)
            a, c, n_rows = a + 2 * a_stride, c + 2 * c_stride, n_rows - 2
        if n_rows:
            one(a, a_stride, b, first, n, ahead, c, c_stride, is_first)

    return product


product_f32, product_f16, product_bf16 = (_product(_Numbers(kind)) for kind in kv_types.KINDS)
keys_q8_0, keys_q4_0 = (_product(_KeyTiles(kind)) for kind in kv_types.TILES)
values_q8_0, values_q4_0 = (_product(_ValueTiles(kind)) for kind in kv_types.TILES)
product_panel = _product(_Numbers(kv_types.F32, is_panel=True))
