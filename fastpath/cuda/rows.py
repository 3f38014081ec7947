"""Rows taken out and put in on CUDA.        definition: refimpl/ops/rows.py

grid     as elementwise.py; a thread moves a number
traffic  each number is read once and written once, side by side within a row
"""

import math

import numpy as np
from numba import float32, int32

from fastpath.cuda import device
from fastpath.cuda.elementwise import launch, places
from fastpath.cuda.kernel import Kernel


def get_rows(x, rows, *, out=None):
    rows = device.put(rows, np.int32)
    out = device.current().empty((len(rows), *x.shape[1:]), np.float32) if out is None else out
    return launch(GET_ROWS, out, x.reshape(len(x), math.prod(x.shape[1:])), rows) if out.size else out


def set_rows(x, rows, values):
    if len(rows):
        rows, values = device.put(rows, np.int32), device.put(values, np.float32)
        launch(SET_ROWS, values, rows, x.reshape(len(x), math.prod(x.shape[1:])))


def swap_axes(x, *, out=None):
    """What has one row already is as it will be: a view, unless `out` is given."""
    A, B = x.shape[:2]
    shape = (B, A, *x.shape[2:])
    if A == 1 and out is None:
        return x.reshape(*shape)
    out = device.current().empty(shape, np.float32) if out is None else out
    return launch(SWAP_AXES, out, x.reshape(A, B, math.prod(x.shape[2:]))) if out.size else out


def _get_rows_kernel(x, rows, out):
    C = x.shape[1]
    for i in places(out.size):
        out[i] = x[rows[i // C], i % C]


def _set_rows_kernel(rows, x, values):
    C = x.shape[1]
    for i in places(values.size):
        x[rows[i // C], i % C] = values[i]


def _swap_axes_kernel(x, out):
    A, C = x.shape[0], x.shape[2]
    for i in places(out.size):
        row = i // C
        out[i] = x[row % A, row // A, i % C]


_F, _ROWS, _I = float32[::1], float32[:, ::1], int32[::1]
GET_ROWS = Kernel(_get_rows_kernel, (_ROWS, _I, _F))
SET_ROWS = Kernel(_set_rows_kernel, (_I, _ROWS, _F), writes=("x",))
SWAP_AXES = Kernel(_swap_axes_kernel, (float32[:, :, ::1], _F))
KERNELS = (GET_ROWS, SET_ROWS, SWAP_AXES)
