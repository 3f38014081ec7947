"""Quantisation to IQ4_NL and IQ4_XS: least squares with the sixteen levels of their codebook.

The codebook formats of fewer bits have no quantiser here: without importance weights they are of little use.
"""

from __future__ import annotations

import numpy as np

from quant.bits import pack_fields, reciprocal, write_f16
from quant.k_quantize import SCALE_CHANGES, as_f16, round_signed

# The 16 levels of IQ4_NL and IQ4_XS: dense near zero, where weights are.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

_VALUES = LEVELS.astype(np.float32)
_BORDERS = (_VALUES[1:] + _VALUES[:-1]) / 2

# Where the value of largest magnitude is brought: near either end of the codebook.
_ENDS = (*range(-133, -120, 2), *range(107, 120, 2))


def _nearest_code(x):
    return np.searchsorted(_BORDERS, x).astype(np.uint8)


def _fit_levels(x):
    """Scale s of x ~ s*level, of either sign: f32[m, w] -> f32[m].

    For given levels l the best s is <x,l>/<l,l>, and the squared error left is |x|^2 - <x,l>^2/<l,l>.
    """
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    per_level = reciprocal(peak)
    best_gain, best_scale = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for end in _ENDS:
        levels = _VALUES[_nearest_code(x * (per_level * np.float32(end)))]
        xl, ll = np.einsum("mw,mw->m", x, levels), np.einsum("mw,mw->m", levels, levels)
        scale = xl / ll
        better = scale * xl > best_gain
        best_gain = np.where(better, scale * xl, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def quantize_iq4_nl(x):
    d = as_f16(_fit_levels(x))
    codes = _nearest_code(x * reciprocal(d)[:, None])
    return np.hstack([write_f16(d), pack_fields(codes, 16, 4)])


def quantize_iq4_xs(x):
    """Eight runs of 32 with scales of 6 bits; the neighbours of the rounded scale are tried."""
    n = x.shape[0]
    runs = x.reshape(n, 8, 32)
    d, near = round_signed(_fit_levels(runs.reshape(-1, 32)).reshape(n, 8), 32)
    sc, codes = near, np.zeros(runs.shape, np.uint8)
    error = np.full(near.shape, np.inf, np.float32)
    for change in SCALE_CHANGES:
        this_sc = np.clip(near + change, -32, 31)
        step = (d[:, None] * this_sc)[:, :, None]
        this_codes = _nearest_code(runs * reciprocal(step))
        residual = step * _VALUES[this_codes] - runs
        this_error = np.einsum("ngw,ngw->ng", residual, residual)
        better = this_error < error
        error = np.where(better, this_error, error)
        sc = np.where(better, this_sc, sc)
        codes = np.where(better[:, :, None], this_codes, codes)
    stored = (sc + 32).astype(np.uint8)
    upper, low = pack_fields(stored >> np.uint8(4), 1, 2), pack_fields(stored & np.uint8(15), 1, 4)
    return np.hstack([write_f16(d), upper, low, pack_fields(codes.reshape(n, 256), 16, 4)])
