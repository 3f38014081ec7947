"""Rows of a table on CUDA.        definition: refimpl/ops/embedding.py

grid       groups of 32 sub-blocks of a row; tokens
block      a warp; a lane has 32 columns of a table that lies as products want it (layout.py): it serves both
arithmetic that of the format's definition (quant), in float32, then one product with the factor
traffic    of a row its codes, 32 bytes side by side or more
"""

import weakref

import numpy as np
from numba import cuda, float32, int32, uint16

from fastpath.cuda import device
from fastpath.cuda.codes import spot_of
from fastpath.cuda.intrinsics import mul_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, LANES, PADDED, ROWS, UNIT, WIDTH, on_device
from fastpath.cuda.values import values_of
from quant import QTensor


def embed(table, ids, scale, *, out=None):
    table = on_device(_in_rows(table))
    T, C = len(ids), table.shape[1]
    out = device.current().empty((T, C), np.float32) if out is None else out
    grid, ids = (-(-C // (LANES * WIDTH)), T), device.put(ids, np.int32)
    kernel = EMBEDDINGS[table.coding_name]
    device.current().launch(kernel, grid, LANES, *table.planes, ids, np.float32(scale), out)
    return out


_flat: weakref.WeakKeyDictionary[QTensor, QTensor] = weakref.WeakKeyDictionary()


def _in_rows(table):
    """Leading axes as one: the positions of images are two tables in one tensor."""
    if not isinstance(table, QTensor) or table.ndim == 2:
        return table
    if table not in _flat:
        data = table.data.reshape(table.n_rows, table.row_bytes)
        _flat[table] = QTensor(table.format, (table.n_rows, table.row_len), data, table.name)
    return _flat[table]


def _embed(coding):
    load, four = values_of(coding)

    def kernel(low, high, sub, block, ids, factor, out):
        t, C = cuda.blockIdx.y, out.shape[1]
        first = (cuda.blockIdx.x * LANES + cuda.threadIdx.x) * WIDTH
        if first >= C:
            return
        n_units = (C + PADDED - 1) // PADDED * (PADDED // UNIT)
        spot = spot_of(ids[t] // ROWS, n_units, first // WIDTH, ids[t] & (ROWS - 1))
        loaded = load(low, high, sub, block, spot)
        for i in range(WIDTH // 4):
            values = four(loaded, i)
            for k in range(4):
                if first + 4 * i + k < C:
                    out[t, first + 4 * i + k] = mul_rn(values[k], factor)

    return kernel


def _kernel(name, coding):
    half = uint16[::1]
    signature = (int32[::1], int32[::1], half, half, int32[::1], float32, float32[:, ::1])
    return Kernel(_embed(coding), signature, ("LDG.E.NA",), registers=96, name=f"embed_{name.lower()}")


EMBEDDINGS = {name: _kernel(name, coding) for name, coding in CODINGS.items()}
KERNELS = tuple(EMBEDDINGS.values())
