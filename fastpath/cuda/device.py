"""Who runs the kernels: the GPU of this machine, or what a test puts in its place.

What ops use of a device:

    empty(shape, dtype)                         an array of undefined numbers where kernels can use it
    put(array, dtype)                           an array of the host, there: an input, other numbers next time
    computed(compute, dtype)                    put(compute(), dtype), which a program does at each replay
    constant(array, dtype)                      the same of one that never changes: brought there once
    launch(kernel, grid, threads, *arguments)   a fastpath.cuda.kernel.Kernel over a grid of blocks

What programs and caches use as well (program.py, arrays.py):

    memory(n_bytes)       u8[n] for as long as it is held; MemoryError
    staging(n_bytes)      u8[n] of the host, from where copies are fast
    fetch(array, host)    numbers of the device into an array of the host
    capture(launches)     -> run(): all of them, as fast as the device can, as often as wanted; with
                          is_early=False each after the one before it has ended
    time(launches)        runs them; seconds of each

Arrays of a device can do what numba's DeviceNDArray can without a copy and without a kernel: shape, strides,
dtype, size, len; reshape, ravel and view of contiguous ones; integers and slices as indices; copy_to_host and
copy_to_device, whole.  They are no NumPy arrays.
"""

import contextlib
import ctypes
import functools
import threading
import weakref

import numpy as np

DRIVER = "libcuda.so.1"
_current = None
_of_thread = threading.local()  # recorder: what stands in for the device while this thread records


@functools.cache
def why_not():
    """One line: why kernels cannot run on a GPU here.  None where they can.

    Looks for the driver first, which takes no time: importing numba-cuda to ask takes a second.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"no NVIDIA driver: {DRIVER} is not here"
    try:
        from numba import cuda
    except Exception as error:  # numba-cuda raises errors of its own where libraries are missing
        return f"numba-cuda does not import: {_line(error)}. Install twinpath[cuda]"
    try:
        cuda.get_current_device()
    except Exception as error:
        return f"no CUDA device: {_line(error)}"
    return None


def _line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_replaced():
    """Does something stand in the place of a GPU?"""
    return _current is not None


def missing():
    """One line: why kernels cannot run at all; None where there is a GPU, or something in its place."""
    return None if _current is not None else why_not()


def describe():
    """The name of the device in use."""
    return real().name


def current():
    """What ops use: the device, or what records them; RuntimeError where there is none."""
    return getattr(_of_thread, "recorder", None) or real()


def real():
    """The device in use, even while a program is recorded (program.py)."""
    return _current if _current is not None else _gpu()


def is_recorded():
    """Does this thread record a program?"""
    return getattr(_of_thread, "recorder", None) is not None


@contextlib.contextmanager
def recorded_by(recorder):
    """Ops of this thread use a recorder inside the `with`."""
    try:
        _of_thread.recorder = recorder
        yield
    finally:
        _of_thread.recorder = None


@contextlib.contextmanager
def use(device):
    """Kernels run on `device` inside the `with`."""
    global _current
    before, _current = _current, device
    try:
        yield device
    finally:
        _current = before


def put(array, dtype):
    """An input where kernels can read it; what is there already stays where it is."""
    return current().put(array, dtype)


def computed(compute, dtype):
    """put(compute(), dtype), for an input that the host computes from others."""
    return current().computed(compute, dtype)


def constant(array, dtype):
    """The same of an array that never changes, such as a weight: brought to the device once."""
    return current().constant(array, dtype)


def get(array):
    """An array of the device as one of the host."""
    return array if isinstance(array, np.ndarray) else array.copy_to_host()


def fill(array, numbers):
    """Numbers of the host into an array of the device."""
    if isinstance(array, np.ndarray):
        array[...] = numbers
    else:
        array.copy_to_device(np.ascontiguousarray(numbers, array.dtype))


@functools.cache
def _gpu():
    if reason := why_not():
        raise RuntimeError(f"backend cuda: {reason}")
    from fastpath.cuda.gpu import Gpu

    return Gpu()


class Constants:
    """Arrays of the host that were brought to a device, as long as they live there.

    upload  array of the host -> array of the device
    """

    def __init__(self, upload):
        self._upload, self._known = upload, {}

    def get(self, array, dtype):
        key = id(array), np.dtype(dtype)
        known = self._known.get(key)
        if known is not None and known[0]() is array:
            return known[1]
        made = self._upload(np.ascontiguousarray(array, dtype))
        self._known[key] = weakref.ref(array, functools.partial(_drop, self._known, key)), made
        return made

    def __len__(self):
        return len(self._known)

    def arrays(self):
        """Those of the device."""
        return [made for _, made in list(self._known.values())]


def _drop(known, key, reference):
    """Another array may have the same id by now."""
    if key in known and known[key][0] is reference:
        del known[key]
