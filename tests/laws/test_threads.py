"""Jobs of many steps: each sees all of the one before, whoever computes what, and no thread is waited for."""

import ctypes
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpath.cpu as cpu
from fastpath.cpu import program, recording, threads
from fastpath.cpu.buffers import address, integers, output
from fastpath.cpu.grouping import group_by_expert
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import ld_i64, st_i64


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


@kernel
def _sum_kernel(args, lo, hi, thread):
    """out[i] = the sum of all of x, plus i: depends on every item of the step before."""
    x, out, n = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    total = 0
    for i in range(n):
        total += ld_i64(x + 8 * i) & 0xFFFFF
    for i in range(lo, hi):
        st_i64(out + 8 * i, total + i)


@kernel
def _thread_kernel(args, lo, hi, thread):
    """seen[i] = who computes item i."""
    for i in range(lo, hi):
        st_i64(ld_i64(args) + 8 * i, thread)


def _after(sizes):
    """What _sum_kernel leaves when it is run on these numbers of items, one step after the other."""
    x = np.arange(1, 4)
    for n in sizes:
        x = (x & 0xFFFFF).sum() + np.arange(n)
    return x


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=60), st.data())
def test_steps_follow_each_other(steps, data):
    """steps: (items, grain)"""
    before = threads.num_threads()
    threads.set_num_threads(data.draw(st.sampled_from([1, 2, 3, 8]), label="threads"))
    try:
        arrays, n = [np.arange(1, 4), np.zeros(40, np.int64), np.zeros(40, np.int64)], 3
        with program.record() as recorded:
            for i, (items, grain) in enumerate(steps):
                source, target = arrays[0 if i == 0 else 1 + i % 2], arrays[2 - i % 2]
                threads.run(_sum_kernel, (address(source), address(target), n), items, grain)
                n = items
        expected = _after([items for items, _ in steps])
        result = arrays[2 - (len(steps) - 1) % 2][:n]
        assert np.array_equal(result, expected)
        for _ in range(3):
            result[:] = -1
            recorded.replay()
            assert np.array_equal(result, expected)
    finally:
        threads.set_num_threads(before)


def test_workers_that_never_run_are_not_waited_for(n_threads):
    """Awake by their words, but no thread behind them: as if the system had no core for them."""
    n_threads(4)
    pool = threads._current()
    pool.wakers, pool.states[:] = [None], threads.IDLE
    x, out = np.arange(50), np.zeros(50, np.int64)
    with program.record() as recorded:
        for source, target in ((x, out), (out, x)) * 10:
            threads.run(_sum_kernel, (address(source), address(target), 50), 50, 1)
    first = x.copy()
    x[:] = np.arange(50)
    recorded.replay()
    assert np.array_equal(x, first) and set(pool.states) == {threads.IDLE}


def test_two_pools_after_each_other(n_threads):
    """A program recorded for more threads than there are now uses those that there are."""
    n_threads(3)
    x = np.random.default_rng(1).standard_normal((64, 48)).astype(np.float32)
    with program.record() as recorded:
        y = cpu.geglu(cpu.rms_norm(x, None, 1e-6), x)
    expected = y.tobytes()
    for n in (1, 2, 5):
        n_threads(n)
        assert recorded.is_stale
        y[:] = 0
        recorded.replay()
        assert y.tobytes() == expected


# -- recording ---------------------------------------------------------------------------------------


def test_only_this_thread_is_recorded():
    x = np.ones((4, 16), np.float32)
    with program.record() as recorded:
        other = threading.Thread(target=cpu.rms_norm, args=(x, None, 1e-6))
        other.start()
        other.join()
        assert len(recorded) == 0 and program.is_recording()
        cpu.add(x, x)
    assert len(recorded) == 1 and not program.is_recording()


def test_a_silent_copy_is_refused_while_recording():
    x = np.ones((4, 32), np.float32)
    assert np.array_equal(cpu.add(x[:, :16], x[:, 16:]), 2 * x[:, :16])
    refused = "add: x: .*strides .128, 4. cannot be recorded"
    with pytest.raises(program.UnableError, match=refused), program.record():
        cpu.add(x[:, :16], x[:, 16:])
    assert not program.is_recording()
    with pytest.raises(program.UnableError, match="positions: int64"), program.record():
        integers(np.arange(3), (3,), "positions")


def test_host_steps_have_memory_of_their_own():
    """They run before all kernels, so no kernel of the recording may have written where they write."""
    ids = np.zeros(1, np.int32)
    table = np.arange(64, dtype=np.float32).reshape(4, 16)
    x = np.ones((1, 16), np.float32)

    def look_up():
        out = output(None, (1, 16), "look_up", of_host=True)
        recording.host(lambda: np.copyto(out, table[ids]))
        return out

    with program.record() as recorded:
        for _ in range(3):
            y = cpu.add(cpu.add(x, x), x)  # leaves a block that nobody holds
            del y
        late = look_up()
        result = cpu.add(late, x)
    for i in range(4):
        ids[0] = i
        recorded.replay()
        assert np.array_equal(result, table[i : i + 1] + 1)


# -- groups ------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.integers(0, 2**32))
def test_groups_are_those_of_a_stable_sort(T, A, E, shares_rows, seed):
    ids = np.random.default_rng(seed).integers(0, E, (T, A)).astype(np.int32)
    groups = group_by_expert(ids, E, A if shares_rows else 1)
    n, U = T * A, min(T * A, E)
    assert (groups.n_entries, groups.n_groups) == (n, U)
    sizes = (U, U + 1, n, n)
    experts, starts, x_rows, out_rows = (
        _numbers_at(at, k) for at, k in zip(groups.addresses, sizes, strict=True)
    )
    order = np.argsort(ids.ravel(), kind="stable")
    assert np.array_equal(out_rows, order) and np.array_equal(x_rows, order // A if shares_rows else order)
    used, first = np.unique(ids.ravel()[order], return_index=True)
    assert np.array_equal(experts[: len(used)], used) and np.array_equal(starts[: len(used)], first)
    assert (starts[len(used) :] == n).all() and (experts >= 0).all() and (experts < E).all()


def _numbers_at(at, n):
    return np.array((ctypes.c_int64 * n).from_address(at))


def test_no_more_threads_than_scratch_was_made_for(n_threads):
    """Somebody sets more threads while a program is recorded, or before it is replayed."""
    n_threads(2)
    seen = np.zeros(64, np.int64)
    with program.record() as recorded:
        threads.run(_thread_kernel, (address(seen),), 64, 1, threads.num_threads())
        n_threads(6)
        threads.run(_thread_kernel, (address(seen),), 64, 1, threads.num_threads())
    for _ in range(30):
        seen[:] = -1
        recorded.replay()
        assert set(seen) <= {0, 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_on_as_many_threads(n_threads):
    n_threads(1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"%d" % threads.num_threads())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"1"
