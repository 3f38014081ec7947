"""Kernels that start before the one ahead has ended: what they do until then, and who may be launched so."""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda import core as cuda_core
from numba import cuda, int32, types
from numba.cuda import dispatcher

from fastpath.cuda import (
    device,
    early,
    elementwise,
    layout,
    linear,
    norm,
    ops,
    read_ahead,
    table,
)
from fastpath.cuda.driver import Compiled, Driver
from fastpath.cuda.fuse_flow import names_of
from fastpath.cuda.fused_steps import write_half
from fastpath.cuda.intrinsics import let_next_start, load_weights_v1, wait_for_previous
from fastpath.cuda.kernel import Kernel
from quant import FORMATS
from tests import strategies
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu import devices, launching, offline, runtime

ENTRY = ".visible .entry k(\n.param .u64 k_param_0\n)\n{\n"
WAIT = "griddepcontrol.wait;\n"
PTX = {
    "ld.param.u64 %rd1, [k_param_0];\n" + WAIT + "ld.global.f32 %f1, [%rd1];\nret;\n": True,
    "cp.async.bulk.prefetch.L2.global [%rd1], %r1;\n" + WAIT + "ret;\n": True,
    "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\n" + WAIT + "ret;\n": True,
    "@%p1 bra $L1;\nadd.s32 %r1, %r1, 1;\n$L1:\n" + WAIT + "ret;\n": True,
    "$L1:\nadd.s32 %r1, %r1, 1;\n@%p1 bra $L1;\n" + WAIT + "ret;\n": True,
    "@%p1 bra $L1;\n" + WAIT + "st.global.u32 [%rd1], %r1;\nret;\n$L1:\n" + WAIT + "ret;\n": True,
    "bra.uni $L2;\n$L1:\nst.global.u32 [%rd1], %r1;\nret;\n$L2:\n" + WAIT + "bra.uni $L1;\n": True,
    "@%p1 bra $L1;\n"
    + WAIT
    + "$L1:\n@!%p1 bra $L2;\n"
    + WAIT
    + "$L2:\nst.global.u32 [%rd1], %r1;\nret;\n": True,
    "@%p1 " + WAIT + "@!%p1 " + WAIT + "ld.global.f32 %f1, [%rd1];\nret;\n": True,
    "@%p1 bra $L1;\n"
    + WAIT
    + "$L1:\nsetp.eq.s32 %p1, %r1, 0;\n@!%p1 bra $L2;\n"
    + WAIT
    + "$L2:\nret;\n": False,
    "@%p1 bra $L1;\n" + WAIT + "$L1:\n@%p1 bra $L2;\n" + WAIT + "$L2:\nret;\n": False,
    "ld.global.f32 %f1, [%rd1];\nret;\n": False,
    "ret;\n": False,
    "$L1:\nbra.uni $L1;\n": False,
    "ld.global.L1::no_allocate.u32 %r1, [%rd1];\n" + WAIT + "ret;\n": False,
    "@%p1 st.global.f32 [%rd1], %f1;\n" + WAIT + "ret;\n": False,
    "ld.shared.f32 %f1, [%r1];\n" + WAIT + "ret;\n": False,
    "cp.async.cg.shared.global [%r1], [%rd1], 16;\n" + WAIT + "ret;\n": False,
    "atom.global.add.u32 %r1, [%rd1], 1;\n" + WAIT + "ret;\n": False,
    "@%p1 ret;\n" + WAIT + "ret;\n": False,
    "@%p1 " + WAIT + "ld.global.f32 %f1, [%rd1];\nret;\n": False,
    "call.uni other, ();\n" + WAIT + "ret;\n": False,
    "@%p1 bra $L1;\n" + WAIT + "$L1:\nld.global.f32 %f1, [%rd1];\nret;\n": False,
    "@%p1 bra $L1;\n" + WAIT + "ret;\n$L1:\nadd.s32 %r1, %r1, 1;\n@%p2 bra $L1;\nret;\n": False,
    "griddepcontrol.launch_dependents;\n" + WAIT + "ret;\n": False,
}


@pytest.mark.parametrize("body", PTX)
def test_who_waits_first(body):
    assert early.waits_first(ENTRY + body + "}\n") is PTX[body]


def _ptx(kernel):
    return offline.to_ptx(kernel.function, kernel.signature, (9, 0), kernel.bounds)


