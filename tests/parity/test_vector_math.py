"""exp and tanh of the kernels against float64, over all exponents."""

import numpy as np

from fastpath.cpu import threads
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import ld_i64, load_f32, store_f32
from fastpath.cpu.vector_math import exp, exp_or_zero, tanh
from tests import tolerances


@kernel
def _all_three(args, lo, hi, thread):
    x, y = ld_i64(args), ld_i64(args + 8)
    n = ld_i64(args + 16)
    for i in range(lo, hi):
        v = load_f32(x + 64 * i)
        store_f32(y + 64 * i, exp(v))
        store_f32(y + 4 * n + 64 * i, exp_or_zero(v))
        store_f32(y + 8 * n + 64 * i, tanh(v))


def _evaluate(x):
    y = np.empty((3, len(x)), np.float32)
    threads.run(_all_three, (x.ctypes.data, y.ctypes.data, len(x)), len(x) // 16, 64)
    return y


def _numbers():
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.uniform(-30, 6.4, 1 << 16))
    return (magnitudes * rng.choice([-1, 1], len(magnitudes))).astype(np.float32)


def _units(got, want):
    """Error in units of the last place."""
    return float(np.max(np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))))


def test_exp():
    x = _numbers()
    got = _evaluate(x)[0]
    inside = np.abs(x) < 87
    assert _units(got[inside], np.exp(x[inside].astype(np.float64))) <= tolerances.EXP_UNITS
    assert np.isfinite(got).all()


def test_exp_or_zero():
    x = -np.abs(_numbers())
    got = _evaluate(x)[1]
    want = np.exp(x.astype(np.float64))
    assert np.all(got[x < -87] == 0)
    assert _units(got[x > -87], want[x > -87]) <= tolerances.EXP_UNITS
    assert np.all(_evaluate(np.full(16, -np.inf, np.float32))[1] == 0)
    assert np.all(_evaluate(np.zeros(16, np.float32))[1] == 1)


def test_tanh():
    x = _numbers()
    got = _evaluate(x)[2]
    assert _units(got, np.tanh(x.astype(np.float64))) <= tolerances.TANH_UNITS
    assert np.all(np.abs(got) <= 1)
    assert np.array_equal(_evaluate(-x)[2], -got)
