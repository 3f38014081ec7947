"""Arrays whose memory comes later: what ops see while a program is recorded.

Each result has a buffer of its own while nothing has memory, so that who reads what is plain; `layout` then
gives buffers that are never needed at the same time the same bytes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from fastpath.cuda.pool import size_class

FIRST_ADDRESS = 1 << 60  # no device, and no host, has memory there
GAP = 1 << 12
ALIGN = 256


class PlanError(ValueError):
    """Something that an array without memory cannot do."""


class Buffer:
    """address: where it seems to be; two buffers of a program never overlap."""

    def __init__(self, address: int, n_bytes: int):
        self.address, self.n_bytes = address, n_bytes


class _Interface:
    def __init__(self, address, shape, dtype):
        self.__array_interface__ = {
            "data": (address, False), "shape": tuple(shape), "typestr": np.dtype(dtype).str, "version": 3,
        }  # fmt: skip


class Planned:
    """An array of a device, as device.py describes them, but for its numbers.

    _ghost  NumPy's idea of the array at an address where nothing is: it computes views, nobody looks inside
    """

    __slots__ = ("__weakref__", "_ghost", "_read", "buffer")

    def __init__(self, buffer: Buffer, ghost, read):
        self.buffer, self._ghost, self._read = buffer, ghost, read

    shape = property(lambda self: self._ghost.shape)
    strides = property(lambda self: self._ghost.strides)
    dtype = property(lambda self: self._ghost.dtype)
    ndim = property(lambda self: self._ghost.ndim)
    size = property(lambda self: self._ghost.size)
    nbytes = property(lambda self: self._ghost.nbytes)

    def __len__(self):
        return len(self._ghost)

    def __repr__(self):
        return f"Planned({self.dtype}{list(self.shape)})"

    @property
    def __cuda_array_interface__(self):
        return self._ghost.__array_interface__

    @property
    def offset(self) -> int:
        """Bytes from the beginning of the buffer."""
        return self._ghost.__array_interface__["data"][0] - self.buffer.address

    @property
    def is_contiguous(self) -> bool:
        return self._ghost.flags.c_contiguous

    def reshape(self, *shape):
        return self._alike(self._contiguous().reshape(*shape))

    def ravel(self):
        return self.reshape(-1)

    def view(self, dtype):
        ghost = self._ghost if self.dtype.itemsize == np.dtype(dtype).itemsize else self._contiguous()
        return self._alike(ghost.view(dtype))

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(k, (int, np.integer, slice)) for k in keys) or len(keys) > self.ndim:
            raise PlanError(f"{self!r}: got indices {keys}, expected integers and slices")
        if sum(not isinstance(k, slice) for k in keys) == self.ndim:
            raise PlanError(f"{self!r}: a number of it is asked for, and it has none yet")
        return self._alike(self._ghost[key])

    def copy_to_host(self):
        """An array that holds the numbers when the program has run."""
        return self._read(self)

    def copy_to_device(self, other):
        raise PlanError(f"{self!r}: only kernels write it")

    def _contiguous(self):
        if not self.is_contiguous:
            raise PlanError(f"{self!r} is not contiguous, and nobody copies it")
        return self._ghost

    def _alike(self, ghost):
        return Planned(self.buffer, ghost, self._read)


class Planner:
    """Buffers side by side in no memory at all."""

    def __init__(self):
        self._next = FIRST_ADDRESS

    def array(self, shape, dtype, read) -> Planned:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = Buffer(self._next, n_bytes)
        self._next += (n_bytes // GAP + 2) * GAP
        return Planned(buffer, np.asarray(_Interface(buffer.address, shape, dtype)), read)


def in_memory(planned: Planned, memory, start: int):
    """The array in memory of a device, u8[n], whose bytes from `start` on are the buffer's."""
    if not planned.is_contiguous:
        raise PlanError(f"{planned!r} is not contiguous: a kernel cannot take it when it is replayed")
    first = start + planned.offset
    return memory[first : first + planned.nbytes].view(planned.dtype).reshape(*planned.shape)


def layout(uses: Iterable[Iterable[Buffer]], kept: Iterable[Buffer]) -> tuple[dict[Buffer, int], int]:
    """Where buffers lie in one piece of memory, and its bytes.

    Args:
        uses: the buffers of each step, in order
        kept: those that are read after the last step
    """
    uses = [set(step) for step in uses]
    last = {buffer: i for i, step in enumerate(uses) for buffer in step}
    last |= dict.fromkeys(kept, len(uses))
    free: dict[int, list[int]] = defaultdict(list)
    starts: dict[Buffer, int] = {}
    end = 0
    for i, step in enumerate(uses):
        for buffer in sorted(step - starts.keys(), key=lambda buffer: buffer.address):
            size = _size(buffer)
            if free[size]:
                starts[buffer] = free[size].pop()
            else:
                starts[buffer], end = end, end + size
        for buffer in step:
            if last[buffer] == i:
                free[_size(buffer)].append(starts[buffer])
    return starts, end


def _size(buffer: Buffer) -> int:
    return -(-size_class(buffer.n_bytes) // ALIGN) * ALIGN
