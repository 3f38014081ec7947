"""Rows taken out and put in on arrays of a device: bytes, and what happens to nothing at all."""

import numpy as np
import pytest
from hypothesis import given, settings

import refimpl.ops
from fastpath.cuda import device, ops
from tests import strategies
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu import devices

STRICT = devices.executor_one()


@settings(max_examples=15)
@given(case=strategies.get_rows())
def test_get_rows(case):
    with device.use(STRICT):
        got = device.get(ops.get_rows(device.put(case["x"], np.float32), case["rows"]))
    np.testing.assert_array_equal(got, refimpl.ops.get_rows(**case))


@settings(max_examples=15)
@given(case=strategies.set_rows())
def test_set_rows(case):
    with device.use(STRICT):
        x = device.put(case["x"], np.float32)
        ops.set_rows(x, case["rows"], case["values"])
    refimpl.ops.set_rows(**case)
    np.testing.assert_array_equal(device.get(x), case["x"])


@settings(max_examples=15)
@given(case=strategies.swap_axes())
def test_swap_axes(case):
    with device.use(STRICT):
        got = device.get(ops.swap_axes(device.put(case["x"], np.float32)))
    np.testing.assert_array_equal(got, refimpl.ops.swap_axes(**case))


@pytest.mark.parametrize("executor", ["sm_80", "sm_90"])
def test_on_executor_two(executor):
    rng = np.random.default_rng(2)
    x, rows = strategies.normal(rng, 5, 3, 100), np.array([4, 0, 2], np.int32)
    with device.use(EXECUTORS[executor]):
        np.testing.assert_array_equal(ops.get_rows(x, rows), x[rows])
        np.testing.assert_array_equal(ops.swap_axes(x), x.swapaxes(0, 1))
        written = x.copy()
        ops.set_rows(written, rows, x[:3])
    np.testing.assert_array_equal(written[rows], x[:3])
    np.testing.assert_array_equal(written[[1, 3]], x[[1, 3]])


def test_nothing_and_one_row():
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    with device.use(devices.executor_one()) as executor:
        x = device.put(x, np.float32)
        none = ops.get_rows(x, np.zeros(0, np.int32))
        ops.set_rows(x, np.zeros(0, np.int32), np.zeros((0, 3, 4), np.float32))
        assert none.shape == (0, 3, 4) and ops.swap_axes(none).shape == (3, 0, 4)
        swapped = ops.swap_axes(x)
        assert swapped.shape == (3, 1, 4) and not executor.launched
        np.testing.assert_array_equal(device.get(swapped).reshape(-1), np.arange(12))
