"""The memory of results: used again when the last view is gone, never before."""

import gc

import numpy as np
import pytest

from fastpath.cpu import pool

N = pool.SMALLEST // 4 + 5


@pytest.fixture(autouse=True)
def fresh():
    pool.clear()
    yield
    pool.clear()


def test_memory_is_used_again():
    first = pool.empty((N,), np.float32)
    where = first.ctypes.data
    del first
    gc.collect()
    again = pool.empty((1, N), np.float32)
    assert again.ctypes.data == where and again.shape == (1, N)


def test_a_view_keeps_the_memory():
    whole = pool.empty((N,), np.float32)
    view = whole.reshape(-1, 1)[3:]
    view[...] = 7
    del whole
    gc.collect()
    other = pool.empty((N,), np.float32)
    other[...] = 1
    assert not np.shares_memory(view, other)
    assert (view == 7).all()


def test_arrays_are_aligned_writable_and_contiguous():
    x = pool.empty((3, N), np.float32)
    assert x.flags.c_contiguous and x.flags.writeable and x.ctypes.data % 64 == 0


def test_what_is_kept_is_bounded():
    arrays = [pool.empty((pool.MOST_FREE // 16,), np.uint8) for _ in range(20)]
    del arrays
    gc.collect()
    assert 0 < pool._n_free <= pool.MOST_FREE
    assert pool._n_free == sum(size * len(blocks) for size, blocks in pool._free.items())


def test_small_arrays_are_numpys():
    assert pool.empty((3, 5), np.int32).base is None
