"""A soak: thousands of random requests with aborts, on fewer pages than they would like.

Looked at all the time: every page is owned as it is counted; the oldest request goes on in every step, so
that nobody starves; events come in order, and the end once.  Looked at after each quarter, with nobody there:
all pages are free, and neither memory nor the number of Python objects has grown.  A sample of the answers is
compared with those of an engine that has nothing else to do.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from fastpath.engine import Engine, Finished, Request, Token, scheduler
from fastpath.engine.engine import KEPT_RESULTS
from fastpath.engine.scheduler import PATIENCE, SMALL_CHUNK
from tests.soak.traffic import Talk, Traffic

CONTEXT, CHUNK, PAGE, N_SEQS = 400, 96, 32, 6
# kind -> pages for all, besides those of one full sequence; and the scheduler's HEADROOM.
MEMORY = {
    "roomy": ({"global": 40, "sliding": 40}, scheduler.HEADROOM),  # all fit, prefixes stay for a while
    "tight": ({"global": 3, "sliding": 14}, 0),  # those who decode run out of pages
}
LARGEST_IMAGE = 17
ABORTED = 0.15  # of the requests
COMPARED = 0.04
LOOKED_AT = 25  # steps between two looks at all pages
QUARTERS = 4

# Results of the latest KEPT_RESULTS requests are kept, a few objects each; the allocator's own ups and downs.
GROWN_OBJECTS_PER_RESULT = 12
GROWN_BYTES = 16 << 20


@dataclass
class Waiter:
    """A request that is not finished.

    due, preemptions  once it is the oldest: the step by which it must be, how often it had to leave
    """

    request: Request
    talk: Talk
    since: int  # step
    tokens: list[int] = field(default_factory=list)
    abort_at: int | None = None
    due: int | None = None
    preemptions: int = 0


@dataclass
class Mark:
    """How things stand at the end of a quarter, with nobody there."""

    n_done: int
    rss: int
    n_objects: int


@dataclass
class Report:
    n_requests: int
    seconds: float = 0.0
    n_steps: int = 0
    reasons: Counter = field(default_factory=Counter)
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    preemptions: int = 0
    recomputed: int = 0
    evicted: int = 0
    n_compared: int = 0
    most_steps: int = 0  # that a request was there for
    marks: list[Mark] = field(default_factory=list)

    def lines(self) -> list[str]:
        first, last = self.marks[len(self.marks) // 2 - 1], self.marks[-1]
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.reasons.most_common())
        share = self.cached / self.prompt
        return [
            f"requests   {self.n_requests}: {reasons}",
            f"steps      {self.n_steps} in {self.seconds:.0f} s, at most {self.most_steps} for one request",
            f"prompts    {self.prompt} tokens, {share:.0%} of them from the prefix cache",
            f"answers    {self.generated} tokens; {self.n_compared} answers are those of an idle engine",
            f"pressure   {self.preemptions} preemptions, {self.recomputed} tokens computed again, "
            f"{self.evicted} checkpoints evicted",
            f"memory     {first.rss >> 20} MB at the half, {last.rss >> 20} MB at the end; "
            f"{first.n_objects} and {last.n_objects} objects",
            "pages      none leaked",
        ]


class Soak:
    """
    model   a tiny one of `family`
    memory  a key of MEMORY
    """

    def __init__(self, model, ops, family: str, n_requests: int, *, memory: str, seed: int = 0):
        self.model, self.ops = model, ops
        self.idle = self._engine(n_seqs=1, prefix_cache=False)
        more, self.headroom = MEMORY[memory]
        one = self.idle.lanes.cache.pools
        self.engine = self._engine(n_seqs=N_SEQS, n_pages={kind: one[kind].n + more[kind] for kind in one})
        self.traffic = Traffic(family, CONTEXT - 60, model.config.model_dim, seed)
        self.random = np.random.default_rng([seed, 1])
        self.report = Report(n_requests)
        self.live: dict[int, Waiter] = {}  # in the order of arrival
        self.threads: list[threading.Thread] = []

    def _engine(self, **options) -> Engine:
        options = {
            "chunk": CHUNK,
            "page": PAGE,
            "largest_image": LARGEST_IMAGE,
            "context_len": CONTEXT,
        } | options
        return Engine(self.model, self.ops, **options)

    def run(self, progress=None) -> Report:
        with patch.object(scheduler, "HEADROOM", self.headroom):
            return self._run(progress)

    def _run(self, progress) -> Report:
        begin = time.perf_counter()
        n_added, each = 0, -(-self.report.n_requests // QUARTERS)
        while n_added < self.report.n_requests or self.live:
            is_full = n_added % each == 0 and n_added // each > len(self.report.marks)
            if not is_full and n_added < self.report.n_requests:
                n_added += self._arrive(n_added, each)
            if self.live:
                self._step()
            elif is_full:
                self._quiet()
                self.report.marks.append(self._mark(n_added))
                if progress is not None:
                    progress(n_added, self.report)
        self._quiet()
        if len(self.report.marks) < QUARTERS:
            self.report.marks.append(self._mark(n_added))
        self._check_marks()
        self.report.seconds = time.perf_counter() - begin
        self.report.evicted = self.engine.prefix_counters.evicted
        return self.report

    def _arrive(self, n_added: int, each: int) -> int:
        """Now a few at once, now nobody; never past the end of a quarter."""
        if len(self.live) >= 4 * N_SEQS or self.random.random() < 0.6:
            return 0
        n = min(int(self.random.geometric(0.4)), each - n_added % each, self.report.n_requests - n_added)
        for _ in range(n):
            request, talk = self.traffic.request()
            waiter = Waiter(request, talk, self.report.n_steps)
            if self.random.random() < ABORTED:
                waiter.abort_at = self.report.n_steps + int(self.random.integers(0, 40))
            self.live[self.engine.add(request)] = waiter
        return n

    def _step(self) -> None:
        for id, waiter in list(self.live.items()):
            if waiter.abort_at == self.report.n_steps:
                self._abort(id)
        self._expect_progress()
        for event in self.engine.step():
            self._hear(event)
        self.report.n_steps += 1
        if self.report.n_steps % LOOKED_AT == 0:
            self.engine.check_integrity()

    def _abort(self, id: int) -> None:
        """Half of them from another thread, while this one is in a step."""
        if self.random.random() < 0.5:
            self.engine.abort(id)
            return
        thread = threading.Thread(target=self.engine.abort, args=(id,))
        thread.start()
        self.threads = [t for t in self.threads if t.is_alive()] + [thread]

    def _expect_progress(self) -> None:
        """The oldest is in every call, with half of a small chunk at least: so one knows when it is done."""
        id, waiter = next(iter(self.live.items()))
        if waiter.due is None:
            n_prompt, most = len(waiter.request.prompt_ids), waiter.request.max_tokens
            half = max(1, min(SMALL_CHUNK, CHUNK) // 2 - LARGEST_IMAGE)
            stops = 2 + len(waiter.request.soft) + n_prompt // PAGE  # where a chunk ends early for the tree
            waiter.preemptions = self.engine.usage(id).preemptions
            waiter.due = self.report.n_steps + 2 * (n_prompt // half + stops) + 2 * most + PATIENCE
        assert self.report.n_steps <= waiter.due, f"request {id} starves: {self.engine.result(id)}"

    def _hear(self, event) -> None:
        waiter = self.live[event.id]
        if isinstance(event, Token):
            assert event.index == len(waiter.tokens), f"request {event.id}: token {event.index} out of order"
            waiter.tokens.append(event.token)
            return
        assert isinstance(event, Finished)
        del self.live[event.id]
        self._count(waiter, event)
        if event.reason != "abort":
            self.traffic.answered(waiter.talk, tuple(waiter.tokens))
            if self.random.random() < COMPARED:
                self._compare(waiter)

    def _count(self, waiter: Waiter, event: Finished) -> None:
        report, usage = self.report, event.usage
        assert event.reason != "abort" or waiter.abort_at is not None, "nobody gave it up"
        assert event.reason in ("stop", "length", "abort"), (
            f"request {event.id}: {event.reason}, {event.error}"
        )
        assert usage.generated == len(waiter.tokens)
        assert waiter.due is None or usage.preemptions == waiter.preemptions, (
            f"{event.id}: the oldest had to leave"
        )
        if usage.computed or waiter.tokens:
            assert usage.cached + usage.computed == usage.prompt == len(waiter.request.prompt_ids)
        report.reasons[event.reason] += 1
        report.prompt += usage.cached + usage.computed
        report.cached += usage.cached
        report.generated += usage.generated
        report.preemptions += usage.preemptions
        report.recomputed += usage.recomputed
        report.most_steps = max(report.most_steps, report.n_steps - waiter.since)

    def _compare(self, waiter: Waiter) -> None:
        id = self.idle.add(waiter.request)
        assert list(self.idle.stream(id)) == waiter.tokens, "another answer than alone"
        self.report.n_compared += 1

    def _quiet(self) -> None:
        """Nobody is there: no page may be anybody's but the tree's, and then nobody's."""
        for thread in self.threads:
            thread.join()
        assert self.engine.is_idle and not self.live
        assert not self.engine.step()
        self.engine.check_integrity()
        self.engine.forget_prefixes()
        for kind, pool in self.engine.lanes.cache.pools.items():
            assert pool.n_free == pool.n, f"{pool.n - pool.n_free} {kind} pages leaked"

    def _mark(self, n_done: int) -> Mark:
        gc.collect()
        with open("/proc/self/statm") as statm:
            rss = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Mark(n_done, rss, len(gc.get_objects()))

    def _check_marks(self) -> None:
        """From the half on nothing grows but the results that the engine keeps on purpose."""
        half, last = self.report.marks[QUARTERS // 2 - 1], self.report.marks[-1]
        n_results = min(KEPT_RESULTS, last.n_done) - min(KEPT_RESULTS, half.n_done)
        objects = last.n_objects - half.n_objects
        assert objects <= 2000 + GROWN_OBJECTS_PER_RESULT * n_results, (
            f"{objects} objects more than at the half"
        )
        assert last.rss - half.rss <= GROWN_BYTES, f"{last.rss - half.rss} bytes more than at the half"
