"""Products of many tokens with quantised matrices on tensor cores.        definition: refimpl/ops/integer.py

grid       tiles of 64 weight rows; tiles of 64 tokens, or of 64 entries of one expert (tiles.py)
block      4 warps, 2 by 2: a warp has 32 rows and 32 tokens of the result, a lane 32 numbers of it.  Warps
           without tokens only help to bring what the others multiply
step       256 columns: activations come by cp.async, weights are unpacked to int8 on their way.  Nothing is
           kept twice: four blocks fit on a multiprocessor, and multiply while others wait for memory
arithmetic mma.sync m16n8k32, exact integers: a multiplication of matrices is a block of 32 values, or a
           sub-block of 256; the minima of a block of 256 are one more.  Then the definition's chain of float32
           roundings, blocks ascending: the same bytes as linear.py's, whatever the number of tokens
shared     less than 48 KB, which a kernel has without asking for more.  A row of 256 bytes is 16 chunks; rows
           are 17 chunks apart, so that eight of them spread over the banks.  Scales lie as lanes want them:
           those of four rows, or of eight tokens, side by side
traffic    weights are read once for 64 tokens, activations once for 64 rows, both in whole sectors
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from fastpath.cuda import device
from fastpath.cuda.codes import unpacked_of
from fastpath.cuda.intrinsics import (
    add32,
    address_of,
    and32,
    as_f32,
    as_i32,
    commit_copies,
    f16_to_f32,
    fma_rn,
    loads_at,
    mma_s8,
    mma_s8_short,
    mul32,
    permute_bytes,
    sar32,
    shl32,
    shr32,
    wait_copies,
    wide_mad,
    xor32,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, PADDED, ROWS, UNIT, UNITS
from fastpath.cuda.shared_memory import (
    afresh,
    copy_16,
    load_addresses,
    load_matrices,
    load_words,
    shared_address,
    store_addresses,
    store_words,
)
from fastpath.cuda.tiles import no_tiles
from fastpath.cuda.warp import WHOLE_WARP

WARPS = 4
THREADS = 32 * WARPS
MANY_ROWS = MANY_TOKENS = 64
OF_WARP = 32  # rows, and tokens
TILES_OF_WARP = MANY_ROWS // ROWS // WARPS  # that a warp unpacks
NUMBERS = 32  # of a lane

# -- places in shared memory, in bytes

CHUNK = 16
ROW = 17 * CHUNK
OPERAND = MANY_ROWS * ROW
WEIGHTS, TOKENS = 0, OPERAND
# Of a scale per sub-block: [units of the step][sub-blocks of a unit][halves of the tile][...]
SUB_BLOCK, HALF = 256, 128
OF_UNIT_ROWS, OF_UNIT_TOKENS = 4 * SUB_BLOCK, 4 * SUB_BLOCK + 16
OF_UNIT_MINIMA = 8 * MANY_ROWS + 64  # eight bytes a row; units lie in other banks
SOURCES = 48  # of eight tokens, 8 apart
IN_UNIT = (0, 32, 128, 160)  # where the sub-blocks of a unit begin in a row; those of the next, 64 behind


class _Places:
    """Where kernels have what belongs to rows and tokens, one behind the other."""

    def __init__(self, is_256, n_scales):
        self._top = 2 * OPERAND
        self.sources = self._place(8 * SOURCES)  # words before a token's row of q
        self.entries = self._place(4 * MANY_TOKENS)  # its row of the result
        # what a thread needs to bring a step: registers are for products
        self.own = (16 * CHUNK, self._place(16 * THREADS), self._place(16 * THREADS if is_256 else 0))
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


PLACES_32, PLACES_256, PLACES_16_OF_256 = _Places(False, 1), _Places(True, 1), _Places(True, 2)


def multiply(weight, rounded, out):
    """rounded: quantize.Rounded, of all tokens; out f32[T, M]."""
    _launch(weight, rounded, -(-out.shape[0] // MANY_TOKENS), *no_tiles(), 0, out)


def multiply_experts(weight, rounded, tiles, entries, share, out):
    """Of a stack of matrices; tiles and entries as tiles.py has them, share rows of out for one of x."""
    _launch(weight, rounded, len(tiles), tiles, entries, share, out)


def _launch(weight, rounded, n_tiles, tiles, entries, share, out):
    grid = -(-out.shape[1] // MANY_ROWS), n_tiles
    arguments = rounded.q.view(np.int32), rounded.scale, rounded.sums
    device.current().launch(
        PRODUCTS[weight.coding_name], grid, THREADS, *weight.planes, *arguments, np.int32(weight.n_tiles),
        tiles, entries, np.int32(share), out,
    )  # fmt: skip


@cuda.jit(device=True)
def _place_of_row(row):
    """Of the 64 rows' numbers: a lane's four side by side, 8 rows apart."""
    return (row >> 5) * HALF + (row & 7) * 16 + (row >> 3 & 3) * 4


@cuda.jit(device=True)
def _place_of_token(token):
    """Of the 64 tokens' numbers: a lane's eight side by side, pairs of them 8 tokens apart."""
    return (token >> 5) * HALF + (token >> 1 & 3) * 32 + (token >> 3 & 3) * 8 + (token & 1) * 4


# -- from global memory

_WEIGHTS = "ld.global.nc.L1::no_allocate"
_load_weights = {n: loads_at(f"{_WEIGHTS}.{kind}", n, 1, 16) for n, kind in
                 {1: "u32", 2: "v2.u32", 4: "v4.u32"}.items()}  # fmt: skip
# Scales of the next steps lie in the same sectors.
_SCALES = "ld.global.nc"
_load_two_scales, _load_four_scales = (loads_at(f"{_SCALES}.v{n}.u32", n, 1, 4 * n) for n in (2, 4))
_load_half = loads_at(f"{_SCALES}.u16", 1, 1, 2)
_load_two_pieces = loads_at(f"{_WEIGHTS}.v4.u32", 4, 2)
_load_4 = loads_at("ld.global.v4.u32", 4, 1, 16)
_load_8 = loads_at("ld.global.v4.u32", 4, 2, 16)


@cuda.jit(device=True)
def _nothing(address, width):
    return ()


@cache
def _plane(bits):
    """(bytes from a tile to what a lane has of it in a step, its words): one plane, so many bits to a code.

    A lane has sub-block i of unit `unit` of the step, of row r.
    """

    @cuda.jit(device=True)
    def offset(first, width, unit, r, i):
        piece, inside = (i * bits) >> 2, (i * bits & 3) * 4
        in_step = add32(mul32(width, int32(16 * r + 64 * piece)), int32(inside))
        return add32(in_step, add32(mul32(first, 64 * bits), mul32(unit, 16)))

    if bits == 8:

        @cuda.jit(device=True)
        def words(address, width):
            return _load_two_pieces(address, int64(mul32(width, 64)))

        return offset, words
    if bits == 0:
        return offset, _nothing
    load = _load_weights[bits]

    @cuda.jit(device=True)
    def words(address, width):
        return load(address)

    return offset, words


def _signed(coding):
    """(word of four codes) -> the same less the format's offset, as signed bytes."""
    above = (128 - coding.offset) * 0x01010101  # no carry: codes are below 64 where there is an offset

    @cuda.jit(device=True)
    def signed(word):
        return xor32(add32(word, above), -0x7F7F7F80)  # 0x80808080

    @cuda.jit(device=True)
    def same(word):
        return word

    return signed if coding.offset else same


