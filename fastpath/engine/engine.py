"""Engine: many requests on one set of weights, each with the bytes that it would get alone.

    engine = Engine(model, ops_for("cpu"), n_seqs=8)
    ids = [engine.add(Request(prompt)) for prompt in prompts]
    while not engine.is_idle:
        for event in engine.step():      # one forward call: a token for each that decodes, chunks of prompts
            ...

or, for one of them:  for token in engine.stream(ids[0]): ...  which makes the steps that it waits for.

Requests may be added and given up from any thread, also while another one is in a step.  Who computes what is
decided by scheduler.py, what is in the cache is known to store.py; here is the loop.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fastpath.engine.call import Outcome, accepted, batch_of, largest_of, outcomes_of
from fastpath.engine.checks import check_pages, check_request
from fastpath.engine.request import (
    Event,
    Finished,
    PromptRead,
    Reason,
    Record,
    Request,
    Result,
    Token,
    Usage,
)
from fastpath.engine.scheduler import NOWHERE, Plan, Scheduler, Task
from fastpath.engine.store import Store
from fastpath.kv.budget import full_and_spare, share_out
from fastpath.kv.geometry import PAGE, Geometry, KVType
from fastpath.lanes import Lanes, NotFiniteError

Progress = Callable[[int, int], None]
KEPT_RESULTS, KEPT_TOKENS = 1000, 1 << 20  # of the latest requests that are finished
READ, LAST = -1, 1 << 62  # indices of events before and behind all tokens
LOGITS_BYTES = 1 << 27  # most bytes of logits of prompts that are read, in a call


class Engine:
    """
    n_seqs        requests that are computed at the same time; others wait, first come, first served
    kv_bytes      of keys and values, kept ones included; None: for `n_seqs` full sequences and a few more
    n_pages       instead of kv_bytes: kind of layers ("global", "sliding") -> pages
    prefix_cache  what was computed stays for requests that begin alike, until its pages are needed
    Others as in Lanes.
    """

    def __init__(
        self,
        model,
        ops,
        *,
        n_seqs: int = 1,
        kv_bytes: int | None = None,
        n_pages: Mapping[str, int] | None = None,
        prefix_cache: bool = True,
        context_len: int | None = None,
        chunk: int | None = None,
        largest_image: int = 0,
        kv_type: KVType | None = None,
        page: int = PAGE,
        activations: str = "int8",
        dtype=np.float32,
        replay: bool = True,
    ):
        if n_seqs < 1:
            raise ValueError(f"an engine for {n_seqs} sequences at once, expected at least 1")

        def pages(full: Geometry) -> Mapping[str, int]:
            if kv_bytes is not None:
                return share_out(kv_bytes, full, n_seqs)
            return full_and_spare(full) if prefix_cache else {}

        self.lanes = Lanes(
            model,
            ops,
            n_seqs=n_seqs,
            n_pages=n_pages or pages,
            context_len=context_len,
            chunk=chunk,
            largest_image=largest_image,
            kv_type=kv_type,
            page=page,
            activations=activations,
            dtype=dtype,
            replay=replay,
        )
        check_pages(self.lanes.cache.geometry)
        self._store = Store(self.lanes, self._record_of, prefix_cache=prefix_cache)
        self._scheduler = self._new_scheduler(n_seqs)
        self._stepping = threading.Lock()  # whoever has it may touch scheduler, store and lanes
        self._moved = threading.Condition()  # and its lock, for what other threads look at: all that follows
        self._live: dict[int, Record] = {}
        self._arrived: deque[Record] = deque()
        self._unwanted: deque[Record] = deque()
        self._finished: OrderedDict[int, Result] = OrderedDict()
        self._events: dict[int, dict[int, Event]] = {}  # that nobody was told yet, by request and index
        self._n_kept_tokens = self._n_added = 0
        self._in_books = False  # an interrupt now may leave scheduler, store and lanes at odds
        self._made: Sequence[Outcome] = ()  # by the last call, until all of it is written down

    # What callers ask.

    def add(self, request: Request) -> int:
        """The request's id. It is computed by the steps to come.

        Raises:
            ValueError: it can never be computed; says why
        """
        check_request(request, self.lanes)
        ends, ids = request.stop_ids, [int(i) for i in request.prompt_ids]
        if ends is None:
            ends = self.lanes.model.tokenizer.eog_ids
        most = min(len(ids) + request.max_tokens, self.lanes.context_len + 1)  # the last is not fed back
        with self._moved:
            n = self._n_added
            is_read = request.n_prompt_logprobs is not None
            task = Task(n, len(ids), most, request.soft, self.lanes.whole_images, is_read=is_read)
            record = Record(n, request, ids, frozenset(ends), task, Usage(len(ids)), time.perf_counter())
            self._live[n] = record
            self._arrived.append(record)
            self._n_added += 1
        return n

    def abort(self, id: int) -> bool:
        """Gives a request up; its pages come back at once, or after the step that another thread is in.

        False: it is finished already, or was never there.
        """
        with self._moved:
            record = self._live.get(id)
            if record is None:
                return False
            self._unwanted.append(record)
        self._tidy()
        return True

    def step(self) -> list[Event]:
        """One forward call, if anybody waits for one; what happened since the last step.

        Events of requests that are read by `stream` are not among them. One thread at a time is in a step,
        others wait. An interrupt costs at most the call that it came into.
        """
        try:
            with self._stepping:
                self._step()
                with self._moved:
                    events, self._events = self._events, {}
        finally:
            self._tidy()
        return [event for of_one in events.values() for event in of_one.values()]

    def stream(self, id: int, progress: Progress | None = None) -> Iterator[int]:
        """The tokens of an answer as they come. Steps are made by whoever reads, if nobody else makes them.

        progress(done, total) of the prompt's tokens is called after each step, until the first token

        Raises:
            KeyError: there is no such request (any more)
            Exception: what the request ended with, if that was an error
        """
        with self._moved:
            record = self._live.get(id)
            if record is not None:
                record.is_streamed = True
                self._events.pop(id, None)
        if record is None:
            result = self.result(id)
            yield from result.tokens
            if result.error is not None:
                raise result.error
            return
        n_told = 0
        while True:
            is_over = record.reason is not None  # asked first: the last token is there before the reason is
            for token in record.ids[record.n_prompt + n_told :]:
                n_told += 1
                yield token
            if is_over:
                break
            self._step_or_wait(record, n_told)
            if progress is not None and not n_told:
                done = record.n_prompt if record.n_answer or record.reason else record.task.n_done
                progress(min(done, record.n_prompt), record.n_prompt)
        if record.error is not None:
            raise record.error

    @property
    def is_idle(self) -> bool:
        return not self._live

    def result(self, id: int) -> Result:
        """The answer so far, or all of it; of finished requests the latest are kept.

        Raises:
            KeyError
        """
        with self._moved:
            record = self._live.get(id)
            if record is not None:
                return record.result()
            if id not in self._finished:
                latest = f"of {self._n_added} so far, the latest {len(self._finished)} finished ones are kept"
                raise KeyError(f"request {id} is not known: {latest}")
            return self._finished[id]

    def usage(self, id: int) -> Usage:
        return self.result(id).usage

    def forget(self, id: int) -> None:
        """Nobody will ask for the result of this request, if it is finished."""
        with self._moved:
            result = self._finished.pop(id, None)
            if result is not None:
                self._n_kept_tokens -= result.n_told

    def check_integrity(self) -> None:
        """AssertionError, if a page or a lane is owned wrongly. Between steps."""
        with self._stepping:
            self._recover()
            self._store.settle(self._scheduler.running)
            self._store.check(self._scheduler.running)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        with self._stepping:
            self._recover()
            self._store.forget_prefixes()

    @property
    def prefix_counters(self):
        """lookups, hits, tokens reused, ... of the prefix cache; None: there is none."""
        return self._store.tree and self._store.tree.counters

    @property
    def n_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def n_waiting(self) -> int:
        return len(self._live) - self.n_running

    # One step.

    def _step(self) -> None:
        began = time.perf_counter()
        self._recover()
        self._made = ()
        self._in_books = True
        self._take_in()
        plan = self._scheduler.plan()
        self._note(plan)
        who = [(self._live[task.id], n) for task, n in plan.parts]
        self._in_books = False
        if who:
            batch, k = batch_of(who), largest_of(who, self.lanes)
            # an interrupt here costs this call and nothing else
            rows = self.lanes.forward(batch) if k is None else self.lanes.largest(batch, k)
            self._made = outcomes_of(who, rows, self.lanes)
            self._in_books = True
            self._write_down(self._made, began)
            self._made = ()
            self._in_books = False

    def _take_in(self) -> None:
        """Those who came and those who go. Each leaves its list when all is done: see `_recover`."""
        while self._arrived:
            self._scheduler.add(self._arrived[0].task)
            self._arrived.popleft()
        while self._unwanted:
            record = self._unwanted[0]
            if record.id in self._live:
                self._scheduler.remove(record.task)
                self._end(record, "abort")
            self._unwanted.popleft()
        self._store.settle(self._scheduler.running)

    def _note(self, plan: Plan) -> None:
        now = time.perf_counter()
        for task in plan.admitted:
            record = self._live[task.id]
            usage = record.usage
            if not record.is_admitted:
                record.is_admitted, usage.queue_s = True, now - record.began
                usage.cached, usage.computed = task.n_done, usage.prompt - task.n_done
            usage.recomputed += max(0, record.n_computed - task.n_done)
        for task in plan.preempted:
            self._live[task.id].usage.preemptions += 1
        if plan.stuck is not None:
            self._end_stuck(self._live[plan.stuck.id])

    def _end_stuck(self, record: Record) -> None:
        """It is alone, and there are no more pages: the answer ends where the memory does."""
        n = len(record.ids)
        pages = ", ".join(f"{pool.n} pages of {name} layers" for name, pool in self.lanes.cache.pools.items())
        self._scheduler.remove(record.task)
        if record.n_answer:
            self._end(record, "length")
        else:
            error = f"a prompt of {n} tokens needs more than there is: {pages}. Give the cache more memory"
            self._end(record, "error", MemoryError(error))

    def _write_down(self, made: Sequence[Outcome], began: float) -> None:
        now = time.perf_counter()
        if any(isinstance(each.error, NotFiniteError) for each in made):
            self._store.forget_prefixes()  # chunks of the prompt may be in it, with NaN among their keys
        for drawn in made:
            each = accepted(drawn)
            record, task = each.record, each.record.task
            task.n_done = each.n_done
            record.n_computed = max(record.n_computed, each.n_done)
            record.is_sound = not isinstance(each.error, NotFiniteError)
            if each.reason is not None:
                self._scheduler.remove(task)
            else:
                self._store.advanced(task)
            _clock(record, began, now)
            self._tell(each)
            task.n_tokens = len(record.ids)

    def _tell(self, each: Outcome) -> None:
        """What others see of it. Doing it again changes nothing."""
        record = each.record
        if each.read:
            self._note_read(record, each)
        if each.token is not None:
            record.ids[each.n_known :] = [each.token]
            record.usage.generated = record.n_answer
            index = each.n_known - record.n_prompt
            with self._moved:
                if not record.is_streamed:
                    event = Token(record.id, index, each.token, each.logits, each.logprob)
                    self._events.setdefault(record.id, {})[index] = event
        if each.reason is not None:
            self._end(record, each.reason, each.error)

    def _note_read(self, record: Record, each: Outcome) -> None:
        known = record.prompt_logprobs[: each.n_first + 1] or [None]
        record.prompt_logprobs = [*known, *each.read[1:]]
        if len(record.prompt_logprobs) == record.n_prompt and not record.is_streamed:
            with self._moved:
                event = PromptRead(record.id, tuple(record.prompt_logprobs))
                self._events.setdefault(record.id, {})[READ] = event

    def _end(self, record: Record, reason: Reason, error: Exception | None = None) -> None:
        with self._moved:
            if record.id not in self._live:
                return
            record.error = error
            record.reason = reason
            result = record.result()
            if not record.is_streamed:
                event = Finished(record.id, reason, record.usage, error)
                self._events.setdefault(record.id, {})[LAST] = event
            self._finished[record.id] = result
            del self._live[record.id]
            self._n_kept_tokens += result.n_told
            while len(self._finished) > KEPT_RESULTS or self._n_kept_tokens > KEPT_TOKENS:
                id, oldest = self._finished.popitem(last=False)
                self._n_kept_tokens -= oldest.n_told
                self._events.pop(id, None)

    # Between steps.

    def _tidy(self) -> None:
        """Whoever leaves a step, or gives a request up, gives pages back; unless another thread is in a step,
        which then does it when it leaves."""
        while self._unwanted and self._stepping.acquire(blocking=False):
            try:
                self._recover()
                self._in_books = True
                self._take_in()
                self._in_books = False
            finally:
                self._stepping.release()
        with self._moved:
            self._moved.notify_all()

    def _step_or_wait(self, record: Record, n_told: int) -> None:
        """A step, by this thread or by another."""
        with self._moved:
            if record.reason is not None or record.n_answer > n_told:
                return
            is_mine = self._stepping.acquire(blocking=False)
            if not is_mine:
                self._moved.wait(timeout=1.0)
        if is_mine:
            try:
                self._step()
            finally:
                self._stepping.release()
                self._tidy()

    def _recover(self) -> None:
        """After an interrupt between calls: what was told stays, what is in the cache is computed again."""
        if not self._in_books:
            return
        for each in self._made:
            self._tell(accepted(each))
        self._made = ()
        self._store.clear()
        self._scheduler = self._new_scheduler(self._scheduler.n_seqs)
        with self._moved:
            self._arrived.clear()
            for record in self._live.values():
                task = record.task
                task.lane, task.n_done, task.n_tokens = NOWHERE, 0, len(record.ids)
                self._scheduler.add(task)
        self._in_books = False

    def _new_scheduler(self, n_seqs: int) -> Scheduler:
        rows = max(1, LOGITS_BYTES // (4 * self.lanes.model.config.vocab_size))
        return Scheduler(self._store, n_seqs, self.lanes.chunk, rows=rows)

    def _record_of(self, task: Task) -> Record:
        return self._live[task.id]


def _clock(record: Record, began: float, now: float) -> None:
    """Counts a call of which the record was a part; before it has another token."""
    usage = record.usage
    if record.n_answer:
        usage.decode_s += now - began
    else:
        usage.prefill_s += now - began
        usage.first_s = now - record.began
