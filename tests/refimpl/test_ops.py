"""What the ops must do, by hand arithmetic and by law."""

import math
import re
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from quant import QTensor
from refimpl import ops
from refimpl.kv_types import own_pages, shapes_of
from tests import tolerances

RNG = np.random.default_rng(7)


def matrix(*shape, fmt="F32"):
    return QTensor.from_array(RNG.standard_normal(shape).astype(np.float32), fmt, "w")


def close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_the_table_is_documented():
    glossary = Path(__file__).parents[2] / "docs" / "glossary.md"
    listed = set(re.findall(r"^\| `(\w+)\(", glossary.read_text(encoding="utf-8"), re.M))
    assert listed == set(ops.__all__)


# --- every op keeps the precision that it is given ------------------------------------


def cases(dtype):
    def x(*shape):
        return RNG.standard_normal(shape).astype(dtype)

    ids, pos, lanes = np.array([[0, 2], [1, 0]]), np.array([3, 4]), np.zeros(2, np.int32)
    cos, sin = ops.rope_table(pos, np.array([1.0, 0.1]))
    cache = x(1, 1, 1, 4, 32), x(1, 1, 1, 1, 32, 32), own_pages(1)
    return {
        "add": ops.add(x(2, 3), x(2, 3)),
        "add_bias": ops.add_bias(x(2, 3), np.ones(3, np.float32)),
        "attention": ops.attention(x(2, 2, 4), *cache, lanes, pos, 3),
        "attention ends": ops.attention(x(2, 2, 4), *cache, lanes, pos, 3, pos + 1),
        "causal_conv": ops.causal_conv(x(4, 3), np.ones((3, 5), np.float32)),
        "clip": ops.clip(x(2, 3), -0.3, 0.4),
        "conv2d": ops.conv2d(x(4, 6, 2), np.ones((5, 2, 3, 3), np.float32)),
        "embed": ops.embed(matrix(5, 4), np.array([1, 3]), dtype(2.5)),
        "expert_linear": ops.expert_linear(x(2, 4), matrix(3, 5, 4), ids, "float"),
        "expert_sum": ops.expert_sum(x(2, 2, 4), x(2, 2)),
        "geglu": ops.geglu(x(2, 3), x(2, 3)),
        "get_rows": ops.get_rows(x(3, 2), ids[0]),
        "glu": ops.glu(x(2, 6)),
        "layer_norm": ops.layer_norm(x(2, 3), np.ones(3, np.float32), None, 1e-5),
        "linear": ops.linear(x(2, 4), matrix(3, 4), "float"),
        "linear int8": ops.linear(x(2, 32), matrix(3, 32, fmt="Q8_0"), "int8"),
        "mean_pool": ops.mean_pool(x(18, 4), 6, 3),
        "relative_attention": ops.relative_attention(
            x(3, 2, 4), x(3, 2, 4), x(3, 2, 4), x(2, 2, 4), x(4), 1.9, 50.0
        ),
        "rms_norm": ops.rms_norm(x(2, 3), np.ones(3, np.float32), 1e-6),
        "rope": ops.rope(x(2, 1, 4), cos, sin),
        "route": ops.route(x(2, 4), 2, np.ones(4, np.float32))[1],
        "scale": ops.scale(x(2, 3), 0.3),
        "silu": ops.silu(x(2, 3)),
        "softcap": ops.softcap(x(2, 3), 30.0),
        "standardize": ops.standardize(x(2, 3), np.ones(3, np.float32), np.ones(3, np.float32)),
        "swap_axes": ops.swap_axes(x(2, 3, 4)),
        "top_k": ops.top_k(x(2, 5), 3)[0],
        "top_k cap": ops.top_k(x(2, 5), 3, 30.0)[0],
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_in_is_precision_out(dtype):
    got = {name: out.dtype for name, out in cases(dtype).items()}
    assert got == dict.fromkeys(got, np.dtype(dtype))
    assert set(ops.__all__) - {"rope_table", "set_rows", "write_kv"} <= set(got)


def test_a_plain_number_keeps_embeddings_in_float32():
    assert ops.embed(matrix(5, 4), np.array([1]), 2.5).dtype == np.float32


# --- rows -----------------------------------------------------------------------------


def test_rows_by_hand():
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    np.testing.assert_array_equal(ops.get_rows(x, np.array([2, 0, 2])), [[5, 6], [1, 2], [5, 6]])
    ops.set_rows(x, np.array([1]), np.array([[7.0, 8.0]]))
    np.testing.assert_array_equal(x, [[1, 2], [7, 8], [5, 6]])
    np.testing.assert_array_equal(ops.swap_axes(x[:2, :, None]), [[[1], [7]], [[2], [8]]])


def test_largest_logits_by_hand():
    logits = np.array([[1.0, 3.0, -2.0, 3.0], [-0.0, 0.0, -1.0, -3.0]])
    values, ids = ops.top_k(logits, 3)
    np.testing.assert_array_equal(values, [[3, 3, 1], [0, 0, -1]])
    np.testing.assert_array_equal(ids, [[1, 3, 0], [0, 1, 2]])
    values, ids = ops.top_k(logits[:1, :2], 3, 2.0)
    close(values[:, :2], [[2 * math.tanh(1.5), 2 * math.tanh(0.5)]], tolerances.FLOAT64)
    assert values[0, 2] == -np.inf and ids.tolist() == [[1, 0, -1]]
    broken = np.array([[np.inf, 1.0, np.nan, -np.inf]])
    values, ids = ops.top_k(broken, 4)
    np.testing.assert_array_equal(values, [[np.nan, np.nan, np.nan, 1]])
    assert ids.tolist() == [[0, 2, 3, 1]]


# --- norm, elementwise, activations ---------------------------------------------------


def test_rms_norm_by_hand():
    x = np.array([[3.0, 4.0], [0.0, 0.0]])
    want = [[3 / math.sqrt(12.5), 2 * 4 / math.sqrt(12.5)], [0, 0]]  # the weight multiplies: no 1 + weight
    close(ops.rms_norm(x, np.array([1.0, 2.0]), 0.0 + 1e-300), want, tolerances.FLOAT64)
    close(ops.rms_norm(np.array([[1e-3]]), None, 1e-6), [[1e-3 / math.sqrt(2e-6)]], tolerances.FLOAT64)


def test_rms_norm_forgets_size():
    x = RNG.standard_normal((3, 2, 11))
    close(ops.rms_norm(100 * x, None, 0.0), ops.rms_norm(x, None, 0.0), tolerances.FLOAT64)
    close(np.mean(ops.rms_norm(x, None, 0.0) ** 2, axis=-1), np.ones((3, 2)), tolerances.FLOAT64)


def test_geglu_by_hand():
    gelu_of_1 = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    got = ops.geglu(np.array([1.0, 0.0, -1.0]), np.array([2.0, 5.0, 3.0]))
    close(got, [2 * gelu_of_1, 0, 3 * (gelu_of_1 - 1)], tolerances.FLOAT64)
    close(ops.geglu(np.array([20.0, -20.0]), np.array([1.0, 1.0])), [20, 0], tolerances.FLOAT64)


def test_softcap_by_hand():
    """Known fault A14: the cap multiplies the tanh.  Log-probabilities show it, their order does not."""
    capped = ops.softcap(np.array([124.0, 60.0, 0.0]), 30.0)
    close(capped, [30 * math.tanh(124 / 30), 30 * math.tanh(2), 0], tolerances.FLOAT64)
    assert [f"{value:.3f}" for value in capped] == ["29.985", "28.921", "0.000"]
    logprob = capped[2] - np.log(np.exp(capped).sum())
    assert f"{logprob:.2f}" == "-30.28"


# --- embed, rope ----------------------------------------------------------------------


def test_embed_takes_scaled_rows():
    table = matrix(6, 32, fmt="Q4_0")
    want = table.dequantize()[[5, 0, 5]] * np.float32(3)
    np.testing.assert_array_equal(ops.embed(table, np.array([5, 0, 5]), 3.0), want)


def test_rope_pairs_by_hand():
    """Known fault A8: of 8 pairs in H = 16 a quarter turns, (0, 8) and (1, 9), here to position 37."""
    inv_freq = np.array([1.0, 1e6 ** (-2 / 16), 0, 0, 0, 0, 0, 0])
    x = RNG.standard_normal((1, 2, 16))
    want = x.copy()
    for i in (0, 1):
        c, s = math.cos(37 * inv_freq[i]), math.sin(37 * inv_freq[i])
        want[..., i] = x[..., i] * c - x[..., i + 8] * s
        want[..., i + 8] = x[..., i + 8] * c + x[..., i] * s
    close(ops.rope(x, *ops.rope_table(np.array([37]), inv_freq)), want, tolerances.FLOAT64)


def test_rope_keeps_lengths_and_sees_distances_only():
    inv_freq = 1e4 ** (-np.arange(6) / 6)
    q, k = RNG.standard_normal((2, 1, 1, 12))

    def score(p, s):
        turned = [ops.rope(x, *ops.rope_table(np.array([at]), inv_freq)) for x, at in ((q, p), (k, s))]
        close([np.linalg.norm(t) for t in turned], [np.linalg.norm(q), np.linalg.norm(k)], tolerances.FLOAT64)
        return float((turned[0] * turned[1]).sum())

    close([score(5, 2), score(1003, 1000)], [score(3, 0)] * 2, tolerances.ROPE_FLOAT64)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


# --- attention ------------------------------------------------------------------------


def empty_cache(R, S, K, H, dtype=np.float64):
    return *(np.full(shape, np.nan, dtype) for shape in shapes_of(R, S, K, H)), own_pages(R)


def filled_cache(n, S, K=2, H=4, lanes=1):
    """Keys and values of n positions, written one call each; and in order, f[n, K, H]."""
    k, v = RNG.standard_normal((2, n, K, H))
    caches = empty_cache(lanes, S, K, H)
    for p in range(n):
        ops.write_kv(k[p : p + 1], v[p : p + 1], *caches, np.array([lanes - 1]), np.array([p]))
    return k, v, caches


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 100, None])
def test_attention_by_definition(window):
    """Softmax over exactly the last `window` positions; query head n reads key head n // G."""
    n, N, H = 8, 6, 4
    k, v, caches = filled_cache(n, 32)  # K = 2
    q = RNG.standard_normal((n, N, H))
    got = ops.attention(q, *caches, np.zeros(n, np.int32), np.arange(n), window)
    for t in range(n):
        seen = range(0 if window is None else max(0, t - window + 1), t + 1)
        for head in range(N):
            e = [math.exp(sum(q[t, head, i] * k[s, head // 3, i] for i in range(H))) for s in seen]
            want = sum(w * v[s, head // 3] for w, s in zip(e, seen)) / sum(e)
            close(got[t, head], want, tolerances.FLOAT64)


def test_window_counts_the_query_itself():
    """Known fault A4: with W = 2, position 2 sees 1 and 2; key 0 concerns positions 0 and 1 only."""
    *_, caches = filled_cache(4, 32, K=1)
    q = RNG.standard_normal((4, 1, 4))

    def run():
        return ops.attention(q, *caches, np.zeros(4, np.int32), np.arange(4), 2)

    before = run()
    caches[0][0, :, 0, :, 0] += 1
    caches[1][0, :, 0, :, 0] += 1
    assert [not np.array_equal(a, b) for a, b in zip(before, run())] == [True, True, False, False]


def test_ring_holds_what_the_window_sees():
    """Known fault A3: slots are found by position; what was never written (NaN here) is never read."""
    n, window = 75, 20
    q = RNG.standard_normal((1, 2, 4))
    k, v = RNG.standard_normal((2, n, 2, 4))
    ring, line = empty_cache(1, 32, 2, 4), empty_cache(1, 96, 2, 4)
    for p in range(n):
        at = np.array([p])
        for caches in (ring, line):
            ops.write_kv(k[p : p + 1], v[p : p + 1], *caches, np.array([0]), at)
        outs = [ops.attention(q, *caches, np.array([0]), at, window) for caches in (ring, line)]
        np.testing.assert_array_equal(*outs)
        assert np.isfinite(outs[0]).all()


def test_lanes_are_apart():
    k, v, caches = filled_cache(3, 32, lanes=3)
    keys, values, _ = caches
    assert np.isnan(keys[:2]).all() and np.isnan(values[:2]).all()
    assert np.isnan(keys[2, ..., 3:]).all() and np.isnan(values[2, ..., 3:, :]).all()
    np.testing.assert_array_equal(keys[2, :, 0, :, :3], k.transpose(1, 2, 0))
    np.testing.assert_array_equal(values[2, :, 0, 0, :3, :4], v.transpose(1, 0, 2))
    assert (values[2, :, 0, 0, :3, 4:] == 0).all()  # what 4 components lack to 32


def test_scores_are_not_scaled():
    """Known fault A15: two keys, q·k = 1 and 0: the weights are e/(e+1) and 1/(e+1), whatever H is."""
    caches = np.zeros((1, 1, 1, 16, 32)), np.zeros((1, 1, 1, 1, 32, 32)), own_pages(1)
    caches[0][0, 0, 0, 0, 0] = caches[1][0, 0, 0, 0, 0, 0] = 1
    q = np.zeros((1, 1, 16))
    q[0, 0, 0] = 1
    got = ops.attention(q, *caches, np.array([0]), np.array([1]), None)
    close(got[0, 0, 0], math.e / (math.e + 1), tolerances.FLOAT64)


def test_a_row_does_not_feel_its_batch():
    n = 9
    *_, caches = filled_cache(n, 32)
    for dtype in (np.float32, np.float64):
        q, kv = RNG.standard_normal((n, 4, 4)).astype(dtype), [a.astype(dtype) for a in caches[:2]]
        kv.append(caches[2])
        together = ops.attention(q, *kv, np.zeros(n, np.int32), np.arange(n), 5)
        for t in range(n):
            alone = ops.attention(q[t : t + 1], *kv, np.array([0]), np.array([t]), 5)
            np.testing.assert_array_equal(alone[0], together[t])


# --- linear, experts ------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "Q4_0", "Q6_K"])
def test_linear_float(fmt):
    weight, x = matrix(9, 256, fmt=fmt), RNG.standard_normal((3, 256))
    want = [[math.fsum(a * b for a, b in zip(row, w)) for w in weight.dequantize(np.float64)] for row in x]
    close(ops.linear(x, weight, "float"), want, tolerances.FLOAT64)
    single = ops.linear(x.astype(np.float32), weight, "float")
    np.testing.assert_array_equal(
        single, ops.linear(x.astype(np.float32).astype(np.float64), weight, "float").astype("f4")
    )


def test_linear_in_slabs(monkeypatch):
    weight, x = matrix(9, 32, fmt="Q4_0"), RNG.standard_normal((3, 32)).astype(np.float32)
    want = [ops.linear(x, weight, activations) for activations in ("float", "int8")]
    monkeypatch.setattr(import_module("refimpl.ops.linear"), "SLAB_VALUES", 64)  # ops.linear is the op
    monkeypatch.setattr(import_module("refimpl.ops.integer"), "SLAB_OUTPUTS", 8)
    for activations, expected in zip(("float", "int8"), want):
        np.testing.assert_array_equal(ops.linear(x, weight, activations), expected)


def test_formats_without_integers_ignore_the_rounding():
    weight, x = matrix(5, 32, fmt="F16"), RNG.standard_normal((3, 32)).astype(np.float32)
    np.testing.assert_array_equal(ops.linear(x, weight, "int8"), ops.linear(x, weight, "float"))


@pytest.mark.parametrize("activations", ["int4", None, ""])
def test_unknown_rounding(activations):
    with pytest.raises(ValueError, match=r"activations: got .*expected 'int8' or 'float'"):
        ops.linear(np.ones((1, 32)), matrix(2, 32), activations)


def test_route_by_hand():
    logits = np.log([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    ids, weights = ops.route(logits, 2, None)
    np.testing.assert_array_equal(ids, [[1, 3], [0, 1]])  # the larger first; of equal ones the lower number
    close(weights, [[4 / 7, 3 / 7], [0.5, 0.5]], tolerances.FLOAT64)
    _, scaled = ops.route(logits, 2, np.array([1.0, 2.0, 0.5, 3.0]))
    close(scaled, [[8 / 7, 9 / 7], [0.5, 1.0]], tolerances.FLOAT64)  # after they were made to sum to 1
    ids, weights = ops.route(logits + 1000, 4, None)
    close(weights[0], [0.4, 0.3, 0.2, 0.1], tolerances.ROUTE_SHIFTED)


def test_expert_linear_is_linear_by_expert():
    stack = matrix(3, 5, 32, fmt="Q8_0")
    ids = np.array([[2, 0], [2, 1], [0, 2], [1, 2]])
    for activations in ("float", "int8"):
        for x in (RNG.standard_normal((4, 32)), RNG.standard_normal((4, 2, 32))):
            x = x.astype(np.float32)
            got = ops.expert_linear(x, stack, ids, activations)
            for t in range(4):
                for a in range(2):
                    row = x[t] if x.ndim == 2 else x[t, a]
                    want = ops.linear(row[None], stack.expert(int(ids[t, a])), activations)[0]
                    np.testing.assert_array_equal(got[t, a], want)


def test_expert_sum_by_hand():
    y = np.array([[[1.0, 2.0], [10.0, 20.0]]])
    close(ops.expert_sum(y, np.array([[0.5, 0.25]])), [[3.0, 6.0]], tolerances.FLOAT64)


def test_expert_sum_is_in_order():
    """1 + 2^24 - 2^24 in float32 is 0 in this order and 1 in another."""
    y = np.array([[[1.0], [2.0**24], [-(2.0**24)]]], np.float32)
    assert ops.expert_sum(y, np.ones((1, 3), np.float32))[0, 0] == 0
    assert Fraction(1) + 2**24 - 2**24 == 1
