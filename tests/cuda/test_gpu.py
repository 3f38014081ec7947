"""What is asked of the driver, and in which order, with a driver that is none."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from fastpath.cuda import device, elementwise, ops
from fastpath.cuda.driver import Driver
from fastpath.cuda.gpu import Gpu
from fastpath.cuda.pool import Block
from tests.cuda.fake_driver import FakeDriver


def _compute(function, arguments):
    """Of the two kernels of these tests."""
    *inputs, out = (a._memory if hasattr(a, "_memory") else a for a in arguments)
    if function is elementwise.SCALE.function:
        out[...] = inputs[0] * inputs[1]
    else:
        out[...] = inputs[0] + inputs[1]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)
    made = Gpu(FakeDriver(compute=_compute))
    made.calls = made._driver.calls
    with device.use(made):
        yield made


def _what(calls):
    return [call[0] for call in calls]


def test_a_program_is_warm_before_it_is_captured_and_reads_inputs_before_it_runs(gpu):
    x = np.arange(6, dtype=np.float32)
    with ops.program.record() as program:
        there = device.put(x, np.float32)
        got = device.get(ops.add(ops.scale(there, 3.0), there))
        assert gpu.calls == []  # nothing runs while it is recorded
    names = [call[1] for call in gpu.calls if call[0].startswith(("launch", "captured", "compile"))]
    scale, add = elementwise.SCALE.function.__name__, elementwise.ADD.function.__name__
    assert names == ["scale", scale, "add", add, scale, add]
    expected = ["allocate", "allocate", "write", "compile", "launch", "compile", "launch", "read"]
    assert _what(gpu.calls) == [*expected, "begin", "captured", "captured early", "end", "complete"]
    np.testing.assert_array_equal(got, 4 * x)

    gpu.calls.clear()
    for i in range(2):
        x[:] = 7 + i
        program.replay()
        np.testing.assert_array_equal(got, np.full(6, 4 * (7 + i)))
    assert _what(gpu.calls) == 2 * [
        "write",
        "graph",
        "read",
    ]  # buffers are written, nothing is captured again
    gpu.calls.clear()
    timings = program.timed()
    assert [t.kernel for t in timings] == ["inputs", "scale", "add"] and timings[1].seconds > 0


def test_a_capture_ends_when_it_fails(gpu):
    x = np.ones(6, np.float32)

    def break_it(kernel, grid, threads, arguments, stream=0, **options):
        if stream:
            raise RuntimeError("no")

    gpu._driver.launch = break_it
    with pytest.raises(RuntimeError, match="no"), ops.program.record():
        device.get(ops.scale(device.put(x, np.float32), 3.0))
    assert _what(gpu.calls)[-2:] == ["begin", "end"]


def test_results_come_from_a_pool(gpu):
    x = device.put(np.arange(2000, dtype=np.float32), np.float32)
    gpu.calls.clear()
    for i in range(20):
        x = ops.scale(x, 1.0 + i)
    assert _what(gpu.calls).count("allocate") == 1  # beside the first array: two take turns
    view = ops.scale(x, 1.0).reshape(2, -1)[1].view(np.int32)
    address = view.__cuda_array_interface__["data"][0]
    later = [ops.scale(x, 2.0) for _ in range(4)]  # a view holds its memory
    assert all(not 0 <= address - a.__cuda_array_interface__["data"][0] < a.nbytes for a in later)


def test_constants_have_memory_of_their_own(gpu):
    weight = np.arange(5, dtype=np.float32)
    first, second = device.constant(weight, np.float32), device.constant(weight, np.float32)
    assert first is second and gpu.pool.n_lent == 0
    np.testing.assert_array_equal(device.get(first), weight)


def test_memory_that_lies_about_is_given_back_before_there_is_none():
    gpu = Gpu(FakeDriver(capacity=100_000))
    with device.use(gpu):
        kept = [gpu.empty((1000,), np.float32) for _ in range(15)]
        del kept
        assert gpu.pool.n_free > 60_000 and gpu.free_bytes() == 100_000
        assert gpu.memory(90_000).nbytes == 90_000
        held = gpu.memory(90_000)
        with pytest.raises(MemoryError, match="the GPU refuses 90000 bytes"):
            gpu.memory(90_000)
        del held
        gpu.memory(90_000)


# -- numba-cuda and cuda.core as they are installed: what can be asked without a GPU


def test_views_of_numbas_arrays_hold_their_block():
    """numba counts references of memory that it allocated itself; ours has an owner that it does not know."""
    real = Driver.__new__(Driver)
    real._cuda = SimpleNamespace(current_context=lambda: None)
    block = Block(None, 0x7F0000001000, 4096)
    gone = weakref.ref(block)
    array = real.array(block, block.address, (4, 6), np.float32)
    assert (array.shape, array.strides, array.nbytes) == ((4, 6), (24, 4), 96)
    views = [array.reshape(3, 8), array.reshape(-1), array.view(np.int16), array._do_getitem(slice(1, 3))]
    views.append(views[3].reshape(-1)._do_getitem(slice(5, 7)).view(np.uint8))
    places = [view.__cuda_array_interface__["data"][0] - block.address for view in views]
    assert places == [0, 0, 0, 24, 44] and views[4].shape == (8,)
    del array, block, views[:4]
    assert gone() is not None
    views.clear()
    assert gone() is None


def test_names_that_the_driver_uses():
    import cuda.core
    from cuda.core.graph import Graph, GraphBuilder
    from numba import cuda as of_numba
    from numba.cuda.cudadrv.driver import Context, CudaAPIError, Event, binding

    for owner, names in (
        (cuda.core.Device, ("set_current", "create_graph_builder")),
        (GraphBuilder, ("begin_building", "end_building", "complete")),
        (Graph, ("upload", "launch")),
        (Context, ("memalloc", "get_memory_info")),
        (Event, ("record", "synchronize")),
        (of_numba, ("jit", "event", "event_elapsed_time", "pinned_array", "current_context")),
    ):
        for name in names:
            assert hasattr(owner, name), f"{owner.__name__} has no {name}"
    assert CudaAPIError(int(binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY), "").code == 2
