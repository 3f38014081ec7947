"""The executors in the place of a GPU: `with fastpath.cuda.device.use(...)` runs the op table on them.

Their arrays are as strict as a GPU's: a DeviceArray can do what numba's DeviceNDArray does without a copy
and without a kernel of its own, and nothing else.  What passes here passes there.
"""

import time

import numpy as np

from fastpath.cuda.device import Constants
from tests.gpu_on_cpu import ir_executor, launching, ptx_executor


class DeviceArrayError(TypeError):
    """Something that device arrays cannot do; the message names it."""


class DeviceArray:
    """A handle of memory that only kernels read and write: shape, views, whole copies.

    Views are of C-contiguous arrays (`reshape`, `ravel`, other item sizes) or by integers and slices.
    """

    __array_ufunc__ = None  # NumPy's operators leave an operand of this kind alone
    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory):
        self._memory = memory

    # -- what it is

    shape = property(lambda self: self._memory.shape)
    strides = property(lambda self: self._memory.strides)
    dtype = property(lambda self: self._memory.dtype)
    ndim = property(lambda self: self._memory.ndim)
    size = property(lambda self: self._memory.size)
    nbytes = property(lambda self: self._memory.nbytes)

    def __len__(self):
        return len(self._memory)

    def __repr__(self):
        return f"DeviceArray({self.dtype}{list(self.shape)})"

    # -- views

    def reshape(self, *shape):
        if not self._memory.flags.c_contiguous:
            raise DeviceArrayError(f"{self!r}.reshape: it is not contiguous, and nobody copies it")
        return self._alike(self._memory.reshape(*shape))

    def ravel(self):
        return self.reshape(-1)

    def view(self, dtype):
        if self.dtype.itemsize != np.dtype(dtype).itemsize and not self._memory.flags.c_contiguous:
            raise DeviceArrayError(f"{self!r}.view({np.dtype(dtype)}): it is not contiguous")
        return self._alike(self._memory.view(dtype))

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        for k in keys:
            if not isinstance(k, (int, np.integer, slice)):
                raise DeviceArrayError(
                    f"{self!r}[{type(k).__name__}]: only integers and slices. Write a kernel, or use get_rows"
                )
        if sum(not isinstance(k, slice) for k in keys) >= self.ndim:
            raise DeviceArrayError(
                f"{self!r}: numbers of it are on the device. device.get brings all of them"
            )
        return self._alike(self._memory[key])

    def _alike(self, memory):
        return DeviceArray(memory)

    @property
    def __cuda_array_interface__(self):
        """Where it is, for those who compare places."""
        return self._memory.__array_interface__

    # -- copies

    def copy_to_host(self):
        return self._memory.copy()

    def copy_to_device(self, other):
        """Overwrites all of it with an array of the host or of the device: same shape, same dtype."""
        theirs = other._memory if isinstance(other, DeviceArray) else other
        if not isinstance(theirs, np.ndarray) or (theirs.shape, theirs.dtype) != (self.shape, self.dtype):
            raise DeviceArrayError(f"{self!r}.copy_to_device: got {theirs!r}")
        for memory in (self._memory, theirs):
            if not memory.flags.c_contiguous:
                raise DeviceArrayError(f"{self!r}.copy_to_device: both must be contiguous")
        self._memory[...] = theirs


def _refuse(name):
    def method(self, *_arguments, **_options):
        raise DeviceArrayError(f"{self!r}: {name} is nothing that a device array can do")

    return method


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_REFUSED = [
    *(prefix + name for name in _OPERATORS for prefix in ("", "r", "i")),
    *("neg pos abs invert lt le gt ge eq ne bool int float index complex iter contains".split()),
    *("setitem array array_function array_interface".split()),
]
for _name in _REFUSED:
    setattr(DeviceArray, f"__{_name}__", _refuse(f"__{_name}__"))
DeviceArray.__hash__ = object.__hash__
DeviceArray.__array_interface__ = property(_refuse("__array_interface__"))


class Executor:
    """
    image_of   Kernel -> launching.Image
    schedules  thread orders under which every launch is repeated, and must give the same bytes
    """

    name = "an executor on the CPU"

    def __init__(self, image_of, schedules=launching.SCHEDULES):
        self.image_of, self.schedules = image_of, schedules
        self.launched = {}  # kernel name: number of launches
        self.uploads = 0
        self._constants = Constants(self._upload)

    def empty(self, shape, dtype):
        """NaN, or -1, until it is written."""
        return DeviceArray(_unwritten(shape, dtype))

    def put(self, array, dtype):
        return self._upload(np.asarray(array, dtype)) if isinstance(array, np.ndarray) else array

    def computed(self, compute, dtype):
        return self.put(compute(), dtype)

    def constant(self, array, dtype):
        return self._constants.get(array, dtype) if isinstance(array, np.ndarray) else array

    def memory(self, n_bytes):
        return self.empty((n_bytes,), np.uint8)

    def staging(self, n_bytes):
        return np.full(n_bytes, 0xFF, np.uint8)

    def fetch(self, array, host):
        host[...] = array.copy_to_host()

    def capture(self, launches, is_early=True):
        return lambda: self.time(launches)

    def time(self, launches):
        return [self._timed(launch) for launch in launches]

    def _timed(self, launch):
        start = time.perf_counter()
        self.launch(launch.kernel, launch.grid, launch.threads, *launch.arguments)
        return time.perf_counter() - start

    def _upload(self, array):
        self.uploads += 1
        return DeviceArray(np.array(array, order="C"))

    def launch(self, kernel, grid, threads, *arguments):
        self.launched[kernel.name] = self.launched.get(kernel.name, 0) + 1
        arguments = [self._argument(kernel, argument) for argument in arguments]
        launching.run(self.image_of(kernel), grid, threads, arguments, schedules=self.schedules)

    def _argument(self, kernel, argument):
        if isinstance(argument, DeviceArray):
            return argument._memory
        if isinstance(argument, np.ndarray):
            raise DeviceArrayError(
                f"{kernel.name}: an array of the host ({argument.dtype}{list(argument.shape)}) given to a "
                "kernel. Bring it to the device first: device.put, or device.constant"
            )
        return argument


class OnHostArrays(Executor):
    """For tests of single kernels, which compare with NumPy at once: NumPy's arrays are the device's."""

    def empty(self, shape, dtype):
        return _unwritten(shape, dtype)

    def put(self, array, dtype):
        return np.asarray(array, dtype)

    constant = put

    def _argument(self, kernel, argument):
        return argument


def _unwritten(shape, dtype):
    n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.full(n_bytes, 0xFF, np.uint8).view(dtype).reshape(shape)


def executor_one(schedules=launching.SCHEDULES, kind=Executor):
    return kind(lambda kernel: ir_executor.image(kernel.function, kernel.signature, kernel.bounds), schedules)


def executor_two(architecture, schedules=launching.SCHEDULES, kind=Executor):
    def image_of(kernel):
        return ptx_executor.image(kernel.function, kernel.signature, architecture, kernel.bounds)

    return kind(image_of, schedules)
