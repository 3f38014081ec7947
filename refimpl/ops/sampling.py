"""What a choice of tokens needs of a row of logits: its largest ones.

They are ops so that a device hands over a few numbers, and not a row of 262,144.
"""

import numpy as np

from refimpl.ops.activation import softcap

MAX_K = 256  # of top_k


def argmax(logits):
    """The largest logit of each row, of equal ones the first; where there is a NaN, the first of these.

    Shapes:
        logits  f[T, V]
    Returns:
        i32[T]
    """
    return np.argmax(logits, axis=-1).astype(np.int32)


def top_k(logits, k, cap=None):
    """The k largest logits of each row after the soft cap, in descending order; of equal ones the lower ids.

        logits are cap * tanh(logits / cap) first, unless cap is None

    Shapes:
        logits  f[T, V]
        k       at most MAX_K
    Returns:
        (f[T, k] logits, i32[T, k] ids); of V < k: -inf and id -1 behind the last one

    Notes:
        These are the tokens that frontend.sampling draws from under `top_k`, in its order.
        What is not finite comes before everything, as NaN, lower ids first: a row is sound if its first
        number is.
    """
    if not 1 <= k <= MAX_K:
        raise ValueError(f"top_k: k = {k}, expected 1 to {MAX_K}. Take the whole row for more")
    logits = logits if cap is None else softcap(logits, cap)
    logits = np.where(np.isfinite(logits), logits, np.nan)
    order = np.argsort(np.where(np.isnan(logits), -np.inf, -logits), axis=-1, kind="stable")[:, :k]
    best, ids = np.full((len(logits), k), -np.inf, logits.dtype), np.full((len(logits), k), -1, np.int32)
    best[:, : order.shape[1]], ids[:, : order.shape[1]] = np.take_along_axis(logits, order, -1), order
    return best, ids
