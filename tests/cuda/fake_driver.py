"""A driver without a GPU (fastpath.cuda.driver): arrays are on the host, what is asked for is noted."""

import numpy as np

from tests.gpu_on_cpu.devices import DeviceArray


class FakeDriver:
    """
    calls     what was asked for, in order: (what, ...)
    capacity  bytes of the device; allocate raises MemoryError beyond
    compute   (function, arguments): what a launch does, or a graph for each of its launches
    can_start_early  kernels are given what early.MORE says as well
    """

    name = "a fake"
    stream = "the default stream"

    def __init__(self, capacity=1 << 40, compute=lambda function, arguments: None, can_start_early=False):
        self.calls, self.capacity, self.compute, self.used = [], capacity, compute, 0
        self.can_start_early = can_start_early

    def allocate(self, n_bytes):
        if self.used + n_bytes > self.capacity:
            raise MemoryError(f"the GPU refuses {n_bytes} bytes")
        self.calls.append(("allocate", n_bytes))
        memory = _Memory(self, n_bytes)
        return memory, memory.host.ctypes.data

    def free_bytes(self):
        return self.capacity - self.used

    def array(self, owner, address, shape, dtype):
        memory = owner.memory
        shape = shape if isinstance(shape, tuple) else (shape,)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        made = _Array(memory.host[:n_bytes].view(dtype).reshape(shape), owner, self)
        assert n_bytes == 0 or made.__cuda_array_interface__["data"][0] == address
        return made

    def staging(self, n_bytes):
        return np.zeros(n_bytes, np.uint8)

    def compile(self, kernel):
        assert not any(call[0] == "begin" for call in self.calls[-1:]), "compiled during a capture"
        self.calls.append(("compile", kernel.name))
        return kernel.function

    def launch(self, compiled, grid, threads, arguments, stream=0, is_early=False):
        if isinstance(stream, FakeBuilder):
            stream.launches.append((compiled, arguments))
            self.calls.append(("captured early" if is_early else "captured", compiled.__name__))
            return
        assert not is_early, "outside of graphs, copies come between kernels"
        self.calls.append(("launch", compiled.__name__))
        self.compute(compiled, arguments)

    def graph_builder(self):
        return FakeBuilder(self)

    def event(self):
        self.calls.append(("event",))
        return len(self.calls)

    def seconds(self, start, end):
        return float(end - start)


class _Memory:
    """Bytes that are the device's again when nobody holds them."""

    def __init__(self, driver, n_bytes):
        self.driver, self.n_bytes = driver, n_bytes
        self.host = np.full(n_bytes, 0xFF, np.uint8)
        driver.used += n_bytes

    def __del__(self):
        self.driver.used -= self.n_bytes
        self.driver.calls.append(("free", self.n_bytes))


class _Array(DeviceArray):
    """Its views hold the owner, as numba's do."""

    __slots__ = ("driver", "owner")

    def __init__(self, memory, owner, driver):
        super().__init__(memory)
        self.owner, self.driver = owner, driver

    def _alike(self, memory):
        return _Array(memory, self.owner, self.driver)

    def copy_to_host(self, host=None):
        self.driver.calls.append(("read", self.nbytes))
        if host is None:
            return super().copy_to_host()
        host[...] = self._memory
        return host

    def copy_to_device(self, other):
        self.driver.calls.append(("write", self.nbytes))
        super().copy_to_device(other)


class FakeBuilder:
    """As cuda.core's GraphBuilder."""

    def __init__(self, driver):
        self.driver, self.launches = driver, []

    def begin_building(self):
        self.driver.calls.append(("begin",))
        return self

    def end_building(self):
        self.driver.calls.append(("end",))
        return self

    def complete(self):
        self.driver.calls.append(("complete",))
        return self

    def upload(self, stream):
        assert stream == self.driver.stream

    def launch(self, stream):
        assert stream == self.driver.stream
        self.driver.calls.append(("graph",))
        for compiled, arguments in self.launches:
            self.driver.compute(compiled, arguments)
