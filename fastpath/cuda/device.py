"""Who runs the kernels: the GPU of this machine, or what a test puts in its place.

A device has four methods:

    empty(shape, dtype)                         an array of undefined numbers where kernels can use it
    put(array, dtype)                           an array of the host, there: an input, other numbers next time
    constant(array, dtype)                      the same of one that never changes: brought there once
    launch(kernel, grid, threads, *arguments)   a fastpath.cuda.kernel.Kernel over a grid of blocks

Arrays of a device can do what numba's DeviceNDArray can without a copy and without a kernel: shape, strides,
dtype, size, len; reshape, ravel and view of contiguous ones; integers and slices as indices; copy_to_host and
copy_to_device, whole.  They are no NumPy arrays.
"""

import contextlib
import functools
import weakref

import numpy as np

_current = None


@functools.cache
def why_not():
    """One line: why kernels cannot run on a GPU here.  None where they can."""
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


def missing():
    """One line: why kernels cannot run at all; None where there is a GPU, or something in its place."""
    return None if _current is not None else why_not()


def describe():
    """The name of the device in use."""
    return current().name


def current():
    """The device in use; RuntimeError where there is none."""
    if _current is not None:
        return _current
    return _gpu()


def real():
    """The device in use, even while a program is recorded (program.py)."""
    return current()


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


def _drop(known, key, reference):
    """Another array may have the same id by now."""
    if key in known and known[key][0] is reference:
        del known[key]


class Gpu:
    """The GPU through numba-cuda.  Kernels are compiled when they are launched first."""

    def __init__(self):
        from numba import cuda

        self._compiled, self._constants = {}, Constants(cuda.to_device)
        self.name = str(cuda.get_current_device().name)

    def empty(self, shape, dtype):
        from numba import cuda

        return cuda.device_array(shape, dtype)

    def put(self, array, dtype):
        from numba import cuda

        if not isinstance(array, np.ndarray):
            return array
        return cuda.to_device(np.ascontiguousarray(array, dtype))

    def constant(self, array, dtype):
        return self._constants.get(array, dtype) if isinstance(array, np.ndarray) else array

    def launch(self, kernel, grid, threads, *arguments):
        if kernel not in self._compiled:
            from numba import cuda

            options = {"launch_bounds": kernel.bounds} if kernel.bounds else {}
            self._compiled[kernel] = cuda.jit(kernel.function, **options)
        self._compiled[kernel][grid, threads](*arguments)
