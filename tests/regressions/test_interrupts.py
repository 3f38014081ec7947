"""Ctrl+C at any moment: never lost, nothing printed beside the one line, nothing left locked or recording."""

import builtins
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

import fastpath.cpu
from fastpath.cli.__main__ import main
from fastpath.cpu import kernel, kernel_cache, pool, program, recording, threads
from fastpath.cpu.simd import ld_i64, st_i64
from fastpath.cpu.warm import kernels_of
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model

HAMMERED = 300


@kernel.kernel
def _count(args, lo, hi, thread):
    for i in range(lo, hi):
        st_i64(ld_i64(args) + 8 * i, i)


class _Destructor:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def _swallowed():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass


@pytest.mark.parametrize("lose", [_swallowed, _Destructor])
def test_one_that_the_compiler_loses_is_raised_when_the_kernel_is_made(monkeypatch, capsys, lose):
    def compiler(signature, **options):
        lose()
        return lambda function: SimpleNamespace(address=1)

    monkeypatch.setattr(kernel_cache, "FOLDER", None)
    monkeypatch.setattr(kernel_cache.numba, "cfunc", compiler)
    with pytest.raises(KeyboardInterrupt):
        kernel_cache.machine_code(_count.function, kernel.SIGNATURE)
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_an_import_makes_an_error_of(monkeypatch, capsys):
    """As NumPy's does, with advice about broken installations."""
    plain = builtins.__import__

    def importing(name, *given, **options):
        if name == "fastpath.cli.answer":
            _swallowed()
            raise ImportError("IMPORTANT: PLEASE READ THIS")
        return plain(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    status = main(["--prompt", "Hi"])
    monkeypatch.undo()
    assert (status, *capsys.readouterr()) == (130, "", "twinpath: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_errors_of_imports_are_not_hidden(monkeypatch):
    plain = builtins.__import__

    def importing(name, *given, **options):
        if name == "fastpath.cli.answer":
            raise ImportError("a fault of the installation")
        return plain(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ImportError, match="a fault of the installation"):
        main(["--prompt", "Hi"])


needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of the system")


def _hammer(call, check, times=HAMMERED, before=lambda: None):
    """Interrupts `call` again and again, each time somewhere else."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    rng, handler = random.Random(1), signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(times):
            before()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 3e-4))
                while True:
                    call()
            except KeyboardInterrupt:
                pass
            check()  # now that nothing holds the traceback, and with it the frames
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def three_threads():
    before = threads.num_threads()
    threads.set_num_threads(3)
    yield threads._current()
    threads.set_num_threads(before)


def _run_count(out):
    threads.run(_count, (out.ctypes.data,), len(out))


@needs_timers
def test_the_workers_stay_free(three_threads):
    out = np.zeros(300, np.int64)
    _run_count(out)

    def check():
        assert not three_threads.busy.locked()

    _hammer(lambda: _run_count(out), check)


@needs_timers
def test_workers_that_are_woken_park_again(three_threads):
    """One whose word says that it is awake while it sleeps would take part in nothing any more."""
    out = np.zeros(300, np.int64)
    _run_count(out)

    def all_parked():
        for _ in range(1000):
            if np.all(three_threads.states == threads.PARKED):
                return
            time.sleep(0.005)
        raise AssertionError(f"words {three_threads.states.tolist()}")

    _hammer(lambda: _run_count(out), lambda: None, times=30, before=all_parked)
    all_parked()
    assert len(three_threads.wakers) == 2


@needs_timers
def test_no_program_records_on(three_threads):
    """A dry run that does not end would make every later result zero."""

    def check():
        assert recording.current() is None

    def record():
        with program.record():
            pass

    _hammer(lambda: kernels_of(lambda: None), check)
    _hammer(record, check)


@needs_timers
def test_replay_stays_free():
    lanes = Lanes(load_model(DEMO), fastpath.cpu, context_len=4096)
    expected = lanes.decode(5).tobytes()

    def check():
        assert not lanes.replay._busy.locked()

    def decode():
        lanes.reset()
        lanes.decode(5)

    _hammer(decode, check, times=100)
    lanes.reset()
    assert lanes.decode(5).tobytes() == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_other_threads_held_is_free_in_a_child():
    lanes = Lanes(load_model(DEMO), fastpath.cpu, context_len=64)
    lanes.decode(5)
    expected = lanes.decode(7).tobytes()
    locks = (
        lanes._one_at_a_time, lanes.replay._busy, threads._current().busy, threads._lock, kernel._lock,
        pool._lock,
    )  # fmt: skip
    held, done = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        lanes.reset()
        lanes.decode(5)
        same = lanes.decode(7).tobytes() == expected
        _count._address = 0
        _count.load()
        free = not lanes.replay._busy.locked()
        os._exit(0 if same and free else 1)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_of_the_forking_thread_stays_its_own():
    from fastpath import locks

    mine = locks.reentrant()
    with mine:
        locks._free()
    assert mine.acquire(blocking=False)
