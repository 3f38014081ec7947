"""Arrays in the memory of the device in use: what fastpath/arrays.py is for the host's."""

import math

import numpy as np

from fastpath.cuda import device


def put(array):
    """Integers become 32 bits, as kernels read them."""
    return device.put(array, np.float32 if array.dtype.kind == "f" else np.int32)


def get(array):
    return device.get(array)


def pages(shape, dtype):
    """Undefined numbers: a query reads positions that were written, only."""
    dtype = np.dtype(dtype)
    return device.real().memory(math.prod(shape) * dtype.itemsize).view(dtype).reshape(*shape)


def copy_page(array, source, target):
    array[target].copy_to_device(array[source])
