"""A few rows of activations against packed weights.        definition: refimpl/ops/integer.py

    work item   a group of 16 weight rows, against a tile of 4, 6 or 8 rows of activations
    arithmetic  that of matmul.py: exact integers per block, one rounding chain per output.  A lane is a
                weight row; a register is unpacked once and meets all rows of the tile, whose words lie in the
                order of reading (activations.py): operands in memory at one address that moves
    limit       two vector instructions begin per cycle.  A block of 32 times 8 rows needs 64 dot products, 24
                for the chains and about 10 that unpack: 49 cycles for 288 bytes of Q4_0, and reading takes 50
    traffic     as in matvec.py

Arguments, int64 words:
    matrix       weights, (its bytes), bytes of a row, n_rows, n_cols
    activations  address, bytes of a row, rows of the tile
    output       y, row stride in bytes
    routing      (1, its number, where its entries start), (activation rows), output rows
    in brackets  what linear.py says to every kernel and this one need not know
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fastpath.cpu import machine, matmul, threads
from fastpath.cpu.activations import firsts_and_pairs, lanes_of_32, lanes_of_256, words_of_block
from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.lanes import PackedBlock
from fastpath.cpu.matvec import addresses, ask_for, fma, put, tuple_of, values_of
from fastpath.cpu.panels import SHAPES, pair
from fastpath.cpu.simd import F32, I32, I64, define, f32x16, i8x64, i32x16, ld_i64, pointer, same, splat
from fastpath.cpu.simd_dot import dot_pairs, dot_u8s8
from quant import FORMATS

TILES = (4, 6, 8)  # rows for which there is code; a tile with fewer is filled up
# Rows for which this pays, against matvec.py and against panels, measured as bench/kernels.py does; short
# registers are too few for eight rows.
LEAST, MOST = (3, 8) if machine.DOT == "avx512vnni" else (5, 6)


class _Tile:
    """Pieces of code for R rows of activations and a format."""

    def __init__(self, name, R):
        self.R, self.shape, self.block_bytes = R, SHAPES[name], FORMATS[name].block_bytes
        self.form, self.floats = self.shape.form, types.UniTuple(f32x16, R)

    def word(self, b, x, number, r, kind=I32):
        """Word `number` of row r, in all lanes."""
        return splat(b, b.load(pointer(b, x, 4 * (number * self.R + r)), typ=kind, align=4), 16)

    def words(self, b, x, number, kind=I32):
        return [self.word(b, x, number, r, kind) for r in range(self.R)]

    def dot(self, b, dots, u, x, number):
        for r in range(self.R):
            q = b.bitcast(self.word(b, x, number, r), i8x64.ir)
            dots[r] = dot_u8s8(b, dots[r], u.value, q, self.shape.is_small)

    def chain(self, b, acc, numbers, scale, x_scales, sign=1):
        for r in range(self.R):
            number, by = numbers[r], b.fmul(scale, x_scales[r])
            number = number if number.type == f32x16.ir else b.sitofp(number, f32x16.ir)
            acc[r] = fma(b, number, by if sign > 0 else b.fneg(by), acc[r])

    def at(self, b, x, number):
        return b.add(x, I64(4 * self.R * number))

    def block_32(self, b, acc, block, x):
        acc, packed, form = values_of(b, acc), PackedBlock(b, block), self.form
        ask_for(b, block, 16 * self.block_bytes)
        dots = [same(i32x16, 0)] * self.R if form.minimum else self.words(b, x, 0)
        for g, u in form.columns(packed):
            self.dot(b, dots, u, x, 1 + g)
        x_scales = self.words(b, x, 9, F32)
        self.chain(b, acc, dots, form.scale(packed).value, x_scales)
        if form.minimum:
            self.chain(b, acc, self.words(b, x, 0, F32), form.minimum(packed).value, x_scales)
        return tuple_of(b, ir.ArrayType(f32x16.ir, self.R), acc)

    def block_256(self, b, acc, block, x):
        acc, packed, form = values_of(b, acc), PackedBlock(b, block), self.form
        n_firsts, n_pairs = firsts_and_pairs(self.shape)
        stack = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(i32x16.ir, form.n_sub)), I64)
        d, dmin, sc, mn = form.scales(packed)
        for j, lanes in enumerate(sc):
            b.store((lanes & 0xFFFF if self.shape.run else lanes).value, pointer(b, stack, 64 * j), align=1)
        minima = [same(i32x16, 0)] * self.R
        for i in range(n_pairs):
            both = pair(mn[2 * i], mn[2 * i + 1]).value
            for r in range(self.R):
                minima[r] = dot_pairs(b, minima[r], both, self.word(b, x, n_firsts + 64 + i, r))
        whole = [cgutils.alloca_once_value(b, same(i32x16, 0)) for _ in acc]
        with cgutils.for_range(b, I64(4), intp=I64) as loop:
            quarter = 4 * self.block_bytes
            ask_for(b, b.add(block, b.mul(loop.index, I64(quarter))), quarter)
            self.part(b, whole, packed, loop.index, x, stack)
        x_scales = self.words(b, x, n_firsts + 64 + n_pairs, F32)
        self.chain(b, acc, [b.load(w) for w in whole], d.value, x_scales)
        if mn:
            self.chain(b, acc, minima, dmin.value, x_scales, -1)
        return tuple_of(b, ir.ArrayType(f32x16.ir, self.R), acc)

    def part(self, b, whole, packed, part, x, stack):
        form, shape = self.form, self.shape
        n_firsts, _ = firsts_and_pairs(shape)
        run = shape.run or form.width
        vectors = {}
        for s, k, u in form.columns(packed, part):
            vectors[s, k] = u
        for s in range(form.n_sub // 4):
            j = form.sub_block(b, part, s)
            sc = b.load(pointer(b, b.add(stack, b.shl(j, I64(6)))), typ=i32x16.ir, align=1)
            firsts = b.add(x, b.mul(j, I64(4 * self.R * (form.width // run))))
            q = b.add(self.at(b, x, n_firsts), b.mul(j, I64(4 * self.R * form.width)))
            for k in range(0, form.width, run):
                dots = self.words(b, firsts, k // run) if n_firsts else [same(i32x16, 0)] * self.R
                for i in range(k, k + run):
                    self.dot(b, dots, vectors[s, i], q, i)
                for slot, dot in zip(whole, dots, strict=True):
                    before = b.load(slot)
                    if shape.run:
                        after = dot_pairs(b, before, dot, sc)
                    else:
                        after = b.add(before, b.mul(dot, sc))
                    b.store(after, slot)


def _group(name, R):
    """A helper: R rows at x times the packed group at `block`, to the rows of y that `outs` names."""
    shape, tile = SHAPES[name], _Tile(name, R)
    step = define(
        tile.floats(tile.floats, types.intp, types.intp), tile.block_32 if shape.is_32 else tile.block_256
    )
    zeros = define(tile.floats(), lambda b: ir.Constant(ir.ArrayType(f32x16.ir, R), None))
    size, packed_bytes, count = 4 * words_of_block(shape) * R, 16 * tile.block_bytes, (0,) * R

    @helper
    def group(block, n_blocks, x, outs, n_outs, y, y_stride, n):
        acc = zeros()
        for _ in range(n_blocks):
            acc = step(acc, block, x)
            block += packed_bytes
            x += size
        put(acc, addresses(outs, n_outs, y, y_stride, count), n)

    return group


def _tile_of(name):
    """The same for as many rows as the tile has."""
    four, six, eight = (_group(name, rows) for rows in TILES)

    @helper
    def group(rows, block, n_blocks, x, outs, n_outs, y, y_stride, n):
        if rows == 4:
            four(block, n_blocks, x, outs, n_outs, y, y_stride, n)
        elif rows == 6:
            six(block, n_blocks, x, outs, n_outs, y, y_stride, n)
        else:
            eight(block, n_blocks, x, outs, n_outs, y, y_stride, n)

    return group


@inlined
def each_group(args, lo, hi, group, block_size):
    weights, row_bytes, n_rows = ld_i64(args), ld_i64(args + 16), ld_i64(args + 24)
    n_blocks, x, rows = ld_i64(args + 32) // block_size, ld_i64(args + 40), ld_i64(args + 56)
    y, y_stride, starts, outs = ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 96), ld_i64(args + 112)
    n_entries = ld_i64(starts + 8)
    for g in range(lo, hi):
        block, n = weights + 16 * row_bytes * g, min(16, n_rows - 16 * g)
        group(rows, block, n_blocks, x, outs, n_entries, y + 64 * g, y_stride, n)


_q4_0 = _tile_of("Q4_0")


@kernel
def few_q4_0(args, lo, hi, thread):
    each_group(args, lo, hi, _q4_0, 32)


_q4_1 = _tile_of("Q4_1")


@kernel
def few_q4_1(args, lo, hi, thread):
    each_group(args, lo, hi, _q4_1, 32)


_q5_0 = _tile_of("Q5_0")


@kernel
def few_q5_0(args, lo, hi, thread):
    each_group(args, lo, hi, _q5_0, 32)


_q5_1 = _tile_of("Q5_1")


@kernel
def few_q5_1(args, lo, hi, thread):
    each_group(args, lo, hi, _q5_1, 32)


_q8_0 = _tile_of("Q8_0")


@kernel
def few_q8_0(args, lo, hi, thread):
    each_group(args, lo, hi, _q8_0, 32)


_iq4_nl = _tile_of("IQ4_NL")


@kernel
def few_iq4_nl(args, lo, hi, thread):
    each_group(args, lo, hi, _iq4_nl, 32)


_mxfp4 = _tile_of("MXFP4")


@kernel
def few_mxfp4(args, lo, hi, thread):
    each_group(args, lo, hi, _mxfp4, 32)


_q2_k = _tile_of("Q2_K")


@kernel
def few_q2_k(args, lo, hi, thread):
    each_group(args, lo, hi, _q2_k, 256)


_q3_k = _tile_of("Q3_K")


@kernel
def few_q3_k(args, lo, hi, thread):
    each_group(args, lo, hi, _q3_k, 256)


_q4_k = _tile_of("Q4_K")


@kernel
def few_q4_k(args, lo, hi, thread):
    each_group(args, lo, hi, _q4_k, 256)


_q5_k = _tile_of("Q5_K")


@kernel
def few_q5_k(args, lo, hi, thread):
    each_group(args, lo, hi, _q5_k, 256)


_q6_k = _tile_of("Q6_K")


@kernel
def few_q6_k(args, lo, hi, thread):
    each_group(args, lo, hi, _q6_k, 256)


_iq4_xs = _tile_of("IQ4_XS")


@kernel
def few_iq4_xs(args, lo, hi, thread):
    each_group(args, lo, hi, _iq4_xs, 256)


KERNELS = {name: globals()[f"few_{name.lower()}"] for name in SHAPES}


# -- wrapper

_ROUTES = {
    rows: matmul.Route(rows, words_of_block, lanes_of_32, lanes_of_256, KERNELS.get, True) for rows in TILES
}


def kernels_for(name):
    """The kernels that products with this format need (for warming up)."""
    return _ROUTES[MOST].order(SHAPES[name]), KERNELS[name]


def takes(n_rows):
    """Whether this is the fastest way for so many rows of one packed matrix."""
    return LEAST <= n_rows <= MOST


def activations(x, weight, groups):
    """x in a tile; (address, bytes of a row, rows of the tile), valid until the next call."""
    n_rows, label = groups.n_entries, weight.name or weight.format.name
    route = _ROUTES[next(rows for rows in TILES if n_rows <= rows)]
    shape, n_threads = SHAPES[weight.format.name], threads.num_threads()
    return *matmul.ordered(route, x, shape, groups, n_rows, n_threads, label), route.rows
