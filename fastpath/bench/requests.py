"""The measurements of `bench --turn` and `--engine`: what requests take beside the calls that they need.

turn     a conversation of n_depth tokens is in the cache, its last ANSWER tokens generated.
         Time from the next request, n_turn tokens longer, to its first token; against that of the same number
         of tokens on an empty cache (cold).
engine   n_seqs requests decode. A step is the forward call, the choice of tokens (the look for NaN, greedy
         sampling), and the rest: scheduler, pages, prefix tree, events. `bare` is the same step without an
         engine: lanes that are given tokens.

Tokens are random.  Each test runs once to warm up.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastpath.backend import ops_for
from fastpath.bench import parity, report
from fastpath.bench.table import markdown
from fastpath.cli.parts import Parts
from fastpath.cli.setup import MANY, prepare, say
from fastpath.engine import Engine, Request, Token
from fastpath.engine import engine as loop
from fastpath.engine.request import Usage
from fastpath.load import load_model

ANSWER = 16  # tokens that the turn before has generated
NEVER: frozenset[int] = frozenset()  # random tokens must not end an answer
WARM_STEPS = 4


@dataclass(frozen=True)
class Turn:
    """samples_ns, cold_ns: to the first token, one per repetition."""

    n_turn: int
    n_depth: int
    cached: int
    computed: int
    samples_ns: list[int]
    cold_ns: list[int]

    @property
    def percent(self) -> float:
        """Of the cold time."""
        return 100 * statistics.median(self.samples_ns) / statistics.median(self.cold_ns)


@dataclass(frozen=True)
class Steps:
    """Nanoseconds of one step each. bare_ns: of one call of the lanes alone."""

    n_seqs: int
    n_depth: int
    samples_ns: list[int]
    forward_ns: list[int]
    choice_ns: list[int]
    bare_ns: list[int]

    @property
    def rest_ns(self) -> list[int]:
        parts = zip(self.samples_ns, self.forward_ns, self.choice_ns, strict=True)
        return [step - forward - choice for step, forward, choice in parts]

    @property
    def percent(self) -> float:
        """The rest, of a step. Means: what happens once in a page counts."""
        return 100 * sum(self.rest_ns) / sum(self.samples_ns)


class Runner:
    """Tests on one engine, which serves nobody else."""

    def __init__(self, engine: Engine, *, seed: int = 0):
        self.engine, self.rng = engine, np.random.default_rng(seed)

    def turn(self, n_turn: int, n_depth: int, repetitions: int) -> Turn:
        usage = Usage(0)
        turns, colds = [], []
        for i in range(1 + repetitions):
            talk = self._ids(n_depth - ANSWER)
            cold_ns, _, _ = self._answer(self._ids(n_depth + n_turn), 1)
            self.engine.forget_prefixes()
            _, answer, _ = self._answer(talk, ANSWER)
            turn_ns, _, usage = self._answer(talk + answer + self._ids(n_turn), 1)
            self.engine.forget_prefixes()
            if i:
                turns.append(turn_ns)
                colds.append(cold_ns)
        return Turn(n_turn, n_depth, usage.cached, usage.computed, turns, colds)

    def _ids(self, n: int) -> list[int]:
        return self.rng.integers(0, self.engine.lanes.model.config.vocab_size, n).tolist()

    def _answer(self, ids: list[int], n: int) -> tuple[int, list[int], Usage]:
        begin = time.perf_counter_ns()
        id = self.engine.add(Request(ids, max_tokens=n, stop_ids=NEVER))
        tokens = list(self.engine.stream(id))
        return time.perf_counter_ns() - begin, tokens, self.engine.usage(id)

    def steps(self, n_seqs: int, n_depth: int, n_steps: int) -> Steps:
        engine = self.engine
        requests = [
            Request(self._ids(n_depth), max_tokens=n_depth + n_steps + WARM_STEPS + n_seqs, stop_ids=NEVER)
            for _ in range(n_seqs)
        ]
        ids = [engine.add(request) for request in requests]
        while len([event for event in engine.step() if isinstance(event, Token)]) < n_seqs:
            pass  # prompts; the first to be done decode meanwhile
        for _ in range(WARM_STEPS):
            engine.step()
        with _Watched(engine) as watched:
            samples = [self._step(watched) for _ in range(n_steps)]
        for id in ids:
            engine.abort(id)
        engine.step()
        engine.forget_prefixes()
        return Steps(
            n_seqs, n_depth, samples, watched.forward, watched.choice, self._bare(n_seqs, n_depth, n_steps)
        )

    def _step(self, watched: "_Watched") -> int:
        watched.next()
        begin = time.perf_counter_ns()
        self.engine.step()
        return time.perf_counter_ns() - begin

    def _bare(self, n_seqs: int, n_depth: int, n_steps: int) -> list[int]:
        lanes, samples = self.engine.lanes, []
        for lane in range(n_seqs):
            lanes.prefill(self._ids(n_depth), lane=lane)
        for i in range(WARM_STEPS + n_steps):
            pieces = [(lane, self._ids(1)) for lane in range(n_seqs)]
            begin = time.perf_counter_ns()
            lanes.extend(pieces)
            if i >= WARM_STEPS:
                samples.append(time.perf_counter_ns() - begin)
        for lane in range(n_seqs):
            lanes.reset(lane)
        return samples


class _Watched:
    """Notes how long the two costly parts of each step take."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.forward: list[int] = []
        self.choice: list[int] = []

    def next(self) -> None:
        self.forward.append(0)
        self.choice.append(0)

    def __enter__(self) -> "_Watched":
        engine: Any = self._engine
        engine.lanes.forward = self._timed(engine.lanes.forward, self.forward)
        self._outcomes_of = loop.outcomes_of
        loop.outcomes_of = self._timed(loop.outcomes_of, self.choice)
        return self

    def __exit__(self, *error) -> None:
        engine: Any = self._engine
        del engine.lanes.forward  # that of the class is seen again
        loop.outcomes_of = self._outcomes_of

    @staticmethod
    def _timed(function: Callable, notes: list[int]) -> Callable:
        def call(*args):
            begin = time.perf_counter_ns()
            result = function(*args)
            notes[-1] += time.perf_counter_ns() - begin
            return result

        return call


