"""The engine on a device brings a row's largest logits, and not the row: the tokens stay what they are."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpath.cuda import device, ops
from fastpath.engine import Request
from fastpath.largest import MAX_K
from refimpl.frontend.sampling import SamplingParams
from tests import tiny
from tests.engine.conftest import tiny_model as tiny_model
from tests.engine.crafted import Crafted, answers, requests, with_layers
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))
OPTIONS = {"n_seqs": 2, "page": 32}


@pytest.fixture(autouse=True)
def not_fused(monkeypatch):
    """Fused kernels take long to compile; whole models on them: test_fused.py."""
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)


@settings(max_examples=5)
@given(asked=requests(3), seed=st.integers(0, 99), suppress=st.sampled_from([(), (2, 30)]), cap=st.booleans())
def test_an_engine_draws_the_same(tiny_model, asked, seed, suppress, cap):
    """Against whole rows of the device: tokens, ends and faults of whatever is mixed; recorded and not."""
    model = with_layers(tiny_model("12b"), 0)
    with device.use(ONCE), patch.object(model.tokenizer, "suppress_ids", suppress):
        table = Crafted(ops, model, cap)
        want, _ = answers(table, model, asked, seed, by_rows=True, replay=False, **OPTIONS)
        got, _ = answers(table, model, asked, seed, by_rows=False, **OPTIONS)
    assert got == want


def test_a_program_for_each_ending(tiny_model):
    """Of one token and of two; what is brought is as small as it can be."""
    model = with_layers(tiny_model("12b"), 0)
    kinds = {}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 70}
    asked = [
        Request(tiny.prompt("12b")[:5], (), SamplingParams(**params), 3, frozenset()) for params in kinds
    ]
    with device.use(ONCE):
        for few, keys in (
            (asked[:1], {(1, 1)}),
            (asked[:2], {(2, 64)}),
            (asked[1:], {(2, MAX_K)}),
        ):
            _, made = answers(Crafted(ops, model), model, few, 0, by_rows=False, **OPTIONS)
            assert made.lanes.replay._known.keys() == keys
            for (n, k), known in made.lanes.replay._known.items():
                assert [host.shape for _, host in known.program._outputs] == [(n, k), (n, k)]
