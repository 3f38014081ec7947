"""Every op of every fast backend against its definition: one test, driven by the op table.

The truth is the reference in float64.  Where the definition is about bits (integer dot products, data
movement), it is the reference on the same float32 numbers, and the test is equality.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpath.cpu
import refimpl.ops
from tests import strategies, tolerances

BACKENDS = {"cpu": fastpath.cpu}
IN_PLACE = {"write_kv": ("k_pages", "v_pages"), "set_rows": ("x",)}


def test_every_op_has_a_strategy_and_a_tolerance():
    for op in refimpl.ops.__all__:
        assert hasattr(strategies, op), f"tests/strategies.py has no strategy {op!r}"
        assert op in tolerances.OPS, f"tests/tolerances.py has no entry for {op!r} in OPS"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", sorted(refimpl.ops.__all__))
@given(data=st.data())
def test_parity(op, backend, data):
    case = data.draw(getattr(strategies, op)(), label=op)
    got = _call(BACKENDS[backend], op, case)
    want = _call(refimpl.ops, op, case if tolerances.is_exact(op, case) else _in_float64(op, case))
    tolerances.check(op, case, got, want)


def _in_float64(op, case):
    """The same case for the reference in float64: exactly the numbers, widened (it widens caches itself)."""
    wide = {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == np.float32
        else value
        for name, value in case.items()
    }
    if op == "embed":  # the op where precision enters
        wide["scale"] = np.float64(case["scale"])
    return wide


def _call(table, op, case):
    """The results of an op as a tuple of arrays; those that it writes in place are copied before."""
    written = {name: case[name].copy() for name in IN_PLACE.get(op, ())}
    with np.errstate(all="ignore"):
        result = getattr(table, op)(**{**case, **written})
    if written:
        assert result is None
        return tuple(written.values())
    return result if isinstance(result, tuple) else (result,)
