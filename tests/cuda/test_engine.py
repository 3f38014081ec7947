"""The engine on arrays of a device: the property of tests/engine/test_many, and tokens of the CPU's kernels.

A trace with everything in it: prefixes that requests share, a page that is copied because two go on in it, a
request that is given up, images, too few pages so that one has to wait and is computed again, programs.  And
random traces of words.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpath.cpu
from fastpath.cuda import device, ops
from fastpath.engine import Engine, Request, scheduler
from fastpath.kv.cache import KVCache
from fastpath.load import load_model
from refimpl.frontend.sampling import SamplingParams
from tests import tiny
from tests.engine import test_many
from tests.engine.conftest import FORMATS
from tests.engine.conftest import tiny_model as tiny_model
from tests.engine.crafted import with_layers
from tests.engine.test_many import Ask, World, run
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))
N = 3  # tokens of an answer
TRACE = [
    *(("add", Ask(document, 31, 0, "greedy"), N) for document in ("words", "seen", "other picture")),
    ("step", 3),
    ("abort", 1),
    ("add", Ask("words", 31, 0, "drawn"), 2),
]


@pytest.fixture
def copies(monkeypatch):
    """Pages that were copied."""
    seen, copier = [], KVCache._copier

    def noting(self, name):
        copy = copier(self, name)
        return lambda source, target: (seen.append((name, source, target)), copy(source, target))

    monkeypatch.setattr(KVCache, "_copier", noting)
    return seen


def test_everybody_gets_what_they_get_alone(tmp_path, monkeypatch, copies):
    """Bytes of logits against the device's own, alone; greedy tokens against the CPU's."""
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    monkeypatch.setattr(test_many, "MOST_TOKENS", N)
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)  # takes long to compile
    path = tiny.make(tmp_path / "m.gguf", "e2b", size="block32", formats=FORMATS["block32"])
    on_cpu = World(load_model(path), "e2b")
    world = World(on_cpu.model, "e2b")
    assert on_cpu.ops is fastpath.cpu
    world.ops = ops
    with device.use(ONCE):
        engine = Engine(
            world.model, ops, page=32, largest_image=18, context_len=96, n_seqs=3, chunk=96, kv_type="f16",
            n_pages={"sliding": 6, "global": 3},
        )  # fmt: skip
        usages = run(world, engine, TRACE)
        assert engine.lanes.replay._known, "nothing was replayed"
        assert any(usage.preemptions for usage in usages), "nobody had to wait"
        assert any(usage.recomputed for usage in usages), "nothing was computed again"
        assert any(usage.cached for usage in usages), "no prefix was found"
        assert copies, "no page was copied"
        for action, *what in TRACE:
            if action == "add" and what[0].params == "greedy":
                got, want = world.alone(what[0], "f16"), on_cpu.alone(what[0], "f16")
                assert got[0] == want[0], what[0]


# -- random traces: in float32 throughout, so that the CPU's kernels are close enough for the same draws

KINDS = (
    {}, {"temperature": 1.3, "top_k": 40, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"repeat_penalty": 1.3},
)  # fmt: skip
# prompt tokens, of which the last are its own; kind; whole rows are wanted; tokens of the answer
asks = st.tuples(
    st.sampled_from([3, 8, 11]), st.integers(0, 2), st.sampled_from(KINDS), st.booleans(), st.integers(1, 3)
)
# who comes, how many steps later the next one does, and who of those who came is given up before
traces = st.lists(st.tuples(asks, st.integers(0, 2), st.none() | st.integers(0, 3)), min_size=2, max_size=4)
engines = st.fixed_dictionaries(
    {"n_seqs": st.sampled_from([2, 3]), "chunk": st.sampled_from([5, 40]), "replay": st.booleans()}
)


def play(table, model, trace, **options):
    """[(tokens, why they ended)] of all who came."""
    engine = Engine(model, table, context_len=64, page=32, kv_type="f32", activations="float", **options)
    words, came = tiny.prompt("12b"), []
    for (n, n_own, kind, wants_rows, most), n_steps, unwanted in trace:
        prompt = words[: n - n_own] + [40 + n_own + i for i in range(n_own)]
        params = SamplingParams(**kind)
        came.append(engine.add(Request(prompt, (), params, most, frozenset(), want_logits=wants_rows)))
        for _ in range(n_steps):
            engine.step()
        if unwanted is not None:
            engine.abort(came[unwanted % len(came)])
    while not engine.is_idle:
        engine.step()
    engine.check_integrity()
    results = map(engine.result, came)
    return [(result.tokens, result.reason) for result in results]


@settings(max_examples=4)
@given(trace=traces, options=engines)
def test_random_traces(tiny_model, trace, options):
    """What the CPU's kernels answer in the same company, and what the last who came gets alone."""
    model = with_layers(tiny_model("12b"), 0, 2)
    with device.use(ONCE):
        got = play(ops, model, trace, **options)
        ((alone, _),) = play(ops, model, [(trace[-1][0], 0, None)], n_seqs=1, replay=False)
    assert got == play(fastpath.cpu, model, trace, **options)
    for ((*_, most), *_), (tokens, reason) in zip(trace, got, strict=True):
        assert reason == ("length" if len(tokens) == most else "abort")
    assert got[-1][0] == alone[: len(got[-1][0])]
