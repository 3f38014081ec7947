"""The engine on arrays of a device: the property of tests/engine/test_many, and tokens of the CPU's kernels.

A trace with everything in it: prefixes that requests share, a page that is copied because two go on in it, a
request that is given up, images, too few pages so that one has to wait and is computed again, programs.
"""

import pytest

import fastpath.cpu
from fastpath.cuda import device, ops
from fastpath.engine import Engine, scheduler
from fastpath.kv.cache import KVCache
from fastpath.load import load_model
from tests import tiny
from tests.engine import test_many
from tests.engine.conftest import FORMATS
from tests.engine.test_many import Ask, World, run
from tests.gpu_on_cpu import devices, launching

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
    with device.use(devices.executor_one((launching.LOCKSTEP,))):
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
