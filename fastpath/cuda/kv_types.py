"""Types of keys and values on CUDA: eight neighbours are widened, a position's numbers rounded and stored.

definition: refimpl/kv_types.py, refimpl/kv_tiles.py

    numbers  f32, f16, bf16: 16 bytes per lane and load (f32: 32)
    tiles    q8_0, q4_0: 8 bytes of codes, and 16 of scales or one; a scale times a code is exact

Eight neighbours are positions of a component of a key, or components of a position of a value.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, float32, int32, uint8, uint16, uint32

from fastpath.cuda.intrinsics import (
    add32,
    add_rn,
    and32,
    as_f32,
    as_i32,
    div32,
    f16_to_f32,
    load_v2,
    load_v4,
    mul32,
    mul_rn,
    or32,
    pack_bf16,
    pack_f16,
    sar32,
    shl32,
    shr32,
    sub32,
)
from fastpath.cuda.warp import WHOLE_WARP
from refimpl.kv_types import NOTHING, SCALES, STEP, TILE_BYTES, TILE_TYPES

NAMES = {"float32": "f32", "float16": "f16", "uint16": "bf16"}
BITS = {
    "f32": float32[::1], "f16": uint16[::1], "bf16": uint16[::1], "q8_0": uint8[::1], "q4_0": uint8[::1],
}  # fmt: skip
INFINITY, LEAST, NAN = 0x7F800000, int(NOTHING.view("i4")), 0x7E00
BYTES_8, BYTES_4 = TILE_BYTES["q8_0"], TILE_BYTES["q4_0"]


def name_of(pages):
    """The type of an array of pages."""
    dtype = str(pages.dtype)
    return TILE_TYPES[pages.shape[-1]] if dtype == "uint8" else NAMES[dtype]


def bits_of(pages):
    """Flat view for kernels: float32 words, bytes, or the halves of 16-bit types."""
    flat = pages.reshape(-1)
    return flat.view("u2") if flat.dtype.itemsize == 2 else flat


class Loads(NamedTuple):
    """What a lane loads long before it needs it, and the eight numbers in it.

    key_words    (pages, block, H, columns, c, eight) -> words, eight positions of component c
    keys         (words, eight) -> numbers
    value_words  (pages, block, columns, column, place, eight) -> words, eight components of position `place`
    values       (words, eight) -> numbers
    n_words      of a load of keys
    """

    key_words: Callable
    keys: Callable
    value_words: Callable
    values: Callable
    n_words: int


# -- numbers


@cuda.jit(device=True)
def _words_f32(pages, at):
    return load_v4(pages, at) + load_v4(pages, at + 4)


@cuda.jit(device=True)
def _words_16(pages, at):
    return load_v4(pages, at)


@cuda.jit(device=True)
def _widen_f32(words, eight):
    return (
        as_f32(words[0]), as_f32(words[1]), as_f32(words[2]), as_f32(words[3]),
        as_f32(words[4]), as_f32(words[5]), as_f32(words[6]), as_f32(words[7]),
    )  # fmt: skip


@cuda.jit(device=True)
def _widen_f16(words, eight):
    a, b, c, d = words[0], words[1], words[2], words[3]
    return (
        f16_to_f32(a), f16_to_f32(shr32(a, 16)), f16_to_f32(b), f16_to_f32(shr32(b, 16)),
        f16_to_f32(c), f16_to_f32(shr32(c, 16)), f16_to_f32(d), f16_to_f32(shr32(d, 16)),
    )  # fmt: skip


@cuda.jit(device=True)
def _widen_bf16(words, eight):
    a, b, c, d = words[0], words[1], words[2], words[3]
    upper = -65536  # 0xffff0000
    return (
        as_f32(shl32(a, 16)), as_f32(and32(a, upper)), as_f32(shl32(b, 16)), as_f32(and32(b, upper)),
        as_f32(shl32(c, 16)), as_f32(and32(c, upper)), as_f32(shl32(d, 16)), as_f32(and32(d, upper)),
    )  # fmt: skip


def _of_numbers(words, widen, n_words):
    @cuda.jit(device=True)
    def key_words(pages, block, H, columns, c, eight):
        return words(pages, (block * H + c) * STEP + eight)

    @cuda.jit(device=True)
    def value_words(pages, block, columns, column, place, eight):
        return words(pages, ((block * columns + column) * STEP + place) * STEP + eight)

    return Loads(key_words, widen, value_words, widen, n_words)


# -- tiles


@cuda.jit(device=True)
def _code_8(word, k):
    """Signed byte k of a word."""
    return float32(sar32(shl32(word, 24 - 8 * k), 24))


@cuda.jit(device=True)
def _code_4(word, k):
    """The lower half of byte k, less 8."""
    return float32(sub32(and32(shr32(word, 8 * k), 15), 8))


@cuda.jit(device=True)
def _words_8(pages, tile, row, eight):
    """Codes eight .. eight + 7 of row `row` of the tile at byte `tile`."""
    return load_v2(pages, tile + SCALES + row * 32 + eight)


@cuda.jit(device=True)
def _codes_8(a, b, eight):
    return (
        _code_8(a, 0), _code_8(a, 1), _code_8(a, 2), _code_8(a, 3),
        _code_8(b, 0), _code_8(b, 1), _code_8(b, 2), _code_8(b, 3),
    )  # fmt: skip


@cuda.jit(device=True)
def _words_4(pages, tile, row, eight):
    return load_v2(pages, tile + SCALES + row * 16 + (eight & 8))


@cuda.jit(device=True)
def _codes_4(a, b, eight):
    upper = int32((eight >> 4) * 4)
    a, b = shr32(a, upper), shr32(b, upper)
    return (
        _code_4(a, 0), _code_4(a, 1), _code_4(a, 2), _code_4(a, 3),
        _code_4(b, 0), _code_4(b, 1), _code_4(b, 2), _code_4(b, 3),
    )  # fmt: skip


def _of_tiles(words, codes, tile_bytes):
    @cuda.jit(device=True)
    def key_words(pages, block, H, columns, c, eight):
        tile = (block * columns + c // STEP) * tile_bytes
        return load_v4(pages, tile + 2 * eight) + words(pages, tile, c % STEP, eight)

    @cuda.jit(device=True)
    def keys(loaded, eight):
        s, x = _widen_f16(loaded, eight), codes(loaded[4], loaded[5], eight)
        return (
            s[0] * x[0], s[1] * x[1], s[2] * x[2], s[3] * x[3],
            s[4] * x[4], s[5] * x[5], s[6] * x[6], s[7] * x[7],
        )  # fmt: skip

    @cuda.jit(device=True)
    def value_words(pages, block, columns, column, place, eight):
        tile = (block * columns + column) * tile_bytes
        at = tile + 2 * place
        return (int32(pages[at]), int32(pages[at + 1]), *words(pages, tile, place, eight))

    @cuda.jit(device=True)
    def values(loaded, eight):
        s = f16_to_f32(or32(loaded[0], shl32(loaded[1], 8)))
        x = codes(loaded[2], loaded[3], eight)
        return (
            s * x[0], s * x[1], s * x[2], s * x[3], s * x[4], s * x[5], s * x[6], s * x[7],
        )  # fmt: skip

    return Loads(key_words, keys, value_words, values, 6)


LOADS = {
    "f32": _of_numbers(_words_f32, _widen_f32, 8),
    "f16": _of_numbers(_words_16, _widen_f16, 4),
    "bf16": _of_numbers(_words_16, _widen_bf16, 4),
    "q8_0": _of_tiles(_words_8, _codes_8, BYTES_8),
    "q4_0": _of_tiles(_words_4, _codes_4, BYTES_4),
}


# -- storing: a warp has 32 neighbouring components of one position, one in each lane; 0 where there is none


@cuda.jit(device=True)
def _same(x):
    return x


@cuda.jit(device=True)
def _half(x):
    return uint16(and32(pack_f16(float32(0), x), 0xFFFF))


@cuda.jit(device=True)
def _bfloat(x):
    return uint16(and32(pack_bf16(float32(0), x), 0xFFFF))


def _store_numbers(narrow):
    @cuda.jit(device=True)
    def key(x, other, has_other, pages, block, H, columns, c, place):
        if c < H:
            pages[(block * H + c) * STEP + place] = narrow(x)

    @cuda.jit(device=True)
    def value(x, pages, block, columns, c, place):
        pages[((block * columns + c // STEP) * STEP + place) * STEP + c % STEP] = narrow(x)

    return key, value


@cuda.jit(device=True)
def _largest(x):
    """Of a warp, as bits: those of NaN are the largest of all."""
    top = and32(as_i32(x), 0x7FFFFFFF)
    for distance in (16, 8, 4, 2, 1):
        top = max(top, cuda.shfl_xor_sync(WHOLE_WARP, top, distance))
    return top


@cuda.jit(device=True)
def _first_of_size(x, top):
    """The number of the first lane that has this magnitude, with its sign."""
    lane = int32(cuda.laneid)
    first = lane if and32(as_i32(x), 0x7FFFFFFF) == top else int32(31)
    for distance in (16, 8, 4, 2, 1):
        first = min(first, cuda.shfl_xor_sync(WHOLE_WARP, first, distance))
    return cuda.shfl_sync(WHOLE_WARP, x, first)


@cuda.jit(device=True)
def _quantize_8(x):
    """(scale as float16, code) of each lane."""
    top = _largest(x)
    if top >= INFINITY:
        return int32(NAN), int32(0)
    if top < LEAST:
        return int32(0), int32(0)
    scale = as_f32(top) / float32(127)
    scaled = mul_rn(x, float32(1) / scale)
    code = int32(scaled)
    if abs(scaled - float32(code)) >= float32(0.5):  # halves go away from zero
        code += int32(1) if scaled > float32(0) else int32(-1)
    return and32(pack_f16(float32(0), scale), 0xFFFF), int32(code)


@cuda.jit(device=True)
def _quantize_4(x):
    """The same; codes plus 8.  What lies between two is cut off, not rounded."""
    top = _largest(x)
    if top >= INFINITY:
        return int32(NAN), int32(8)
    if top < LEAST:
        return int32(0x8000), int32(8)
    scale = _first_of_size(x, top) / float32(-8)
    code = int32(min(add_rn(mul_rn(x, float32(1) / scale), float32(8.5)), float32(15.5)))
    return and32(pack_f16(float32(0), scale), 0xFFFF), code


@cuda.jit(device=True)
def _store_scale(pages, tile, place, scale):
    if cuda.laneid == 0:
        pages[tile + 2 * place] = uint8(and32(scale, 0xFF))
        pages[tile + 2 * place + 1] = uint8(shr32(scale, 8))


@cuda.jit(device=True)
def _key_8(x, other, has_other, pages, block, H, columns, c, place):
    tile = (block * columns + c // STEP) * BYTES_8
    scale, code = _quantize_8(x)
    _store_scale(pages, tile, place, scale)
    pages[tile + SCALES + c % STEP * 32 + place] = uint8(and32(code, 0xFF))


@cuda.jit(device=True)
def _value_8(x, pages, block, columns, c, place):
    tile = (block * columns + c // STEP) * BYTES_8
    scale, code = _quantize_8(x)
    _store_scale(pages, tile, place, scale)
    pages[tile + SCALES + place * 32 + c % STEP] = uint8(and32(code, 0xFF))


@cuda.jit(device=True)
def _key_4(x, other, has_other, pages, block, H, columns, c, place):
    """A byte holds two positions, 16 apart.  has_other: both are new, x and `other`."""
    tile = (block * columns + c // STEP) * BYTES_4
    at = tile + SCALES + c % STEP * 16 + (place & 15)
    scale, code = _quantize_4(x)
    _store_scale(pages, tile, place, scale)
    if has_other:
        scale, upper = _quantize_4(other)
        _store_scale(pages, tile, place + 16, scale)
        byte = or32(code, shl32(upper, 4))
    elif place < 16:
        byte = or32(and32(int32(pages[at]), 0xF0), code)
    else:
        byte = or32(and32(int32(pages[at]), 0x0F), shl32(code, 4))
    pages[at] = uint8(byte)


@cuda.jit(device=True)
def _value_4(x, pages, block, columns, c, place):
    """A byte holds components i and i + 16: the first half of the warp stores them."""
    tile = (block * columns + c // STEP) * BYTES_4
    scale, code = _quantize_4(x)
    _store_scale(pages, tile, place, scale)
    upper = cuda.shfl_xor_sync(WHOLE_WARP, code, 16)
    if c % STEP < 16:
        pages[tile + SCALES + place * 16 + c % STEP] = uint8(or32(code, shl32(upper, 4)))


STORES = {
    "f32": _store_numbers(_same), "f16": _store_numbers(_half), "bf16": _store_numbers(_bfloat),
    "q8_0": (_key_8, _value_8), "q4_0": (_key_4, _value_4),
}  # fmt: skip


@cuda.jit(device=True)
def block_of(table, lane, position, K, head, blocks):
    """Number of the block of 32 positions of a head; a page has `blocks` of them."""
    column, place = column_of(sar32(position, 5), blocks, int32(table.shape[1]))
    return add32(mul32(add32(mul32(table[uint32(lane), uint32(column)], K), head), blocks), place)


@cuda.jit(device=True)
def column_of(block, blocks, held):
    """(column of the table, of so many, that holds the page of a block of positions; its place in the page)

    In 32 bits, which are enough for the number of a block; and without a sign: a device divides 64 by a loop.
    """
    number = div32(block, blocks)
    column = sub32(number, mul32(div32(number, held), held))
    return column, sub32(block, mul32(number, blocks))
