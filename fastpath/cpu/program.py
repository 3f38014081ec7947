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

import time
import weakref
from collections import defaultdict
from contextlib import contextmanager

import numpy as np

from fastpath.cpu import recording, threads
from fastpath.cpu.recording import UnableError
from fastpath.replay import Timing

__all__ = ["Program", "Timing", "UnableError", "is_recording", "record"]

ALIGN = 64


class Program:
    """Steps in the order of computation, with everything that their addresses point to."""

    is_dry = False  # True: steps are noted, and not computed (warm.py)

    def __init__(self):
        self.n_threads = threads.num_threads()
        self._most = threads.MAX_THREADS  # that all steps have scratch memory for
        self.host_steps = []  # callables, run before the compiled steps
        self.workspaces = {}
        self._kept = []
        self._free = defaultdict(list)  # bytes -> memory that no array uses
        self._lent = {}  # weak reference of a block -> its memory
        self._returned = []  # those whose block is gone
        self._steps = []  # (kernel, args, n, grain)
        self._labels = []
        self._marks = []  # of the first steps; those that follow have none yet

    def __len__(self):
        return len(self._steps)

    # -- while recording

    def append(self, kernel, args, n, grain, n_threads, label):
        self._most = min(self._most, n_threads)
        self._steps.append((kernel, args, n, grain))
        self._labels.append(label)

    def keep(self, array):
        """The memory of this array stays, unless it is the program's own."""
        owner = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        if not isinstance(owner, _Block):
            self._kept.append(array)

    def array(self, shape, dtype, is_new=False):
        """Memory for the result of an op; is_new: that no step has used before."""
        while self._returned:
            memory = self._lent.pop(self._returned.pop())
            self._free[len(memory)].append(memory)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = 1 << max(n_bytes - 1, ALIGN - 1).bit_length()
        memory = self._free[size].pop() if self._free[size] and not is_new else _aligned(size)
        block = _Block(memory, shape, np.dtype(dtype).str)
        # the callback is no Python code: an interrupt cannot get lost in it
        self._lent[weakref.ref(block, self._returned.append)] = memory
        return np.asarray(block)

    def mark(self, name, _array):
        """A trace: the steps since the last name get this one."""
        self._marks += [name] * (len(self._steps) - len(self._marks))

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

    @property
    def is_stale(self):
        """Another number of threads is set: it computes the same, on as many as it was recorded for."""
        return self.n_threads != threads.num_threads()

    def replay(self):
        """Compute all steps.  Not twice at once, and not while somebody reads the results."""
        for step in self.host_steps:
            step()
        threads.run_steps(self._address, len(self._steps), self._most)

    def timed(self):
        """Replay and say how long each step took: Timings in order, those of the host steps first."""
        begin = time.perf_counter()
        for step in self.host_steps:
            step()
        middle = time.perf_counter()
        stamps = np.zeros(1 + len(self._steps), np.int64)
        threads.run_steps(self._address, len(self._steps), self._most, stamps.ctypes.data)
        end = time.perf_counter()
        ticks = np.diff(stamps)
        seconds = ticks * ((end - middle) / max(1, stamps[-1] - stamps[0]))
        marks = self._marks + [""] * (len(self._steps) - len(self._marks))
        timings = [Timing("host", None, "", middle - begin)]
        for (kernel, *_), label, mark, s in zip(self._steps, self._labels, marks, seconds, strict=True):
            timings.append(Timing(kernel.name, label, mark, float(s)))
        return timings


class _Block:
    """The memory of one array: alive as long as any view of it."""

    def __init__(self, memory, shape, typestr):
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False), "shape": tuple(shape), "typestr": typestr, "version": 3,
        }  # fmt: skip


def _aligned(size):
    memory = np.zeros(size + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + size]


def is_recording():
    """True while this thread records: another recording has to wait."""
    return recording.current() is not None


@contextmanager
def record():
    """Record what this thread computes; yields the Program, which can be replayed when the block ends."""
    program = Program()
    try:
        recording.of_thread.program = program
        yield program
    finally:
        recording.of_thread.program = None
    program.seal()