# -- scales of a unit: words as they lie -> four numbers for each kind of them, as bits


@cuda.jit(device=True)
def _halves(a, b):
    return (
        as_i32(f16_to_f32(a)), as_i32(f16_to_f32(shr32(a, 16))),
        as_i32(f16_to_f32(b)), as_i32(f16_to_f32(shr32(b, 16))),
    )  # fmt: skip


@cuda.jit(device=True)
def _upper_halves(a, b):
    return shl32(a, 16), and32(a, -65536), shl32(b, 16), and32(b, -65536)


@cuda.jit(device=True)
def _bytes_of(a):
    return and32(a, 255), and32(shr32(a, 8), 255), and32(shr32(a, 16), 255), shr32(a, 24)


@cuda.jit(device=True)
def _signed_bytes_of(a):
    return sar32(shl32(a, 24), 24), sar32(shl32(a, 16), 24), sar32(shl32(a, 8), 24), sar32(a, 24)


@cache
def _put_numbers(at):
    """(address of a row's or token's place, four numbers): a number for each sub-block of a unit."""
    puts = tuple(store_words(1, at + i * SUB_BLOCK) for i in range(4))
    put0, put1, put2, put3 = puts

    @cuda.jit(device=True)
    def put(place, numbers):
        put0(place, numbers[0])
        put1(place, numbers[1])
        put2(place, numbers[2])
        put3(place, numbers[3])

    return put


