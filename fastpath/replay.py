"""Small calls by replay: recorded once per number of tokens and ending, then run as one compiled program.

What is computed and in which order is the same as when the ops are called one by one; so are the bytes.  What
goes away is Python between the ops, about ten microseconds for each of a thousand.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from fastpath import locks
from fastpath.largest import Largest
from refimpl.batch import Batch

MOST_TOKENS = 16  # larger calls spend their time in kernels
MOST_PROGRAMS = 8  # of one ending; each has memory for its results: a logit row of a large vocabulary is 1 MB


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


@dataclass
class _Recorded:
    program: Any
    arrays: tuple[np.ndarray, ...]  # of a batch: what the program reads
    result: np.ndarray | Largest


class Replay:
    """The programs of one set of lanes.

    recorder  what the op table records with (fastpath.cpu.program, fastpath.cuda.program)
    run       (batch, trace, k) -> logits f32[M, V], or Largest of k: the forward call
    state     () -> (objects, values): what the programs depend on besides the batch; others of them, and the
              programs are dropped
    """

    def __init__(self, recorder: Any, run: Callable, state: Callable[[], tuple[tuple, tuple]]):
        self._recorder, self._eagerly, self._state = recorder, run, state
        self._objects: tuple = ()
        self._values: tuple = ()
        self._is_unable = False
        self._known: OrderedDict[tuple[int, int | None], _Recorded] = OrderedDict()  # by tokens and k
        self._busy = locks.lock()

    @staticmethod
    def takes(batch: Batch, vocab_size: int) -> bool:
        """Few tokens, every row wanted, nothing odd: what is odd goes the way on which each op checks."""
        T = len(batch.token_ids)
        if batch.soft is not None:
            return False
        if not 1 <= T <= MOST_TOKENS or len(batch.logit_rows) != T:
            return False
        if not all(array.dtype == np.int32 and array.shape == (T,) for array in _arrays(batch)):
            return False
        ids, positions, lanes, rows = (
            array.tolist() for array in _arrays(batch)
        )  # NumPy takes longer for few
        return min(*ids, *positions, *lanes) >= 0 and max(ids) < vocab_size and rows == list(range(T))

    def forget_if_stale(self) -> None:
        """Programs hold the arrays that they were recorded with, such as those of another model."""
        objects, values = self._state()
        same = all(map(is_, objects, self._objects)) and len(objects) == len(self._objects)
        if not same or values != self._values:
            self._known.clear()
            self._objects, self._values, self._is_unable = objects, values, False

    def run(self, batch: Batch, k: int | None = None) -> np.ndarray | Largest:
        """f32[T, V], or with a k Largest of as many. The cache must have been checked and have room."""
        if self._recorder.is_recording() or self._busy.locked():
            # the second: another Python thread is in one of the programs
            return self._eagerly(batch, None, k)
        with self._busy:
            self.forget_if_stale()
            if self._is_unable:
                return self._eagerly(batch, None, k)
            key = batch.n_tokens, k
            found = self._known.get(key)
            if found is None or found.program.is_stale:
                found = self._record_new(batch, k)
                return self._eagerly(batch, None, k) if found is None else found.result.copy()
            self._known.move_to_end(key)
            for mine, its in zip(found.arrays, _arrays(batch), strict=True):
                mine[:] = its
            found.program.replay()
            return found.result.copy()

    def _record_new(self, batch: Batch, k: int | None) -> _Recorded | None:
        own = Batch(*(array.copy() for array in _arrays(batch)))
        try:
            with self._recorder.record() as program:
                result = self._eagerly(own, program.mark, k)
        except self._recorder.UnableError:
            self._is_unable = True  # until the state is another one; eager calls know how
            return None
        found = _Recorded(program, _arrays(own), result)
        self._known[batch.n_tokens, k] = found
        alike = [key for key in self._known if key[1] == k]
        for oldest in alike[:-MOST_PROGRAMS]:
            del self._known[oldest]
        return found

    def program(self, n_tokens: int, k: int | None = None) -> Any:
        """The program for so many tokens and this ending, if there is one: for profiles."""
        self.forget_if_stale()
        found = self._known.get((n_tokens, k))
        return found and found.program


def _arrays(batch: Batch) -> tuple[np.ndarray, ...]:
    return batch.token_ids, batch.positions, batch.seq_ids, batch.logit_rows
