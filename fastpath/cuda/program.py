"""A forward call as a list of launches: recorded once, then replayed with other numbers in its inputs.

    with record() as program:
        logits = forward(...)        # nothing runs yet: each launch is noted
    ...                              # the block has ended: everything ran once, `logits` holds the rows
    ...                              # other ids, positions, lanes and tables into the same host arrays
    program.replay()                 # the same launches: `logits` holds the new rows

While recording, results have no memory (planned.py).  At the end launches are fused (fuse.py), buffers are
laid out, and all of it runs once, which compiles what was not compiled.  From then on a GPU launches all
as one CUDA graph.  Inputs lie side by side: one copy brings all of them before each replay.

Launch arguments are shapes and numbers of the model, never numbers of the call: those come in inputs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.planned import ALIGN, Buffer, PlanError, Planned, Planner, in_memory, layout
from fastpath.replay import Timing

__all__ = ["Launch", "Program", "UnableError", "is_recording", "record"]

UnableError = PlanError


@dataclass(frozen=True)
class Launch:
    """A kernel over a grid of blocks; arguments are arrays of the device and numbers.

    mark  the first name traced afterwards: the llama.cpp name of what it helped to compute, or ""
    """

    kernel: Kernel
    grid: Any
    threads: int
    arguments: tuple
    mark: str = ""


@dataclass
class Input:
    """array(): the numbers of the call, an array of the host; planned: where launches read them."""

    array: Callable[[], np.ndarray]
    planned: Planned


class Recorder:
    """The device in use while a program is recorded: it notes what it is asked for."""

    def __init__(self, real: Any):
        self.real, self.name = real, real.name
        self.launches: list[Launch] = []
        self.inputs: list[Input] = []
        self.outputs: list[tuple[Planned, np.ndarray]] = []
        self._planner = Planner()
        self._n_marked = 0

    def empty(self, shape, dtype):
        return self._planner.array(shape, dtype, self._read)

    def put(self, array, dtype):
        return self.computed(lambda: array, dtype) if isinstance(array, np.ndarray) else array

    def computed(self, compute, dtype):
        planned = self.empty(compute().shape, dtype)
        self.inputs.append(Input(compute, planned))
        return planned

    def constant(self, array, dtype):
        return self.real.constant(array, dtype)

    def launch(self, kernel, grid, threads, *arguments):
        if self.outputs:
            raise UnableError(f"{kernel.name}: launched after results were read. Read them at the end")
        self.launches.append(Launch(kernel, grid, threads, arguments))

    def mark(self, name):
        for i in range(self._n_marked, len(self.launches)):
            self.launches[i] = replace(self.launches[i], mark=name)
        self._n_marked = len(self.launches)

    def _read(self, planned):
        host = self.real.staging(planned.nbytes).view(planned.dtype).reshape(planned.shape)
        self.outputs.append((planned, host))
        return host


class Program:
    """Launches in the order of computation, with the memory that they use.

    launches  as they are replayed: on arrays with memory
    """

    def __init__(self):
        self.launches: list[Launch] = []
        self.n_recorded = 0  # launches before they were fused
        self._device = device.real()
        self._recorder = Recorder(self._device)

    def __len__(self):
        return len(self.launches)

    @property
    def is_stale(self) -> bool:
        """Another device is in use."""
        return self._device is not device.real()

    def mark(self, name: str, _array: Any) -> None:
        """A trace: the launches since the last name get this one."""
        self._recorder.mark(name)

    def seal(self) -> None:
        """Recording is over: launches get memory, and run."""
        recorder = self._recorder
        del self._recorder
        self.n_recorded = len(recorder.launches)
        launches = _fused(recorder.launches, [planned for planned, _ in recorder.outputs])
        inputs = self._lay_out_inputs(recorder.inputs)
        self._lay_out(launches, inputs, recorder.outputs)
        self._replay = self._eagerly
        self.replay()  # what is not compiled yet is compiled now: nothing may be while a graph is captured
        self._replay = self._device.capture(self.launches)

    def _lay_out_inputs(self, inputs: list[Input]) -> dict[Buffer, tuple[Any, int]]:
        starts, end = [], 0
        for one in inputs:
            starts.append(end)
            end += max(1, -(-one.planned.nbytes // ALIGN)) * ALIGN
        self._input_memory = self._device.memory(max(end, ALIGN))
        self._staging = self._device.staging(max(end, ALIGN))
        self._staging[:] = 0
        self._inputs = []
        for one, start in zip(inputs, starts, strict=True):
            p = one.planned
            place = self._staging[start : start + p.nbytes].view(p.dtype).reshape(p.shape)
            self._inputs.append((one.array, place))
        return {
            one.planned.buffer: (self._input_memory, start) for one, start in zip(inputs, starts, strict=True)
        }

    def _lay_out(self, launches, inputs, outputs) -> None:
        """Results of ops in one piece of memory."""
        uses = [
            {a.buffer for a in launch.arguments if isinstance(a, Planned)} - inputs.keys()
            for launch in launches
        ]
        kept = {planned.buffer for planned, _ in outputs}
        starts, n_bytes = layout(uses, kept)
        memory = self._device.memory(max(n_bytes, ALIGN))
        places = inputs | {buffer: (memory, start) for buffer, start in starts.items()}

        def real(argument):
            if not isinstance(argument, Planned):
                return argument
            return in_memory(argument, *places[argument.buffer])

        self.launches = [replace(launch, arguments=tuple(map(real, launch.arguments))) for launch in launches]
        self._outputs = [(real(planned), host) for planned, host in outputs]
        self.nbytes = n_bytes + self._input_memory.nbytes

    def replay(self) -> None:
        """Compute all of it.  Not twice at once, and not while somebody reads the results."""
        self._bring_inputs()
        self._replay()
        for array, host in self._outputs:
            self._device.fetch(array, host)

    def _bring_inputs(self) -> None:
        for array, place in self._inputs:
            np.copyto(place, array(), casting="unsafe")
        self._input_memory.copy_to_device(self._staging)

    def _eagerly(self) -> None:
        for launch in self.launches:
            self._device.launch(launch.kernel, launch.grid, launch.threads, *launch.arguments)

    def timed(self) -> list[Timing]:
        """Launch one by one and say how long each took: Timings in order, the inputs' first."""
        begin = time.perf_counter()
        self._bring_inputs()
        timings = [Timing("inputs", None, "", time.perf_counter() - begin)]
        for launch, seconds in zip(self.launches, self._device.time(self.launches), strict=True):
            timings.append(Timing(launch.kernel.name, None, launch.mark, seconds))
        return timings


def _fused(launches: list[Launch], results: list[Planned]) -> list[Launch]:
    from fastpath.cuda.fuse import fuse  # which makes launches of its own

    return fuse(launches, results)


def is_recording() -> bool:
    """True while this thread records: another recording has to wait."""
    return device.is_recorded()


@contextmanager
def record() -> Iterator[Program]:
    """Record what this thread launches; yields the Program, which can be replayed when the block ends."""
    program = Program()
    with device.recorded_by(program._recorder):
        yield program
    program.seal()
