"""Tiles: the matrix unit's registers of 16 rows by 64 bytes, and the few things that can be done with them.

    shapes = {0: (16, 64), 4: (16, 32), 6: (8, 64)}     rows and bytes of a row, by the tile's number
    unit = Tiles(shapes)
    configure = unit.configure()                        functions for kernels; their first argument is `state`
    dot = unit.dot(0, 4, 6)                             c += a b, int8 by int8, sums in int32

`b` holds a matrix with 4 neighbouring rows side by side: byte j of row k and column l stands for row 4k + j.

Where machine.TILES is "registers" these are the instructions (AMX).  Otherwise a tile is memory at `state`
(STATE bytes per thread), and each function computes by plain code what the instruction would: for tests on
CPUs without tiles.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fastpath.cpu import machine
from fastpath.cpu.simd import I8, I32, I64, define, i8x64, i32x16, invoke, pointer, same, splat

TILE = 1024  # bytes
STATE = 8 * TILE + 64

_VOID = ir.VoidType()


class Tiles:
    def __init__(self, shapes):
        self.shapes = shapes

    def _define(self, n_args, in_register, in_memory):
        def build(b, *args):
            (in_register if machine.TILES == "registers" else in_memory)(b, *args)

        return define(types.void(*[types.intp] * n_args), build)

    def configure(self):
        """(state): tiles get their shapes; each thread does this before it uses them."""

        def load(b, state):
            place = b.add(state, I64(8 * TILE))
            b.store(ir.Constant(i8x64.ir, list(self.configuration())), pointer(b, place), align=1)
            invoke(b, "llvm.x86.ldtilecfg", _VOID, [pointer(b, place)])

        return self._define(1, load, lambda b, state: None)

    def configuration(self):
        """The 64 bytes that the instruction reads: palette 1, bytes of a row from 16 on, rows from 48 on."""
        config = bytearray(64)
        config[0] = 1
        for number, (rows, row_bytes) in self.shapes.items():
            config[16 + 2 * number] = row_bytes
            config[48 + number] = rows
        return config

    def release(self):
        """(state): the unit may sleep, and threads are switched faster."""
        return self._define(
            1, lambda b, state: invoke(b, "llvm.x86.tilerelease", _VOID, []), lambda b, state: None
        )

    def zero(self, t):
        """(state)"""
        return self._define(
            1,
            lambda b, state: invoke(b, "llvm.x86.tilezero", _VOID, [I8(t)]),
            lambda b, state: self._rows(
                b, t, lambda at, row: b.store(same(i8x64, 0), pointer(b, at), align=1), state
            ),
        )

    def load(self, t):
        """(state, address, stride)"""

        def from_memory(b, state, address, stride):
            kind = ir.VectorType(I8, self.shapes[t][1])

            def copy(at, row):
                source = b.add(address, b.mul(row, stride))
                b.store(b.load(pointer(b, source), typ=kind, align=1), pointer(b, at), align=1)

            self._rows(b, t, copy, state)

        def into_register(b, state, address, stride):
            invoke(b, "llvm.x86.tileloadd64", _VOID, [I8(t), pointer(b, address), stride])

        return self._define(3, into_register, from_memory)

    def store(self, t):
        """(state, address), rows of 64 bytes"""

        def to_memory(b, state, address):
            def copy(at, row):
                target = b.add(address, b.shl(row, I64(6)))
                b.store(b.load(pointer(b, at), typ=i8x64.ir, align=1), pointer(b, target), align=1)

            self._rows(b, t, copy, state)

        def from_register(b, state, address):
            invoke(b, "llvm.x86.tilestored64", _VOID, [I8(t), pointer(b, address), I64(64)])

        return self._define(2, from_register, to_memory)

    def dot(self, c, a, t):
        """(state): tile c += tile a times tile t, signed bytes"""

        def in_memory(b, state):
            def row_of_c(at, row):
                with cgutils.for_range(b, I64(self.shapes[t][0]), intp=I64) as loop:
                    four = b.add(
                        b.add(state, I64(a * TILE)), b.add(b.shl(row, I64(6)), b.shl(loop.index, I64(2)))
                    )
                    x = splat(b, b.load(pointer(b, four), typ=I32, align=1), 16)
                    line = b.add(b.add(state, I64(t * TILE)), b.shl(loop.index, I64(6)))
                    y = b.load(pointer(b, line), typ=i32x16.ir, align=1)
                    total = b.load(pointer(b, at), typ=i32x16.ir, align=1)
                    for j in range(4):
                        total = b.add(total, b.mul(_byte(b, x, j), _byte(b, y, j)))
                    b.store(total, pointer(b, at), align=1)

            self._rows(b, c, row_of_c, state)

        def in_register(b, state):
            invoke(b, "llvm.x86.tdpbssd", _VOID, [I8(c), I8(a), I8(t)])

        return self._define(1, in_register, in_memory)

    def _rows(self, b, t, step, state):
        """step(address, number) for each row of a tile in memory."""
        with cgutils.for_range(b, I64(self.shapes[t][0]), intp=I64) as loop:
            step(b.add(b.add(state, I64(t * TILE)), b.shl(loop.index, I64(6))), loop.index)


def _byte(b, words, j):
    """Byte j of each word, with its sign."""
    return b.ashr(b.shl(words, same(i32x16, 24 - 8 * j)), same(i32x16, 24))
