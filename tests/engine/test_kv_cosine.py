"""What rounding keys and values does to logits: their cosine to those of a float32 cache, at every length.

Judged on the demo checkpoint, which was trained, with text that it never saw, and on random models whose
branches are small beside the residual stream.  Plain random models are no measure: docs/numerics.md, "Rounded
keys and values".
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import fastpath.cpu
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from refimpl.batch import make_batch
from tests import tiny, tolerances
from tests.engine import held_out

N = 24  # conversations
PAGE, CHUNK = 32, 40
NEAR = 3  # lengths on either side of a border


def logits(model, ids, kv_type):
    """f64[T, V]: after each length of a sequence, which is computed in calls of CHUNK tokens."""
    lanes = Lanes(model, fastpath.cpu, activations="float", kv_type=kv_type, page=PAGE, chunk=CHUNK)
    parts = [
        lanes.forward(make_batch([(0, start, ids[start:stop], "all")]))
        for start, stop in lanes.plan(len(ids))
    ]
    return np.concatenate(parts).astype(np.float64)


def cosine(a, b):
    """Of rows."""
    return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def borders(window, n):
    """Lengths up to n near multiples of a page, and near those that fill the window or let it begin on a new
    page.
    """
    marks = {*range(PAGE, n + 1, PAGE), *range(window, n + 1, PAGE)}
    return sorted({m + d for m in marks for d in range(-NEAR, NEAR + 1) if 0 < m + d <= n})


def window_of(model):
    return next(layer.window for layer in model.config.layers if layer.window is not None)


@cache
def demo():
    """(model, texts, their logits on a float32 cache)"""
    model = load_model(DEMO)
    texts = [ids for ids, _ in held_out.conversations(model.tokenizer, N)]
    return model, texts, [logits(model, ids, "f32") for ids in texts]


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
def test_demo_at_every_length(kv_type):
    model, texts, want = demo()
    got = [cosine(logits(model, ids, kv_type), rows) for ids, rows in zip(texts, want, strict=True)]
    least = min(c.min() for c in got)
    print(f"least cosine of {sum(map(len, got))} lengths: {least:.6f}")
    assert least >= tolerances.KV_COSINE[kv_type]


@pytest.mark.parametrize("kv_type", [("q4_0", "f16"), ("f16", "q4_0"), "q4_0"])
def test_demo_in_4_bits(kv_type):
    """At every length around the borders, over all texts together; and of single lengths nearly all."""
    model, texts, want = demo()
    got = [logits(model, ids, kv_type) for ids in texts]
    for length in borders(window_of(model), max(map(len, texts))):
        rows = [(g[length - 1], w[length - 1]) for g, w in zip(got, want, strict=True) if len(g) >= length]
        if len(rows) < N // 3:
            continue
        together = cosine(*(np.concatenate(side) for side in zip(*rows, strict=True)))
        assert together >= tolerances.KV_COSINE["q4_0"], f"length {length}: {together:.5f}"
    single = np.concatenate([cosine(g, w) for g, w in zip(got, want, strict=True)])
    share = np.mean(single >= tolerances.KV_COSINE["q4_0"])
    print(f"least {single.min():.4f}, median {np.median(single):.5f}, {100 * share:.1f} % above the bound")
    assert share >= tolerances.KV_Q4_0_SHARE


@cache
def damped(family, folder):
    """A random model whose branches are small beside the residual stream, with scores of deviation 1."""
    path = tiny.make(
        folder / f"{family}.gguf", family, size="block256", keys={"gemma4.attention.sliding_window": 45}
    )
    model = load_model(path)
    small, mild = np.float32(0.1), np.float32(0.5)
    layers = [
        replace(
            layer,
            post_attention_norm=layer.post_attention_norm * small,
            post_ffw_norm=layer.post_ffw_norm * small,
            post_norm=None if layer.post_norm is None else layer.post_norm * small,
            attn_q_norm=layer.attn_q_norm * mild,
        )
        for layer in model.weights.layers
    ]
    model = replace(model, weights=replace(model.weights, layers=layers))
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, 230).tolist()
    return model, ids, logits(model, ids, "f32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damped")


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["e2b", "31b"])
def test_random_models_at_every_length(folder, family, kv_type):
    """The window is no multiple of a page, and the ring of pages goes round more than once."""
    model, ids, want = damped(family, folder)
    assert window_of(model) % PAGE and len(ids) > 2 * (window_of(model) + CHUNK)
    got = cosine(logits(model, ids, kv_type), want)
    print(f"least {got.min():.6f} at length {got.argmin() + 1}")
    assert got.min() >= tolerances.KV_COSINE[kv_type], f"length {got.argmin() + 1}: {got.min():.6f}"
    assert got.min() < 1 - 1e-9, "nothing was rounded"
