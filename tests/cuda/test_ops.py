"""Ops of fastpath.cuda against their definitions, on the executors: tests/parity for a GPU's code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.cuda import device, norm, ops, sampling
from tests import strategies, tolerances
from tests.cuda.executors import EXAMPLES, EXECUTORS

OPS = [
    op
    for op in refimpl.ops.__all__
    if op not in ("attention", "write_kv", "set_rows", "linear", "expert_linear", "embed")  # files of their own
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("op", OPS)
def test_parity(op, executor):
    @settings(max_examples=EXAMPLES[executor])
    @given(data=st.data())
    def check(data):
        case = data.draw(getattr(strategies, op)(), label=op)
        with device.use(EXECUTORS[executor]):
            got = getattr(ops, op)(**case)
        want = getattr(refimpl.ops, op)(**(case if tolerances.is_exact(op, case) else _in_float64(case)))
        as_tuple = (lambda result: result) if op in ("route", "rope_table") else (lambda result: (result,))
        tolerances.check(op, case, as_tuple(got), as_tuple(want))

    with np.errstate(all="ignore"):
        check()


def _in_float64(case):
    return {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == np.float32
        else value
        for name, value in case.items()
    }


@pytest.mark.parametrize("executor", EXECUTORS)
def test_argmax(executor):
    """As NumPy's: the first of equal ones, and the first NaN before everything."""
    rng = np.random.default_rng(3)
    with device.use(EXECUTORS[executor]):
        for V in (1, 255, 4097, 9001):
            logits = rng.integers(0, 40, (5, V)).astype(np.float32)
            logits[1, rng.integers(0, V, 3)] = np.nan
            logits[2], logits[3, 0] = -np.inf, np.inf
            np.testing.assert_array_equal(sampling.argmax(logits), logits.argmax(axis=-1))


@pytest.mark.parametrize("D", [1, 37, 256, 515, 2561])
def test_norms_of_all_widths(D):
    """One warp, a few, and eight of them."""
    rng = np.random.default_rng(D)
    case = {"x": strategies.normal(rng, 2, D), "weight": strategies.normal(rng, D), "eps": 1e-6}
    with device.use(EXECUTORS["ir"]):
        got = norm.rms_norm(**case)
    tolerances.check("rms_norm", case, (got,), (refimpl.ops.rms_norm(**_in_float64(case)),))
