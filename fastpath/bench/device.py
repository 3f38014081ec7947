"""What a device computes, op by op, against the definitions: the first part of `device-check`.

Needs nothing but the extra `cuda`.  It runs on the device in use, which may be an executor of the tests.
"""

import functools
import time

import numpy as np

from fastpath.backend import ops_for
from fastpath.cuda import device, layout, ops
from quant import FORMATS, QTensor
from refimpl.kv_types import dtypes_of, own_pages, shapes_of

# What a result may be off by, as a share of its largest number.  Sums of 512 products of normal numbers: up
# to 60 roundings of half a unit (2^-24) one after the other, of magnitudes that add up to 512 * 2/pi = 326,
# 4.4 times the largest of the few hundred results.  No other op here has more.  A wrong term is of a result's
# size.
FLOAT_LIMIT = 60 * 4.4 * 2.0**-24
# Nothing: their definition is one of bits
EXACT = {"clip", "top_k"}
DEFINITIONS = ops_for("ref")
T = 18  # tokens: more than linear.MANY, so that products go both ways
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def check(rng_seed=0):
    """[{op, case, error, limit, ok, seconds}]; an exception of a kernel is its error."""
    return [one() for _, _, one in checks(rng_seed)]


def checks(rng_seed=0):
    """(op, name of the case, () -> its result)"""
    for op, case, arguments in cases(np.random.default_rng(rng_seed)):
        yield op, case, functools.partial(_one, op, case, arguments)


def cases(rng):
    """(op, name of the case, arguments)"""
    x, y, row = _normal(rng, T, 512), _normal(rng, T, 512), _normal(rng, 512)
    heads, angles = x.reshape(T, 4, 128), _normal(rng, T, 64)
    yield "add", "", (x, y)
    yield "add_bias", "", (x, row)
    yield "scale", "", (x, 0.37)
    yield "standardize", "", (x, row, row)
    yield "clip", "", (x, -0.5, 0.7)
    yield "geglu", "", (x, y)
    yield "glu", "", (x,)
    yield "silu", "", (x,)
    yield "softcap", "", (x, 30.0)
    yield "top_k", "k = 1", (x, 1)
    yield "top_k", "k = 64", (np.round(x, 1), 64)
    yield "rms_norm", "", (x, row, 1e-6)
    yield "layer_norm", "", (x, row, None, 1e-6)
    yield "rope", "", (heads, np.cos(angles), np.sin(angles))
    yield "rope_table", "", (np.arange(T, dtype=np.int32) * 7001, 1e4 ** -(np.arange(64) / 64))
    yield "route", "", (_normal(rng, T, 128), 8, row[:128].copy())
    yield "expert_sum", "", (heads, y[:, :4].copy())
    yield "conv2d", "", (x.reshape(T, 32, 16), _normal(rng, 5, 16, 3, 3))
    yield "causal_conv", "", (x, _normal(rng, 512, 5))
    yield "mean_pool", "", (x, 6, 3)
    yield "relative_attention", "", (heads, heads, heads, heads[:12].copy(), row[:128].copy(), 1.9, 50.0)
    for name in layout.CODINGS:
        weight = QTensor.from_array(_normal(rng, 37, 512), FORMATS[name])
        experts = QTensor.from_array(_normal(rng, 5, 9, 512), FORMATS[name])
        chosen = rng.integers(0, 5, (T, 2)).astype(np.int32)
        yield "embed", name, (weight, rng.integers(0, 37, T).astype(np.int32), np.float32(22.5))
        for activations in ("int8", "float"):
            yield "linear", f"{name} {activations}, {T} tokens", (x, weight, activations)
            yield "linear", f"{name} {activations}, 1 token", (x[:1].copy(), weight, activations)
            yield "expert_linear", f"{name} {activations}", (x, experts, chosen, activations)
    for name in KV_TYPES:
        yield "attention", name, _attention(rng, name)


def _attention(rng, kv_type):
    """Two lanes of 288 positions, heads of 256 in groups of 4."""
    S, K, H = 288, 2, 256
    shapes = shapes_of(2, S, K, H, kv_type)
    pages = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes_of(kv_type), strict=True)]
    table = own_pages(2)
    for lane in range(2):
        k, v = _normal(rng, 2, S, K, H)
        DEFINITIONS.write_kv(k, v, *pages, table, np.full(S, lane), np.arange(S))
    q, lanes = _normal(rng, T, 4 * K, H) / np.float32(16), np.arange(T, dtype=np.int32) % 2
    return q, *pages, table, lanes, rng.integers(0, S, T).astype(np.int32), 200


def _one(op, case, arguments):
    start = time.perf_counter()
    with np.errstate(all="ignore"):
        want = _tuple(getattr(DEFINITIONS, op)(*arguments))
        try:
            here = (_on_device(argument) for argument in arguments)
            got = _tuple(getattr(ops, op)(*here))
            error = max(_error(device.get(g), w) for g, w in zip(got, want, strict=True))
        except Exception as failed:  # of a compiler, a driver or a launch: the others still run
            return {"op": op, "case": case, "ok": False, "error": f"{type(failed).__name__}: {failed}"[:300]}
    seconds = round(time.perf_counter() - start, 3)
    limit = _limit(op, arguments)
    return {"op": op, "case": case, "ok": error <= limit, "error": error, "limit": limit, "seconds": seconds}


def _limit(op, arguments):
    """Integer sums and one chain of roundings leave products by int8 no choice (refimpl/ops/integer.py)."""
    is_product = op in ("linear", "expert_linear")
    by_integers = is_product and arguments[-1] == "int8" and arguments[1].format.integer_parts is not None
    return 0.0 if op in EXACT or by_integers else FLOAT_LIMIT


def _on_device(argument):
    return device.put(argument, argument.dtype) if isinstance(argument, np.ndarray) else argument


def _error(got, want):
    """The largest difference as a share of the largest number; infinite where one is NaN."""
    difference = np.abs(got.astype(np.float64) - want).max()
    return float(difference / max(1e-30, np.abs(want).max())) if np.isfinite(difference) else float("inf")


def _tuple(result):
    return result if isinstance(result, tuple) else (result,)


def _normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)