@cache
def _stage_scales_32(kind, has_minimum, places):
    """(place of the row's numbers, of its minima, words of the unit)"""
    put, put_minima = _put_numbers(places.scales[0]), _put_numbers(places.minima)
    read = _upper_halves if kind == "e" else _halves

    @cuda.jit(device=True)
    def stage(place, row, words):
        put(place, read(words[0], words[1]))
        if has_minimum:
            put_minima(place, read(words[2], words[3]))

    return stage


@cache
def _stage_scales_256(kind, has_minimum, places):
    put, put_second = _put_numbers(places.scales[0]), _put_numbers(places.scales[-1])
    put_minima = store_words(2, places.minima)

    @cuda.jit(device=True)
    def minima(row, a, b):
        put_minima(row, (a, b))

    @cuda.jit(device=True)
    def bytes_and_minima(place, row, words):
        put(place, _bytes_of(words[0]))
        minima(row, permute_bytes(words[1], 0, 0x1100), permute_bytes(words[1], 0, 0x3322))

    @cuda.jit(device=True)
    def nibbles(place, row, words):
        a, b = and32(words[0], 0x0F0F0F0F), and32(words[1], 0x0F0F0F0F)
        put(place, _bytes_of(permute_bytes(a, b, 0x6420)))
        put_second(place, _bytes_of(permute_bytes(a, b, 0x7531)))
        minima(row, and32(shr32(words[0], 4), 0x0F0F0F0F), and32(shr32(words[1], 4), 0x0F0F0F0F))

    @cuda.jit(device=True)
    def signed(place, row, words):
        put(place, _signed_bytes_of(permute_bytes(words[0], words[1], 0x6420)))
        put_second(place, _signed_bytes_of(permute_bytes(words[0], words[1], 0x7531)))

    return {"8 sc mn": bytes_and_minima, "16 sc mn": nibbles, "16 sc": signed}[kind]


# -- the products of a warp: 2 by 4 matrices of 16 rows and 8 tokens

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
    upper = load_matrices(4, WEIGHTS + IN_UNIT[i])
    lower = load_matrices(4, WEIGHTS + IN_UNIT[i] + 16 * ROW)
    first, second = load_matrices(4, TOKENS + IN_UNIT[i]), load_matrices(4, TOKENS + IN_UNIT[i] + 16 * ROW)

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


# -- activations


@cache
def _stage_x_scales_32(has_minimum, places):
    """(place, addresses of a token's scales and sums of a unit)"""
    put, put_sums = _put_numbers(places.x_scale), _put_numbers(places.x_sums)

    @cuda.jit(device=True)
    def stage(place, token, unit, scale, sums):
        put(place, _load_4(scale))
        if has_minimum:
            a, b, c, d, e, f, g, h = _load_8(sums)
            put_sums(place, (_as_number(a, b), _as_number(c, d), _as_number(e, f), _as_number(g, h)))

    return stage


@cuda.jit(device=True)
def _as_number(a, b):
    return as_i32(float32(add32(a, b)))


@cache
def _stage_x_sums_256(places):
    put_high, put_low = store_words(2, places.high), store_words(2, places.low)

    @cuda.jit(device=True)
    def stage(place, token, unit, scale, sums):
        a, b, c, d, e, f, g, h = _load_8(sums)
        at = add32(token, unit)
        put_low(at, (and32(_packed(a, b, c, d), 0x3F3F3F3F), and32(_packed(e, f, g, h), 0x3F3F3F3F)))
        put_high(at, (_packed(sar32(a, 6), sar32(b, 6), sar32(c, 6), sar32(d, 6)),
                      _packed(sar32(e, 6), sar32(f, 6), sar32(g, 6), sar32(h, 6))))  # fmt: skip

    return stage


