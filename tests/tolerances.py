"""Every floating-point tolerance of the tests, each with its reason.  No test file has one of its own."""

import numpy as np

from refimpl import kv_tiles
from refimpl.ops.attention import widen

# quant: bytes and numbers

# value = d*sc*q - dmin*mn in float32 takes four roundings of half a unit in the last place (2^-24).
INTEGER_PARTS_REL = 4 * 2.0**-24

# The aim of this project: own K quantisers lose at most 2 % more than ggml's (measured: 0.1 to 29 % less).
QUANT_RMSE_OVER_GGML = 1.02

# The same blocks; only the order of a float64 sum may differ from that of the recorded run.
QUANT_RMSE_SAME_REL = 1e-9

# A constant block is one level times one scale.  What is left is the rounding of d to float16, where small
# values are denormals: 0.02/31/63 = 1.0e-5 in steps of 6.0e-8.
QUANT_CONSTANT_REL = 2.0**-8

# oracle: the model against other programs

# transformers in float64 is the same arithmetic in another order (measured: 5e-14 on values up to 20).
ORACLE_F64_ABS = 1e-11

# Two float32 programs, each 1e-5 to 3e-5 from float64 on logits of deviation 1.6; layer outputs are
# measured in units of their deviation, 1.5 to 7.
ORACLE_F32_ABS = 1e-4

# The same program on another machine: matrix products in another order, float32 and float64 (and int32:
# none).
ORACLE_AGAIN_ABS = {"float32": 1e-4, "float64": 1e-11, "int32": 0}

# llama.cpp reads GELU from a table in float16 (11 bits): normalised mean squared error, measured 1.2e-6 and
# less.
LLAMA_CPP_NMSE = 1e-5

# Quantised weights: both round activations to int8, in blocks and with scales of their own, and the errors
# of seven layers of random weights add up (measured: 7.6e-3, as far as either is from float activations).
LLAMA_CPP_INT8_NMSE = 1.5e-2

# refimpl: the definition against its laws

# A few dozen float64 operations on numbers of size 1: sums of up to 256 terms lose less than 256 * 2^-53 =
# 3e-14.
FLOAT64 = 1e-13

# cos and sin of angles of up to 1003 in float64: the angle itself is rounded by 1003 * 2^-53 = 1.1e-13.
ROPE_FLOAT64 = 1e-11

# Logits around 1000 in float64 hold their differences to 1000 * 2^-53 only.
ROUTE_SHIFTED = 1e-12

# The whole model in float64, cut in other ways: dozens of layers' sums of FLOAT64's kind, amplified by norms.
MODEL_FLOAT64 = 1e-11

# float32 against float64 on logits of deviation 1.6 (measured: up to 9e-6).
MODEL_FLOAT32 = 5e-5

# float32 in other chunks: `linear` sums in float64, so that it takes a rounding in 1e8 for any difference
# at all.
CHUNKS_FLOAT32 = 1e-5

# Equal numbers scaled before or after a matrix product: one float32 rounding of the stored weight each.
SCALE_MOVED = 1e-6

# ops: the fast op tables against the definition in float64
#
# One float32 rounding is at most U of its result.  A tolerance is a number of roundings, times U, times a
# magnitude: what the rounded numbers are made of.  Factors of 2 to 4 below are not slack for bugs but the
# usual distance of a bound from an error; a wrong term is of the size of the magnitude itself, millions of
# U.

U = 2.0**-24
TINY = 2.0**-126  # below it float32 loses digits; exp() of the kernels is 0 or about 1e-38 there


def _of_result(case, want):
    return np.abs(want)


def _linear(case, want):
    """Sum of |x| * |w|: what a sum of products may lose digits of."""
    return np.abs(case["x"].astype(np.float64)) @ np.abs(case["weight"].dequantize(np.float64)).T


def _expert_linear(case, want):
    x, ids = np.abs(case["x"].astype(np.float64)), case["expert_ids"]
    w = np.abs(case["weight"].dequantize(np.float64))[ids]
    return np.einsum(
        "tac,tamc->tam", np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1])), w
    )


def _rope(case, want):
    first, second = np.split(np.abs(case["x"].astype(np.float64)), 2, axis=-1)
    return np.concatenate([first + second] * 2, axis=-1)


def _largest_of_pages(pages):
    """Of what was written: the rest is NaN."""
    if pages.dtype != np.uint8:
        return np.nanmax(np.abs(widen(pages, np.float64)))
    scales, codes = kv_tiles.unpack(pages)
    return np.nanmax(np.abs(scales).astype(np.float64)) * np.abs(codes.astype(int)).max()


