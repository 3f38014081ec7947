"""The fast composition on the reference's op table gives the reference's bytes: every name, every logit."""

import numpy as np
import pytest

import refimpl.ops
from fastpath.kv.cache import KVCache as FastCache
from fastpath.model.text import forward as fast_forward
from refimpl.batch import make_batch
from refimpl.cache import KVCache as ReferenceCache
from refimpl.model.text import forward as reference_forward
from tests import tiny

CASES = [(family, "odd", "float") for family in tiny.FAMILIES] + [
    (family, size, "int8") for family in tiny.FAMILIES for size in ("block32", "block256")
]


def run(forward, cache, model, parts, activations, *, is_fast):
    """Logits of several calls, and every intermediate of theirs, in order."""
    seen, logits = [], []
    for part in parts:
        call = (model.config, model.weights, cache, make_batch(part))
        options = {
            "activations": activations,
            "trace": lambda name, array: seen.append((name, np.array(array))),
        }
        logits.append(forward(refimpl.ops, *call, **options) if is_fast else forward(*call, **options))
    return logits, seen


@pytest.mark.parametrize(("family", "size", "activations"), CASES)
def test_the_same_bytes_as_the_reference(tiny_model, family, size, activations):
    """Three calls: a prompt that wraps the window, a second sequence beside its next token, one more each."""
    model, ids = tiny_model(family, size), tiny.prompt(family)
    parts = [
        [(0, 0, ids[:20], "all")],
        [(1, 0, ids[5:14], "last"), (0, 20, ids[20:21], "all")],
        [(0, 21, ids[21:24], "none"), (1, 9, ids[14:15], "all")],
    ]
    caches = [cls(model.config, 2, 64, 20, dtype=np.float32) for cls in (ReferenceCache, FastCache)]
    expected = run(reference_forward, caches[0], model, parts, activations, is_fast=False)
    got = run(fast_forward, caches[1], model, parts, activations, is_fast=True)
    assert [name for name, _ in got[1]] == [name for name, _ in expected[1]]
    for (name, ours), (_, theirs) in zip(got[1], expected[1], strict=True):
        assert ours.tobytes() == theirs.tobytes(), name
    for ours, theirs in zip(got[0], expected[0], strict=True):
        assert ours.dtype == np.float32 and ours.tobytes() == theirs.tobytes()


def test_float64_reaches_the_logits(tiny_model):
    """The reference's table under this composition is exact when the cache is: the truth for both sides."""
    model, ids = tiny_model("e2b"), tiny.prompt("e2b")
    batch = make_batch([(0, 0, ids, "all")])
    fast = fast_forward(
        refimpl.ops,
        model.config,
        model.weights,
        FastCache(model.config, 1, 64, 64, dtype=np.float64),
        batch,
        activations="float",
    )
    reference = reference_forward(
        model.config,
        model.weights,
        ReferenceCache(model.config, 1, 64, 64, dtype=np.float64),
        batch,
        activations="float",
    )
    assert fast.dtype == np.float64 and fast.tobytes() == reference.tobytes()
