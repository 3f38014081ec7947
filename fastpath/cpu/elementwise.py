"""Sums and scalings.        definition: refimpl/ops/elementwise.py

NumPy's own loops: they are bound by memory, and one rounding per value leaves nothing to choose.
"""

import numpy as np

from fastpath.cpu.buffers import floats, output, shaped


def add(x, y, *, out=None):
    x = floats(x, "add: x")
    return np.add(x, shaped(y, x.shape, "add: y"), out=output(out, x.shape, "add"))


def scale(x, factor, *, out=None):
    x = floats(x, "scale: x")
    return np.multiply(x, np.float32(factor), out=output(out, x.shape, "scale"))
