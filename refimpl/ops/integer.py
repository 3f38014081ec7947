"""Integer dot products: what the fast engines compute on quantised weights, to the last bit.

A quantised row is small integers with a scale per block.  If the activations are rounded to int8 with a scale
per block too, the sum inside a block is one of integers: exact, in any order, on any machine.  What is left
are a few float32 roundings per block and output.  Writing them down in one order makes a definition that a
kernel can equal in every bit, however it splits its work.
"""

import numpy as np

# Outputs computed at a time, so that the arrays of the chain stay in cache.
SLAB_OUTPUTS = 1 << 16


def integer_linear(x, weight):
    """`linear` with activations rounded to int8.

        q, s = round_activations(x)                                    per block of 32 or 256, as the weights
        acc = +0
        for b ascending:
            32-value formats    acc = fma(I_b, d_b * s_b, acc)           I_b = sum of w_q * q
                                acc = fma(S_b, m_b * s_b, acc)           S_b = sum of q; with m only
            256-value formats   acc = fma(I_b, d_b * s_b, acc)           I_b = sum of sc_j * w_q * q
                                acc = fma(M_b, dmin_b * -s_b, acc)       M_b = sum of mn_j * S_j; with mn only

    I, S and M are exact integers, rounded to float32 once; each product of scales is one float32 rounding,
    each fma another one (fused: the product inside is not rounded).

    Shapes:
        x       f32[T, C]
        weight  QTensor[M, C] of a format with `integer_parts` (see quant.Format for w_q, d, m, sc, mn, dmin)
    Returns:
        f32[T, M]
    """
    M, C = weight.shape
    block_size = weight.format.block_size
    q, s = round_activations(x, block_size)
    chain = _chain_256 if block_size == 256 else _chain_32
    out = np.empty((len(x), M), np.float32)
    step = max(1, SLAB_OUTPUTS // max(1, len(x)))
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be inf, in random bytes at least
        for start in range(0, M, step):
            rows = weight.take_rows(start, min(start + step, M)).data
            blocks = rows.reshape(-1, weight.format.block_bytes)
            parts = [
                None if part is None else part.reshape(len(rows), C // block_size, -1)
                for part in weight.format.integer_parts(blocks)
            ]
            out[:, start : start + step] = chain(q, s, *parts)
    return out


def round_activations(x, block_size):
    """Round each block to int8 with one float32 scale, so that x is about scale * q.

        amax = max|x| of the block
        scale = amax / 127;   q = round_half_even(x * (127 / amax))           each step one float32 rounding
        a block with amax < 1e-30: scale 0, q 0      (denormal scales cost much and say nothing)

    Shapes:
        x           f32[T, C]
        block_size  int  32 or 256
    Returns:
        q i8[T, C/block, block], scale f32[T, C/block]

    Notes:
        A block with an infinity or a NaN in it has q 0 and that scale: the outputs become NaN, and are
        noticed.
    """
    x = x.reshape(len(x), -1, block_size)
    amax = np.abs(x).max(axis=-1)
    scale = np.where(amax < np.float32(1e-30), np.float32(0), amax / np.float32(127))
    usable = (scale > 0) & np.isfinite(amax)
    inverse = np.float32(127) / np.where(usable, amax, np.float32(1))
    q = np.rint(np.where(usable[..., None], x, np.float32(0)) * inverse[..., None])
    return q.astype(np.int8), scale


def _chain_32(q, s, w_q, d, m):
    """q i8[T, B, 32], s f32[T, B], w_q i8[M, B, 32], d and m f32[M, B, 1] -> f32[T, M]."""
    acc = np.zeros((len(q), len(w_q)), np.float32)
    for b in range(q.shape[1]):
        s_b = s[:, b, None]
        acc = fma(_dot(q[:, b], w_q[:, b]), d[:, b, 0] * s_b, acc)
        if m is not None:
            acc = fma(_dot(q[:, b], np.ones_like(w_q[:, b])), m[:, b, 0] * s_b, acc)
    return acc


def _chain_256(q, s, w_q, sc, mn, d, dmin):
    """q i8[T, B, 256], s f32[T, B], w_q i8[M, B, 256], sc and mn i16[M, B, 16], d and dmin f32[M, B, 1] ->
    f32[T, M]."""
    acc = np.zeros((len(q), len(w_q)), np.float32)
    for b in range(q.shape[1]):
        s_b = s[:, b, None]
        acc = fma(_dot(q[:, b], w_q[:, b] * np.repeat(sc[:, b], 16, axis=1)), d[:, b, 0] * s_b, acc)
        if mn is not None:
            sums = q[:, b].reshape(-1, 16, 16).sum(axis=-1, dtype=np.int32)
            acc = fma(_dot(sums, mn[:, b]), dmin[:, b, 0] * -s_b, acc)
    return acc


def _dot(q, w):
    """Exact integer dot products, rounded to float32.  float64 holds them (below 2^28), and its product is
    fast."""
    return (q.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)


def fma(a, b, c):
    """float32 a * b + c with one rounding, which NumPy does not have.

    Notes:
        In float64 the product is exact (24 + 24 bits) and the sum s is not; rounding s again to float32 could
        land on the wrong side of a tie.  So s is first rounded to odd: if the sum was inexact and the last
        bit of s is 0, s becomes its neighbour on the side of the exact sum.  An odd s is never a tie of the
        shorter format, and lies on the same side of all ties as the exact sum (Boldo and Melquiond 2008); 53
        >= 24 + 2 bits are enough.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    s = product + addend
    of_product = s - addend
    error = (product - of_product) + (addend - (s - of_product))  # exact: Knuth's TwoSum
    bits = s.view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (s > 0)
    bits += np.where(inexact, np.where(away_from_zero, 1, -1), 0)
    return s.astype(np.float32)