@cuda.jit(device=True)
def _packed(a, b, c, d):
    """The lowest bytes."""
    return permute_bytes(permute_bytes(a, b, 0x0040), permute_bytes(c, d, 0x0040), 0x5410)


@cuda.jit(device=True)
def _no_stage(place, token, unit, scale, sums):
    pass


# -- the kernel


@cuda.jit(device=True)
def _spot(step, n_units):
    """(first unit of the 8 that lie together, how many there are, the step's first one among them)"""
    first = and32(shl32(step, 1), -8)
    return first, min(int32(UNITS), int32(n_units - first)), and32(shl32(step, 1), 6)


@cuda.jit(device=True)
def _tile_and_rest(tile, n_tiles):
    """(the tile, or the last one; tiles behind it)"""
    return min(tile, n_tiles - 1), max(0, n_tiles - 1 - tile)


@cuda.jit(device=True)
def _pair(a, b, base):
    """Two addresses in one word; `_first` and `_second` give them back."""
    return int32(a - base | (b - base) << 16)


@cuda.jit(device=True)
def _first(pair, base):
    return add32(and32(pair, 0xFFFF), base)


@cuda.jit(device=True)
def _second(pair, base):
    return add32(shr32(pair, 16), base)


@cache
def _copies(offset):
    """(shared address, global address before a row, words to the rows of eight tokens)"""
    copy0, copy1, copy2, copy3, copy4, copy5, copy6, copy7 = (
        copy_16(TOKENS + offset + 8 * ROW * i) for i in range(8)
    )

    @cuda.jit(device=True)
    def copy(to, source, rows, more):
        copy0(to, wide_mad(rows[0], 4, source))
        copy1(to, wide_mad(rows[1], 4, source))
        copy2(to, wide_mad(rows[2], 4, source))
        copy3(to, wide_mad(rows[3], 4, source))
        copy4(to, wide_mad(more[0], 4, source))
        copy5(to, wide_mad(more[1], 4, source))
        copy6(to, wide_mad(more[2], 4, source))
        copy7(to, wide_mad(more[3], 4, source))

    return copy


def _stage_codes(coding):
    """(shared address, words of sub-blocks of four tiles): the codes as signed bytes."""
    unpacked, signed = unpacked_of(coding), _signed(coding)
    puts = [(store_words(4, WEIGHTS + n * ROWS * ROW), store_words(4, WEIGHTS + n * ROWS * ROW + CHUNK))
            for n in range(TILES_OF_WARP)]  # fmt: skip

    def stage_of(n):
        put, put_rest = puts[n]

        @cuda.jit(device=True)
        def stage(at, words):
            a, b, c, d, e, f, g, h = unpacked(words)
            put(at, (signed(a), signed(b), signed(c), signed(d)))
            put_rest(at, (signed(e), signed(f), signed(g), signed(h)))

        return stage

    return tuple(stage_of(n) for n in range(TILES_OF_WARP))


