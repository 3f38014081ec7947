"""Convolutions of the audio encoder, and the pooling of the vision encoder: sums over neighbours."""

import numpy as np


def conv2d(x, weight):
    """A 3 x 3 convolution that halves both axes.

        out[t, f, m] = sum_{i, j, c} x[2t + i - 1, 2f + j - 1, c] * weight[m, c, i, j]        zeros outside

    Shapes:
        x       f[T, F, C]  time, frequency, channels
        weight  f[M, C, 3, 3]
    Returns:
        f[ceil(T/2), ceil(F/2), M], in the precision of x

    Notes:
        Sums are float64 and rounded once, as in `linear`.
    """
    T, F, C = x.shape
    padded = np.zeros((T + 2, F + 2, C))
    padded[1:-1, 1:-1] = x
    out = np.zeros(((T + 1) // 2, (F + 1) // 2, len(weight)))
    for i in range(3):
        for j in range(3):
            out += padded[i : i + T : 2, j : j + F : 2] @ weight[:, :, i, j].T.astype(np.float64)
    return out.astype(x.dtype)


def causal_conv(x, weight):
    """Each channel is a weighted sum of its own last k values ("depthwise").

        out[t, c] = sum_j x[t - (k - 1) + j, c] * weight[c, j]          zeros before the beginning

    Shapes:
        x       f[T, C]
        weight  f[C, k]
    Returns:
        f[T, C]
    """
    T, k = len(x), weight.shape[1]
    padded = np.concatenate([np.zeros((k - 1, x.shape[1]), x.dtype), x])
    out = padded[:T] * weight[:, 0]
    for j in range(1, k):
        out = out + padded[j : j + T] * weight[:, j]
    return out


def mean_pool(x, n_columns, side):
    """Means over squares of a grid.

        out[r, c] = mean of x[side * r + i, side * c + j] over i, j < side

    Shapes:
        x          f[rows * n_columns, D]  a grid, row by row; both sides multiples of `side`
        n_columns  int
        side       int
    Returns:
        f[rows/side * n_columns/side, D]
    """
    grid = x.reshape(-1, side, n_columns // side, side, x.shape[1])
    return grid.mean(axis=(1, 3)).reshape(-1, x.shape[1])
