"""The inner products of matmul.py on vectors: 1 to ROWS rows of activations against GROUPS panels.

    work item   a tile of activations (activations.py) against the panels of a slab
    arithmetic  R x GROUPS accumulators of 16 lanes stay in registers, a lane is a weight row.  A vector of
                weights meets R activations, an activation meets GROUPS vectors, once they are in registers
    limit       of a block of 32 per output vector 8 dot products, a conversion, a product of scales and an
                fma: 11 of the instructions of which a core begins two at a time.  Of a block of 256 64 dot
                products and one product with the sub-scale per run of columns (panels.py)
    traffic     panels from the first-level cache, activations once per tile from the second, front to back

What is written here is the code for a number of rows, by functions that build LLVM IR: one for all numbers.

Arguments, int64 words:
    panels       address
    activations  first tile's address, bytes of a row, number of entries, rows of a tile
    blocks       number of the slab's first one in a row, how many
    acc          f32[entries][GROUPS][16]
    ahead        bytes to ask the memory for meanwhile: address, how many, and to the same of the next group
"""

from llvmlite import ir
from numba import types

from fastpath.cpu import machine
from fastpath.cpu.activations import first_of_tile, firsts_and_pairs, words_of_block
from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.panels import COLUMNS, GROUPS, MIN_PAIRS, MINIMA, PANEL, SCALES, SHAPES, SUB_SCALES
from fastpath.cpu.simd import (
    F32,
    I32,
    define,
    f32x16,
    i8x64,
    i32x16,
    invoke,
    ld_i64,
    pointer,
    same,
    splat,
)
from fastpath.cpu.simd_dot import dot_pairs, dot_u8s8, prefetch

# Of a tile.  With GROUPS = 2, 12 accumulators of integers and 12 of numbers fit into 32 long registers; with
# AVX2's 16 short ones 3 rows measured best.
ROWS = 6 if machine.DOT == "avx512vnni" else 3

ask_for = define(types.void(types.intp), prefetch)


@inlined
def ask(ahead, n_bytes, stop, to_next):
    """Prefetch some bytes of each of GROUPS groups; returns where they end."""
    end = min(ahead + n_bytes, stop)
    for line in range(ahead, end, 64):
        for g in range(GROUPS):
            ask_for(line + g * to_next)
    return end


class _Tile:
    """Pieces of code for R rows; a tuple of R * GROUPS vectors is ordered by row, then by group.

    is_small    bytes of weights are below 128, which saves AVX2 half of its products
    """

    def __init__(self, R, is_small):
        self.R, self.n, self.is_small = R, R * GROUPS, is_small
        self.floats, self.ints = types.UniTuple(f32x16, self.n), types.UniTuple(i32x16, self.n)
        self.load = define(self.floats(types.intp), self._load)
        self.store = define(types.void(types.intp, self.floats), self._store)

    def each(self):
        return [(r, g, r * GROUPS + g) for r in range(self.R) for g in range(GROUPS)]

    def tuple(self, b, values):
        result = ir.Constant(ir.ArrayType(values[0].type, self.n), ir.Undefined)
        for i, value in enumerate(values):
            result = b.insert_value(result, value, i)
        return result

    def values(self, b, value):
        return [b.extract_value(value, i) for i in range(self.n)]

    def _load(self, b, at):
        return self.tuple(b, [vector(b, at, 64 * i, f32x16) for i in range(self.n)])

    def _store(self, b, at, value):
        for i, lanes in enumerate(self.values(b, value)):
            b.store(lanes, pointer(b, at, 64 * i), align=64)

    def word(self, b, x, number, r, kind=I32):
        """Word `number` of row r of a block, in all lanes."""
        return splat(b, b.load(pointer(b, x, 4 * (number * self.R + r)), typ=kind, align=4), 16)

    def dots(self, b, dots, panel, x, n):
        """n vectors of the panels, from `panel` on, times the words from x on."""
        for k in range(n):
            weights = [vector(b, panel, 64 * k + PANEL * g, i8x64) for g in range(GROUPS)]
            for r in range(self.R):
                q = self.word(b, x, k, r)
                for g in range(GROUPS):
                    i = r * GROUPS + g
                    dots[i] = dot_u8s8(b, dots[i], weights[g], b.bitcast(q, i8x64.ir), self.is_small)
        return dots

    def pairs(self, b, sums, panel, x, n):
        """n vectors of pairs of 16-bit numbers of the panels times the words from x on."""
        for k in range(n):
            weights = [vector(b, panel, 64 * k + PANEL * g, i32x16) for g in range(GROUPS)]
            for r, g, i in self.each():
                sums[i] = dot_pairs(b, sums[i], weights[g], self.word(b, x, k, r))
        return sums

    def chain(self, b, acc, numbers, panel, x, sign=1):
        """acc = fma(number, +-(scale in the panel * scale at x), acc)"""
        scales = [vector(b, panel, PANEL * g, f32x16) for g in range(GROUPS)]
        for r, g, i in self.each():
            number, by = numbers[i], b.fmul(scales[g], self.word(b, x, 0, r, F32))
            number = number if number.type == f32x16.ir else b.sitofp(number, f32x16.ir)
            acc[i] = invoke(b, "llvm.fma.v16f32", f32x16.ir, [number, by if sign > 0 else b.fneg(by), acc[i]])
        return acc


