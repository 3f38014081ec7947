"""Whole tiny models on the kernels: the tokens that the CPU's kernels and the reference generate."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.cuda import device, ops
from fastpath.lanes import Lanes
from fastpath.load import load_model
from tests import tiny
from tests.engine.conftest import FORMATS
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))
N_NEW = 4


class Run:
    """Greedy tokens of three prompts of one model: in chunks of 9, then three at a time, in one call."""

    def __init__(self, table, model, ids, **options):
        self.lanes = Lanes(model, table, context_len=64, chunk=9, n_seqs=3, page=32, replay=False, **options)
        self.logits = []
        prompts = ids[:20], ids[3:10], ids[5:24]
        self.tokens = [
            [int(self._seen(self.lanes.prefill(p, lane=i)).argmax())] for i, p in enumerate(prompts)
        ]
        for _ in range(N_NEW - 1):
            rows = self.lanes.extend([(i, found[-1:]) for i, found in enumerate(self.tokens)])
            for found, row in zip(self.tokens, rows, strict=True):
                found.append(int(self._seen(row).argmax()))

    def _seen(self, row):
        self.logits.append(np.array(row))
        return row


WHOLE = (
    "e2b",
    "26b",
)  # the other families have parts of these: all of it under `slow`, a short case otherwise
CASES = [
    *(
        pytest.param(family, "odd", "float", "f16", marks=[] if family in WHOLE else [pytest.mark.slow])
        for family in tiny.FAMILIES
    ),
    *((family, "block256" if family == "e2b" else "block32", "int8", "q8_0") for family in WHOLE),
]


@pytest.mark.parametrize(("family", "size", "activations", "kv_type"), CASES)
def test_tokens(tmp_path, family, size, activations, kv_type):
    model, ids = (
        load_model(tiny.make(tmp_path / "m.gguf", family, size=size, formats=FORMATS[size])),
        tiny.prompt(family),
    )
    options = {"activations": activations, "kv_type": kv_type}
    with device.use(ONCE):
        got = Run(ops, model, ids, **options)
    for table in (fastpath.cpu, refimpl.ops):
        assert got.tokens == Run(table, model, ids, **options).tokens


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in WHOLE])
def test_few_tokens(tmp_path, family):
    """A prompt that is longer than the window, in two chunks, and a token after it."""
    model = load_model(tiny.make(tmp_path / "m.gguf", family))
    ids, answers = tiny.prompt(family)[:11], []
    for table in (ops, refimpl.ops):
        with device.use(ONCE):
            lanes = Lanes(model, table, context_len=32, chunk=9, n_seqs=1, page=32, replay=False)
            first = int(np.array(lanes.prefill(ids, lane=0)).argmax())
            answers.append([first, int(np.array(lanes.extend([(0, [first])])).argmax())])
    assert answers[0] == answers[1]
