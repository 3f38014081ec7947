"""What a choice of tokens needs of a row of logits: its largest ones.

This is an op so that a device hands over a few numbers, and not a row of 262,144.
"""

import numpy as np

from refimpl.ops.activation import softcap


def top_k(logits, k, cap=None):
    """The k largest logits of each row after the soft cap, in descending order; of equal ones the lower ids.

        logits are cap * tanh(logits / cap) first, unless cap is None

    Shapes:
        logits  f[T, V]
        k       int  at least 1
    Returns:
        (f[T, k] logits, i32[T, k] ids); of V < k: -inf and id -1 behind the last one

    Notes:
        These are the tokens that frontend.sampling draws from under `top_k`, in its order; the first is the
        greedy one.
        What is not finite comes before everything, as NaN, lower ids first: a row is sound if its first
        number is.
    """
    logits = logits if cap is None else softcap(logits, cap)
    logits = np.where(np.isfinite(logits), logits, np.nan)
    order = np.argsort(np.where(np.isnan(logits), -np.inf, -logits), axis=-1, kind="stable")[:, :k]
    best, ids = np.full((len(logits), k), -np.inf, logits.dtype), np.full((len(logits), k), -1, np.int32)
    best[:, : order.shape[1]], ids[:, : order.shape[1]] = np.take_along_axis(logits, order, -1), order
    return best, ids
