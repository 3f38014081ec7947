"""What random sizes (test_kernels.py) do not show of ops of fastpath.cuda."""

import numpy as np
import pytest

import refimpl.ops
from fastpath.cuda import device, norm, ops
from tests import strategies, tolerances
from tests.cuda.executors import EXECUTORS, ONCE


def _in_float64(case):
    return {name: x.astype(np.float64) if isinstance(x, np.ndarray) else x for name, x in case.items()}


@pytest.mark.parametrize("k", [1, 64])
@pytest.mark.parametrize("V", [300, 4097])
def test_capped_as_they_are_sorted(V, k):
    """The cap within top_k is that of softcap, equal numbers that it makes included."""
    rng = np.random.default_rng(V)
    logits = strategies.normal(rng, 2, V, scale=300)
    with device.use(EXECUTORS["ir"]):
        capped = ops.softcap(logits, 30.0)
        for got, want in zip(ops.top_k(logits, k, 30.0), refimpl.ops.top_k(capped, k), strict=True):
            np.testing.assert_array_equal(got, want)
    assert len(np.unique(capped[0])) < V


def test_a_vocabulary():
    """Of 262,144 logits, in three launches; most of them are equal."""
    logits = np.random.default_rng(8).integers(-9, 9, (1, 1 << 18)).astype(np.float32)
    logits[0, [77, 9999, 200_000]] = 9, 11, 10
    with device.use(ONCE):
        for k in (1, 256):
            for got, want in zip(ops.top_k(logits, k), refimpl.ops.top_k(logits, k), strict=True):
                np.testing.assert_array_equal(got, want)
        with pytest.raises(ValueError, match="top_k: k = 257, expected 1 to 256"):
            ops.top_k(logits, 257)


@pytest.mark.parametrize("D", [1, 37, 256, 515, 2561])
def test_norms_of_all_widths(D):
    """One warp, a few, and eight of them."""
    rng = np.random.default_rng(D)
    case = {"x": strategies.normal(rng, 2, D), "weight": strategies.normal(rng, D), "eps": 1e-6}
    with device.use(EXECUTORS["ir"]):
        got = norm.rms_norm(**case)
    tolerances.check("rms_norm", case, (got,), (refimpl.ops.rms_norm(**_in_float64(case)),))