@pytest.mark.parametrize("kernel", [norm.RMS_NORM, linear.PRODUCTS["Q4_K"]], ids=lambda k: k.name)
def test_three_lines_in_front(kernel):
    """In PTX; without them a kernel is not launched early."""
    ptx = _ptx(early.kernel_of(kernel))
    assert early.waits_first(ptx) and not early.waits_first(_ptx(kernel))
    lines = [ptx.index(word) for word in ("prefetch", early.WAIT, "griddepcontrol.launch_dependents;")]
    assert lines == sorted(lines)


def _loading_first():
    """It waits only when it has read the weights' first word, as products might."""

    def function(x, y, out):
        words = load_weights_v1(x, cuda.threadIdx.x)
        wait_for_previous()
        let_next_start()
        out[cuda.blockIdx.x, cuda.threadIdx.x] = words[0] + y[cuda.threadIdx.x]

    def plain(x, y, out):
        out[cuda.blockIdx.x, cuda.threadIdx.x] = x[cuda.threadIdx.x] + y[cuda.threadIdx.x]

    return Kernel(plain, (int32[::1], int32[::1], int32[:, ::1]), name="plain", early=function)


def test_a_wait_of_its_own():
    """Kernel.early takes the place of two lines and of the kernel; blocks that only ask wait as well."""
    kernel = early.kernel_of(_loading_first())
    ptx = _ptx(kernel)
    assert early.waits_first(ptx) and ptx.count(early.WAIT) == 2
    before = ptx[ptx.index("{") : ptx.index("griddepcontrol.launch_dependents")]
    loads = re.findall(r"ld\.global\.[\w.:]+", before)
    assert all(one.startswith("ld.global.nc.") for one in loads)
    assert sum("no_allocate" in one for one in loads) == 1 + 6 + 1  # pieces, the rows of pages, weights


class Early:
    """An executor that runs what a GPU would.  n pieces of an array that nobody may read beyond."""

    def __init__(self, executor, pieces=()):
        self.executor, self.pieces = executor, list(pieces)

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def launch(self, kernel, grid, threads, *arguments):
        n = len(self.pieces)
        nothing = read_ahead.Piece(0, 0, 0)
        asks = read_ahead.Asks(self.pieces)
        more = read_ahead.more_of(read_ahead.table([read_ahead.Asks([nothing] * 3), asks]), 3, asks, grid)
        self.executor.launch(early.kernel_of(kernel), read_ahead.grid_of(grid, n), threads, *arguments, *more)


class Guarded:
    """Bytes between pages that nobody may touch."""

    def __init__(self, n_bytes):
        self.length = ctypes.c_size_t()
        self.n_bytes = n_bytes
        self.address = runtime.library().run_guarded(n_bytes, ctypes.byref(self.length))

    def pieces(self, size, beyond=0):
        ends = range(0, self.n_bytes + beyond, size)
        return [read_ahead.Piece(self.address + start, size, 0) for start in ends]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        runtime.library().run_guarded_free(self.address, self.n_bytes, self.length)


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
@pytest.mark.parametrize("op", ["norm", "own", "product"])
def test_same_bytes_and_every_piece_once(op, executor):
    """With pieces to ask for, fewer and more than there are warps, and blocks that do nothing else."""
    rng = np.random.default_rng(4)
    x = strategies.normal(rng, 3, 320)
    weight = strategies.weights(rng, FORMATS["Q5_1"], 9, 320)
    words = rng.integers(0, 99, (2, 40)).astype(np.int32)

    def run():
        if op == "norm":
            return ops.rms_norm(x, x[0].copy(), 1e-6)
        if op == "product":
            return linear.linear(x, layout.device_matrix(weight), "int8")
        out = np.zeros((3, 40), np.int32)
        device.current().launch(_LOADING_FIRST, 3, 40, *words, out)
        return out

    one = EXECUTORS[executor]
    with device.use(one):
        want = run()
    for n, size in ((0, 16), (1, 4096), (300, 16)):
        with Guarded(4800 if n == 300 else 4096) as memory:
            before = runtime.library().run_prefetched_so_far()
            with device.use(Early(one, memory.pieces(size)[:n])):
                np.testing.assert_array_equal(run(), want)
            launched = 2 if op == "product" else 1  # activations are rounded first
            found = runtime.library().run_prefetched_so_far() - before
            assert found == launched * len(one.schedules) * n * size


_LOADING_FIRST = _loading_first()


def test_names_of_arguments_are_the_kernels_own():
    for kernel in (*table.KERNELS.values(), write_half("f16", "k")):
        names = names_of(early.kernel_of(kernel))
        assert names[:-6] == names_of(kernel) and len(set(names)) == len(names)


