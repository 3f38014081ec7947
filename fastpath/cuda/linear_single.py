"""A tile of weights times one row of activations: a part of larger steps (linear_summed.py, linear_gated.py).

The arithmetic is that of linear.py, and so are the bytes.  A warp has the tile, lane 8r + u unit u of row r.
"""

from functools import cache

from numba import cuda, float32, int32

from fastpath.cuda import linear
from fastpath.cuda.layout import UNITS
from fastpath.cuda.unit import codes_of, loads_of


@cache
def walk_of(coding):
    """(words of the first step, planes, units before the tile's, row of activations, x, row, unit, next) ->
    (words of `next`, product): all 8 lanes of a row get it.

    x     (q, scale, sums, units of a row, words of a row of q over 4): as linear.py has it
    next  (planes, units before a tile's, units of a row; 0: none): what the last step loads meanwhile
    """
    load, codes_of_unit, scales = loads_of(coding).load, codes_of(coding).of_unit, linear._scales(coding)
    terms, chain, _ = linear._steps(coding)

    @cuda.jit(device=True)
    def walk(words, planes, unit, r, x, row, u, next):
        acc, first, left = float32(0), int32(0), x[3]
        while left > 0:
            mine = u if left >= UNITS else int32(min(u, left - 1))
            found = terms(r, codes_of_unit(words), scales(words), x, first, mine)
            unit, left = int32(unit + UNITS), int32(left - UNITS)
            if left > 0:
                words = load(planes, unit, left, row, u)
            else:
                words = load(next[0], next[1], next[2], row, u)
            acc = chain(acc, found)
            first = int32(first + UNITS)
        return words, acc

    return walk


@cache
def activations_of(coding):
    """(q, scale, sums) -> x of `walk_of`."""
    is_256 = coding.is_256

    @cuda.jit(device=True)
    def activations(q, scale, sums):
        n_units = int32(scale.shape[1] * 2 if is_256 else scale.shape[1] >> 2)
        return q, scale, sums, n_units, int32(q.shape[1] >> 2)

    return activations
