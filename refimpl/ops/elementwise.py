"""Sums and scalings.  They are ops so that the fast engines can fuse them with their neighbours."""


def add(x, y):
    """x + y, for two arrays of one shape: the residual connections."""
    return x + y


def scale(x, factor):
    """factor * x, for a number: factors of the per-layer embeddings, and the layer scalars.

    Notes:
        A Python float takes the precision of x.
    """
    return x * x.dtype.type(factor)


def add_bias(x, bias):
    """One vector added to every row: f[T, C] + f[C].  The text model has none; encoders have a few."""
    return x + bias


def standardize(x, mean, factor):
    """(x - mean) * factor, one of each for every column: f[T, C], f[C], f[C].

    Notes:
        In the vision tower of the large models means reach 5e4, and most of each number cancels: float16
        does not hold it.
    """
    return (x - mean) * factor
