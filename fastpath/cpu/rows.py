"""Rows taken out and put in.        definition: refimpl/ops/rows.py

NumPy does it.  A program that is recorded has none of it: its rows would be those of the recorded call.
"""

import numpy as np

from fastpath.cpu import recording
from fastpath.cpu.buffers import floats


def get_rows(x, rows, *, out=None):
    _refuse_recording("get_rows")
    return np.take(floats(x, "get_rows: x"), rows, axis=0, out=out)


def set_rows(x, rows, values):
    _refuse_recording("set_rows")
    x[rows] = values


def swap_axes(x, *, out=None):
    """A view, unless `out` is given."""
    swapped = x.swapaxes(0, 1)
    if out is None:
        return swapped
    _refuse_recording("swap_axes with out=")
    out[...] = swapped
    return out


def _refuse_recording(where):
    if recording.current() is not None:
        raise recording.UnableError(f"{where} cannot be recorded. Run without replay")