def run(args, path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows, and the same as text."""
    from fastpath.cpu import machine

    engine = _engine(args, path)
    lanes = engine.lanes
    prepare(args, lanes, MANY, "last", Parts())
    n_cases = parity.check(lanes.model, lanes.ops, lanes.kv_type)
    n_cases += parity.check_replay(lanes, args.batch if args.engine else [1])
    runner = Runner(engine)
    rows: list[dict[str, Any]] = []
    turns, steps = (
        [["test", "ms", "cold ms", "% of cold", "cached", "computed"]],
        [["test", "ms", "calls alone, ms", "forward, ms", "choice, ms", "rest, ms", "rest, %"]],
    )
    for depth in args.depth:
        for n in args.turn or ():
            say(f"turn of {n} tokens after {depth}")
            turn = runner.turn(n, depth, args.repetitions)
            rows.append({"test": f"turn{n} @ d{depth}", **asdict(turn), "percent": turn.percent})
            ms = [_ms(turn.samples_ns), _ms(turn.cold_ns)]
            turns.append([rows[-1]["test"], *ms, f"{turn.percent:.2f}", str(turn.cached), str(turn.computed)])
        for n in args.batch if args.engine else ():
            for n_steps in args.n_gen:
                found = runner.steps(n, max(1, depth), n_steps)
                name = f"engine tg{n_steps} x{n}" + (f" @ d{depth}" if depth else "")
                rest = {"rest_ns": found.rest_ns, "percent": found.percent}
                rows.append({"test": name, **asdict(found), **rest})
                parts = (found.samples_ns, found.bare_ns, found.forward_ns, found.choice_ns, found.rest_ns)
                steps.append([name, *map(_ms, parts), f"{found.percent:.2f}"])
    head = (
        f"machine  {report.cpu_name()}; kernels {machine.describe()}\n"
        f"model    {lanes.model.config.name or lanes.model.path.name}; parity of {n_cases} cases is green"
    )
    tables = [markdown(table) for table in (turns, steps) if len(table) > 1]
    return rows, "\n\n".join([head, *tables])


def _ms(samples_ns: list[int]) -> str:
    return f"{statistics.median(samples_ns) / 1e6:.2f}"


def _engine(args, path: Path) -> Engine:
    model = load_model(path)
    most = model.config.context_len
    longest = [depth + n for depth in args.depth for n in args.turn or ()]
    if args.engine:
        longest += [d + n + WARM_STEPS + max(args.batch) + 1 for d in args.depth for n in args.n_gen]
    if args.turn and min(args.depth) <= ANSWER:
        raise ValueError(
            f"bench: a turn at depth {min(args.depth)}, expected more than the {ANSWER} tokens of the answer "
            "before it. Give -d a larger number"
        )
    if args.engine and min(args.n_gen) < 1:
        raise ValueError("bench: --engine without steps. Give -n a number above 0")
    if max(longest) > most:
        raise ValueError(
            f"bench: {max(longest)} positions asked for, but the model was made for {most}. Ask for fewer."
        )
    return Engine(
        model,
        ops_for("cpu"),
        n_seqs=max(args.batch) if args.engine else 1,
        context_len=min(most, max(*longest, parity.REPLAY_STEPS)),
        chunk=args.batch_size,
        kv_type=args.kv_type,
        replay=not args.no_replay,
    )
