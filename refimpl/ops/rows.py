"""Rows taken out and put in.  They are ops because arrays of a device have no indexing by arrays."""


def get_rows(x, rows):
    """x[rows]: some rows of f[T, ...], in this order, i32[M]; f[M, ...]."""
    return x[rows]


def set_rows(x, rows, values):
    """x[rows] = values, in place: f[T, ...], i32[M] without repetitions, f[M, ...].

    Notes:
        So the embeddings of images and sounds get their places among those of words.
    """
    x[rows] = values


def swap_axes(x):
    """f[A, B, ...] -> f[B, A, ...]: what tokens have for layers becomes what layers have for tokens."""
    return x.swapaxes(0, 1)
