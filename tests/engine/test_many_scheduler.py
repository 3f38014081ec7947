"""The scheduler against a simulation that only counts: pages are numbers, tokens are not computed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastpath.engine.scheduler import NOWHERE, PATIENCE, Scheduler, Task
from refimpl.batch import SoftTokens


class Counting:
    """Pages of `size` tokens. Of what a sequence gives back a prefix tree keeps some: `kept` may be freed."""

    def __init__(self, n_lanes, n_pages, size):
        self.size, self.n_pages = size, n_pages
        self.lanes, self.free, self.kept, self.held = set(range(n_lanes)), n_pages, 0, {}
        self.hit = 0  # tokens that the next newcomer finds

    def pages(self, n_tokens):
        return -(-n_tokens // self.size)

    def place(self, task):
        assert task.lane == NOWHERE and task.n_done == 0
        task.lane = min(self.lanes)
        self.lanes.remove(task.lane)
        task.n_done = max(0, min(self.hit, task.n_tokens - 1, self.kept * self.size))
        self.held[task.lane] = self.pages(task.n_done)
        self.kept -= self.held[task.lane]

    def admitted(self, task):
        assert task.lane != NOWHERE

    def take_back(self, task):
        pages = self.held.pop(task.lane)
        self.lanes.add(task.lane)
        self.kept += pages // 2
        self.free += pages - pages // 2

    def missing(self, parts):
        return sum(self.pages(task.n_done + n) - self.held[task.lane] for task, n in parts)

    def has_room(self, parts):
        return self.missing(parts) <= self.free + self.kept

    def make_room(self, parts):
        evicted = min(self.kept, max(0, self.missing(parts) - self.free))
        self.kept, self.free = self.kept - evicted, self.free + evicted
        return self.missing(parts) <= self.free

    def write(self, task, n):
        more = self.missing([(task, n)])
        assert more <= self.free, "a part of the plan has no pages"
        self.free -= more
        self.held[task.lane] += more


class Trace(RuleBasedStateMachine):
    """Requests come, go and are given up at any time."""

    @initialize(
        n_lanes=st.integers(1, 4),
        n_pages=st.integers(2, 20),
        size=st.sampled_from([1, 3, 4]),
        chunk=st.integers(1, 12),
        small=st.integers(1, 12),
    )
    def begin(self, n_lanes, n_pages, size, chunk, small):
        self.memory = Counting(n_lanes, n_pages, size)
        self.scheduler = Scheduler(self.memory, n_lanes, chunk, small)
        self.tasks, self.answers, self.admitted = [], {}, []
        self.n_added = self.idle_steps = 0

    @rule(data=st.data())
    def add(self, data):
        n = data.draw(st.integers(1, self.memory.n_pages * self.memory.size), label="prompt")
        more = data.draw(st.integers(0, 9), label="answer")
        stops = data.draw(st.lists(st.integers(1, n), max_size=2, unique=True).map(sorted), label="stops")
        task = Task(self.n_added, n, n + more, stops=stops)
        self.n_added += 1
        self.tasks.append(task)
        self.answers[task] = n + more
        self.scheduler.add(task)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def abort(self, data):
        self._leave(data.draw(st.sampled_from(self.tasks)))

    @rule(hit=st.integers(0, 30))
    def step(self, hit):
        self._step(hit)

    def _step(self, hit):
        scheduler, memory = self.scheduler, self.memory
        memory.hit = hit
        before, first = list(scheduler.running), next(iter(scheduler.waiting), None)
        plan = scheduler.plan()
        new = [task for task in scheduler.running if task not in before]
        assert not new or new[0] is first, "somebody overtook the first in the queue"
        for task in plan.preempted:
            assert task not in scheduler.running and task.lane == NOWHERE and task.n_done == 0
        if plan.stuck is not None:
            assert scheduler.running == [plan.stuck] and not plan.parts
            assert memory.kept == 0 and memory.missing([(plan.stuck, 1)]) > memory.free, "it could go on"
            self._leave(plan.stuck)
            return
        assert bool(plan.parts) == bool(self.tasks), "nothing is done although somebody waits"
        self._check_budget(plan.parts)
        for task, n in plan.parts:
            memory.write(task, n)
            task.n_done += n
            if task.pending == 0:
                if task.n_tokens == self.answers[task]:
                    self._leave(task)
                else:
                    task.n_tokens += 1

    def _check_budget(self, parts):
        rows = [task for task, _ in parts if task.pending == 1]
        chunks = [(task, n) for task, n in parts if task.pending > 1]
        assert len({task for task, _ in parts}) == len(parts) and all(1 <= n <= t.pending for t, n in parts)
        assert set(rows) == {task for task in self.scheduler.running if task.pending == 1}, "a decoder waits"
        budget = self.scheduler.small if rows else self.scheduler.chunk
        assert sum(n for _, n in chunks) <= budget
        prompts = [task for task in self.scheduler.running if task.pending > 1]
        if prompts:
            oldest, n = chunks[0]
            stop = next((s for s in oldest.stops if s > oldest.n_done), oldest.n_tokens)
            assert oldest is prompts[0] and n >= min((budget + 1) // 2, stop - oldest.n_done)
        for task, n in chunks:
            assert not any(task.n_done < s < task.n_done + n for s in task.stops), "a checkpoint is passed"

    def _leave(self, task):
        self.scheduler.remove(task)
        self.tasks.remove(task)

    @invariant()
    def everything_is_accounted_for(self):
        memory, scheduler = self.memory, self.scheduler
        assert memory.free + memory.kept + sum(memory.held.values()) == memory.n_pages
        lanes = [task.lane for task in scheduler.running]
        assert sorted([*lanes, *memory.lanes]) == list(range(scheduler.n_seqs))
        assert set(memory.held) == set(lanes)
        order = [task.id for task in [*scheduler.running, *scheduler.waiting]]
        assert order == [task.id for task in self.tasks], "somebody is lost, or out of order"
        assert all(task.lane == NOWHERE and task.n_done == 0 for task in scheduler.waiting)

    def teardown(self):
        """Whatever is left ends, in a bounded number of steps, with a prefix cache that finds nothing."""
        if not hasattr(self, "tasks"):
            return
        work = sum(self.answers[task] for task in self.tasks)
        for _ in range(work * (len(self.tasks) + 1) + PATIENCE):
            if not self.tasks:
                break
            self._step(0)
            self.everything_is_accounted_for()
        assert not self.tasks, "somebody starves"
        assert self.memory.free + self.memory.kept == self.memory.n_pages


TestTrace = Trace.TestCase
TestTrace.settings = settings(max_examples=settings.default.max_examples * 4, stateful_step_count=40)


# -- cases by hand --------------------------------------------------------------------------------------


def scheduler_of(n_lanes=4, n_pages=1000, chunk=100, small=20, size=4):
    return Scheduler(Counting(n_lanes, n_pages, size), n_lanes, chunk, small)


def went_on(scheduler, sampled=True):
    """One call; who went on by how much."""
    plan = scheduler.plan()
    for task, n in plan.parts:
        scheduler.memory.write(task, n)
        task.n_done += n
        if task.pending == 0 and sampled:
            task.n_tokens += 1
    return [(task.id, n) for task, n in plan.parts]


def test_a_lone_prompt_goes_in_large_chunks():
    scheduler = scheduler_of()
    scheduler.add(Task(0, 250, 260))
    assert [went_on(scheduler) for _ in range(5)] == [[(0, 100)], [(0, 100)], [(0, 50)], [(0, 1)], [(0, 1)]]


def test_a_prompt_beside_one_that_decodes_goes_in_small_chunks():
    scheduler = scheduler_of()
    scheduler.add(Task(0, 5, 260))
    went_on(scheduler)
    scheduler.add(Task(1, 50, 60))
    calls = [went_on(scheduler) for _ in range(4)]
    assert calls == [[(0, 1), (1, 20)], [(0, 1), (1, 20)], [(0, 1), (1, 10)], [(0, 1), (1, 1)]]


def test_short_prompts_do_not_stand_behind_a_long_one_nor_stop_it():
    scheduler = scheduler_of()
    for i, n in enumerate([1000, 400, 30, 10]):
        scheduler.add(Task(i, n, n + 5))
    assert went_on(scheduler) == [(0, 50), (3, 10), (2, 30), (1, 10)]
    assert went_on(scheduler) == [(2, 1), (3, 1), (0, 10), (1, 10)]


def test_what_the_others_do_not_need_is_the_oldest_ones():
    scheduler = scheduler_of()
    for i, n in enumerate([1000, 8]):
        scheduler.add(Task(i, n, n + 5))
    assert went_on(scheduler) == [(0, 92), (1, 8)]


def test_the_youngest_gives_its_pages_back_and_is_first_in_the_queue():
    """Of 80 pages two newcomers may want 36 each before long, and a third waits; at 40 each all are taken."""
    scheduler = scheduler_of(n_pages=80)
    tasks = [Task(i, 15, 1000) for i in range(3)]
    for task in tasks:
        scheduler.add(task)
    for _ in range(200):
        plan = scheduler.plan()
        if plan.preempted:
            break
        for task, n in plan.parts:
            scheduler.memory.write(task, n)
            task.n_done += n
            task.n_tokens += task.pending == 0
    assert plan.preempted == [tasks[1]] and plan.parts == [(tasks[0], 1)]
    assert list(scheduler.waiting) == tasks[1:] and scheduler.running == tasks[:1]
    assert tasks[0].n_done == tasks[1].n_tokens - 1 == 160  # its answer so far stays


def test_one_that_cannot_grow_is_said():
    scheduler = scheduler_of(n_pages=2)
    task = Task(0, 7, 20)
    scheduler.add(task)
    assert [went_on(scheduler) for _ in range(2)] == [[(0, 7)], [(0, 1)]]
    plan = scheduler.plan()
    assert plan.stuck is task and not plan.parts


def image(start, stop):
    return SoftTokens(start, [0] * (stop - start), True)


@pytest.mark.parametrize(
    ("whole", "calls"),
    [(True, [5, 30, 20, 5]), (False, [20, 20, 20])],
)
def test_an_image_is_a_call_of_its_own_where_it_must_be_whole(whole, calls):
    scheduler = scheduler_of(chunk=20)
    scheduler.add(Task(0, 60, 61, soft=[image(5, 35)], whole=whole))
    assert [went_on(scheduler, sampled=False)[0][1] for _ in calls] == calls


def test_an_image_larger_than_what_is_left_waits_and_is_not_forgotten():
    scheduler = scheduler_of(chunk=20)
    scheduler.add(Task(0, 60, 61))
    scheduler.add(Task(1, 31, 32, soft=[image(0, 30)], whole=True))
    calls = [went_on(scheduler) for _ in range(7)]
    assert calls[0] == [(0, 10)] and [(0, 1), (1, 30)] in calls
