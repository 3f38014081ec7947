"""Rotary position embedding."""

import numpy as np


def rope_table(positions, inv_freq):
    """Cosine and sine of every angle that the tokens of a call need, once for all layers of one kind.

        angle[t, i] = positions[t] * inv_freq[i]

    Shapes:
        positions  i[T]
        inv_freq   f64[H/2]  radians per position of each pair; 0 for the pairs that do not rotate
    Returns:
        cos, sin  f64[T, H/2]; `rope` rounds them to the precision that it works in

    Notes:
        Angles are float64.  In float32 those at position 131,071 would be off by up to 0.01.
    """
    angles = np.asarray(positions, np.float64)[:, None] * inv_freq
    return np.cos(angles), np.sin(angles)


def rope(x, cos, sin):
    """Rotate pair (i, i + H/2) of every head by the token's angle i.

        out[i]       = x[i] * cos[i] - x[i + H/2] * sin[i]
        out[i + H/2] = x[i + H/2] * cos[i] + x[i] * sin[i]

    Shapes:
        x         f[T, N, H]
        cos, sin  f[T, H/2]
    Returns:
        f[T, N, H]

    Notes:
        The pairs span the whole head.  Global layers rotate a quarter of their pairs: components 0..63 with
        256..319 of 512, not the first 128 components.  For the other pairs inv_freq is 0, hence cos 1 and sin
        0: identity.
    """
    cos, sin = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
