"""The soak's short version: the same looks at twice 80 requests (2,000: make soak)."""

import os

import pytest

from fastpath.backend import ops_for
from fastpath.load import load_model
from tests import tiny
from tests.engine.conftest import FORMATS
from tests.soak.soak import MEMORY, Soak


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux to ask for the memory")
def test_a_short_soak(tmp_path):
    keys = {"gemma4.attention.sliding_window": 45}
    path = tiny.make(tmp_path / "tiny.gguf", "26b", size="block32", formats=FORMATS["block32"], keys=keys)
    model, ops = load_model(path).packed(), ops_for("cpu")
    for memory in MEMORY:
        report = Soak(model, ops, "26b", 80, memory=memory, seed=5).run()
        assert sum(report.reasons.values()) == 80
        assert all(report.reasons[reason] for reason in ("abort", "stop", "length"))
        assert report.cached and report.evicted and report.n_compared
        assert (report.preemptions > 0) == (memory == "tight")
