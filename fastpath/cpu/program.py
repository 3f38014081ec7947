"""A forward call as a flat program: recorded once while it runs, then replayed in one compiled call.

    with record() as program:
        logits = forward(...)        # runs as ever; each kernel call is noted as a step
    ...                              # other ids, positions and lanes into the same batch arrays
    program.replay()                 # the same steps on the same memory: `logits` holds the new rows

A step is what `threads.run` was given: a kernel, its argument words, its number of items.  Since words are
addresses and shapes, never values of the call (recording.py has the rules), the steps hold for any values.

Results of ops lie in the program's own memory.  A block whose array nobody holds any more while recording is
given to a later op, as the interpreter's allocator would do; the replay repeats the order of the recording,
so what was safe then is safe now.  And the working set stays a few hundred KB, whatever the number of layers.
"""

import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fastpath.cpu import recording, threads

ALIGN = 64


@dataclass(frozen=True)
class Timing:
    """One step of a timed replay.

    kernel  name of the kernel          label  what it worked on (a weight's name), or None
    mark    the first name traced after the step: the llama.cpp name of what it helped to compute, or ""
    """

    kernel: str
    label: str | None
    mark: str
    seconds: float


class Program:
    """Steps in the order of computation, with everything that their addresses point to."""

    def __init__(self):
        self.n_threads = threads.num_threads()
        self.host_steps = []  # callables, run before the compiled steps
        self.workspaces = {}
        self.busy = threading.Lock()
        self._kept = []
        self._free = defaultdict(list)  # bytes -> blocks that no array uses
        self._steps = []  # (kernel, args, n, grain)
        self._names = []  # (kernel's name, label), and the mark once it is known

    def __len__(self):
        return len(self._steps)

    # -- while recording

    def append(self, kernel, args, n, grain, label):
        self._steps.append((kernel, args, n, grain))
        self._names.append((kernel.name, label))

    def keep(self, array):
        """The memory of this array stays, unless it is the program's own."""
        owner = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        if not isinstance(owner, _Block):
            self._kept.append(array)

    def array(self, shape, dtype):
        """Memory for the result of an op."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = 1 << max(n_bytes - 1, ALIGN - 1).bit_length()
        memory = self._free[size].pop() if self._free[size] else _aligned(size)
        return np.asarray(_Block(self._free[size], memory, shape, np.dtype(dtype).str))

    def mark(self, name, _array):
        """A trace: steps since the last name get this one."""
        first = len(self._names)
        while first and len(self._names[first - 1]) == 2:
            first -= 1
        self._names[first:] = [(*names, name) for names in self._names[first:]]

    def seal(self):
        """Recording is over: the steps as a table."""
        words = [word for _, args, _, _ in self._steps for word in args]
        self._words = np.array(words, np.int64)
        table, at = [], self._words.ctypes.data
        for kernel, args, n, grain in self._steps:
            table.append((kernel.address, at, n, grain))
            at += 8 * len(args)
        self._table = np.array(table, np.int64).reshape(-1, threads.STEP // 8)
        self._address = self._table.ctypes.data

    # -- afterwards

    def replay(self, stamps=0):
        """Compute all steps.  Not twice at once: whoever shares a program holds `busy`, also while reading."""
        for step in self.host_steps:
            step()
        threads.run_steps(self._address, len(self._steps), self.n_threads, stamps)

    def timed(self):
        """Replay and say how long each step took: Timings in order."""
        stamps = np.zeros(len(self._steps) + 1, np.int64)
        begin = time.perf_counter()
        self.replay(stamps.ctypes.data)
        elapsed = time.perf_counter() - begin
        return stamps, elapsed


class _Block:
    """The memory of one array, given back to the program when the last view of it is gone."""

    def __init__(self, free, memory, shape, typestr):
        self.free, self.memory = free, memory
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False), "shape": tuple(shape), "typestr": typestr, "version": 3,
        }  # fmt: skip

    def __del__(self):
        self.free.append(self.memory)


def _aligned(size):
    memory = np.zeros(size + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + size]


@contextmanager
def record():
    """Record what this thread computes; yields the Program, which can be replayed when the block ends."""
    program = Program()
    recording.start(program)
    try:
        yield program
    finally:
        recording.start(None)
    program.seal()
