"""Private memory in huge pages, for weights: one piece per model, given back when the last view on it goes.

Reading through 4 KB pages the processor spends a third of its time on addresses; in pages of 2 MB it does not.
Linux makes them on request for private memory without a file.  Elsewhere the memory is what the system gives.
Nothing is touched here: the threads that write first share the work of zeroing the pages.
"""

import mmap
import sys

import numpy as np

from fastpath.cpu.buffers import address

HUGE = 2 << 20
LINE = 64


class Arena:
    """`n_bytes` of memory, handed out from the beginning in multiples of 64 bytes."""

    def __init__(self, n_bytes):
        self.nbytes = n_bytes
        self._memory = (
            _huge_pages(n_bytes) if sys.platform == "linux" else _aligned(np.empty(n_bytes + HUGE, np.uint8))
        )
        self._used = 0

    def take(self, n_bytes):
        """u8[n_bytes], aligned to 64 bytes."""
        begin = self._used
        if begin + n_bytes > self.nbytes:
            raise ValueError(
                f"arena: {n_bytes} bytes asked for, {self.nbytes - begin} of {self.nbytes} are left. "
                "This is a fault of the program: the plan and the packing disagree"
            )
        self._used += -(-n_bytes // LINE) * LINE
        return self._memory[begin : begin + n_bytes]


def _huge_pages(n_bytes):
    whole = -(-n_bytes // HUGE) * HUGE
    memory = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # a system without them
    return _aligned(np.frombuffer(memory, np.uint8))


def _aligned(memory):
    """The view from the first multiple of 2 MB on."""
    return memory[-address(memory) % HUGE :]
