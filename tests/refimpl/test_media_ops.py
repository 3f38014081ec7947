"""The ops of the encoders: by hand, and against loops written from their formulas."""

import math

import numpy as np
import pytest

from refimpl import ops
from refimpl.kv_types import own_pages, shapes_of
from tests.tolerances import FLOAT64

RNG = np.random.default_rng(8)


def close(got, want, tolerance=FLOAT64):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def caches(k, v):
    """The keys and values of one lane, as attention reads them."""
    arrays = *(np.zeros(shape) for shape in shapes_of(1, *k.shape)), own_pages(1)
    ops.write_kv(k, v, *arrays, np.zeros(len(k), int), np.arange(len(k)))
    return arrays


def test_silu_and_glu_by_hand():
    x = np.array([[0.0, 1.0, -2.0, 800.0, -800.0]])
    close(ops.silu(x), [[0, 1 / (1 + math.exp(-1)), -2 / (1 + math.exp(2)), 800, 0]])
    close(ops.glu(np.array([[3.0, 4.0, 0.0, -900.0]])), [[1.5, 0.0]])


def test_clip_by_hand():
    x = np.array([-3.0, -1.0, 0.2, 9.0, np.nan, np.inf])
    np.testing.assert_array_equal(ops.clip(x, -1.0, 2.0), [-1, -1, 0.2, 2, np.nan, 2])
    np.testing.assert_array_equal(ops.clip(x, 0.0, math.inf), [0, 0, 0.2, 9, np.nan, np.inf])
    assert ops.clip(np.float32([5]), -1e300, 1e300).dtype == np.float32


def test_layer_norm_by_hand():
    x = np.array([[1.0, 3.0], [5.0, 5.0]])
    close(
        ops.layer_norm(x, np.array([2.0, 1.0]), np.array([0.5, 0.0]), 0.0 + 1e-300),
        [[-1.5, 1.0], [0.5, 0.0]],
    )
    close(ops.layer_norm(np.array([[0.0, 2e-3]]), np.ones(2), None, 1e-6), [[-(0.5**0.5), 0.5**0.5]])


def test_layer_norm_forgets_place_and_size():
    x, w = RNG.standard_normal((4, 9)), RNG.standard_normal(9)
    close(ops.layer_norm(3 * x + 7, w, None, 0.0), ops.layer_norm(x, w, None, 0.0), 1e-12)


def test_add_bias_and_standardize():
    x, b, s = RNG.standard_normal((3, 4)), RNG.standard_normal(4), RNG.standard_normal(4)
    for t in range(3):
        close(ops.add_bias(x, b)[t], [x[t, c] + b[c] for c in range(4)])
        close(ops.standardize(x, b, s)[t], [(x[t, c] - b[c]) * s[c] for c in range(4)])


