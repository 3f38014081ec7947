"""Device arrays of the executors do nothing that a GPU's cannot do."""

import copy
import math

import numpy as np
import pytest

from fastpath.cuda import device, elementwise, norm
from tests.gpu_on_cpu import devices, launching


@pytest.fixture
def executor():
    with device.use(devices.executor_one((launching.LOCKSTEP,))) as made:
        yield made


def _numbers(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


FORBIDDEN = {
    "NumPy function": np.sum,
    "NumPy operator": lambda x: np.float32(2) * x,
    "as an array": np.asarray,
    "of an array": lambda x: np.zeros(3, np.float32) + x,
    "arithmetic": lambda x: x + 1,
    "in place": lambda x: x.__imul__(2),
    "comparison": lambda x: x == x,
    "truth": bool,
    "number": lambda x: float(x[0, 0]),
    "iteration": list,
    "rows by a list": lambda x: x[[0, 1]],
    "rows by an array": lambda x: x[np.array([0, 1])],
    "a mask": lambda x: x[np.array([True, False, True])],
    "a new axis": lambda x: x[None],
    "dots": lambda x: x[..., 0],
    "assignment": lambda x: x.__setitem__(0, 1),
    "a gap closed by reshape": lambda x: x[:, :2].reshape(-1),
    "a gap closed by view": lambda x: x[:, :2].view(np.uint8),
    "a copy into a gap": lambda x: x[:, :2].copy_to_device(np.zeros((3, 2), np.float32)),
    "a copy of another shape": lambda x: x.copy_to_device(np.zeros(12, np.float32)),
    "a copy of another type": lambda x: x.copy_to_device(np.zeros((3, 4))),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_device_array_cannot_do(what, executor):
    with pytest.raises(devices.DeviceArrayError):
        FORBIDDEN[what](device.put(_numbers(3, 4), np.float32))


@pytest.mark.parametrize("method", ["sum", "copy", "T", "astype", "tolist", "transpose", "flags"])
def test_it_has_no_methods_of_numpy(method, executor):
    assert not hasattr(device.put(_numbers(3, 4), np.float32), method)


def test_what_it_can_do(executor):
    numbers = _numbers(3, 4)
    x = device.put(numbers, np.float32)
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, len(x)) == ((3, 4), np.float32, 2, 12, 48, 3)
    assert x.strides == (16, 4) and x[:, 1:3].strides == (16, 4)
    for view, of_host in (
        (x.reshape(4, 3), numbers.reshape(4, 3)),
        (x.reshape((2, -1)), numbers.reshape(2, -1)),
        (x.ravel(), numbers.ravel()),
        (x.view(np.uint16), numbers.view(np.uint16)),
        (x[1], numbers[1]),
        (x[1:, 2], numbers[1:, 2]),
        (x[-2:].reshape(-1)[3:5], numbers[-2:].reshape(-1)[3:5]),
    ):
        np.testing.assert_array_equal(device.get(view), of_host)


def test_views_share_memory_and_uploads_do_not(executor):
    numbers = _numbers(3, 4)
    x = device.put(numbers, np.float32)
    numbers[:] = 7
    x[1].copy_to_device(np.full(4, 5, np.float32))
    x[2].copy_to_device(x[0])
    np.testing.assert_array_equal(device.get(x), [[0, 1, 2, 3], [5, 5, 5, 5], [0, 1, 2, 3]])
    got = device.get(x)
    got[:] = 0
    assert device.get(x).any()
    assert device.put(x, np.float32) is x and device.constant(x, np.float32) is x


def test_kernels_take_no_arrays_of_the_host(executor):
    with pytest.raises(devices.DeviceArrayError, match="add: an array of the host"):
        elementwise.add(_numbers(3, 4), _numbers(3, 4))


def test_constants_are_brought_once_as_long_as_they_live(executor):
    weight, x = _numbers(4), device.put(_numbers(3, 4), np.float32)
    before = executor.uploads
    for _ in range(3):
        norm.rms_norm(x, weight, 1e-6)
    assert executor.uploads == before + 1 and len(executor._constants) == 1
    assert device.constant(weight, np.float32) is not device.constant(weight, np.int32)
    del weight
    assert len(executor._constants) == 0
    other = copy.copy(_numbers(4) + 1)  # perhaps where the first one was
    np.testing.assert_array_equal(device.get(device.constant(other, np.float32)), other)