def _product(coding):
    is_256, is_16 = coding.is_256, coding.scales.startswith("16")
    places = (PLACES_16_OF_256 if is_16 else PLACES_256) if is_256 else PLACES_32
    low_offset, low_words = _plane(coding.low_bits)
    high_offset, high_words = _plane(coding.high_bits)
    low_bits, high_bits, has_high = coding.low_bits, coding.high_bits, coding.high_bits > 0
    stage0, stage1, stage2, stage3 = _stage_codes(coding)
    sub_bytes = 16 if coding.scales == "d m" else 8
    load_sub = _load_four_scales if sub_bytes == 16 else _load_two_scales
    has_minimum = coding.has_minimum
    stage_scales = (_stage_scales_256 if is_256 else _stage_scales_32)(coding.scales, has_minimum, places)
    if is_256:
        stage_x = _stage_x_sums_256(places) if has_minimum else _no_stage
        put_d, put_dmin, put_x = (store_words(1, at) for at in (places.d, places.dmin, places.x_scale))
        end_of_block = _end_of_block(has_minimum, places)
        sub_blocks = [_sub_block_256(i, is_16, places) for i in range(4)]
    else:
        stage_x = _stage_x_scales_32(has_minimum, places)
        put_d = put_dmin = put_x = end_of_block = None
        sub_blocks = [_sub_block_32(i, has_minimum, places) for i in range(4)]
    sub_block0, sub_block1, sub_block2, sub_block3 = sub_blocks
    put_entry, put_source = store_words(1, places.entries), store_words(1, places.sources)
    get_entry = load_words(1, places.entries)
    put_own0, load_own0 = store_words(4, places.own[0]), load_words(4, places.own[0])
    put_own1, load_own1 = store_addresses(places.own[1]), load_addresses(places.own[1])
    put_own2, load_own2 = store_addresses(places.own[2]), load_addresses(places.own[2])
    load_sources, load_more_sources = (load_words(4, places.sources + at) for at in (0, 16))
    entries0, entries1, entries2, entries3 = (load_words(2, places.entries + 32 * n) for n in range(4))
    copy, halves_of_block = _copies(0), 2 if has_minimum else 1
    n_words, n_numbers = places.words, NUMBERS
    half_steps = PADDED // UNIT

    def kernel(
        low, high, sub, block, q, scale, sums, n_tiles, tiles, entries, share, out
    ):
        base = shared_address(cuda.shared.array(n_words, int32, alignment=16))
        thread, warp, lane = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        matrix, first, n = int32(0), int32(cuda.blockIdx.y * MANY_TOKENS), int32(0)
        if share == 0:
            n = int32(min(MANY_TOKENS, out.shape[0] - first))
        else:
            matrix, first, n = tiles[cuda.blockIdx.y, 0], tiles[cuda.blockIdx.y, 1], tiles[cuda.blockIdx.y, 2]
            if matrix < 0:
                return
        if thread < MANY_TOKENS:
            entry = int32(first + min(thread, n - 1))
            if share != 0:
                entry = entries[entry]
            put_entry(base + 4 * thread, entry)
            source = mul32(_row_of(entry, share), int32(q.shape[1]))
            put_source(base + SOURCES * (thread & 7) + 4 * (thread >> 3), source)
        cuda.syncthreads()

        if is_256:
            n_units = int32(2 * scale.shape[1])
        else:
            n_units = int32(scale.shape[1] >> 2)
        steps = n_units >> 1
        tile0, before = cuda.blockIdx.x * (MANY_ROWS // ROWS), int64(matrix) * n_tiles
        # codes: a lane has a sub-block of one of two units, of a row of each of four tiles
        unit, r, i = lane & 1, lane >> 1 & 3, lane >> 3
        tile, rest = _tile_and_rest(tile0 + TILES_OF_WARP * warp, n_tiles)
        low_at = address_of(low, (before + tile) * n_units * (16 * low_bits))
        high_at = address_of(high, (before + tile) * n_units * (16 * high_bits))
        rest = int32(rest)
        codes_to = int32(
            base + (4 * ROWS * warp + r) * ROW + 64 * unit + (i >> 1) * 128 + (i & 1) * 32
        )
        # scales: a thread has those of a unit of a row, and of a unit of a token
        row, unit_of_row, token = int32(OF_WARP * (warp >> 1) + lane), warp & 1, thread >> 1
        tile, _ = _tile_and_rest(tile0 + row // ROWS, n_tiles)
        sub_at = address_of(sub, (before + tile) * n_units * (2 * sub_bytes))
        scales_to = int32(base + _place_of_row(row) + OF_UNIT_ROWS * unit_of_row)
        minima_to = int32(base + 8 * row + OF_UNIT_MINIMA * unit_of_row)
        x_sums_at = mul32(_row_of(get_entry(base + 4 * token), share), int32(sums.shape[1])) + 8 * unit
        x_scales_to = int32(base + _place_of_token(token) + OF_UNIT_TOKENS * unit)
        x_sums_to = int32(base + 16 * token)
        # activations: a thread has a chunk of every eighth token
        chunk = thread & 15
        of_chunk = int32((chunk >> 1) * 8 + (chunk & 1))
        tokens_to = int32(
            base + (thread >> 4) * ROW + (chunk >> 3) * 128 + (chunk & 1) * 64 + (chunk >> 1 & 3) * CHUNK
        )
        # formats of 256: half of the threads have a row's d, the others a token's scale
        block_at, single_to = int64(0), int32(0)
        if is_256:
            mine = thread & (MANY_ROWS - 1)
            if thread < MANY_ROWS:
                tile, _ = _tile_and_rest(tile0 + mine // ROWS, n_tiles)
                block_at = address_of(
                    block, ((before + tile) * steps * ROWS + (mine & 3)) * halves_of_block
                )
                single_to = int32(base + _place_of_row(mine))
            else:
                x_row = int64(_row_of(get_entry(base + 4 * mine), share))
                block_at = address_of(scale, x_row * scale.shape[1])
                single_to = int32(base + _place_of_token(mine))
        own0, own = int32(base + ROW * thread), int32(base + 16 * thread)
        put_own1(own, (low_at, sub_at))
        if is_256:
            put_own2(own, (block_at, high_at))
        put_own0(
            own0,
            (
                _pair(codes_to, tokens_to, base), _pair(scales_to, x_scales_to, base),
                _pair(minima_to, x_sums_to, base), int32(x_sums_at),
            ),
        )  # fmt: skip
        # products
        of_warp, to_warp, g, c = OF_WARP * (warp & 1), OF_WARP * (warp >> 1), lane >> 2, lane & 3
        inside = lane & 7
        rows_at = int32(base + (of_warp + (lane >> 3 & 1) * 8 + inside) * ROW + (lane >> 4) * CHUNK)
        tokens_at = int32(base + (to_warp + (lane >> 4) * 8 + inside) * ROW + (lane >> 3 & 1) * CHUNK)
        of_rows, of_tokens = int32(base + HALF * (warp & 1) + 16 * g), int32(base + HALF * (warp >> 1) + 32 * c)
        is_busy = to_warp < n
        acc, dots = cuda.local.array(n_numbers, float32), cuda.local.array(n_numbers, int32)
        for k in range(n_numbers):
            acc[k] = float32(0)

        step = int32(0)
        while step < steps:
            first_unit, width, in_step = _spot(step, n_units)
            now = afresh(thread)
            own0, own = add32(mul32(now, ROW), base), add32(mul32(now, 16), base)
            to, to_scales, to_minima, x_sums_at = load_own0(own0)
            low_at, sub_at = load_own1(own)
            if is_256:
                block_at, high_at = load_own2(own)
            sources_at = add32(mul32(shr32(now, 4), SOURCES), base)
            of_x = add32(add32(mul32(first_unit, 8), in_step), of_chunk)
            copy(
                _second(to, base), wide_mad(of_x, 16, address_of(q, 0)),
                load_sources(sources_at), load_more_sources(sources_at),
            )  # fmt: skip
            commit_copies()
            here = low_at + int64(low_offset(first_unit, width, add32(in_step, unit), r, i))
            tile_bytes = mul32(n_units, 64)
            apart1, apart2, apart3 = (
                mul32(tile_bytes, min(int32(1), rest)), mul32(tile_bytes, min(int32(2), rest)),
                mul32(tile_bytes, min(int32(3), rest)),
            )  # fmt: skip
            words0 = low_words(here, width)
            words1 = low_words(wide_mad(apart1, low_bits, here), width)
            words2 = low_words(wide_mad(apart2, low_bits, here), width)
            words3 = low_words(wide_mad(apart3, low_bits, here), width)
            if has_high:
                here = high_at + int64(high_offset(first_unit, width, add32(in_step, unit), r, i))
                more0 = high_words(here, width)
                more1 = high_words(wide_mad(apart1, high_bits, here), width)
                more2 = high_words(wide_mad(apart2, high_bits, here), width)
                more3 = high_words(wide_mad(apart3, high_bits, here), width)
                words0, words1, words2, words3 = words0 + more0, words1 + more1, words2 + more2, words3 + more3
            of_unit = add32(
                add32(mul32(first_unit, ROWS), mul32(width, int32(row & 3))), add32(in_step, int32(unit_of_row))
            )
            of_sub = load_sub(wide_mad(of_unit, sub_bytes, sub_at))
            x_sums_at = add32(x_sums_at, mul32(step, 16))
            stage_x(
                _second(to_scales, base), _second(to_minima, base), mul32(unit, 8),
                wide_mad(x_sums_at, 2, address_of(scale, 0)), wide_mad(x_sums_at, 4, address_of(sums, 0)),
            )  # fmt: skip
            if is_256:
                if thread < MANY_ROWS:
                    block_at = wide_mad(step, 2 * ROWS * halves_of_block, block_at)
                    put_d(single_to, as_i32(f16_to_f32(_load_half(block_at)[0])))
                    if has_minimum:
                        put_dmin(single_to, as_i32(-f16_to_f32(_load_half(block_at + 2)[0])))
                else:
                    put_x(single_to, _load_1(wide_mad(step, 4, block_at))[0])
            stage_scales(_first(to_scales, base), _first(to_minima, base), of_sub)
            stage0(_first(to, base), words0)
            stage1(_first(to, base), words1)
            stage2(_first(to, base), words2)
            stage3(_first(to, base), words3)
            wait_copies()
            cuda.syncthreads()
            if is_busy:
                if is_256:
                    for k in range(n_numbers):
                        dots[k] = int32(0)
                for half in range(half_steps):
                    left, right = int32(rows_at + 64 * half), int32(tokens_at + 64 * half)
                    of_left, of_right = (
                        int32(of_rows + OF_UNIT_ROWS * half),
                        int32(of_tokens + OF_UNIT_TOKENS * half),
                    )
                    sub_block0(acc, dots, left, right, of_left, of_right)
                    sub_block1(acc, dots, left, right, of_left, of_right)
                    sub_block2(acc, dots, left, right, of_left, of_right)
                    sub_block3(acc, dots, left, right, of_left, of_right)
                if is_256:
                    now = afresh(thread)
                    of_sums = add32(add32(mul32(and32(now, 31), 4), mul32(shr32(now, 6), 16 * OF_WARP)), base)
                    of_minima = add32(and32(mul32(now, 2), 7 * 8), and32(mul32(now, 8), 8 * OF_WARP))
                    of_minima = add32(of_minima, and32(mul32(now, 4), 4))
                    of_minima = add32(of_minima, mul32(and32(shr32(now, 1), 1), OF_UNIT_MINIMA))
                    of_minima = add32(of_minima, base)
                    end_of_block(acc, dots, of_rows, of_tokens, of_minima, of_sums)
            cuda.syncthreads()
            step = add32(step, 1)

        if is_busy:
            m, t = int32(cuda.blockIdx.x * MANY_ROWS + of_warp + g), int32(to_warp + 2 * c)
            at = int32(base + 4 * t)
            _write(out, acc, 0, entries0(at), m, n - t)
            _write(out, acc, 4, entries1(at), m, n - t - 8)
            _write(out, acc, 8, entries2(at), m, n - t - 16)
            _write(out, acc, 12, entries3(at), m, n - t - 24)

    return kernel


_load_1 = loads_at("ld.global.u32", 1, 1, 4)


@cuda.jit(device=True)
def _row_of(entry, share):
    """Of x, for a row of the result."""
    return entry if share < 2 else int32(uint32(entry) // uint32(share))


@cuda.jit(device=True)
def _write(out, acc, at, entries, m, n):
    """Two tokens, if there are as many, and rows m, m + 8, ..."""
    if n > 0:
        _write_rows(out, entries[0], m, acc[at], acc[at + 2], acc[at + 16], acc[at + 18])
    if n > 1:
        _write_rows(out, entries[1], m, acc[at + 1], acc[at + 3], acc[at + 17], acc[at + 19])


@cuda.jit(device=True)
def _write_rows(out, entry, m, a, b, c, d):
    M = out.shape[1]
    if m < M:
        out[entry, m] = a
    if m + 8 < M:
        out[entry, m + 8] = b
    if m + 16 < M:
        out[entry, m + 16] = c
    if m + 24 < M:
        out[entry, m + 24] = d


def _kernel(name, coding):
    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32,
        int32[:, ::1], int32[::1], int32, float32[:, ::1],
    )  # fmt: skip
    wants = ("IMMA", "LDGSTS", "LDSM.16.M88.4", "STS.128", "FFMA")
    blocks, registers = (3, 168) if coding.is_256 else (4, 128)
    bounds = (THREADS, blocks)
    return Kernel(
        _product(coding), signature, wants, registers=registers, bounds=bounds, name=f"many_{name.lower()}"
    )


PRODUCTS = {name: _kernel(name, coding) for name, coding in CODINGS.items() if not coding.is_plain}
KERNELS = tuple(PRODUCTS.values())
