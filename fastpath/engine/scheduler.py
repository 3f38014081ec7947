"""Who computes what in the next call: decided from lengths and free pages, without arrays or a model.

    waiting ──admit──► running ──► every task with one token to go: that token (it decodes)
       ▲                  │        those with more (a prompt): a chunk each, as far as the budget goes
       └──── preempt ─────┘        pages run out: the youngest gives its own back and is computed again later

Why everybody finishes: the oldest running task is in every plan and is never preempted, and nobody who came
later is admitted before the first in the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from refimpl.batch import SoftTokens, plan_chunks

SMALL_CHUNK = 256  # prompt tokens per call while others decode, who wait for them with each of their tokens
HEADROOM = 128  # tokens that those who run may still write before they need what a newcomer would take
NOWHERE = -1  # the lane of those who have none
PATIENCE = 16  # plans until a newcomer that found no room asks again


@dataclass(eq=False)
class Task:
    """A sequence as the scheduler sees it.

    n_tokens  ids that are known: those of the prompt, and those sampled since
    n_done    how many of them have keys in the cache
    most      what n_tokens may become
    lane      where it is in the cache
    soft      its images; where `whole`, a chunk never ends inside one
    stops     places where a chunk has to end, ascending: the prefix tree wants to keep what is before
    """

    id: int
    n_tokens: int
    most: int
    soft: Sequence[SoftTokens] = ()
    whole: bool = False
    stops: Sequence[int] = ()
    n_done: int = 0
    lane: int = NOWHERE

    @property
    def pending(self) -> int:
        return self.n_tokens - self.n_done

    def chunk(self, limit: int) -> int:
        """Tokens of the next chunk: at most `limit`, but an image that is larger goes whole."""
        stop = next((s for s in self.stops if s > self.n_done), self.n_tokens)
        stop = min(stop, self.n_done + limit)
        _, stop = plan_chunks(self.n_done, stop, limit, self.soft, whole=self.whole)[0]
        return stop - self.n_done


Parts = list[tuple[Task, int]]  # who goes on by how many tokens


class Memory(Protocol):
    """What the scheduler asks of the cache."""

    def place(self, task: Task) -> None:
        """Gives a lane, and in it what is known of the sequence: `lane` and `n_done` are set."""

    def admitted(self, task: Task) -> None:
        """Its place is for good. Told before room is made: it may hold on to pages."""

    def take_back(self, task: Task) -> None:
        """The lane and its pages. The scheduler forgets `lane` and `n_done`."""

    def has_room(self, parts: Parts) -> bool:
        """Whether pages for all of it are free, or could be made free without anybody's loss."""

    def make_room(self, parts: Parts) -> bool:
        """Frees them if need be; False: it cannot be done."""


@dataclass
class Plan:
    """One call.

    parts      each with at least one token; those that decode come first
    admitted   who runs from now on
    preempted  who had to leave, youngest first
    stuck      the only task that runs, if the pages that there are do not suffice for it
    """

    parts: Parts = field(default_factory=list)
    admitted: list[Task] = field(default_factory=list)
    preempted: list[Task] = field(default_factory=list)
    stuck: Task | None = None


class Scheduler:
    """`n_seqs` tasks run at most; `chunk` prompt tokens in a call at most, `small` while anybody decodes."""

    def __init__(self, memory: Memory, n_seqs: int, chunk: int, small: int = SMALL_CHUNK):
        self.memory, self.n_seqs, self.chunk, self.small = memory, n_seqs, chunk, min(small, chunk)
        self.waiting: OrderedDict[Task, None] = OrderedDict()  # a queue that anybody may leave at once
        self.running: list[Task] = []  # in the order of arrival, as is `waiting`
        self._wait = 0  # plans until the first in the queue is looked at again

    def add(self, task: Task) -> None:
        self.waiting[task] = None

    def remove(self, task: Task) -> None:
        """It is finished, or nobody wants it any more; at any time between two calls."""
        if task in self.running:
            self.running.remove(task)
            self._evict(task)
            self._wait = 0
        else:
            self.waiting.pop(task, None)

    def plan(self) -> Plan:
        """Chooses and makes room; whoever has parts has pages for them."""
        plan = Plan(admitted=self._admit())
        plan.parts = self._choose()
        while plan.parts and not self.memory.make_room(plan.parts):
            if len(self.running) == 1:
                plan.parts, plan.stuck = [], self.running[0]
                break
            plan.preempted.append(self._preempt())
            plan.parts = self._choose()
        plan.admitted = [task for task in plan.admitted if task.lane != NOWHERE]
        return plan

    def _admit(self) -> list[Task]:
        """First come, first served: nobody overtakes the first in the queue, whatever their size."""
        admitted: list[Task] = []
        if self._wait and self.running:
            self._wait -= 1
            return admitted
        while self.waiting and len(self.running) < self.n_seqs:
            task = next(iter(self.waiting))
            self.memory.place(task)
            if self.running and not self.memory.has_room([(t, _soon(t)) for t in [*self.running, task]]):
                self._evict(task)
                self._wait = PATIENCE
                break
            del self.waiting[task]
            self.running.append(task)
            self.memory.admitted(task)
            admitted.append(task)
        return admitted

    def _preempt(self) -> Task:
        """The youngest: it has waited least and its loss is the smallest."""
        task = self.running.pop()
        self._evict(task)
        self.waiting[task] = None
        self.waiting.move_to_end(task, last=False)
        self._wait = PATIENCE
        return task

    def _evict(self, task: Task) -> None:
        self.memory.take_back(task)
        task.lane, task.n_done = NOWHERE, 0

    def _choose(self) -> Parts:
        rows = [(task, 1) for task in self.running if task.pending == 1]
        prompts = [task for task in self.running if task.pending > 1]
        return rows + _share(prompts, self.small if rows else self.chunk) if prompts else rows


def _soon(task: Task) -> int:
    """Tokens that it has to write, and may want to write before long."""
    return min(task.most, task.n_tokens + HEADROOM) - task.n_done


def _share(prompts: Sequence[Task], budget: int) -> Parts:
    """Half of the budget is the oldest prompt's, so that it gets done; the other half goes to those with the
    least to do, so that short ones do not stand behind a long one. What one cannot use, others may.
    """
    oldest, *others = prompts
    others.sort(key=lambda task: task.pending)  # stable: of equal ones the older
    parts: Parts = []
    left = budget
    for task in [oldest, *others]:
        if left == 0:
            break
        others_want = sum(t.pending for t in others) if task is oldest else 0
        n = task.chunk(max(1, left - min(left // 2, others_want)))
        if n <= left or not parts:  # an image larger than what is left has a call's prompt tokens for itself
            parts.append((task, n))
            left = max(0, left - n)
    return parts
