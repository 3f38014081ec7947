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