def vector(b, at, offset, vec):
    return b.load(pointer(b, at, offset), typ=vec.ir, align=64)


def _rows_of_32(R, is_small, has_minima):
    tile = _Tile(R, is_small)

    def block(b, acc, columns, scales, x):
        acc, q, scale = tile.values(b, acc), b.add(x, _bytes(R)), b.add(x, _bytes(9 * R))
        if has_minima:
            dots = [same(i32x16, 0)] * tile.n
        else:
            dots = [tile.word(b, x, 0, r) for r, _, _ in tile.each()]
        dots = tile.dots(b, dots, columns, q, 8)
        acc = tile.chain(b, acc, dots, scales, scale)
        if has_minima:
            sums = [tile.word(b, x, 0, r, F32) for r, _, _ in tile.each()]
            acc = tile.chain(b, acc, sums, b.add(scales, _bytes(MINIMA - SCALES, 1)), scale)
        return tile.tuple(b, acc)

    step = define(tile.floats(tile.floats, *[types.intp] * 3), block)
    load, store = tile.load, tile.store

    @helper
    def rows(panel, x, n_blocks, acc, ahead, per_panel, stop, to_next):
        sums = load(acc)
        for first in range(0, n_blocks, 8):
            ahead = ask(ahead, per_panel, stop, to_next)
            for number in range(min(8, n_blocks - first)):
                sums = step(sums, panel + COLUMNS + 512 * number, panel + SCALES + 64 * number, x)
                x += 40 * R
            panel += GROUPS * PANEL
        store(acc, sums)
        return ahead

    return rows


def _bytes(n, size=4):
    return ir.Constant(ir.IntType(64), n * size)


