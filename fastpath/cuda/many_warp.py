"""The products of a warp: 32 rows and 32 tokens, 2 by 4 matrices of 16 and 8 (linear_many.py).

A lane has rows g, g + 8, g + 16, g + 24 and tokens 2c, 2c + 1, then 8, 16 and 24 behind, of its warp's; g is
lane / 4, c lane % 4.  Number 16i + 4n + 2j + k of its 32 is row 16i + 8j + g, token 8n + 2c + k.
"""

from functools import cache

from numba import cuda, float32, int32

from fastpath.cuda.intrinsics import (
    add32,
    and32,
    as_f32,
    fma_rn,
    mma_s8,
    mma_s8_short,
    mul32,
    shl32,
    shr32,
)
from fastpath.cuda.layout import PADDED, UNIT
from fastpath.cuda.many_places import (
    CHUNK,
    HALF,
    OF_UNIT,
    OF_UNIT_MINIMA,
    OF_UNIT_ROWS,
    OF_UNIT_TOKENS,
    OF_WARP,
    PIECES,
    ROW,
    SUB_BLOCK,
    TOKENS,
    WEIGHTS,
)
from fastpath.cuda.shared_memory import afresh, load_matrices, load_words
from fastpath.cuda.warp import WHOLE_WARP

NUMBERS = 32  # of a lane
UNITS_OF_STEP = PADDED // UNIT


@cuda.jit(device=True)
def lane_places(base, thread):
    """Addresses of what a lane takes: its rows' and its tokens' codes, and their scales."""
    warp, lane = thread >> 5, thread & 31
    row = OF_WARP * (warp & 1) + (lane >> 3 & 1) * 8 + (lane & 7)
    token = OF_WARP * (warp >> 1) + (lane >> 4) * 8 + (lane & 7)
    return (
        afresh(int32(base + row * ROW + (lane >> 4) * CHUNK)),
        afresh(int32(base + token * ROW + (lane >> 3 & 1) * CHUNK)),
        afresh(int32(base + HALF * (warp & 1) + 16 * (lane >> 2))),
        afresh(int32(base + HALF * (warp >> 1) + 32 * (lane & 3))),
    )


def step_of(coding, places):
    """(acc, dots, base, thread, lane's places): the products of a step, added to acc."""
    has_minimum, is_256, is_16 = coding.has_minimum, coding.is_256, coding.scales.startswith("16")
    sub_blocks = (
        _sub_block_256(i, is_16, places) if is_256 else _sub_block_32(i, has_minimum, places)
        for i in range(4)
    )
    sub_block0, sub_block1, sub_block2, sub_block3 = sub_blocks
    end_of_block = _end_of_block(has_minimum, places) if is_256 else None

    @cuda.jit(device=True)
    def step(acc, dots, base, thread, rows_at, tokens_at, of_rows, of_tokens):
        if is_256:
            for k in range(NUMBERS):
                dots[k] = int32(0)
        for unit in range(UNITS_OF_STEP):
            left, right = int32(rows_at + OF_UNIT * unit), int32(tokens_at + OF_UNIT * unit)
            of_left, of_right = int32(of_rows + OF_UNIT_ROWS * unit), int32(of_tokens + OF_UNIT_TOKENS * unit)
            sub_block0(acc, dots, left, right, of_left, of_right)
            sub_block1(acc, dots, left, right, of_left, of_right)
            sub_block2(acc, dots, left, right, of_left, of_right)
            sub_block3(acc, dots, left, right, of_left, of_right)
        if is_256:
            of_minima, of_sums = _places_of_minima(afresh(thread), base)
            end_of_block(acc, dots, of_rows, of_tokens, of_minima, of_sums)

    return step


@cuda.jit(device=True)
def _places_of_minima(thread, base):
    """Of the words with minima of the lane's rows, and with sums of its tokens."""
    of_sums = add32(mul32(and32(thread, 31), 4), mul32(shr32(thread, 6), 16 * OF_WARP))
    row = add32(and32(mul32(thread, 2), 8 * 7), and32(mul32(thread, 8), 8 * OF_WARP))
    unit = mul32(and32(shr32(thread, 1), 1), OF_UNIT_MINIMA)
    return add32(add32(row, unit), add32(and32(mul32(thread, 4), 4), base)), add32(of_sums, base)


WHOLE = 0x4B400000  # the bits of 1.5 * 2^23: added to a small integer, those of a float32 that much larger


@cuda.jit(device=True)
def _chain(acc, at, left, b0, b1, d0, d1, s0, s1):
    """A block of 32: its integers come as float32, after one subtraction that is exact."""
    x = mma_s8(left, (b0, b1), (int32(WHOLE), int32(WHOLE), int32(WHOLE), int32(WHOLE)))
    acc[at] = fma_rn(_less_whole(x[0]), d0 * s0, acc[at])
    acc[at + 1] = fma_rn(_less_whole(x[1]), d0 * s1, acc[at + 1])
    acc[at + 2] = fma_rn(_less_whole(x[2]), d1 * s0, acc[at + 2])
    acc[at + 3] = fma_rn(_less_whole(x[3]), d1 * s1, acc[at + 3])