def _attention(case, want):
    """Values up to max|v|; a score's error e changes a probability by the factor 1 + e."""
    k, v = (_largest_of_pages(case[name]) for name in ("k_pages", "v_pages"))
    largest_score = np.abs(case["q"]).sum(-1, dtype=np.float64).max() * k
    return np.full_like(want, v * (1 + min(largest_score, 100.0)))


def _geglu(case, want):
    """exp(-2y) turns an absolute error of 2y into a relative one; the definition's 1 + tanh(y) cancels in
    float64.
    """
    gate = case["gate"].astype(np.float64)
    y = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return np.abs(want) * (1 + np.minimum(np.abs(2 * y), 100.0)) + np.abs(gate * case["up"]) * (2.0**-53 / U)


def _add(case, want):
    return np.abs(case["x"].astype(np.float64)) + np.abs(case["y"])


def _expert_sum(case, want):
    return np.einsum("tad,ta->td", np.abs(case["y"].astype(np.float64)), np.abs(case["expert_weights"]))


def _gated(case, want):
    """x times a sigmoid, which is 0 in float32 where exp() overflows: below 3e-39."""
    x = case["x"].astype(np.float64)
    return np.abs(want) + np.abs(x[..., : want.shape[-1]]) * 2.0**-100


def _layer_norm(case, want):
    """Numbers before and after the mean is taken off, in deviations: a large mean costs digits."""
    x = np.abs(case["x"].astype(np.float64))
    deviation = np.sqrt(np.var(case["x"], axis=-1, dtype=np.float64, keepdims=True) + case["eps"])
    bias = 0 if case["bias"] is None else np.abs(case["bias"])
    return (x + x.mean(-1, keepdims=True)) / deviation * np.abs(case["weight"]) + np.abs(want) + bias


def _conv2d(case, want):
    from refimpl.ops import conv2d

    return conv2d(np.abs(case["x"].astype(np.float64)), np.abs(case["weight"].astype(np.float64)))


def _causal_conv(case, want):
    from refimpl.ops import causal_conv

    return causal_conv(np.abs(case["x"].astype(np.float64)), np.abs(case["weight"].astype(np.float64)))


def _mean_pool(case, want):
    from refimpl.ops import mean_pool

    return mean_pool(np.abs(case["x"].astype(np.float64)), case["n_columns"], case["side"])


def _relative_attention(case, want):
    """As attention; a score is bounded by its cap as well."""
    q = np.abs(case["q"] * case["q_scale"]).sum(-1, dtype=np.float64).max()
    score = q * (np.abs(case["k"]).max() * case["k_scale"] + np.abs(case["relative"]).max())
    return np.full_like(want, np.abs(case["v"]).max() * (1 + min(score, 100.0)))


EXACT = "exact"

# op: (roundings, magnitude, reason), or EXACT
OPS = {
    "add": (1, _of_result, "one rounding"),
    "add_bias": (1, _of_result, "one rounding"),
    "attention": (
        60, _attention,
        "up to 130 roundings of a score, of partial sums that random signs keep far below the magnitude; 32 "
        "keys in sequence and up to 4 steps, exp to 2 units, the sum of p, a division; q and p as two "
        "float16 (attention_tensor.py) are 4 roundings each",
    ),
    "causal_conv": (7, _causal_conv, "five products, four sums"),
    "clip": EXACT,
    "conv2d": (60, _conv2d, "as linear: 9 x 128 products at most"),
    "embed": (2, _of_result, "the factor and the product; dequantised values are float32 by definition"),
    "expert_linear": (60, _expert_linear, "as linear"),
    "expert_sum": (9, _expert_sum, "a product and a sum per expert, 8 experts"),
    "geglu": (8, _geglu, "y in 3 roundings, exp to 2 units, a sum, a division, a product"),
    "get_rows": EXACT,
    "glu": (8, _gated, "exp to 2 units, a sum, a division, a product"),
    "layer_norm": (40, _layer_norm, "two reductions of 1025 numbers in 16 lanes, a root, a division"),
    "linear": (60, _linear, "768 columns in 16 lanes are 48 sums in sequence, and 4 to join the lanes"),
    "mean_pool": (10, _mean_pool, "nine sums and a division"),
    "relative_attention": (60, _relative_attention, "as attention, with a tanh"),
    "rms_norm": (
        20, _of_result,
        "300 squares in 16 lanes are 19 sums in sequence, and 4; half of that after the root",
    ),
    "rope": (4, _rope, "cos and sin, two products, a sum"),
    "rope_table": (1.01, lambda case, want: 1.0, "float64 angles, rounded once; |cos| <= 1"),
    "route": (
        40, _of_result, "differences of logits up to 30 are rounded, and exp makes that relative; A sums",
    ),
    "scale": (2, _of_result, "the factor and the product"),
    "set_rows": EXACT,
    "silu": (8, _gated, "exp to 2 units, a sum, a division"),
    "softcap": (8, _of_result, "tanh to 2 units, a division, a product, the cap as float32"),
    "standardize": (2, _of_result, "a difference, a product"),
    "swap_axes": EXACT,
    "top_k": EXACT,
    "write_kv": EXACT,
}  # fmt: skip


