"""What the wrappers refuse, in one line each."""

import numpy as np
import pytest

import fastpath.cpu as cpu
from fastpath.cpu import threads
from quant import FORMATS
from tests import strategies

RNG = np.random.default_rng(0)
X = strategies.normal(RNG, 3, 64)
W = strategies.weights(RNG, FORMATS["Q4_0"], 5, 64)
STACK = strategies.weights(RNG, FORMATS["Q4_0"], 4, 5, 64)
KV = strategies.kv_caches(*strategies.normal(RNG, 2, 2, 32, 1, 8))
THREE_HEADS = strategies.kv_caches(*strategies.normal(RNG, 2, 1, 32, 3, 8))
Q = strategies.normal(RNG, 1, 2, 8)
ZERO = np.zeros(1, np.int32)

FAULTS = {
    "float64": (lambda: cpu.linear(X.astype(np.float64), W, "int8"), "float64, expected float32"),
    "width": (lambda: cpu.linear(X[:, :32], W, "int8"), r"x \(3, 32\) and weight \(5, 64\)"),
    "activations": (lambda: cpu.linear(X, W, "int4"), "expected 'int8' or 'float'"),
    "expert": (lambda: cpu.expert_linear(X, STACK, np.full((3, 1), 4, np.int32), "int8"), "expert 4.*0 .. 3"),
    "table row": (lambda: cpu.embed(W, np.array([5]), 1.0), "row 5.*0 .. 4"),
    "norm weight": (lambda: cpu.rms_norm(X, X[0, :63], 1e-6), r"weight: got shape \(63,\), expected \(64,\)"),
    "angles": (lambda: cpu.rope(Q, X[:1, :3], X[:1, :3]), "cos"),
    "gate": (lambda: cpu.geglu(X, X[:2]), "up"),
    "too far": (lambda: cpu.attention(Q, *KV, ZERO, ZERO + 32, None), "32 slots"),
    "lane": (lambda: cpu.attention(Q, *KV, ZERO + 2, ZERO, None), "2 lanes"),
    "negative position": (lambda: cpu.attention(Q, *KV, ZERO, ZERO - 1, None), "positions -1"),
    "window": (lambda: cpu.attention(Q, *KV, ZERO, ZERO + 90, 33), "32 slots"),
    "integers in a cache": (
        lambda: cpu.attention(Q, KV[0].astype(np.int8), *KV[1:], ZERO, ZERO, None),
        "k_pages: got int8",
    ),
    "layout of a cache": (
        lambda: cpu.attention(Q, KV[1], *KV[1:], ZERO, ZERO, None),
        r"expected .N, 1, P/32, 8, 32.",
    ),
    "cache of part of a block": (
        lambda: cpu.attention(Q, KV[0], KV[1][..., :31, :], KV[2], ZERO, ZERO, None),
        r"expected .*1, 32, 32\] of f32 and f32",
    ),
    "heads": (
        lambda: cpu.attention(
            Q, *strategies.kv_caches(*strategies.normal(RNG, 2, 1, 32, 3, 8)), ZERO, ZERO, None
        ),
        "expected a multiple",
    ),
    "lane to write": (lambda: cpu.write_kv(Q[:, :1], Q[:, :1], *KV, ZERO + 2, ZERO), "2 lanes"),
    "a page that is not there": (
        lambda: cpu.attention(Q, *KV[:2], np.array([[1, -1]], np.int32), ZERO, ZERO + 32, None),
        "lane 0 has page -1 for its page number 1, expected 0 to 1",
    ),
    "a page of nobody to write": (
        lambda: cpu.write_kv(Q[:, :1], Q[:, :1], *KV[:2], np.array([[2]], np.int32), ZERO, ZERO),
        "lane 0 has page 2 for its page number 0",
    ),
    "table": (
        lambda: cpu.attention(Q, *KV[:2], KV[2].astype(np.int64), ZERO, ZERO, None),
        r"int64\[2, 1\], expected int32\[R, E\]",
    ),
    "experts": (lambda: cpu.route(X, 65, None), "1 to 64"),
    "threads": (lambda: threads.set_num_threads(0), "1 to"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_in_one_line(fault):
    call, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_views_with_gaps_are_copied():
    wide = strategies.normal(RNG, 3, 128)
    for op, x in ((cpu.rms_norm, (wide[:, ::2], None, 1e-6)), (cpu.linear, (wide[:, ::2], W, "int8"))):
        assert np.array_equal(op(*x), op(np.ascontiguousarray(x[0]), *x[1:]))


def test_permuted_queries_keys_and_values_are_copied():
    """F4: a past bug read a permuted query as if it were contiguous, and nobody was told."""
    q, k, v = (
        strategies.normal(RNG, n, 5, 8) for n in (2, 1, 1)
    )  # [N, T, H], as a batched product leaves it
    lanes, positions = np.zeros(5, np.int32), np.arange(5, dtype=np.int32)
    found = []
    for of in (lambda x: x.transpose(1, 0, 2), lambda x: np.ascontiguousarray(x.transpose(1, 0, 2))):
        cache = [np.zeros_like(KV[0]), np.zeros_like(KV[1]), KV[2]]
        cpu.write_kv(of(k), of(v), *cache, lanes, positions)
        found.append([*cache[:2], cpu.attention(of(q), *cache, lanes, positions, None)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True)) and found[0][0].any()


def test_no_rows():
    assert cpu.linear(X[:0], W, "int8").shape == (0, 5)
    assert cpu.rms_norm(X[:0], None, 1e-6).shape == (0, 64)
    assert cpu.expert_linear(X[:0], STACK, np.zeros((0, 2), np.int32), "int8").shape == (0, 2, 5)
    assert cpu.attention(Q[:0], *KV, ZERO[:0], ZERO[:0], None).shape == (0, 2, 8)