@cuda.jit(device=True)
def _less_whole(x):
    return as_f32(x) - float32(12582912)


@cuda.jit(device=True)
def _chain_minima(acc, at, m0, m1, s0, s1, t0, t1):
    acc[at] = fma_rn(t0, m0 * s0, acc[at])
    acc[at + 1] = fma_rn(t1, m0 * s1, acc[at + 1])
    acc[at + 2] = fma_rn(t0, m1 * s0, acc[at + 2])
    acc[at + 3] = fma_rn(t1, m1 * s1, acc[at + 3])


@cuda.jit(device=True)
def _sum(dots, at, left, b0, b1, sc, more):
    """A sub-block of 256 with one scale."""
    zero = int32(0)
    x = mma_s8(left, (b0, b1), (zero, zero, zero, zero))
    _add(dots, at, x, sc)


@cuda.jit(device=True)
def _sum_of_halves(dots, at, left, b0, b1, sc, more):
    """With one for either half."""
    zero = int32(0)
    nothing = zero, zero, zero, zero
    _add(dots, at, mma_s8_short((left[0], left[1]), (b0,), nothing), sc)
    _add(dots, at, mma_s8_short((left[2], left[3]), (b1,), nothing), more)


@cuda.jit(device=True)
def _add(dots, at, x, sc):
    dots[at] = add32(dots[at], mul32(sc[0], x[0]))
    dots[at + 1] = add32(dots[at + 1], mul32(sc[0], x[1]))
    dots[at + 2] = add32(dots[at + 2], mul32(sc[1], x[2]))
    dots[at + 3] = add32(dots[at + 3], mul32(sc[1], x[3]))


@cuda.jit(device=True)
def _end(acc, at, x, d0, d1, s0, s1):
    """The end of a block of 256."""
    acc[at] = fma_rn(float32(x[0]), d0 * s0, acc[at])
    acc[at + 1] = fma_rn(float32(x[1]), d0 * s1, acc[at + 1])
    acc[at + 2] = fma_rn(float32(x[2]), d1 * s0, acc[at + 2])
    acc[at + 3] = fma_rn(float32(x[3]), d1 * s1, acc[at + 3])


@cuda.jit(device=True)
def _end_of_sum(acc, at, dots, d0, d1, s0, s1):
    _end(acc, at, (dots[at], dots[at + 1], dots[at + 2], dots[at + 3]), d0, d1, s0, s1)


@cuda.jit(device=True)
def _numbers(words):
    return as_f32(words[0]), as_f32(words[1]), as_f32(words[2]), as_f32(words[3])


@cache
def _operands(i):
    """(addresses of the lane's rows and tokens) -> fragments of 2 by 4 matrices, sub-block i of a unit."""
    upper = load_matrices(4, WEIGHTS + PIECES[i])
    lower = load_matrices(4, WEIGHTS + PIECES[i] + 16 * ROW)
    first, second = load_matrices(4, TOKENS + PIECES[i]), load_matrices(4, TOKENS + PIECES[i] + 16 * ROW)

    @cuda.jit(device=True)
    def operands(rows, tokens):
        return upper(rows), lower(rows), first(tokens), second(tokens)

    return operands


@cache
def _sub_block_32(i, has_minimum, places):
    operands = _operands(i)
    load_d, load_m = (load_words(4, at + i * SUB_BLOCK) for at in (places.scales[0], places.minima))
    load_s, load_s4 = (load_words(4, places.x_scale + i * SUB_BLOCK + at) for at in (0, 16))
    load_t, load_t4 = (load_words(4, places.x_sums + i * SUB_BLOCK + at) for at in (0, 16))

    @cuda.jit(device=True)
    def sub_block(acc, dots, rows, tokens, of_rows, of_tokens):
        upper, lower, a, b = operands(rows, tokens)
        d, s, t = _numbers(load_d(of_rows)), _numbers(load_s(of_tokens)), _numbers(load_s4(of_tokens))
        _chain(acc, 0, upper, a[0], a[1], d[0], d[1], s[0], s[1])
        _chain(acc, 4, upper, a[2], a[3], d[0], d[1], s[2], s[3])
        _chain(acc, 8, upper, b[0], b[1], d[0], d[1], t[0], t[1])
        _chain(acc, 12, upper, b[2], b[3], d[0], d[1], t[2], t[3])
        _chain(acc, 16, lower, a[0], a[1], d[2], d[3], s[0], s[1])
        _chain(acc, 20, lower, a[2], a[3], d[2], d[3], s[2], s[3])
        _chain(acc, 24, lower, b[0], b[1], d[2], d[3], t[0], t[1])
        _chain(acc, 28, lower, b[2], b[3], d[2], d[3], t[2], t[3])
        if has_minimum:
            m, u, v = _numbers(load_m(of_rows)), _numbers(load_t(of_tokens)), _numbers(load_t4(of_tokens))
            _chain_minima(acc, 0, m[0], m[1], s[0], s[1], u[0], u[1])
            _chain_minima(acc, 4, m[0], m[1], s[2], s[3], u[2], u[3])
            _chain_minima(acc, 8, m[0], m[1], t[0], t[1], v[0], v[1])
            _chain_minima(acc, 12, m[0], m[1], t[2], t[3], v[2], v[3])
            _chain_minima(acc, 16, m[2], m[3], s[0], s[1], u[0], u[1])
            _chain_minima(acc, 20, m[2], m[3], s[2], s[3], u[2], u[3])
            _chain_minima(acc, 24, m[2], m[3], t[0], t[1], v[0], v[1])
            _chain_minima(acc, 28, m[2], m[3], t[2], t[3], v[2], v[3])
        cuda.syncwarp(WHOLE_WARP)

    return sub_block


