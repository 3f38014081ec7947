"""The measurements of `bench`: tests like llama-bench's, and what each says of the machine.

A test is one of
    prompt    n_prompt tokens from position n_depth on, in calls of n_batch; logits of the last one
    decode    n_gen tokens one after the other from position n_depth on, n_seqs sequences in each call
and is run once to warm up, then n times. Tokens are random; nothing is sampled.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastpath.bench import profile
from fastpath.bench.profile import Profiled
from fastpath.bench.traffic import Call, Watched, totals
from fastpath.lanes import Lanes

WARM_STEPS = 3  # decode calls before those that are timed; the first may record a program, the cache may grow


@dataclass(frozen=True)
class Workload:
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_seqs: int = 1

    @property
    def name(self) -> str:
        what = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        rows = f" x{self.n_seqs}" if self.n_seqs > 1 else ""
        return what + rows + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        return (self.n_prompt or self.n_gen) * self.n_seqs

    @property
    def n_positions(self) -> int:
        return self.n_depth + (self.n_prompt or self.n_gen)


@dataclass(frozen=True)
class Result:
    """samples_ns: one per repetition. traffic: of all forward calls of one repetition together. profiled: one
    prompt or one step, looked at more closely."""

    test: Workload
    samples_ns: list[int]
    traffic: Call
    profiled: Profiled

    @property
    def samples_ts(self) -> list[float]:
        return [1e9 * self.test.n_tokens / ns for ns in self.samples_ns]


def workloads(prompts: list[int], gens: list[int], depths: list[int], n_seqs: list[int]) -> list[Workload]:
    """Every combination, as llama-bench makes them: prompts, then generations, for each depth."""
    found = []
    for depth in depths:
        found += [Workload(n_prompt=n, n_depth=depth) for n in prompts if n]
        found += [Workload(n_gen=n, n_depth=depth, n_seqs=rows) for n in gens if n for rows in n_seqs]
    return found


class Runner:
    """Runs tests on one engine, whose cache is big enough for all of them."""

    def __init__(self, engine: Lanes, *, seed: int = 0):
        self.engine = engine
        self.rng = np.random.default_rng(seed)

    def run(self, test: Workload, repetitions: int, between: Callable[[], None] = lambda: None) -> Result:
        """between: called before the first and after each repetition, for what is measured in turn."""
        self._fill(test)
        for _ in range(1 if test.n_prompt else WARM_STEPS):
            if not self.engine.room():
                self._rewind(test)
            self._one_call(test, self._ids(test))
        one_call, profiled = self._profile(test)
        samples = []
        between()
        for _ in range(repetitions):
            self._rewind(test)
            samples.append(self._timed(test))
            between()
        for lane in range(test.n_seqs):
            self.engine.reset(lane)
        n_calls = 1 if test.n_prompt else test.n_gen
        traffic = totals([one_call] * n_calls)
        if profiled.is_replay:
            profiled = replace(profiled, wall_ns=round(statistics.median(samples) / n_calls))
        return Result(test, samples, traffic, profiled)

    def _timed(self, test: Workload) -> int:
        ids = [self._ids(test) for _ in range(1 if test.n_prompt else test.n_gen)]
        begin = time.perf_counter_ns()
        for each in ids:
            self._one_call(test, each)
        return time.perf_counter_ns() - begin

    def _ids(self, test: Workload) -> list[list[int]]:
        """For each lane, the ids of one prompt or one step."""
        V = self.engine.model.config.vocab_size
        n = test.n_prompt or 1
        return [self.rng.integers(0, V, n).tolist() for _ in range(test.n_seqs)]

    def _one_call(self, test: Workload, ids: list[list[int]]) -> None:
        if test.n_prompt:
            self.engine.prefill(ids[0])
        elif test.n_seqs == 1:
            self.engine.decode(ids[0][0])
        else:
            self.engine.extend(list(enumerate(ids)))

    def _fill(self, test: Workload) -> None:
        """Every lane holds n_depth tokens."""
        V = self.engine.model.config.vocab_size
        for lane in range(test.n_seqs):
            self.engine.reset(lane)
            if test.n_depth:
                self.engine.prefill(self.rng.integers(0, V, test.n_depth).tolist(), lane=lane)

    def _rewind(self, test: Workload) -> None:
        """Back to n_depth tokens: the cache still holds what they need, unless a ring was overrun."""
        engine = self.engine
        windows = [layer.window for layer in engine.model.config.layers if layer.window is not None]
        n_lost = max(engine.length(lane) for lane in range(test.n_seqs)) - test.n_depth
        if windows and test.n_depth and n_lost > engine.chunk:
            self._fill(test)
        for lane in range(test.n_seqs):
            engine.tokens[lane] = engine.tokens[lane][: test.n_depth]

    def _profile(self, test: Workload) -> tuple[Call, Profiled]:
        """What one prompt or one step reads and multiplies, and where its time goes."""
        self._rewind(test)
        engine = self.engine
        ops, replay = engine.ops, engine.replay
        watched = Watched(ops, engine.model)
        engine.ops, engine.replay = watched, None
        try:
            self._one_call(test, self._ids(test))
        finally:
            engine.ops, engine.replay = ops, replay
        program = None if replay is None or test.n_prompt else replay.program(test.n_seqs)
        if program is None:
            profiled = profile.of_ops(test.name, watched.calls)
        else:
            profiled = profile.of_replay(test.name, program, engine.model, watched.calls)
        return totals(watched.calls), profiled


def positions(tests: list[Workload]) -> int:
    return max(test.n_positions for test in tests)


def lanes(tests: list[Workload]) -> int:
    return max(test.n_seqs for test in tests)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, as llama-bench computes them."""
    x = np.asarray(values, np.float64)
    return float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else 0.0
