"""What both executors share: arguments in guarded memory, thread schedules, and how results are compared."""

import ctypes
import struct
from typing import NamedTuple

import numpy as np
from numba import types

from tests.gpu_on_cpu import runtime


class KernelError(AssertionError):
    """A kernel broke a rule of the device; the message says what, and which block and thread."""


class Schedule(NamedTuple):
    """An order in which a device might run the threads of a grid."""

    name: str
    threads: str  # "forward", "backward" or "random": who is first in each round
    by_warps: bool = False  # a warp runs as far as it can, before the next one starts
    blocks_backward: bool = False

    def order(self, n):
        if self.threads == "random":
            return np.random.default_rng(7).permutation(n).astype(np.int32)
        step = 1 if self.threads == "forward" else -1
        return np.ascontiguousarray(np.arange(n, dtype=np.int32)[::step])


LOCKSTEP = Schedule("in turns", "forward")
# Results that differ between these depend on who came first: a barrier or a wait is missing.
SCHEDULES = (
    LOCKSTEP,
    Schedule("in turns, backward", "backward", blocks_backward=True),
    Schedule("warp after warp", "forward", by_warps=True),
    Schedule("warp after warp, backward", "backward", by_warps=True, blocks_backward=True),
    Schedule("random turns", "random"),
)


class Image:
    """A kernel compiled for this CPU.  Subclasses set address, signature, shared (a SharedLayout)."""

    def launch(self, grid, threads, arguments, dynamic=0, schedule=LOCKSTEP):
        """Run the grid; arrays are copied into guarded memory and back."""
        grid, threads = _three(grid), _three(threads)
        n_threads = int(np.prod(threads))
        dynamic_start = self.dynamic_start
        used = dynamic_start + dynamic
        if n_threads > 1024:
            raise KernelError(f"{n_threads} threads in a block; a device runs 1024")
        if self.shared.top + dynamic > runtime.SHARED_LIMIT:
            raise KernelError(
                f"{self.shared.top + dynamic} bytes of shared memory; sm_90 has {runtime.SHARED_LIMIT}"
            )
        gaps = [*self.shared.gaps, (self.shared.top, dynamic_start - self.shared.top), (used, runtime.GAP)]
        gaps = np.array(gaps, np.int64)
        memory = _Guarded()
        words = [
            word
            for kind, value in zip(self.signature, arguments, strict=True)
            for word in memory.words(kind, value)
        ]
        order = schedule.order(n_threads)
        failed = runtime.library().run_launch(
            self.address, (ctypes.c_uint64 * max(1, len(words)))(*words), (ctypes.c_int * 3)(*grid),
            (ctypes.c_int * 3)(*threads), dynamic, order.ctypes.data, schedule.by_warps,
            schedule.blocks_backward,
            gaps.ctypes.data, len(gaps), used + runtime.GAP,
        )  # fmt: skip
        memory.release(copy_back=not failed)
        if failed:
            raise KernelError(
                f"{self.name}: {runtime.library().run_error().decode()} (threads {schedule.name})"
            )

    @property
    def dynamic_start(self):
        return -(-(self.shared.top + runtime.GAP) // 128) * 128


class _Guarded:
    """Copies of arrays between two pages that nobody may touch, and the words of a kernel's arguments."""

    def __init__(self):
        self.copies = {}  # address: (array, copy, size, length)

    def words(self, kind, value):
        if isinstance(kind, types.Array):
            copy = self._copy(value, kind.layout)
            return [0, 0, copy.size, copy.itemsize, copy.ctypes.data, *copy.shape, *copy.strides]
        if isinstance(kind, types.BaseTuple):
            return [word for k, v in zip(kind, value, strict=True) for word in self.words(k, v)]
        if isinstance(kind, types.Float):
            code = "<f" if kind.bitwidth == 32 else "<d"
            return [int.from_bytes(struct.pack(code, value).ljust(8, b"\0"), "little")]
        return [int(value) & (2**64 - 1)]

    def _copy(self, array, layout):
        key = array.ctypes.data, array.nbytes  # an array that is given twice is one array
        if not array.flags.c_contiguous:
            if layout != "A":
                raise KernelError("an array argument is not C-contiguous")
            key += array.strides
        if key not in self.copies:
            size, length = max(1, array.nbytes), ctypes.c_size_t()
            at = runtime.library().run_guarded(size, ctypes.byref(length))
            copy = np.frombuffer((ctypes.c_char * size).from_address(at), np.uint8)[: array.nbytes]
            copy = copy.view(array.dtype).reshape(array.shape)
            copy[...] = array
            self.copies[key] = array, copy, at, size, length.value
        return self.copies[key][1].view(array.dtype).reshape(array.shape)

    def release(self, copy_back):
        spoilt = False
        for array, copy, at, size, length in self.copies.values():
            if copy_back and array.flags.writeable:
                array[...] = copy
            spoilt |= bool(runtime.library().run_guarded_free(at, size, length))
        if spoilt and copy_back:
            raise KernelError("bytes beside an array were written")


def _three(sizes):
    sizes = (sizes,) if np.isscalar(sizes) else tuple(sizes)
    return tuple(int(size) for size in (*sizes, 1, 1)[:3])


def run(image, grid, threads, arguments, dynamic=0, schedules=SCHEDULES):
    """Launch under each schedule from the same inputs; all must give the same bytes."""
    if len(schedules) == 1:  # nothing to compare with, and nothing to begin anew from
        image.launch(grid, threads, arguments, dynamic, schedules[0])
        return
    arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.flags.writeable]
    before, first = [a.copy() for a in arrays], None
    for schedule in schedules:
        for array, saved in zip(arrays, before, strict=True):
            array[...] = saved
        image.launch(grid, threads, arguments, dynamic, schedule)
        after = [a.tobytes() for a in arrays]
        if first is None:
            first = after
        elif after != first:
            raise KernelError(
                f"{image.name}: other results with threads {schedule.name} than {schedules[0].name}; "
                "a barrier or a wait is missing"
            )