def _rows_of_256(R, shape):
    tile, (n_firsts, n_pairs) = _Tile(R, shape.is_small), firsts_and_pairs(shape)
    width, run = shape.form.width, shape.run or shape.form.width
    has_minima, in_words = shape.has_minima, bool(shape.run)

    def one_run(b, whole, columns, sub_scales, q, first):
        dots = [tile.word(b, first, 0, r) if n_firsts else same(i32x16, 0) for r, _, _ in tile.each()]
        dots = tile.dots(b, dots, columns, q, run)
        whole = tile.values(b, whole)
        sc = [vector(b, sub_scales, PANEL * g, i32x16) for g in range(GROUPS)]
        for _, g, i in tile.each():
            if in_words:  # sc has zeros above, so that the sign of the dot product adds nothing
                whole[i] = dot_pairs(b, whole[i], dots[i], sc[g])
            else:
                whole[i] = b.add(whole[i], b.mul(dots[i], sc[g]))
        return tile.tuple(b, whole)

    def end(b, whole, panel, pairs, scale, acc):
        sums = tile.values(b, tile._load(b, acc))
        sums = tile.chain(b, sums, tile.values(b, whole), b.add(panel, _bytes(SCALES, 1)), scale)
        if has_minima:
            minima = [same(i32x16, 0)] * tile.n
            minima = tile.pairs(b, minima, b.add(panel, _bytes(MIN_PAIRS, 1)), pairs, n_pairs)
            sums = tile.chain(b, sums, minima, b.add(panel, _bytes(MINIMA, 1)), scale, -1)
        tile._store(b, acc, tile.tuple(b, sums))

    zeros = define(tile.ints(), lambda b: ir.Constant(ir.ArrayType(i32x16.ir, tile.n), None))
    one_run = define(tile.ints(tile.ints, *[types.intp] * 4), one_run)
    end = define(types.void(tile.ints, *[types.intp] * 4), end)
    n_runs, word = 64 // run, 4 * R
    q_at, pairs_at = n_firsts * word, (n_firsts + 64) * word
    scale_at, size = (n_firsts + 64 + n_pairs) * word, words_of_block(shape) * word

    @helper
    def rows(panel, x, n_blocks, acc, ahead, per_panel, stop, to_next):
        per_run = (per_panel // n_runs + 63) // 64 * 64
        for _ in range(n_blocks):
            whole = zeros()
            for i in range(n_runs):
                at = COLUMNS + 64 * run * i, SUB_SCALES + 64 * (run * i // width)
                whole = one_run(whole, panel + at[0], panel + at[1], x + q_at + word * run * i, x + word * i)
                ahead = ask(ahead, per_run, stop, to_next)
            end(whole, panel, x + pairs_at, x + scale_at, acc)
            panel += GROUPS * PANEL
            x += size
        return ahead

    return rows


def _any_number_of(rows_of):
    """A helper (R, ...) that calls one of rows_of(1), ..., rows_of(ROWS)."""

    def up_to(R):
        these, fewer = rows_of(R), up_to(R - 1) if R > 1 else None

        @helper
        def choose(n, panel, x, n_blocks, acc, ahead, per_panel, stop, to_next):
            if fewer is None or n == R:
                return these(panel, x, n_blocks, acc, ahead, per_panel, stop, to_next)
            return fewer(n, panel, x, n_blocks, acc, ahead, per_panel, stop, to_next)

        return choose

    return up_to(ROWS)


@inlined
def _each_tile(args, lo, hi, rows, block_bytes, per):
    panel, x, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    n_entries, most = ld_i64(args + 24), ld_i64(args + 32)
    first_block, n_blocks, acc = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    ahead, size, to_next = ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80)
    stop, n_panels = ahead + size, (n_blocks + per - 1) // per
    per_panel = (size // ((hi - lo) * n_panels) + 63) // 64 * 64
    origin = first_of_tile(lo, n_entries, most)
    for tile in range(lo, hi):
        first = first_of_tile(tile, n_entries, most)
        n = first_of_tile(tile + 1, n_entries, most) - first
        source = x + row_bytes * first + block_bytes * n * first_block
        target = acc + 64 * GROUPS * (first - origin)
        ahead = rows(n, panel, source, n_blocks, target, ahead, per_panel, stop, to_next)


_of_32 = _any_number_of(lambda R: _rows_of_32(R, False, False))
_of_32_small = _any_number_of(lambda R: _rows_of_32(R, True, False))
_of_32_with_minima = _any_number_of(lambda R: _rows_of_32(R, True, True))
_of_q2_k = _any_number_of(lambda R: _rows_of_256(R, SHAPES["Q2_K"]))
_of_q3_k = _any_number_of(lambda R: _rows_of_256(R, SHAPES["Q3_K"]))
_of_q4_k = _any_number_of(lambda R: _rows_of_256(R, SHAPES["Q4_K"]))
_of_q5_k = _any_number_of(lambda R: _rows_of_256(R, SHAPES["Q5_K"]))
_of_q6_k = _any_number_of(lambda R: _rows_of_256(R, SHAPES["Q6_K"]))
_of_iq4_xs = _any_number_of(lambda R: _rows_of_256(R, SHAPES["IQ4_XS"]))
_BYTES = {name: 4 * words_of_block(shape) for name, shape in SHAPES.items()}
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS = (
    _BYTES[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
)


@kernel
def rows_32(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_32, 40, 8)


@kernel
def rows_32_small(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_32_small, 40, 8)


@kernel
def rows_32_with_minima(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_32_with_minima, 40, 8)


@kernel
def rows_q2_k(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_q2_k, _Q2_K, 1)


@kernel
def rows_q3_k(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_q3_k, _Q3_K, 1)


@kernel
def rows_q4_k(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_q4_k, _Q4_K, 1)


@kernel
def rows_q5_k(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_q5_k, _Q5_K, 1)


@kernel
def rows_q6_k(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_q6_k, _Q6_K, 1)


@kernel
def rows_iq4_xs(args, lo, hi, thread):
    _each_tile(args, lo, hi, _of_iq4_xs, _IQ4_XS, 1)


def product_kernel(name):
    """The kernel for a format."""
    shape = SHAPES[name]
    if shape.is_32 and shape.has_minima:
        return rows_32_with_minima
    if shape.is_32:
        return rows_32_small if shape.is_small and machine.DOT not in ("avx512vnni", "avxvnni") else rows_32
    return globals()[f"rows_{name.lower()}"]
