"""Quantisation to Q2_K .. Q6_K: least squares per sub-block, then rounding of the scales themselves.

Every sub-block is rounded at a few step sizes near the one that its range suggests; for each the best scale
(and minimum) follows from least squares, and the smallest squared error wins.  The scales of a super-block
are then rounded to their own few bits, and the values once more, to the scales as they will be read.
"""

from __future__ import annotations

import itertools

import numpy as np

from quant.bits import pack_fields, reciprocal, write_f16

# How far from the step that maps the range onto all levels the search goes, in levels.
SIGNED_SEARCH = np.linspace(-0.9, 0.9, 19, dtype=np.float32)
AFFINE_SEARCH = np.linspace(-1.0, 1.0, 21, dtype=np.float32)

# Rounding scale and minimum each to the nearest is not always best for the pair: their neighbours are tried.
SCALE_CHANGES = (0, -1, 1)


def _dot(a, b):
    return np.einsum("mw,mw->m", a, b)


def _fit_signed(x, half: int):
    """Scale s of x ~ s*l, with l an integer in -half .. half-1.

    For given l the best s is <x,l>/<l,l>, and the squared error that it leaves is |x|^2 - <x,l>^2/<l,l>.

    Shapes:
        x  f32[m, w]
    Returns:
        f32[m], of either sign: the value of largest magnitude is mapped to the side with one level more
    """
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    per_level = -reciprocal(peak)
    best_gain, best_scale = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for delta in SIGNED_SEARCH:
        levels = np.clip(np.rint(x * (per_level * (half + delta))), -half, half - 1)
        xl, ll = _dot(x, levels), _dot(levels, levels)
        scale = xl * reciprocal(ll)
        better = scale * xl > best_gain
        best_gain = np.where(better, scale * xl, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def _round_affine(x, step, shift, top: int):
    """Levels q of x ~ step*q - shift, and the squared error left: f32[..., w] -> u8[..., w], f32[...]."""
    q = np.clip(np.rint((x + shift) * reciprocal(step)), 0, top)
    residual = step * q - shift - x
    return q.astype(np.uint8), np.einsum("...w,...w->...", residual, residual)


def _fit_affine(x, top: int):
    """Scale s >= 0 and minimum m >= 0 of x ~ s*l - m, with l an integer in 0 .. top.

    Shapes:
        x  f32[m, w]
    Returns:
        s f32[m], m f32[m]
    """
    w = x.shape[1]
    low = np.minimum(x.min(axis=1, keepdims=True), np.float32(0))
    per_range = reciprocal(x.max(axis=1, keepdims=True) - low)
    sum_x = x.sum(axis=1)
    # To begin with, the line through the extremes: where all values are equal there is no other.
    best_scale, best_min = (x.max(axis=1) - low[:, 0]) / np.float32(top), -low[:, 0]
    _, best_error = _round_affine(x, best_scale[:, None], best_min[:, None], top)
    for delta in AFFINE_SEARCH:
        levels = np.clip(np.rint((x - low) * (per_range * (top + delta))), 0, top)
        sum_l, ll, xl = levels.sum(axis=1), _dot(levels, levels), _dot(x, levels)
        determinant = w * ll - sum_l * sum_l
        scale = (w * xl - sum_x * sum_l) * reciprocal(determinant)
        minimum = (sum_l * xl - ll * sum_x) * reciprocal(determinant)
        # The format cannot shift upwards: then the best line goes through zero.
        through_zero = minimum < 0
        scale = np.where(through_zero, xl * reciprocal(ll), scale)
        minimum = np.where(through_zero, np.float32(0), minimum)
        residual = scale[:, None] * levels - minimum[:, None] - x
        error = _dot(residual, residual)
        better = (error < best_error) & (determinant > 0)
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_min = np.where(better, minimum, best_min)
    return best_scale, best_min


def as_f16(d):
    return d.astype(np.float16).astype(np.float32)


def _round_unsigned(values, top: int):
    """Round numbers >= 0 of a super-block to d * integer, d being a float16.

    Shapes:
        values  f32[n, g]
    Returns:
        d f32[n], i16[n, g] in 0 .. top
    """
    d = as_f16(values.max(axis=1) / np.float32(top))
    return d, np.clip(np.rint(values * reciprocal(d)[:, None]), 0, top).astype(np.int16)


def round_signed(values, half: int):
    """The same for scales of either sign; the largest in magnitude becomes -half."""
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = as_f16(peak / np.float32(-half))
    return d, np.clip(np.rint(values * reciprocal(d)[:, None]), -half, half - 1).astype(np.int16)


def _affine_blocks(x, group: int, top: int, scale_top: int):
    """All integers of an affine super-block.

    Shapes:
        x  f32[n, 256]; group: values per sub-block; top, scale_top: largest q, largest sc and mn
    Returns:
        d f32[n], dmin f32[n], sc u8[n, 256/group], mn u8[n, 256/group], q u8[n, 256]
    """
    n = x.shape[0]
    runs = x.reshape(n, -1, group)
    scale, minimum = _fit_affine(runs.reshape(-1, group), top)
    d, near_sc = _round_unsigned(scale.reshape(n, -1), scale_top)
    dmin, near_mn = _round_unsigned(minimum.reshape(n, -1), scale_top)
    sc, mn, q = near_sc, near_mn, np.zeros(runs.shape, np.uint8)
    error = np.full(near_sc.shape, np.inf, np.float32)
    for sc_change, mn_change in itertools.product(SCALE_CHANGES, repeat=2):
        this_sc = np.clip(near_sc + sc_change, 0, scale_top)
        this_mn = np.clip(near_mn + mn_change, 0, scale_top)
        step, shift = (d[:, None] * this_sc)[:, :, None], (dmin[:, None] * this_mn)[:, :, None]
        this_q, this_error = _round_affine(runs, step, shift, top)
        better = this_error < error
        error = np.where(better, this_error, error)
        sc, mn = np.where(better, this_sc, sc), np.where(better, this_mn, mn)
        q = np.where(better[:, :, None], this_q, q)
    return d, dmin, sc.astype(np.uint8), mn.astype(np.uint8), q.reshape(n, 256)


def _signed_blocks(x, half: int, scale_half: int):
    """All integers of a super-block without minima, sub-blocks of 16.

    Returns:
        d f32[n], sc i16[n, 16], q u8[n, 256] in 0 .. 2*half-1, the stored form with `half` added
    """
    n = x.shape[0]
    runs = x.reshape(n, 16, 16)
    d, sc = round_signed(_fit_signed(runs.reshape(-1, 16), half).reshape(n, 16), scale_half)
    step = (d[:, None] * sc)[:, :, None]
    q = np.clip(np.rint(runs * reciprocal(step)), -half, half - 1) + half
    return d, sc, q.astype(np.uint8).reshape(n, 256)


def _pack_scales_and_mins(sc, mn):
    """Inverse of k_quants' reading of 12 bytes: u8[n, 8] twice, below 64 -> u8[n, 12]."""
    four, six = np.uint8(4), np.uint8(6)
    first = sc[:, :4] | (sc[:, 4:] >> four) << six
    second = mn[:, :4] | (mn[:, 4:] >> four) << six
    low = (sc[:, 4:] & np.uint8(15)) | (mn[:, 4:] & np.uint8(15)) << four
    return np.hstack([first, second, low])


def quantize_q2_k(x):
    d, dmin, sc, mn, q = _affine_blocks(x, 16, 3, 15)
    return np.hstack([sc | mn << np.uint8(4), pack_fields(q, 32, 2), write_f16(d), write_f16(dmin)])


def quantize_q3_k(x):
    d, sc, q = _signed_blocks(x, 4, 32)
    codes = (sc + np.int16(32)).astype(np.uint8)
    scales = np.hstack([pack_fields(codes & np.uint8(15), 8, 4), pack_fields(codes >> np.uint8(4), 4, 2)])
    low = pack_fields(q & np.uint8(3), 32, 2)
    return np.hstack([pack_fields(q >> np.uint8(2), 32, 1), low, scales, write_f16(d)])


def quantize_q4_k(x):
    d, dmin, sc, mn, q = _affine_blocks(x, 32, 15, 63)
    return np.hstack([write_f16(d), write_f16(dmin), _pack_scales_and_mins(sc, mn), pack_fields(q, 32, 4)])


def quantize_q5_k(x):
    d, dmin, sc, mn, q = _affine_blocks(x, 32, 31, 63)
    fifth, low = pack_fields(q >> np.uint8(4), 32, 1), pack_fields(q & np.uint8(15), 32, 4)
    return np.hstack([write_f16(d), write_f16(dmin), _pack_scales_and_mins(sc, mn), fifth, low])


def quantize_q6_k(x):
    d, sc, q = _signed_blocks(x, 32, 128)
    low, upper = pack_fields(q & np.uint8(15), 64, 4), pack_fields(q >> np.uint8(4), 32, 2)
    return np.hstack([low, upper, sc.astype(np.int8).view(np.uint8), write_f16(d)])
