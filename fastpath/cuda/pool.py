"""Memory that results of ops take and give back, so that a call of a thousand ops allocates nothing.

A block is given back when the last array in it is gone, and is for the next taker of its size.  All kernels
run one after the other on one stream: whoever takes a block writes it after everybody before has read it.
"""

import weakref
from collections import defaultdict

from fastpath import locks

LEAST = 512  # bytes
STEPS = 4  # sizes between a power of two and the next one: a fifth at most of a block is unused


class Block:
    """address, size: bytes.  Alive as long as an array of it; `memory` is what the device gave."""

    __slots__ = ("__weakref__", "address", "memory", "size")

    def __init__(self, memory, address, size):
        self.memory, self.address, self.size = memory, address, size


class Pool:
    """
    allocate  bytes -> (memory, address); MemoryError where the device has no more.  Memory is given back to
              the device when nobody holds it
    most      bytes that are kept while nobody uses them
    """

    def __init__(self, allocate, most=1 << 30):
        self._allocate, self.most = allocate, most
        self._free = defaultdict(list)  # size -> [(memory, address)]
        self._lent = {}  # weak reference of a block -> (memory, address, size)
        self._busy = locks.reentrant()  # threads may share a device
        self._returned = []  # references of those whose block is gone
        self._n_free = 0  # bytes

    def take(self, n_bytes) -> Block:
        """At least so many bytes.

        Raises:
            MemoryError: the device has no more, not even after all that is unused was given back
        """
        with self._busy:
            self._collect()
            size = size_class(n_bytes)
            if self._free[size]:
                memory, address = self._free[size].pop()
                self._n_free -= size
            else:
                memory, address = self._new(size)
            block = Block(memory, address, size)
            # the callback is no Python code: an interrupt cannot get lost in it
            self._lent[weakref.ref(block, self._returned.append)] = memory, address, size
            return block

    def clear(self):
        """Gives everything that is unused back to the device."""
        with self._busy:
            self._collect()
            self._free.clear()
            self._n_free = 0

    @property
    def n_free(self):
        """Bytes that nobody uses."""
        with self._busy:
            self._collect()
            return self._n_free

    @property
    def n_lent(self):
        """Bytes that somebody uses."""
        with self._busy:
            self._collect()
            return sum(size for _, _, size in self._lent.values())

    def _new(self, size):
        try:
            return self._allocate(size)
        except MemoryError:
            self.clear()
        return self._allocate(size)

    def _collect(self):
        while self._returned:
            memory, address, size = self._lent.pop(self._returned.pop())
            if self._n_free + size <= self.most:
                self._free[size].append((memory, address))
                self._n_free += size


def size_class(n_bytes):
    """The size of a block for so many bytes."""
    if n_bytes <= LEAST:
        return LEAST
    step = (1 << (n_bytes - 1).bit_length() - 1) // STEPS
    return -(-n_bytes // step) * step
