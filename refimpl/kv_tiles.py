"""Tiles: what quantised keys and values are, as bytes and as numbers.

A position's 32 neighbouring components share a scale d, a float16; number = d * code.

    q8_0   code -127 .. 127, a signed byte
    q4_0   code -8 .. 7, stored as code + 8 in 4 bits; of 32 neighbours in a row of codes the first 16 are the
           low halves of 16 bytes, the others the high halves

Scales and codes are those that quant/ gives for 32 weights, and so ggml's.  It says nothing on numbers that
cannot be quantised; here 32 components with a NaN or an infinity among them are NaN throughout, so that
nobody takes what is left of them for a result.  Components all below 2^-100 are 0: as a float16 their scale
is 0, and its reciprocal need not be a number.
"""

import numpy as np

from quant import FORMATS
from refimpl.kv_types import COLUMNS, NOTHING, SCALES, STEP, TILE_TYPES


def quantize(x, name):
    """Components by 32, those that are missing 0: f[..., H] -> scales f16[..., C], codes i8[..., C, 32]."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % COLUMNS)])
    x = x.reshape(*x.shape[:-1], -1, COLUMNS).astype(np.float32)
    is_number = np.isfinite(x).all(axis=-1, keepdims=True)
    size = np.abs(np.where(is_number, x, 0)).max(axis=-1, keepdims=True)
    blocks = np.where(size >= NOTHING, x, np.float32(0)).reshape(-1, COLUMNS)
    fmt = FORMATS[name.upper()]
    codes, scales, _ = fmt.integer_parts(fmt.quantize_blocks(blocks))
    scales = np.where(is_number[..., 0], scales.reshape(x.shape[:-1]), np.nan)
    return scales.astype(np.float16), codes.reshape(x.shape)


def unpack(tiles):
    """Tiles u8[..., bytes] -> scales f16[..., 32] by position, codes i8[..., 32, 32] as they lie."""
    scales = np.ascontiguousarray(tiles[..., :SCALES]).view(np.float16)
    codes = tiles[..., SCALES:].reshape(*tiles.shape[:-1], STEP, -1)
    if TILE_TYPES[tiles.shape[-1]] == "q4_0":
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1) - np.uint8(8)
    return scales, codes.view(np.int8)


def pack(scales, codes, name):
    """Inverse of `unpack`."""
    codes = codes.view(np.uint8)
    if name == "q4_0":
        codes = codes + np.uint8(8)
        codes = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales.view(np.uint8), codes.reshape(*codes.shape[:-2], -1)], axis=-1)


def store(x, pages, found, of_keys):
    """x f[T, K, H] into tiles; found: page, block and place in the block of each token."""
    name = TILE_TYPES[pages.shape[-1]]
    x_scales, x_codes = quantize(x, name)
    for t, (page, block, place) in enumerate(zip(*found, strict=True)):
        scales, codes = unpack(pages[page, :, block])
        scales[..., place] = x_scales[t]
        by_position = codes.swapaxes(-1, -2) if of_keys else codes
        by_position[..., place, :] = x_codes[t]
        pages[page, :, block] = pack(scales, codes, name)


def load(pages, found, of_keys):
    """f32[n, K, H or more]: what n positions have stored, exactly."""
    number, blocks, places = found
    scales, codes = unpack(pages[number, :, blocks])
    codes = codes.swapaxes(-1, -2) if of_keys else codes
    each = np.arange(len(places))
    with np.errstate(invalid="ignore"):  # NaN times anything
        x = scales[each, :, :, places].astype(np.float32)[..., None] * codes[each, :, :, places]
    return x.reshape(*x.shape[:2], -1)
