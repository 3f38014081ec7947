"""Where products of many tokens have in shared memory what belongs to rows and tokens (linear_many.py).

A row of 256 bytes is 16 chunks, rows are 17 chunks apart, so that eight of them spread over the banks.  Chunk
8h + 4u + p is piece 4h + p of unit u of the step (layout.py).  Scales lie as lanes want them: those of four
rows, or of eight tokens, side by side.  All in bytes.
"""

from numba import cuda, int32, uint32

from fastpath.cuda.intrinsics import add32, and32, shr32
from fastpath.cuda.layout import ROWS

WARPS = 4
THREADS = 32 * WARPS
MANY_ROWS = MANY_TOKENS = 64
OF_WARP = 32  # rows, and tokens
TILES_OF_WARP = MANY_ROWS // ROWS // WARPS  # that a warp unpacks

CHUNK = 16
ROW = 17 * CHUNK
OPERAND = MANY_ROWS * ROW
WEIGHTS, TOKENS = 0, OPERAND
HALVES, OF_UNIT, PIECES = 128, 64, (0, 32, 128, 160)  # in a row; where the sub-blocks of a unit begin
# Of a scale per sub-block: [units of the step][sub-blocks of a unit][halves of the tile][...]
SUB_BLOCK, HALF = 256, 128
OF_UNIT_ROWS, OF_UNIT_TOKENS = (
    4 * SUB_BLOCK,
    4 * SUB_BLOCK + 16,
)  # where two units are written, in other banks
OF_UNIT_MINIMA = 8 * MANY_ROWS + 64  # eight bytes a row
SOURCES = 48  # of eight tokens, 8 apart


class Places:
    """One behind the other, for formats of 32 values, of 256, and of 256 with scales of 16."""

    def __init__(self, is_256, n_scales):
        self._top = 2 * OPERAND
        self.sources = self._place(8 * SOURCES)  # words before a token's row of q
        self.entries = self._place(4 * MANY_TOKENS)  # its row of the result
        # what a thread needs to bring a step, behind its row and here: registers are for products
        self.own = 16 * CHUNK, self._place(16 * THREADS), self._place(16 * THREADS)
        self.scales = [self._place(2 * OF_UNIT_ROWS) for _ in range(n_scales)]
        if is_256:
            self.d, self.x_scale = self._place(4 * MANY_ROWS), self._place(4 * MANY_TOKENS)
            self.dmin = self._place(4 * MANY_ROWS)
            self.minima = self._place(2 * OF_UNIT_MINIMA)
            self.high, self.low = self._place(16 * MANY_TOKENS), self._place(16 * MANY_TOKENS)
        else:
            self.minima = self._place(2 * OF_UNIT_ROWS)
            self.x_scale, self.x_sums = self._place(2 * OF_UNIT_TOKENS), self._place(2 * OF_UNIT_TOKENS)
        self.words = self._top // 4

    def _place(self, n_bytes):
        self._top += n_bytes
        return self._top - n_bytes


_OF_32, _OF_256, _OF_16 = Places(False, 1), Places(True, 1), Places(True, 2)


def places_of(coding):
    if not coding.is_256:
        return _OF_32
    return _OF_16 if coding.scales.startswith("16") else _OF_256


@cuda.jit(device=True)
def place_of_row(row):
    """Of the 64 rows' numbers: a lane's four side by side, 8 rows apart."""
    return (row >> 5) * HALF + (row & 7) * 16 + (row >> 3 & 3) * 4


@cuda.jit(device=True)
def place_of_token(token):
    """Of the 64 tokens' numbers: a lane's eight side by side, pairs of them 8 tokens apart."""
    return (token >> 5) * HALF + (token >> 1 & 3) * 32 + (token >> 3 & 3) * 8 + (token & 1) * 4


@cuda.jit(device=True)
def pair_of(a, b):
    """Two places in one word; `first_of` and `second_of` give their addresses."""
    return int32(a | b << 16)


@cuda.jit(device=True)
def first_of(pair, base):
    return add32(and32(pair, 0xFFFF), base)


@cuda.jit(device=True)
def second_of(pair, base):
    return add32(shr32(pair, 16), base)


@cuda.jit(device=True)
def row_of(entry, share):
    """Of x, for a row of the result."""
    return entry if share < 2 else int32(uint32(entry) // uint32(share))
