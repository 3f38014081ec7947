"""The executors find what they are there to find, each in a kernel that does it wrong on purpose."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from fastpath.cuda import intrinsics as ptx
from fastpath.cuda.kernel import Kernel
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu.launching import KernelError

WHOLE_WARP = 0xFFFFFFFF
F, I = float32[::1], int32[::1]


def behind_the_end(x):
    x[cuda.grid(1) + 8] = float32(1)


def just_behind_the_end(x):
    """Within the 16 bytes to which arrays are rounded up."""
    if cuda.threadIdx.x == 0:
        x[x.size] = float32(1)


def behind_shared(x):
    shared = cuda.shared.array(32, float32)
    shared[cuda.threadIdx.x + 1] = float32(1)
    cuda.syncthreads()
    x[cuda.threadIdx.x] = shared[cuda.threadIdx.x]


def without_barrier(x):
    shared = cuda.shared.array(64, float32)
    shared[cuda.threadIdx.x] = float32(cuda.threadIdx.x)
    x[cuda.threadIdx.x] = shared[63 - cuda.threadIdx.x]


def block_after_block(x):
    """Blocks of a grid have no order."""
    x[cuda.blockIdx.x] = x[(cuda.blockIdx.x + 1) % x.size] + float32(1)


def half_a_warp_shuffles(x):
    if cuda.threadIdx.x < 7:
        x[cuda.threadIdx.x] = cuda.shfl_xor_sync(WHOLE_WARP, x[cuda.threadIdx.x], 1)


def some_at_the_barrier(x):
    if cuda.threadIdx.x < 40:
        cuda.syncthreads()
    x[cuda.threadIdx.x] = float32(0)


def barrier_against_shuffle(x):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        x[cuda.threadIdx.x] = cuda.shfl_xor_sync(WHOLE_WARP, x[cuda.threadIdx.x], 1)
        cuda.syncthreads()
    if cuda.threadIdx.x == 3:
        cuda.syncwarp(WHOLE_WARP)


def copy_without_wait(x, y):
    shared = cuda.shared.array(128, int32, alignment=16)
    t = cuda.threadIdx.x
    ptx.copy_async_16(shared, t * 4, x, t * 4)
    ptx.commit_copies()
    cuda.syncthreads()
    y[t] = shared[t]


def crooked_load(x, y):
    y[cuda.threadIdx.x] = ptx.load_v4(x, cuda.threadIdx.x)[0]


WRONG = [
    (behind_the_end, (F,), 4, 32, "no part of an array"),
    (just_behind_the_end, (F,), 1, 32, "beside an array"),
    (behind_shared, (F,), 1, 32, "shared memory was written outside"),
    (without_barrier, (F,), 1, 64, "a barrier or a wait is missing"),
    (block_after_block, (F,), 126, 1, "a barrier or a wait is missing"),
    (half_a_warp_shuffles, (F,), 1, 32, "has exited|deadlock"),
    (
        some_at_the_barrier,
        (F,),
        1,
        64,
        "deadlock: 40 threads at syncthreads, 0 at a warp instruction, 24 have exited",
    ),
    (barrier_against_shuffle, (F,), 1, 64, "has exited|deadlock"),
    (copy_without_wait, (I, I), 1, 32, "nobody waited for"),
    (crooked_load, (I, I), 1, 32, "access of 16 bytes"),
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "function, signature, grid, threads, message", WRONG, ids=lambda w: getattr(w, "__name__", "")
)
def test_wrong_kernels_are_found(function, signature, grid, threads, message, executor):
    arrays = [np.zeros(126, np.float32 if kind is F else np.int32) for kind in signature]
    with pytest.raises(KernelError, match=message):
        EXECUTORS[executor].launch(Kernel(function, signature), grid, threads, *arrays)


def reads_nothing(x):
    shared = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    if i < 16:
        shared[i] = float32(1)
    cuda.syncthreads()
    x[i] = shared[i]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_nobody_wrote_is_not_a_number(executor):
    x = np.zeros(32, np.float32)
    EXECUTORS[executor].launch(Kernel(reads_nothing, (F,)), 1, 32, x)
    np.testing.assert_array_equal(np.isnan(x), np.arange(32) >= 16)


def names_the_thread(x):
    if cuda.blockIdx.y == 2 and cuda.threadIdx.y == 1 and cuda.threadIdx.x == 3:
        x[1 << 20] = float32(1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_block_and_thread_are_named(executor):
    with pytest.raises(KernelError, match=r"names_the_thread.*: block \(0,2,0\) thread \(3,1,0\): access"):
        EXECUTORS[executor].launch(Kernel(names_the_thread, (F,)), (1, 3), (8, 2), np.zeros(4, np.float32))