def test_asking_for_too_much_is_found():
    with Guarded(4096) as memory, device.use(Early(EXECUTORS["ir"], memory.pieces(4096, beyond=1))):
        with pytest.raises(AssertionError, match=r"no part of an array|beside"):
            ops.rms_norm(np.ones((1, 320), np.float32), None, 1e-6)


def test_nobody_looks_how_deep_the_grid_is():
    """Blocks that only ask lie behind the others in z: for a kernel they are not there."""
    for file in Path(early.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert "gridDim.z" not in text or file.name == "asking.py", file.name
        assert not re.search(r"cuda\.gridsize|gridDim\b(?!\.)", text), file.name


def _compiled(kernel, waits):
    """As numba-cuda has it."""
    made = dispatcher._Kernel.__new__(dispatcher._Kernel)
    made.signature, made.extensions, made.cooperative, made.debug = (
        types.void(*kernel.signature),
        [],
        False,
        False,
    )
    cufunc = SimpleNamespace(kernel=f"{kernel.name} on the device")
    made._codelibrary = SimpleNamespace(get_cufunc=lambda: cufunc)

    class Function:
        overloads = {kernel.signature: made}  # noqa: RUF012

        def __getitem__(self, place):
            grid, threads, stream = place
            return lambda *arguments: made.launch(arguments, grid, threads, stream)

    return Compiled(Function(), waits)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_launch(waits, is_early, monkeypatch):
    """The same kernel, arguments and grid as numba launches; early only if asked for, and if it waits."""
    launched = []
    for module in (cuda_core, dispatcher):
        monkeypatch.setattr(module, "launch", lambda *call: launched.append(call))
    driver = Driver.__new__(Driver)
    driver._cuda = SimpleNamespace(current_context=lambda: None)
    x, y = (driver.array(None, 0x7F0000001000 + i * 4096, (3, 5), np.float32) for i in range(2))
    arguments = x.reshape(-1), np.float32(2.5), y.reshape(-1)
    compiled = _compiled(elementwise.SCALE, waits)
    driver.launch(compiled, (7, 2), 128, arguments, "a stream", is_early=is_early)
    driver.launch(compiled, (7, 2), 128, arguments, "a stream")
    (stream, config, *rest), (_, plain, *as_numba) = launched
    assert stream == "a stream" and list(map(str, rest)) == list(map(str, as_numba))
    assert 0x7F0000002000 in rest and rest[0] == "scale on the device"
    assert (config.grid, config.block) == (plain.grid, plain.block) == ((7, 2, 1), (128, 1, 1))
    assert config.programmatic_stream_serialization is (waits and is_early)
    assert plain.programmatic_stream_serialization is False


# -- products that wait by themselves, in fused kernels


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
def test_fused_products_wait_by_themselves(executor, monkeypatch):
    """Two products and a norm in one launch: its blocks wait at once, those of products in their own time."""
    rng = np.random.default_rng(6)
    x, y = strategies.normal(rng, 2, 256), strategies.normal(rng, 2, 256)
    weights = [strategies.weights(rng, FORMATS["Q8_0"], 9, 256) for _ in range(2)]
    rows = np.array([1, 0])

    def run(one):
        with device.use(one), ops.program.record() as program:
            there, other = (device.put(a, np.float32) for a in (x, y))
            made = [linear.linear(there, weight, "int8") for weight in weights]
            made.append(ops.rms_norm(ops.get_rows(other, rows), None, 1e-6))
            made = list(map(device.get, made))
        return made, [launch.kernel for launch in program.launches]

    kind = {"ir": devices.executor_one, "sm_90": lambda s, k: devices.executor_two((9, 0), s, k)}[executor]
    schedules = (launching.LOCKSTEP,)
    want, _ = run(kind(schedules, devices.Executor))
    got, kernels = run(kind(schedules, EarlyExecutor))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    (kernel,) = (kernel for kernel in kernels if "linear" in kernel.name)
    assert kernel.early
    ptx = _ptx(early.kernel_of(kernel))
    assert early.waits_first(ptx) and ptx.count(early.WAIT) >= 2  # products, blocks that only ask


class EarlyExecutor(devices.Executor):
    def launch(self, kernel, grid, threads, *arguments):
        listed = self.put(read_ahead.table([]), np.int32)
        more = read_ahead.more_of(listed, 0, read_ahead.NOTHING, grid)
        super().launch(early.kernel_of(kernel), grid, threads, *arguments, *more)
