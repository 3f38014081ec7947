"""Weights as products with many rows read them: panels of 256 columns of 16 rows, as unsigned bytes.

    work item   a panel: 8 blocks of 32 or one of 256 (fewer blocks at the end of a row)
    traffic     weights are read once, 4 KiB per panel stay in the first-level cache

A panel in memory; GROUPS of them, of neighbouring groups of 16 rows and the same columns, follow each other:

    COLUMNS      u8[64][16][4]   vector k has columns 4k .. 4k+3 of the 16 rows; u = q + offset
    SCALES       f32[8][16]      d of each block; MINIMA: m, or dmin
    SUB_SCALES   i32[16][16]     of blocks of 256: sc of each sub-block
    MIN_PAIRS    i16[8][16][2]   mn of two neighbouring sub-blocks

A product of 16-bit integers is three times as fast as one of 32 bits, so dot products inside a block of 256
meet their sub-scale while they fit in 16 bits: `Shape` says how many columns they span, at most
32767 / (127 max|q|).
"""

from dataclasses import dataclass

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath.cpu import unpack
from fastpath.cpu.kernel import inlined, kernel
from fastpath.cpu.lanes import PackedBlock, RowsBlock
from fastpath.cpu.simd import I64, ld_i64, pointer

COLUMNS, SCALES, MINIMA, SUB_SCALES, MIN_PAIRS = 0, 4096, 4608, 5120, 6144
PANEL = 6656  # bytes

GROUPS = 2  # panels that share each activation while it is in a register


@dataclass(frozen=True)
class Shape:
    """What a product with a format needs to know.

    run     of blocks of 256: vectors of 4 columns whose dot product is one 16-bit number; 0 if none is
    """

    form: unpack.Blocks32 | unpack.Blocks256
    run: int = 0

    @property
    def is_32(self):
        return isinstance(self.form, unpack.Blocks32)

    @property
    def is_small(self):
        """All u are below 128."""
        return self.form.offset < 128

    @property
    def has_minima(self):
        return self.form.minimum is not None if self.is_32 else self.form.has_minima


SHAPES = {
    "Q4_0": Shape(unpack.Q4_0),
    "Q4_1": Shape(unpack.Q4_1),
    "Q5_0": Shape(unpack.Q5_0),
    "Q5_1": Shape(unpack.Q5_1),
    "Q8_0": Shape(unpack.Q8_0),
    "IQ4_NL": Shape(unpack.IQ4_NL),
    "MXFP4": Shape(unpack.MXFP4),
    "Q2_K": Shape(unpack.Q2_K, 4),
    "Q3_K": Shape(unpack.Q3_K, 4),
    "Q4_K": Shape(unpack.Q4_K, 4),
    "Q5_K": Shape(unpack.Q5_K, 2),
    "Q6_K": Shape(unpack.Q6_K, 2),
    "IQ4_XS": Shape(unpack.IQ4_XS),
}


def _store(b, lanes, address, offset):
    b.store(lanes.value, pointer(b, address, offset), align=1)


def pair(x, y):
    """Two small numbers per lane in one word."""
    return (x & 0xFFFF) | (y << 16)


def _write_32(b, shape, block, panel, number):
    form = shape.form
    columns = b.add(panel, b.shl(number, I64(9)))
    scales = b.add(panel, b.shl(number, I64(6)))
    for k, u in form.columns(block):
        _store(b, u, columns, COLUMNS + 64 * k)
    _store(b, form.scale(block), scales, SCALES)
    if form.minimum:
        _store(b, form.minimum(block), scales, MINIMA)


