"""Memory of results, used again: new pages cost more than most ops.

The system clears each page of new memory when it is first touched, which takes longer than a sum of two
arrays.  So the memory of a large array goes back to a list here when the last view of it is gone, and the
next array of about its size takes it.
"""

import ctypes
import weakref

import numpy as np

from fastpath import locks

SMALLEST = 1 << 17  # bytes; below this the C library's own lists do the same
MOST_FREE = 1 << 28  # bytes kept for later; what comes back beyond is returned to the system
_ALIGN = 64

_lock = locks.reentrant()  # a collection of garbage may bring memory back while some is being taken
_free: dict[int, list[np.ndarray]] = {}
_n_free = 0


def empty(shape, dtype):
    """A new array; of what its memory held before, anything may be left."""
    dtype = np.dtype(dtype)
    n_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if n_bytes < SMALLEST:
        return np.empty(shape, dtype)
    memory = _take(_class_of(n_bytes))
    address = -(-memory.ctypes.data // _ALIGN) * _ALIGN
    carrier = (ctypes.c_char * n_bytes).from_address(address)  # what all views of the array hold on to
    weakref.finalize(carrier, _give_back, memory).atexit = False
    return np.frombuffer(carrier, dtype).reshape(shape)


def _class_of(n_bytes):
    """Sizes in steps of an eighth, so that arrays of nearly the same size share memory."""
    step = 1 << max(12, n_bytes.bit_length() - 4)
    return -(-n_bytes // step) * step


def _take(size):
    global _n_free
    with _lock:
        blocks = _free.get(size)
        if blocks:
            _n_free -= size
            return blocks.pop()
    return np.empty(size + _ALIGN, np.uint8)


def _give_back(memory):
    global _n_free
    size = memory.nbytes - _ALIGN
    with _lock:
        if _n_free + size <= MOST_FREE:
            _free.setdefault(size, []).append(memory)
            _n_free += size


def clear():
    """Give everything that waits here back to the system."""
    global _n_free
    with _lock:
        _free.clear()
        _n_free = 0
