"""Recorded programs: a replay gives the bytes that the ops give one by one; and what cannot be recorded."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpath.cuda import device, elementwise, ops
from fastpath.cuda.planned import PlanError, Planner, in_memory, layout
from fastpath.lanes import Lanes
from fastpath.load import load_model
from tests import strategies, tiny
from tests.engine.conftest import FORMATS
from tests.gpu_on_cpu import devices, launching


@pytest.fixture(autouse=True)
def not_fused(monkeypatch):
    """Fused kernels take long to compile; they are tested in test_fused.py, on whole models as well."""
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)


ONCE = devices.executor_one((launching.LOCKSTEP,))


def _steps(x, y, rows, weight, choices):
    """A random little model: every step reads one or two of the arrays that there are, and may forget one."""
    live = [x, y]
    for kind, a, b, forget in choices:
        a, b = live[a % len(live)], live[b % len(live)]
        made = {
            "add": lambda a=a, b=b: ops.add(a, b),
            "scale": lambda a=a: ops.scale(a, 0.37),
            "geglu": lambda a=a, b=b: ops.geglu(a, b),
            "norm": lambda a=a: ops.rms_norm(a, weight, 1e-6),
            "rows": lambda a=a: ops.get_rows(a, rows),
            "views": lambda a=a: (
                ops.swap_axes(a.reshape(len(x), 2, -1)).reshape(2, -1)[1:].reshape(x.shape[0], -1)
            ),
        }[kind]()
        if kind == "views":
            made = ops.add(ops.scale(b, 0.5), a) if made.shape != x.shape else made
        live.append(made)
        if forget and len(live) > 2:
            del live[0]
    return ops.add(live[-1], live[0]), live[-1]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    T=st.integers(1, 4),
    choices=st.lists(
        st.tuples(
            st.sampled_from(["add", "scale", "geglu", "norm", "rows", "views"]),
            st.integers(0, 9), st.integers(0, 9), st.booleans(),
        ),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_replay_is_what_the_ops_do(seed, T, choices):
    rng = np.random.default_rng(seed)
    weight = strategies.normal(rng, 10)
    inputs = strategies.normal(rng, T, 10), strategies.normal(rng, T, 10), rng.permutation(T)

    def run(arrays):
        x, y = (device.put(array, np.float32) for array in arrays[:2])
        return tuple(map(device.get, _steps(x, y, arrays[2], weight, choices)))

    with device.use(ONCE):
        with ops.program.record() as program:
            replayed = run(inputs)
        for again in range(2):
            if again:
                inputs[0][:], inputs[1][:] = strategies.normal(rng, 2, T, 10)
                inputs[2][:] = rng.permutation(T)
                program.replay()
            for got, want in zip(replayed, run(inputs), strict=True):
                assert got.tobytes() == want.tobytes()


class World:
    """Two runs of one tiny model on the device, and what recorded programs do to it."""

    def __init__(self, folder, family, size):
        self.model = load_model(tiny.make(folder / "m.gguf", family, size=size, formats=FORMATS[size]))
        self.ids = tiny.prompt(family)

    def lanes(self, replay):
        return Lanes(self.model, ops, context_len=64, chunk=32, n_seqs=3, page=32, replay=replay)


@pytest.mark.parametrize(
    ("family", "size"), [("e2b", "block32"), pytest.param("26b", "block256", marks=pytest.mark.slow)]
)
def test_calls_of_a_model(family, size, tmp_path):
    """One and two tokens a call, in lanes of their own, over the border of a page and of the window."""
    world = World(tmp_path, family, size)
    calls = [((0, 5), (1, 6)), ((0, 7),), ((1, 8), (0, 9)), ((2, 7),)]
    with device.use(ONCE):
        runs = []
        for replay in (False, True):
            lanes = world.lanes(replay)
            got = [lanes.prefill(world.ids[:31]), lanes.prefill(world.ids[3:10], lane=1)]
            got += [lanes.extend([(lane, [token]) for lane, token in call]) for call in calls]
            runs.append(b"".join(logits.tobytes() for logits in got))
        assert runs[0] == runs[1]
        program = lanes.replay.program(1)
        timings = program.timed()
    assert len(timings) == 1 + len(program) and {t.mark for t in timings} >= {"Qcur-0", "result_output"}
    assert len(lanes.replay._known) == 2


def test_inputs_are_brought_once_and_constants_never_again(tmp_path):
    world = World(tmp_path, "e2b", "block32")
    executor = devices.executor_one((launching.LOCKSTEP,))
    with device.use(executor):
        lanes = world.lanes(True)
        lanes.prefill(world.ids[:4])
        lanes.decode(5)
        before = executor.uploads
        lanes.decode(6)
        assert executor.uploads == before  # one copy into memory that is there
        eager = world.lanes(False)
        eager.prefill(world.ids[:4])
        before = executor.uploads
        eager.decode(5)
        # ids, positions, lanes, a table for each of two kinds of layers, cosines and sines of each
        assert executor.uploads == before + 3 + 2 + 4


def test_what_cannot_be_recorded():
    x = np.ones((2, 4), np.float32)
    with device.use(ONCE):
        with pytest.raises(ops.program.UnableError, match="scale: launched after results were read"):
            with ops.program.record():
                there = ops.scale(device.put(x, np.float32), 2.0)
                ops.scale(device.put(device.get(there), np.float32), 2.0)
        assert not ops.program.is_recording()
        for use in (lambda a: a[0, 0], lambda a: a[None], lambda a: device.fill(a, x)):
            with pytest.raises(ops.program.UnableError), ops.program.record():
                use(ops.scale(device.put(x, np.float32), 2.0))
        with ops.program.record() as program:
            assert ops.program.is_recording()
            device.get(ops.scale(device.put(x, np.float32), 2.0))
        assert not program.is_stale
    with device.use(devices.executor_one()):
        assert program.is_stale


def test_a_fault_while_recording_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(elementwise, "SCALE", elementwise.ADD)  # takes other arguments: the launch fails
    x = np.ones((2, 4), np.float32)
    with device.use(ONCE):
        with pytest.raises(AttributeError), ops.program.record():
            device.get(ops.scale(device.put(x, np.float32), 2.0))
        assert not ops.program.is_recording()
        assert device.get(ops.add(device.put(x, np.float32), device.put(x, np.float32))).sum() == 16


# -- memory


@given(data=st.data())
def test_buffers_that_are_needed_together_do_not_overlap(data):
    planner = Planner()
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=12))
    buffers = [planner.array((n,), np.uint8, None).buffer for n in sizes]
    uses = data.draw(st.lists(st.lists(st.sampled_from(buffers), min_size=1, max_size=4), max_size=20))
    used = sorted({b for step in uses for b in step}, key=lambda b: b.address)
    kept = data.draw(st.lists(st.sampled_from(used), max_size=2)) if used else []
    starts, end = layout(uses, kept)
    assert starts.keys() == set(used)
    for b in used:
        assert starts[b] % 256 == 0 and starts[b] + b.n_bytes <= end
    last = len(uses)
    life = {
        b: (
            min(i for i, step in enumerate(uses) if b in step),
            last if b in kept else max(i for i, step in enumerate(uses) if b in step),
        )
        for b in used
    }
    for i, a in enumerate(used):
        for b in used[:i]:
            together = life[a][0] <= life[b][1] and life[b][0] <= life[a][1]
            apart = starts[a] + a.n_bytes <= starts[b] or starts[b] + b.n_bytes <= starts[a]
            assert apart or not together


def test_memory_is_used_again():
    planner = Planner()
    chain = [planner.array((1000,), np.float32, None).buffer for _ in range(50)]
    _, end = layout(list(itertools.pairwise(chain)), [chain[-1]])
    assert end == 2 * 4096


def test_planned_arrays_are_views_of_the_memory_that_they_get():
    planned = Planner().array((3, 4, 5), np.float32, None)
    numbers = np.arange(60, dtype=np.float32)
    with device.use(ONCE):
        memory = device.put(np.concatenate([np.zeros(64, np.uint8), numbers.view(np.uint8)]), np.uint8)
        for view, of_host in (
            (planned, numbers.reshape(3, 4, 5)),
            (planned[1], numbers.reshape(3, 4, 5)[1]),
            (planned[2, 1:3], numbers.reshape(3, 4, 5)[2, 1:3]),
            (planned.reshape(12, 5)[4:].reshape(-1), numbers[20:]),
            (planned.ravel().view(np.uint16), numbers.view(np.uint16)),
        ):
            assert (view.shape, view.dtype, view.size) == (of_host.shape, of_host.dtype, of_host.size)
            np.testing.assert_array_equal(device.get(in_memory(view, memory, 64)), of_host)
    with pytest.raises(PlanError, match="not contiguous"):
        in_memory(planned[:, :2], None, 0)
    with pytest.raises(PlanError, match="not contiguous"):
        planned[:, :2].reshape(-1)