@cache
def _sub_block_256(i, is_16, places):
    operands, product = _operands(i), _sum_of_halves if is_16 else _sum
    load, load_more = (load_words(4, at + i * SUB_BLOCK) for at in (places.scales[0], places.scales[-1]))

    @cuda.jit(device=True)
    def sub_block(acc, dots, rows, tokens, of_rows, of_tokens):
        upper, lower, a, b = operands(rows, tokens)
        sc = load(of_rows)
        more = load_more(of_rows) if is_16 else sc
        product(dots, 0, upper, a[0], a[1], sc[:2], more[:2])
        product(dots, 4, upper, a[2], a[3], sc[:2], more[:2])
        product(dots, 8, upper, b[0], b[1], sc[:2], more[:2])
        product(dots, 12, upper, b[2], b[3], sc[:2], more[:2])
        product(dots, 16, lower, a[0], a[1], sc[2:], more[2:])
        product(dots, 20, lower, a[2], a[3], sc[2:], more[2:])
        product(dots, 24, lower, b[0], b[1], sc[2:], more[2:])
        product(dots, 28, lower, b[2], b[3], sc[2:], more[2:])
        cuda.syncwarp(WHOLE_WARP)  # the next one's operands wait: registers are short

    return sub_block


@cache
def _end_of_block(has_minimum, places):
    """(acc, dots, addresses of the lane's scales of rows and tokens, of its words of minima and of sums)"""
    load_d, load_dmin = load_words(4, places.d), load_words(4, places.dmin)
    load_s, load_t = load_words(4, places.x_scale), load_words(4, places.x_scale + 16)
    minima = tuple(load_words(1, places.minima + 8 * 8 * k) for k in range(4))
    high = tuple(load_words(1, places.high + 8 * 16 * n) for n in range(4))
    low = tuple(load_words(1, places.low + 8 * 16 * n) for n in range(4))
    minima0, minima1, minima2, minima3 = minima
    high0, high1, high2, high3 = high
    low0, low1, low2, low3 = low

    @cuda.jit(device=True)
    def two(acc, at, left, more, high, low, m, s0, s1):
        """Minima of 32 rows and 8 tokens: sums of activations are 64 * high + low, both in a byte."""
        _end(acc, at, _product_of_sums(left, high, low), m[0], m[1], s0, s1)
        _end(acc, at + 16, _product_of_sums(more, high, low), m[2], m[3], s0, s1)

    @cuda.jit(device=True)
    def end(acc, dots, of_rows, of_tokens, of_minima, of_sums):
        d, s, t = _numbers(load_d(of_rows)), _numbers(load_s(of_tokens)), _numbers(load_t(of_tokens))
        _end_of_sum(acc, 0, dots, d[0], d[1], s[0], s[1])
        _end_of_sum(acc, 4, dots, d[0], d[1], s[2], s[3])
        _end_of_sum(acc, 8, dots, d[0], d[1], t[0], t[1])
        _end_of_sum(acc, 12, dots, d[0], d[1], t[2], t[3])
        _end_of_sum(acc, 16, dots, d[2], d[3], s[0], s[1])
        _end_of_sum(acc, 20, dots, d[2], d[3], s[2], s[3])
        _end_of_sum(acc, 24, dots, d[2], d[3], t[0], t[1])
        _end_of_sum(acc, 28, dots, d[2], d[3], t[2], t[3])
        if has_minimum:
            m = _numbers(load_dmin(of_rows))
            left = minima0(of_minima), minima1(of_minima)
            more = minima2(of_minima), minima3(of_minima)
            two(acc, 0, left, more, high0(of_sums), low0(of_sums), m, s[0], s[1])
            two(acc, 4, left, more, high1(of_sums), low1(of_sums), m, s[2], s[3])
            two(acc, 8, left, more, high2(of_sums), low2(of_sums), m, t[0], t[1])
            two(acc, 12, left, more, high3(of_sums), low3(of_sums), m, t[2], t[3])

    return end


@cuda.jit(device=True)
def _product_of_sums(left, high, low):
    zero = int32(0)
    x = mma_s8_short(left, (high,), (zero, zero, zero, zero))
    return mma_s8_short(left, (low,), (shl32(x[0], 6), shl32(x[1], 6), shl32(x[2], 6), shl32(x[3], 6)))
