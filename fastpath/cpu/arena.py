"""Private memory in huge pages, for weights: one piece per model, given back when the last view on it goes.

Through pages of 4 KB two cores read 21-25 GB/s, through pages of 2 MB 29-31.  Linux makes large ones on
request, for private memory without a file.  Elsewhere the memory is what the system gives.
Nothing is touched here: the threads that write first share the work of zeroing the pages.
"""

import mmap
import re
import sys
from pathlib import Path

import numpy as np

from fastpath.cpu.buffers import address

HUGE = 2 << 20
LINE = 64


class Arena:
    """`nbytes` of memory, handed out from the beginning in multiples of 64 bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self._memory = _huge_pages(nbytes) if sys.platform == "linux" else np.empty(nbytes + HUGE, np.uint8)
        self._memory = self._memory[-address(self._memory) % HUGE :]
        self._used = 0

    def take(self, nbytes):
        """u8[nbytes], aligned to 64 bytes."""
        begin = self._used
        if begin + nbytes > self.nbytes:
            raise ValueError(
                f"arena: {nbytes} bytes asked for, {self.nbytes - begin} of {self.nbytes} are left. "
                "The plan and the packing disagree, which is a fault of the program: report it"
            )
        self._used += -(-nbytes // LINE) * LINE
        return self._memory[begin : begin + nbytes]

    def resident_bytes(self):
        """How much of it has been touched, where the system says so (Linux)."""
        return self._mapped("Rss")

    def huge_bytes(self):
        """How much of that is in huge pages."""
        return self._mapped("AnonHugePages")

    def _mapped(self, name):
        try:
            text = Path("/proc/self/smaps").read_text()
        except OSError:
            return None
        first = address(self._memory)
        for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
            begin, end = (int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))
            if begin <= first < end:
                return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", entry, re.MULTILINE)[1])
        return None


def _huge_pages(nbytes):
    whole = -(-nbytes // HUGE) * HUGE
    memory = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # a system without them
    return np.frombuffer(memory, np.uint8)
