"""The inner products of matmul.py on tiles: 16 rows of activations against GROUPS panels.

    work item   a tile of activations (activations.py) against the panels of a slab
    arithmetic  that of matmul_rows.py: the same exact integers, the same chains, hence the same bytes
    limit       a product of tiles is 16 cycles, and while one is under way the core begins one operation on
                512 bits of floats per cycle: what counts is how few of them there are.  Blocks of 32: 3 per
                row.  Blocks of 256: sub-scales become part of the weights, which then need two bytes,
                sc * q = 64 h + l: 8 products of tiles, and 3 to 6 operations per row
    traffic     panels from the first-level cache; activations once per tile, as tiles, front to back

Before the first tile the panels of the slab are made signed (`_fold_32`), or become two planes (`_fold_256`).

Arguments as in matmul_rows.py, and:
    offset       of the unpacked weights: u = q + offset
    tiles        scratch: the low planes, results of products, state (tile.py)
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fastpath.cpu import machine
from fastpath.cpu.activations import words_of_tile
from fastpath.cpu.kernel import helper, inlined, kernel
from fastpath.cpu.matmul_rows import ask, vector
from fastpath.cpu.panels import COLUMNS, GROUPS, MIN_PAIRS, MINIMA, PANEL, SCALES, SHAPES, SUB_SCALES
from fastpath.cpu.simd import (
    F32,
    I8,
    I16,
    I64,
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
from fastpath.cpu.tile import STATE, TILE, Tiles

ROWS = 16
PLANE = 4096

# scratch: low planes of a slab of up to 2 panels, results of products (twice), state
RESULTS = 2 * GROUPS * PLANE
STATE_AT = RESULTS + 2 * 8 * TILE
SCRATCH = STATE_AT + STATE

SUMS = types.UniTuple(f32x16, ROWS)


def pin(b, value):
    """No instruction, but one that may not move: without it LLVM postpones a chain of sums behind later
    products of tiles, and all the rows that it needs then go through memory."""
    if machine.DOT != "avx512vnni":
        return value
    nothing = ir.InlineAsm(ir.FunctionType(value.type, [value.type]), "", "=v,0", side_effect=True)
    return b.call(nothing, [value])


def _store(b, value, at, offset=0):
    b.store(value, pointer(b, at, offset), align=64)


def _scaled(b, number, scale, x_scales, r, total, sign=1):
    """fma(number, +-(scale * x_scales[r]), total)"""
    by = b.fmul(scale, splat(b, b.load(pointer(b, x_scales, 4 * r), typ=F32, align=4), 16))
    number = number if number.type == f32x16.ir else b.sitofp(number, f32x16.ir)
    return invoke(b, "llvm.fma.v16f32", f32x16.ir, [number, by if sign > 0 else b.fneg(by), total])


# -- blocks of 32

_unit = Tiles({0: (16, 64), 1: (16, 64), 4: (16, 32), 5: (16, 32), 6: (8, 64), 7: (8, 64)})
configure_32, release = _unit.configure(), _unit.release()
zero_0, load_a0, load_b0, dot_0, store_0 = (
    _unit.zero(0), _unit.load(4), _unit.load(6), _unit.dot(0, 4, 6), _unit.store(0),
)  # fmt: skip
zero_1, load_a1, load_b1, dot_1, store_1 = (
    _unit.zero(1), _unit.load(5), _unit.load(7), _unit.dot(1, 5, 7), _unit.store(1),
)  # fmt: skip
BLOCK_32 = ROWS * 40  # bytes of a block of 32 in a tile of activations


def _make_signed(b, columns, n_vectors, offset):
    by = splat(b, b.trunc(offset, I8), 64)
    with cgutils.for_range(b, n_vectors, intp=I64) as loop:
        at = b.add(columns, b.shl(loop.index, I64(6)))
        _store(b, b.sub(vector(b, at, 0, i8x64), by), at)


def _load_sums(b, at):
    result = ir.Constant(ir.ArrayType(f32x16.ir, ROWS), ir.Undefined)
    for r in range(ROWS):
        result = b.insert_value(result, vector(b, at, 64 * GROUPS * r, f32x16), r)
    return result


def _store_sums(b, at, sums):
    for r in range(ROWS):
        _store(b, b.extract_value(sums, r), at, 64 * GROUPS * r)


def _chains_32(has_minima):
    def chains(b, sums, result, x, scales):
        """sums of 16 rows with the block at x added, whose integers are at `result`."""
        scale, x_scales = vector(b, scales, 0, f32x16), b.add(x, I64(32 * ROWS))
        minimum = vector(b, scales, MINIMA - SCALES, f32x16) if has_minima else None
        for r in range(ROWS):
            total = b.extract_value(sums, r)
            total = _scaled(b, vector(b, result, 64 * r, i32x16), scale, x_scales, r, total)
            if has_minima:
                of_x = splat(b, b.load(pointer(b, x_scales, 64 + 4 * r), typ=F32, align=4), 16)
                total = _scaled(b, of_x, minimum, x_scales, r, total)
            sums = b.insert_value(sums, pin(b, total), r)
        return sums

    return define(SUMS(SUMS, *[types.intp] * 3), chains)


make_signed = define(types.void(*[types.intp] * 3), _make_signed)
load_sums = define(SUMS(types.intp), _load_sums)
store_sums = define(types.void(types.intp, SUMS), _store_sums)
chains_32, chains_32_with_minima = _chains_32(False), _chains_32(True)


@inlined
def _first(state, columns, x, block):
    """Begin the product of an even block."""
    zero_0(state)
    load_b0(state, columns + PANEL * GROUPS * (block >> 3) + 512 * (block & 7), 64)
    load_a0(state, x + BLOCK_32 * block, 32)
    dot_0(state)


@inlined
def _second(state, columns, x, block):
    zero_1(state)
    load_b1(state, columns + PANEL * GROUPS * (block >> 3) + 512 * (block & 7), 64)
    load_a1(state, x + BLOCK_32 * block, 32)
    dot_1(state)


@inlined
def _tile_of_32(panel, x, n_blocks, acc, tiles, chains):
    """One tile against one panel; while a product is under way the sums take the one before it."""
    state, even, odd = tiles + STATE_AT, tiles + RESULTS, tiles + RESULTS + TILE
    sums = load_sums(acc)
    _first(state, panel + COLUMNS, x, 0)
    for block in range(0, n_blocks - 1, 2):
        store_0(state, even)
        _second(state, panel + COLUMNS, x, block + 1)
        at = panel + SCALES + PANEL * GROUPS * (block >> 3) + 64 * (block & 7)
        sums = chains(sums, even, x + BLOCK_32 * block, at)
        store_1(state, odd)
        _first(state, panel + COLUMNS, x, min(block + 2, n_blocks - 1))  # the last one for nothing
        sums = chains(sums, odd, x + BLOCK_32 * (block + 1), at + 64)
    if n_blocks & 1:
        store_0(state, even)
        last = n_blocks - 1
        at = panel + SCALES + PANEL * GROUPS * (last >> 3) + 64 * (last & 7)
        sums = chains(sums, even, x + BLOCK_32 * last, at)
    store_sums(acc, sums)


@inlined
def _tiles_of_32(args, lo, hi, chains):
    panel, x, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    first_block, n_blocks, acc = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    ahead, size, to_next = ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80)
    offset, tiles = ld_i64(args + 88), ld_i64(args + 96)
    stop, per_tile = ahead + size, (size // (hi - lo) + 63) // 64 * 64
    for g in range(GROUPS):
        for at in range(0, n_blocks, 8):
            columns = panel + PANEL * (GROUPS * (at >> 3) + g) + COLUMNS
            make_signed(columns, 8 * min(8, n_blocks - at), offset)
    configure_32(tiles + STATE_AT)
    for tile in range(lo, hi):
        source = x + ROWS * row_bytes * tile + BLOCK_32 * first_block
        target = acc + 64 * GROUPS * ROWS * (tile - lo)
        ahead = ask(ahead, per_tile, stop, to_next)
        for g in range(GROUPS):
            _tile_of_32(panel + PANEL * g, source, n_blocks, target + 64 * g, tiles, chains)
    release(tiles + STATE_AT)


@kernel
def tiles_32(args, lo, hi, thread):
    _tiles_of_32(args, lo, hi, chains_32)


@kernel
def tiles_32_with_minima(args, lo, hi, thread):
    _tiles_of_32(args, lo, hi, chains_32_with_minima)


# -- blocks of 256


def _fold(n_sub):
    """u of a panel -> (u - offset) sc = 64 h + l: h in its place, l in a plane of its own; mn to bytes."""
    word = ir.VectorType(I16, 32)

    def words(value):
        return ir.Constant(word, [value] * 32)

    def fold(b, panel, low, offset):
        by = splat(b, b.trunc(offset, I8), 64)
        with cgutils.for_range(b, I64(64), intp=I64) as loop:
            at = b.shl(loop.index, I64(6))
            sub = b.lshr(loop.index, I64((64 // n_sub).bit_length() - 1))
            sc = vector(b, b.add(panel, b.shl(sub, I64(6))), SUB_SCALES, i32x16)
            sc = b.bitcast(b.mul(b.and_(sc, same(i32x16, 0xFFFF)), same(i32x16, 0x10001)), word)
            q = b.bitcast(b.sub(vector(b, b.add(panel, at), COLUMNS, i8x64), by), word)
            high, rest = [], []
            for part in (b.ashr(b.shl(q, words(8)), words(8)), b.ashr(q, words(8))):
                value = b.mul(part, sc)
                high.append(b.ashr(b.add(value, words(32)), words(6)))
                rest.append(b.sub(value, b.shl(high[-1], words(6))))
            for (even, odd), place in ((high, b.add(panel, I64(COLUMNS))), (rest, low)):
                both = b.or_(b.and_(even, words(255)), b.shl(odd, words(8)))
                _store(b, b.bitcast(both, i8x64.ir), b.add(place, at))

    return define(types.void(*[types.intp] * 3), fold)


def _fold_minima(n_sub):
    """Pairs of 16-bit numbers -> 4 bytes per row, in their place."""

    def fold(b, panel):
        for i in range(n_sub // 4):
            two = [vector(b, panel, MIN_PAIRS + 64 * (2 * i + j), i32x16) for j in range(2)]
            bytes_ = [b.or_(b.and_(x, same(i32x16, 0xFF)), b.lshr(x, same(i32x16, 8))) for x in two]
            both = b.or_(bytes_[0], b.shl(bytes_[1], same(i32x16, 16)))
            _store(b, both, panel, MIN_PAIRS + 64 * i)

    return define(types.void(types.intp), fold)


fold_8, fold_16 = _fold(8), _fold(16)
fold_minima_8, fold_minima_16 = _fold_minima(8), _fold_minima(16)


def _chains_256(n_groups, has_minima):
    def chains(b, results, x_scales, panel, acc):
        """The sums of 16 rows in memory with a block added; at `results` tiles h, l of each group, then
        those of the minima."""

        def number(at, r):
            high, low = (vector(b, results, TILE * (at + i) + 64 * r, i32x16) for i in range(2))
            return b.add(b.shl(high, same(i32x16, 6)), low)

        for g in range(n_groups):
            d = vector(b, panel, PANEL * g + SCALES, f32x16)
            dmin = vector(b, panel, PANEL * g + MINIMA, f32x16) if has_minima else None
            for r in range(ROWS):
                place = 64 * (n_groups * r + g)
                total = _scaled(b, number(2 * g, r), d, x_scales, r, vector(b, acc, place, f32x16))
                if has_minima:
                    total = _scaled(b, number(4 + 2 * g, r), dmin, x_scales, r, total, -1)
                _store(b, pin(b, total), acc, place)

    return define(types.void(*[types.intp] * 4), chains)


chains_256, chains_256_with_minima = _chains_256(GROUPS, False), _chains_256(GROUPS, True)


class _Products:
    """Products of a block of 256 with n_sub sub-blocks: tiles 0 to 3 are h, l of two groups."""

    def __init__(self, n_sub):
        assert GROUPS == 2, "tiles 0 to 3 are two results for each of two groups"
        shapes = {t: (16, 64) for t in range(6)} | {6: (16, n_sub), 7: (n_sub // 4, 64)}
        unit = Tiles(shapes)
        self.configure = unit.configure()
        zeros, stores = [unit.zero(t) for t in range(4)], [unit.store(t) for t in range(4)]
        load_a, load_b = unit.load(4), unit.load(5)
        dots = [unit.dot(t, 4, 5) for t in range(4)]
        load_sum, load_min = unit.load(6), unit.load(7)
        min_dots = [unit.dot(t, 6, 7) for t in range(4)]
        zero_a, zero_b, zero_c, zero_d = zeros
        store_a, store_b, store_c, store_d = stores
        dot_a, dot_b, dot_c, dot_d = dots
        min_a, min_b, min_c, min_d = min_dots
        sums_bytes = ROWS * n_sub

        @helper
        def columns(state, panel, low, x, results):
            zero_a(state)
            zero_b(state)
            zero_c(state)
            zero_d(state)
            for c in range(4):
                load_a(state, x + ROWS * 64 * c, 64)
                load_b(state, panel + COLUMNS + TILE * c, 64)
                dot_a(state)
                load_b(state, low + TILE * c, 64)
                dot_b(state)
                load_b(state, panel + PANEL + COLUMNS + TILE * c, 64)
                dot_c(state)
                load_b(state, low + PLANE + TILE * c, 64)
                dot_d(state)
            store_a(state, results)
            store_b(state, results + TILE)
            store_c(state, results + 2 * TILE)
            store_d(state, results + 3 * TILE)

        @helper
        def minima(state, panel, x, results):
            zero_a(state)
            zero_b(state)
            zero_c(state)
            zero_d(state)
            load_sum(state, x + sums_bytes, n_sub)  # times 64
            load_min(state, panel + MIN_PAIRS, 64)
            min_a(state)
            load_min(state, panel + PANEL + MIN_PAIRS, 64)
            min_c(state)
            load_sum(state, x, n_sub)
            min_d(state)
            load_min(state, panel + MIN_PAIRS, 64)
            min_b(state)
            store_a(state, results)
            store_b(state, results + TILE)
            store_c(state, results + 2 * TILE)
            store_d(state, results + 3 * TILE)

        self.columns, self.minima = columns, minima


_eight, _sixteen = _Products(8), _Products(16)
configure_8, columns_8, minima_8 = _eight.configure, _eight.columns, _eight.minima
configure_16, columns_16, minima_16 = _sixteen.configure, _sixteen.columns, _sixteen.minima


@inlined
def _tiles_of_256(args, lo, hi, row_words, fold, fold_minima, configure, columns, minima, chains, has_minima):
    """While the products of a block are under way the sums take those of the block before it."""
    panel, x, row_bytes = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    first_block, n_blocks, acc = ld_i64(args + 40), ld_i64(args + 48), ld_i64(args + 56)
    ahead, size, to_next = ld_i64(args + 64), ld_i64(args + 72), ld_i64(args + 80)
    offset, tiles = ld_i64(args + 88), ld_i64(args + 96)
    state, stop, per_tile = tiles + STATE_AT, ahead + size, (size // (hi - lo) + 63) // 64 * 64
    block_bytes = 4 * ROWS * row_words
    for i in range(GROUPS * n_blocks):
        fold(panel + PANEL * i, tiles + PLANE * i, offset)
        if has_minima:
            fold_minima(panel + PANEL * i)
    configure(state)
    n = (hi - lo) * n_blocks
    for step in range(n + 1):
        tile, block = step // n_blocks, step % n_blocks
        now = tiles + RESULTS + 8 * TILE * (step & 1)
        at = panel + PANEL * GROUPS * block
        source = x + ROWS * row_bytes * (lo + tile) + block_bytes * (first_block + block)
        if step < n:
            if block == 0:
                ahead = ask(ahead, per_tile, stop, to_next)
            columns(state, at, tiles + PLANE * GROUPS * block, source, now)
            if has_minima:
                minima(state, at, source + 256 * ROWS, now + 4 * TILE)
        if step > 0:
            last = step - 1
            at = panel + PANEL * GROUPS * (last % n_blocks)
            source = x + ROWS * row_bytes * (lo + last // n_blocks)
            source += block_bytes * (first_block + last % n_blocks + 1) - 4 * ROWS
            target = acc + 64 * GROUPS * ROWS * (last // n_blocks)
            chains(tiles + RESULTS + 8 * TILE * (last & 1), source, at, target)
    release(state)


_WORDS = {name: words_of_tile(shape) for name, shape in SHAPES.items()}
_WITH_8, _WITH_16, _WITHOUT = _WORDS["Q4_K"], _WORDS["Q2_K"], _WORDS["Q6_K"]


@kernel
def tiles_8_with_minima(args, lo, hi, thread):
    _tiles_of_256(
        args,
        lo,
        hi,
        _WITH_8,
        fold_8,
        fold_minima_8,
        configure_8,
        columns_8,
        minima_8,
        chains_256_with_minima,
        True,
    )


@kernel
def tiles_16_with_minima(args, lo, hi, thread):
    _tiles_of_256(
        args, lo, hi, _WITH_16, fold_16, fold_minima_16, configure_16, columns_16, minima_16,
        chains_256_with_minima, True,
    )  # fmt: skip


@kernel
def tiles_8(args, lo, hi, thread):
    _tiles_of_256(
        args, lo, hi, _WITHOUT, fold_8, fold_minima_8, configure_8, columns_8, minima_8, chains_256, False
    )


@kernel
def tiles_16(args, lo, hi, thread):
    _tiles_of_256(
        args,
        lo,
        hi,
        _WITHOUT,
        fold_16,
        fold_minima_16,
        configure_16,
        columns_16,
        minima_16,
        chains_256,
        False,
    )


def product_kernel(name):
    """The kernel for a format."""
    shape = SHAPES[name]
    minima = "_with_minima" if shape.has_minima else ""
    return globals()[f"tiles_{32 if shape.is_32 else shape.form.n_sub}{minima}"]