def is_exact(op, case):
    """Is the definition of this case one of bits?"""
    by_integers = case.get("activations") == "int8" and case["weight"].format.integer_parts is not None
    return OPS[op] == EXACT or by_integers


def check(op, case, got, want):
    """Results of an op, tuples of arrays, against the definition's."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape, f"{op}: shape {g.shape}, expected {w.shape}"
        if is_exact(op, case) or w.dtype.kind in "iu":
            np.testing.assert_array_equal(g, w, err_msg=op)
            continue
        assert g.dtype == np.float32, f"{op}: {g.dtype}, expected float32"
        roundings, magnitude, reason = OPS[op]
        with np.errstate(over="ignore"):
            limit = roundings * U * magnitude(case, w) + 4 * TINY
            error = np.abs(g - w)
        bad = ~((error <= limit) | (np.float32(w) == g))
        if bad.any():
            i = np.unravel_index(np.argmax(np.where(bad, error - limit, -1)), g.shape) if g.ndim else ()
            raise AssertionError(
                f"{op} at {tuple(map(int, i))}: got {g[i]!r}, expected {w[i]!r}; error {error[i]:.3g}, "
                f"limit {np.broadcast_to(limit, g.shape)[i]:.3g} ({reason}); "
                f"{bad.sum()} of {bad.size} are over"
            )


# What rounding may do to a key or a value, as a share of the largest magnitude among the numbers that are
# rounded together.  Floats: half a unit in the last of 11 or 8 bits.  q8_0: half a step, of which the largest
# is 127, and the scale's rounding to 11 bits.  q4_0: a step, of which the largest is 8, since the other sign
# ends at 7, and the scale's rounding.
KV_ROUNDING = {
    "f32": 0.0,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "q8_0": 0.5 / 127 + 2.0**-11,
    "q4_0": 1 / 8 + 2.0**-11,
}


def rounded_kv(q, k, v, k_type, v_type):
    """A bound on how far attention over rounded keys and values is from that over the numbers themselves.

    Components of keys that are off by at most e move a score by at most e * sum |q|, so that exp(2 * that)
    bounds how a weight changes, and that less one how all of them together do; values are a weighted mean.
    """
    moved = np.abs(q).sum(-1, dtype=np.float64).max() * KV_ROUNDING[k_type] * np.abs(k).max()
    largest = float(np.abs(v).max())
    roundings = 2 * OPS["attention"][0] * U  # of float32, as in OPS
    return largest * (KV_ROUNDING[v_type] + np.expm1(2 * moved) * (1 + KV_ROUNDING[v_type]) + roundings)


# Cosine of logits to those of a float32 cache: the aims of this project, for bf16 (8 bits, as few as q8_0's)
# that of q8_0.  Measured least, demo and random models: f16 0.999999, bf16 0.99997, q8_0 0.9998; q4_0 0.9944
# on the random ones.  On the demo q4_0 misses its aim at one length in a hundred (least 0.962, median 0.9997)
# where the logits are small: docs/numerics.md.
KV_COSINE = {"f16": 0.9999, "bf16": 0.999, "q8_0": 0.999, "q4_0": 0.99}
KV_Q4_0_SHARE = 0.98  # of the demo's lengths that reach it (measured: 0.990)

# How likely the demo finds held-out text, by the fast engine against the definition in float64.  The first is
# the aim of this project (measured with int8 and f16: 0.05 %).  One token's log-probability moves by the
# noise of rounding to int8 (measured: 0.047), or with float activations by that of rounding keys and values
# (measured: 1.8e-6, 1.4e-3 and 1.2e-2).
LOG_PROBABILITY_REL = 5e-3
LOG_PROBABILITY_RMS = {"int8": 0.1, "f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}

# The polynomials of exp and tanh and their last rounding (measured over 65,536 numbers: 0.98 and 1.24).
EXP_UNITS = 1.25
TANH_UNITS = 1.5

# media: what encoders read

# 8-bit pixels against transformers' processor, which resizes by the same library (measured: 0).
PIXEL_STEPS = 1

# float32 front end of transformers (window and samples) against ours in float64 (measured: 1.6e-5).
LOG_MEL_ABS = 1e-4

# A tone of level 0.5 under a Hann window at another rate; the window's own spectrum falls off at 18 dB an
# octave and is cut at the band's end (measured: up to 2e-6).
RESAMPLED_ABS = 1e-4

# 16-bit steps.
SAME_SOUND_ABS = 2.0**-15