def _write_256(b, shape, block, panel, number):
    form = shape.form
    with cgutils.for_range(b, I64(4), intp=I64) as loop:
        for s, k, u in form.columns(block, loop.index):
            first = b.mul(form.sub_block(b, loop.index, s), I64(64 * form.width))
            _store(b, u, b.add(panel, first), COLUMNS + 64 * k)
    d, dmin, sc, mn = form.scales(block)
    _store(b, d, panel, SCALES)
    for j, lanes in enumerate(sc):
        _store(b, lanes & 0xFFFF if shape.run else lanes, panel, SUB_SCALES + 64 * j)
    if mn:
        _store(b, dmin, panel, MINIMA)
        for i in range(form.n_sub // 2):
            _store(b, pair(mn[2 * i], mn[2 * i + 1]), panel, MIN_PAIRS + 64 * i)


def _writers(name):
    """Intrinsics (source, stride, last, panel, number of the block in it): from rows, from packed blocks."""
    shape = SHAPES[name]
    write = _write_32 if shape.is_32 else _write_256

    def writer(block_of):
        @intrinsic
        def written(typingctx, source, stride, last, panel, number):
            def codegen(context, b, signature, args):
                source, stride, last, panel, number = args
                write(b, shape, block_of(b, source, stride, last), panel, number)
                return context.get_dummy_value()

            return types.void(*[types.int64] * 5), codegen

        return written

    return writer(RowsBlock), writer(lambda b, source, stride, last: PackedBlock(b, source))


@inlined
def _fill(args, lo, hi, write, per_panel):
    """Panels lo .. hi-1 of a group; args: group, stride and last of its rows, bytes from a block to the next,
    number of blocks in a row, where to write the panel lo."""
    source, stride, last, step = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    n_blocks, panel = ld_i64(args + 32), ld_i64(args + 40)
    for item in range(lo, hi):
        first = per_panel * item
        for i in range(min(per_panel, n_blocks - first)):
            write(source + (first + i) * step, stride, last, panel, i)
        panel += GROUPS * PANEL


rows_q4_0, packed_q4_0 = _writers("Q4_0")


@kernel
def panel_q4_0(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q4_0, 8)


@kernel
def packed_panel_q4_0(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q4_0, 8)


rows_q4_1, packed_q4_1 = _writers("Q4_1")


@kernel
def panel_q4_1(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q4_1, 8)


@kernel
def packed_panel_q4_1(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q4_1, 8)


rows_q5_0, packed_q5_0 = _writers("Q5_0")


@kernel
def panel_q5_0(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q5_0, 8)


@kernel
def packed_panel_q5_0(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q5_0, 8)


rows_q5_1, packed_q5_1 = _writers("Q5_1")


@kernel
def panel_q5_1(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q5_1, 8)


@kernel
def packed_panel_q5_1(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q5_1, 8)


rows_q8_0, packed_q8_0 = _writers("Q8_0")


@kernel
def panel_q8_0(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q8_0, 8)


@kernel
def packed_panel_q8_0(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q8_0, 8)


rows_iq4_nl, packed_iq4_nl = _writers("IQ4_NL")


@kernel
def panel_iq4_nl(args, lo, hi, thread):
    _fill(args, lo, hi, rows_iq4_nl, 8)


@kernel
def packed_panel_iq4_nl(args, lo, hi, thread):
    _fill(args, lo, hi, packed_iq4_nl, 8)


rows_mxfp4, packed_mxfp4 = _writers("MXFP4")


@kernel
def panel_mxfp4(args, lo, hi, thread):
    _fill(args, lo, hi, rows_mxfp4, 8)


@kernel
def packed_panel_mxfp4(args, lo, hi, thread):
    _fill(args, lo, hi, packed_mxfp4, 8)


rows_q2_k, packed_q2_k = _writers("Q2_K")


@kernel
def panel_q2_k(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q2_k, 1)


@kernel
def packed_panel_q2_k(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q2_k, 1)


rows_q3_k, packed_q3_k = _writers("Q3_K")


@kernel
def panel_q3_k(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q3_k, 1)


@kernel
def packed_panel_q3_k(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q3_k, 1)


rows_q4_k, packed_q4_k = _writers("Q4_K")


@kernel
def panel_q4_k(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q4_k, 1)


@kernel
def packed_panel_q4_k(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q4_k, 1)


rows_q5_k, packed_q5_k = _writers("Q5_K")


@kernel
def panel_q5_k(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q5_k, 1)


@kernel
def packed_panel_q5_k(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q5_k, 1)


rows_q6_k, packed_q6_k = _writers("Q6_K")


@kernel
def panel_q6_k(args, lo, hi, thread):
    _fill(args, lo, hi, rows_q6_k, 1)


@kernel
def packed_panel_q6_k(args, lo, hi, thread):
    _fill(args, lo, hi, packed_q6_k, 1)


rows_iq4_xs, packed_iq4_xs = _writers("IQ4_XS")


@kernel
def panel_iq4_xs(args, lo, hi, thread):
    _fill(args, lo, hi, rows_iq4_xs, 1)


@kernel
def packed_panel_iq4_xs(args, lo, hi, thread):
    _fill(args, lo, hi, packed_iq4_xs, 1)


ROWS = {name: globals()[f"panel_{name.lower()}"] for name in SHAPES}
PACKED = {name: globals()[f"packed_panel_{name.lower()}"] for name in SHAPES}
