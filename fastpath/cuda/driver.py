"""Everything that is asked of numba-cuda, of cuda.core and of the driver behind them: one small class.

Tests put another one in its place (tests/cuda/fake_driver.py).  Launches, copies and graphs go to one stream,
the default one, so that they run in the order in which they were asked for.
"""

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from fastpath.cuda import early


class Compiled(NamedTuple):
    """
    function  numba's
    waits     its PTX waits for the kernel before it: it may be launched early
    """

    function: Any
    waits: bool


class Driver:
    """The GPU of this process."""

    def __init__(self):
        from numba import cuda
        from numba.cuda.cudadrv.driver import _to_core_stream

        self._cuda = cuda
        self.name = str(cuda.get_current_device().name)
        self.stream = _to_core_stream(0)
        self.can_start_early = tuple(cuda.get_current_device().compute_capability) >= early.FROM

    def allocate(self, n_bytes):
        """(memory, address): given back to the device when nobody holds it any more.

        Raises:
            MemoryError: the device has no more; names the bytes
        """
        with _memory_errors(n_bytes):
            memory = self._cuda.current_context().memalloc(n_bytes)
        return memory, int(memory.device_pointer)

    def array(self, owner, address, shape, dtype):
        """An array in memory that lives as long as `owner`, a pool.Block: it and its views hold it."""
        from numba.cuda.cudadrv.devicearray import DeviceNDArray
        from numba.cuda.cudadrv.driver import MemoryPointer, binding

        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        dtype = np.dtype(dtype)
        strides = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        n_bytes = math.prod(shape) * dtype.itemsize
        pointer = MemoryPointer(
            self._cuda.current_context(), binding.CUdeviceptr(address), n_bytes, owner=owner
        )
        return DeviceNDArray(shape, strides, dtype, gpu_data=pointer)

    def free_bytes(self):
        return int(self._cuda.current_context().get_memory_info().free)

    def staging(self, n_bytes):
        """u8[n] of the host that the device reads and writes by itself."""
        return self._cuda.pinned_array(n_bytes, np.uint8)

    def compile(self, kernel):
        """For one signature, and no other: what was checked is what runs.  Where kernels can start early:
        early.kernel_of's."""
        kernel = early.kernel_of(kernel) if self.can_start_early else kernel
        options = {"launch_bounds": kernel.bounds} if kernel.bounds else {}
        made = self._cuda.jit(kernel.signature, **options)(kernel.function)
        return Compiled(made, early.waits_first(_only(made).inspect_asm(None)))

    def launch(self, compiled, grid, threads, arguments, stream=0, is_early=False):
        """is_early: before the launch before it has ended, if the kernel waits for that by itself."""
        if not (is_early and compiled.waits):
            compiled.function[grid, threads, stream](*arguments)
            return
        from cuda.core import LaunchConfig, launch

        kernel = _only(compiled.function)
        numbers: list[Any] = []
        for kind, value in zip(kernel.argument_types, arguments, strict=True):
            kernel._prepare_args(kind, value, stream, [], numbers)
        config = LaunchConfig(grid=grid, block=threads, programmatic_stream_serialization=True)
        launch(stream, config, kernel.library.get_cufunc().kernel, *numbers)

    def graph_builder(self):
        from cuda.core import Device

        device = Device()
        device.set_current()
        return device.create_graph_builder()

    def event(self):
        """What happens now on the stream."""
        event = self._cuda.event()
        event.record()
        return event

    def seconds(self, start, end):
        """Between two events."""
        end.synchronize()
        return self._cuda.event_elapsed_time(start, end) / 1e3


def _only(function):
    """numba's kernel of the only signature that a function was compiled for."""
    (kernel,) = function.overloads.values()
    return kernel


@contextlib.contextmanager
def _memory_errors(n_bytes):
    from numba.cuda.cudadrv.driver import CudaAPIError, binding

    try:
        yield
    except CudaAPIError as error:
        if error.code != int(binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise
        raise MemoryError(f"the GPU refuses {n_bytes} bytes") from None