@pytest.mark.parametrize("T, F, C, M", [(1, 1, 1, 1), (2, 5, 1, 3), (5, 4, 3, 2), (7, 8, 2, 4)])
def test_conv2d(T, F, C, M):
    x, w = RNG.standard_normal((T, F, C)), RNG.standard_normal((M, C, 3, 3))
    want = np.zeros(((T + 1) // 2, (F + 1) // 2, M))
    for t, f, m in np.ndindex(want.shape):
        for i, j, c in np.ndindex(3, 3, C):
            a, b = 2 * t + i - 1, 2 * f + j - 1
            if 0 <= a < T and 0 <= b < F:
                want[t, f, m] += x[a, b, c] * w[m, c, i, j]
    close(ops.conv2d(x, w), want)


@pytest.mark.parametrize("T", [1, 3, 9])
def test_causal_conv(T):
    x, w = RNG.standard_normal((T, 3)), RNG.standard_normal((3, 5))
    want = [
        [sum(x[t - 4 + j, c] * w[c, j] for j in range(5) if t - 4 + j >= 0) for c in range(3)]
        for t in range(T)
    ]
    close(ops.causal_conv(x, w), want)
    later = ops.causal_conv(np.concatenate([x, 100 + x]), w)
    np.testing.assert_array_equal(later[:T], ops.causal_conv(x, w))


def test_mean_pool():
    rows, columns, side = 4, 6, 2
    x = RNG.standard_normal((rows * columns, 3))
    grid = x.reshape(rows, columns, 3)
    want = [
        grid[r : r + side, c : c + side].mean(axis=(0, 1))
        for r in range(0, rows, side)
        for c in range(0, columns, side)
    ]
    close(ops.mean_pool(x, columns, side), want)


@pytest.mark.parametrize("T", [1, 4, 11])
def test_relative_attention(T):
    W, N, H, cap, k_scale = 4, 2, 6, 5.0, 1.9
    q, k, v = RNG.standard_normal((3, T, N, H))
    relative, q_scale = RNG.standard_normal((W, N, H)), RNG.standard_normal(H)
    want = np.zeros((T, N, H))
    for t, n in np.ndindex(T, N):
        seen = [d for d in range(W) if t - d >= 0]
        scores = [
            cap * math.tanh(((q[t, n] * q_scale) @ (k[t - d, n] * k_scale + relative[d, n])) / cap)
            for d in seen
        ]
        weights = np.exp(scores) / np.exp(scores).sum()
        want[t, n] = sum(weight * v[t - d, n] for weight, d in zip(weights, seen))
    close(ops.relative_attention(q, k, v, relative, q_scale, k_scale, cap), want)


def test_relative_attention_in_blocks():
    """The published form: blocks of 12 queries, 24 keys, and positions shifted into place."""
    T, W, N, H = 31, 12, 2, 4
    q, k, v = RNG.standard_normal((3, T, N, H))
    relative = RNG.standard_normal((W + 1, N, H))  # distances 12 .. 0 in rows of the published table
    n_blocks = -(-T // W)
    padded_q = np.zeros((n_blocks * W, N, H))
    padded_q[:T] = q
    padded = np.zeros((2, W + n_blocks * W, N, H))
    padded[:, W : W + T] = k, v
    out = np.zeros((n_blocks * W, N, H))
    for block in range(n_blocks):
        rows = padded_q[block * W : block * W + W]
        keys, values = padded[:, block * W : block * W + 2 * W]
        content = np.einsum("bnh,cnh->nbc", rows, keys)
        by_position = np.einsum("bnh,rnh->nbr", rows, relative[::-1])
        shifted = np.pad(by_position, ((0, 0), (0, 0), (0, 2 * W + 1 - (W + 1))))
        shifted = shifted.reshape(N, -1)[:, : W * 2 * W].reshape(N, W, 2 * W)
        scores = 50 * np.tanh((content + shifted) / 50)
        i = np.arange(block * W, block * W + W)[:, None]
        j = np.arange(block * W - W, block * W + W)[None]
        scores[:, (j < 0) | (j >= T) | (i - j < 0) | (i - j >= W)] = -1e9
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[block * W : block * W + W] = np.einsum("nbc,cnh->bnh", weights, values)
    close(ops.relative_attention(q, k, v, relative[:W], np.ones(H), 1.0, 50.0), out[:T], 1e-12)


def test_attention_with_ends_is_full_attention():
    """All patches of an image see all: the softmax over every key, in any order of patches."""
    T, N, H = 7, 2, 4
    q, k, v = RNG.standard_normal((3, T, N, H))
    lanes, order, last = np.zeros(T, int), np.arange(T), np.full(T, T - 1)
    got = ops.attention(q, *caches(k, v), lanes, order, None, last)
    scores = np.einsum("tnh,snh->nts", q, k)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    close(got, np.einsum("nts,snh->tnh", weights, v))
    shuffled = RNG.permutation(T)
    again = ops.attention(q[shuffled], *caches(k[shuffled], v[shuffled]), lanes, order, None, last)
    close(again, got[shuffled])


def test_ends_of_their_own_change_nothing():
    T, N, H = 9, 2, 4
    q, k, v = RNG.standard_normal((3, T, N, H))
    lanes, order = np.zeros(T, int), np.arange(T)
    for window in (None, 3):
        plain = ops.attention(q, *caches(k, v), lanes, order, window)
        np.testing.assert_array_equal(ops.attention(q, *caches(k, v), lanes, order, window, order), plain)
