"""What a block of products of many tokens multiplies in a step, brought to shared memory (linear_many.py).

    begin_of(coding, places)    once: where a thread finds its part, and where it puts it
    step_of(coding, places)     256 columns: activations by cp.async, weights unpacked to signed bytes

A thread has a chunk of every eighth token; a sub-block of a row of each of four tiles of weights; the scales
of a unit of a row, and of a unit of a token; in formats of 256, the scale of a whole row, or token.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from fastpath.cuda.codes import unpacked_of
from fastpath.cuda.intrinsics import (
    add32,
    address_of,
    and32,
    as_i32,
    commit_copies,
    f16_to_f32,
    loads_at,
    mul32,
    permute_bytes,
    sar32,
    shl32,
    shr32,
    wide_mad,
    xor32,
)
from fastpath.cuda.layout import ROWS, UNITS
from fastpath.cuda.many_places import (
    CHUNK,
    HALVES,
    MANY_ROWS,
    OF_UNIT,
    OF_UNIT_MINIMA,
    OF_UNIT_ROWS,
    OF_UNIT_TOKENS,
    OF_WARP,
    ROW,
    SOURCES,
    SUB_BLOCK,
    TILES_OF_WARP,
    TOKENS,
    WEIGHTS,
    first_of,
    pair_of,
    place_of_row,
    place_of_token,
    row_of,
    second_of,
)
from fastpath.cuda.shared_memory import (
    afresh,
    copy_16,
    load_addresses,
    load_words,
    store_addresses,
    store_words,
)


def begin_of(coding, places):
    """(base, thread, matrix, ...): a thread's own addresses, noted in shared memory."""
    put_pairs, get_entry = store_words(4, places.own[0]), load_words(1, places.entries)
    put_weights, put_more = store_addresses(places.own[1]), store_addresses(places.own[2])
    low_words, high_words = 16 * coding.low_bits, 16 * coding.high_bits  # of a unit of a tile
    sub_halves, block_halves = 2 * _sub_bytes(coding), 2 if coding.has_minimum else 1
    is_256 = coding.is_256

    @cuda.jit(device=True)
    def begin(base, thread, matrix, n_units, n_tiles, low, high, sub, block, scale, sums, share):
        tile0, before = cuda.blockIdx.x * (MANY_ROWS // ROWS), int64(matrix) * n_tiles
        tile, _ = _tile_and_rest(tile0 + TILES_OF_WARP * (thread >> 5), n_tiles)
        row, unit_of_row = _row_of_scales(thread)
        tile_of_row, _ = _tile_and_rest(tile0 + row // ROWS, n_tiles)
        low_at = address_of(low, (before + tile) * n_units * low_words)
        put_weights(
            base + 16 * thread, (low_at, address_of(sub, (before + tile_of_row) * n_units * sub_halves))
        )
        other_at = int64(0)
        if is_256:
            mine = thread & (MANY_ROWS - 1)
            if thread < MANY_ROWS:
                tile_of_row, _ = _tile_and_rest(tile0 + mine // ROWS, n_tiles)
                at = ((before + tile_of_row) * (n_units >> 1) * ROWS + (mine & 3)) * block_halves
                other_at = address_of(block, at)
            else:
                x_row = int64(row_of(get_entry(base + 4 * mine), share))
                other_at = address_of(scale, x_row * scale.shape[1])
        put_more(base + 16 * thread, (address_of(high, (before + tile) * n_units * high_words), other_at))

        unit, r, i = _part_of_codes(thread)
        codes_to = (4 * ROWS * (thread >> 5) + r) * ROW + OF_UNIT * unit + (i >> 1) * HALVES + (i & 1) * 32
        chunk, token = thread & 15, thread >> 1
        in_row = (chunk >> 3) * HALVES + (chunk & 1) * OF_UNIT + (chunk >> 1 & 3) * CHUNK
        scales_to = place_of_row(row) + OF_UNIT_ROWS * unit_of_row
        x_scales_to = place_of_token(token) + OF_UNIT_TOKENS * unit
        x_row = row_of(get_entry(base + 4 * token), share)
        put_pairs(
            int32(base + ROW * thread),
            (
                pair_of(codes_to, (thread >> 4) * ROW + in_row), pair_of(scales_to, x_scales_to),
                pair_of(8 * row + OF_UNIT_MINIMA * unit_of_row, 16 * token),
                int32(mul32(x_row, int32(sums.shape[1])) + 8 * unit),
            ),
        )  # fmt: skip

    return begin


def step_of(coding, places):
    """(base, thread, step, n_units, n_tiles, q, scale, sums); who waits for the copies has it all."""
    load_pairs, copy = load_words(4, places.own[0]), _copies()
    load_weights_at, load_more_at = load_addresses(places.own[1]), load_addresses(places.own[2])
    load_sources, load_more_sources = (load_words(4, places.sources + at) for at in (0, 16))
    load_codes, stage0, stage1, stage2, stage3 = _codes_of_tiles(coding), *_stage_codes(coding)
    has_minimum, is_256, sub_bytes = coding.has_minimum, coding.is_256, _sub_bytes(coding)
    needs_more = is_256 or coding.high_bits > 0
    load_sub = _load_four_scales if sub_bytes == 16 else _load_two_scales
    if is_256:
        stage_scales = _stage_scales_256(coding.scales, places)
        stage_x = _stage_x_sums_256(places) if has_minimum else _no_stage
        stage_more = _stage_more(has_minimum, places)
    else:
        stage_scales = _stage_scales_32(coding.scales, has_minimum, places)
        stage_x, stage_more = _stage_x_scales_32(has_minimum, places), None

    @cuda.jit(device=True)
    def step(base, thread, step, n_units, n_tiles, q, scale, sums):
        first, width, in_step = _spot(step, n_units)
        now = afresh(thread)
        own = add32(mul32(now, 16), base)
        to, scales_to, minima_to, x_sums_at = load_pairs(add32(mul32(now, ROW), base))
        low_at, sub_at = load_weights_at(own)
        high_at, other_at = load_more_at(own) if needs_more else (low_at, low_at)
        chunk, sources_at = thread & 15, add32(mul32(shr32(now, 4), SOURCES), base)
        of_x = add32(add32(mul32(first, 8), in_step), int32((chunk >> 1) * 8 + (chunk & 1)))
        copy(
            second_of(to, base), wide_mad(of_x, 16, address_of(q, 0)),
            load_sources(sources_at), load_more_sources(sources_at),
        )  # fmt: skip
        commit_copies()
        words = load_codes(thread, first, width, in_step, n_units, n_tiles, low_at, high_at)
        row, unit_of_row = _row_of_scales(thread)
        of_unit = add32(mul32(first, ROWS), mul32(width, int32(row & 3)))
        of_unit = add32(of_unit, add32(in_step, int32(unit_of_row)))
        of_sub = load_sub(wide_mad(of_unit, sub_bytes, sub_at))
        x_sums_at = add32(x_sums_at, mul32(step, 16))
        stage_x(
            second_of(scales_to, base), second_of(minima_to, base), int32(8 * (thread & 1)),
            wide_mad(x_sums_at, 2, address_of(scale, 0)), wide_mad(x_sums_at, 4, address_of(sums, 0)),
        )  # fmt: skip
        if is_256:
            stage_more(base, thread, step, other_at)
        stage_scales(first_of(scales_to, base), first_of(minima_to, base), of_sub)
        stage0(first_of(to, base), words[0])
        stage1(first_of(to, base), words[1])
        stage2(first_of(to, base), words[2])
        stage3(first_of(to, base), words[3])

    return step


def _sub_bytes(coding):
    """Of a unit of a row."""
    return 16 if coding.scales == "d m" else 8


# -- who has what


@cuda.jit(device=True)
def _part_of_codes(thread):
    """(unit of the step, row of a tile, sub-block of a unit)"""
    return thread & 1, thread >> 1 & 3, thread >> 3 & 3


@cuda.jit(device=True)
def _row_of_scales(thread):
    """(row, unit): a warp has one unit of 32 rows"""
    return int32(OF_WARP * (thread >> 6) + (thread & 31)), thread >> 5 & 1


@cuda.jit(device=True)
def _spot(step, n_units):
    """(first unit of the 8 that lie together, how many there are, the step's first one among them)"""
    first = and32(shl32(step, 1), -8)
    return first, min(int32(UNITS), int32(n_units - first)), and32(shl32(step, 1), 6)


@cuda.jit(device=True)
def _tile_and_rest(tile, n_tiles):
    """(the tile, or the last one; tiles behind it)"""
    return min(tile, n_tiles - 1), max(0, n_tiles - 1 - tile)


# -- from global memory

_WEIGHTS = "ld.global.nc.L1::no_allocate"
_load_weights = {n: loads_at(f"{_WEIGHTS}.{kind}", n, 1, 16) for n, kind in
                 {1: "u32", 2: "v2.u32", 4: "v4.u32"}.items()}  # fmt: skip
# Scales of the next steps lie in the same sectors.
_SCALES = "ld.global.nc"
_load_two_scales, _load_four_scales = (loads_at(f"{_SCALES}.v{n}.u32", n, 1, 4 * n) for n in (2, 4))
_load_half = loads_at(f"{_SCALES}.u16", 1, 1, 2)
_load_two_pieces = loads_at(f"{_WEIGHTS}.v4.u32", 4, 2)
_load_1 = loads_at("ld.global.u32", 1, 1, 4)
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


def _codes_of_tiles(coding):
    """The words of a lane's sub-block in each of a warp's four tiles; behind the last one, that one again."""
    low_offset, low_words = _plane(coding.low_bits)
    high_offset, high_words = _plane(coding.high_bits)
    low_bits, high_bits = coding.low_bits, coding.high_bits

    @cuda.jit(device=True)
    def load(thread, first, width, in_step, n_units, n_tiles, low_at, high_at):
        unit, r, i = _part_of_codes(thread)
        tile = cuda.blockIdx.x * (MANY_ROWS // ROWS) + TILES_OF_WARP * (thread >> 5)
        rest, of_tile = int32(_tile_and_rest(tile, n_tiles)[1]), mul32(n_units, 64)
        apart1, apart2 = mul32(of_tile, min(int32(1), rest)), mul32(of_tile, min(int32(2), rest))
        apart3, unit = mul32(of_tile, min(int32(3), rest)), add32(in_step, int32(unit))
        at = low_at + int64(low_offset(first, width, unit, r, i))
        a, b = low_words(at, width), low_words(wide_mad(apart1, low_bits, at), width)
        c = low_words(wide_mad(apart2, low_bits, at), width)
        d = low_words(wide_mad(apart3, low_bits, at), width)
        if high_bits == 0:
            return a, b, c, d
        at = high_at + int64(high_offset(first, width, unit, r, i))
        e, f = high_words(at, width), high_words(wide_mad(apart1, high_bits, at), width)
        g = high_words(wide_mad(apart2, high_bits, at), width)
        return a + e, b + f, c + g, d + high_words(wide_mad(apart3, high_bits, at), width)

    return load


@cache
def _copies():
    """(shared address, global address before a row, words to the rows of eight tokens)"""
    copy0, copy1, copy2, copy3, copy4, copy5, copy6, copy7 = (copy_16(TOKENS + 8 * ROW * i) for i in range(8))

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
def _stage_scales_256(kind, places):
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


@cache
def _stage_more(has_minimum, places):
    """A row's d and dmin, the latter negative, by half of the threads; a token's scale by the others."""
    put_d, put_dmin, put_x = (store_words(1, at) for at in (places.d, places.dmin, places.x_scale))
    halves = 2 if has_minimum else 1

    @cuda.jit(device=True)
    def stage(base, thread, step, at):
        mine = thread & (MANY_ROWS - 1)
        if thread < MANY_ROWS:
            at, to = wide_mad(step, 2 * ROWS * halves, at), int32(base + place_of_row(mine))
            put_d(to, as_i32(f16_to_f32(_load_half(at)[0])))
            if has_minimum:
                put_dmin(to, as_i32(-f16_to_f32(_load_half(at + 2)[0])))
        else:
            put_x(int32(base + place_of_token(mine)), _load_1(wide_mad(step, 4, at))[0])

    return stage
