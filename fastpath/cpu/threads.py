"""The worker threads, and `run`: a kernel's work items over all of them.

Workers are Python threads that sit inside compiled code without the interpreter lock.  While work keeps
coming they spin on a word of memory, so that handing out a job costs well under a microsecond; after a
while without work they park on a Python lock.  Each worker has one word:

    IDLE -> POSTED   the caller offers the job            POSTED -> RUNNING   the worker takes part
    POSTED -> IDLE   the caller finished alone            RUNNING -> IDLE     the worker is done
    IDLE -> PARKED   nothing came for a while

The caller works too, and takes back the offer from every worker that has not begun: it waits only for items
that are being computed, never for a thread that the system has not scheduled.  Items are handed out in
pieces of `grain`; no item's result depends on who computes it.
"""

import atexit
import ctypes
import os
import struct
import threading
import time
import weakref
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath.cpu import kernel_cache, machine
from fastpath.cpu.kernel import call
from fastpath.cpu.simd import I32, I64, ld_i64

IDLE, POSTED, RUNNING, PARKED = 0, 1, 2, 3
LINE = 64  # bytes: each word that threads share has its own cache line
JOB, NEXT, STATES = 0, LINE, 2 * LINE  # job: function, args, n, grain
MAX_THREADS = 256
MAX_ARGS = 32
SPINS = 4000  # about 0.1 to 0.2 ms of waiting before a worker parks
_WORD = I64.as_pointer()  # llvmlite's atomics still want a typed pointer


@intrinsic
def atomic_load(typingctx, address):
    def codegen(context, b, signature, args):
        return b.load_atomic(b.inttoptr(args[0], _WORD), "acquire", 8, typ=I64)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    def codegen(context, b, signature, args):
        b.store_atomic(args[1], b.inttoptr(args[0], _WORD), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], _WORD), args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def swap_if(typingctx, address, old, new):
    """Atomically replace `old` by `new`; True if it was `old`."""

    def codegen(context, b, signature, args):
        result = b.cmpxchg(b.inttoptr(args[0], _WORD), args[1], args[2], "acq_rel", "acquire")
        return b.extract_value(result, 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def relax(typingctx):
    """Tell the core that this is a waiting loop."""

    def codegen(context, b, signature, args):
        if machine.IS_X86:
            kind, name, values = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause", []
        elif machine.IS_AARCH64:
            kind, name, values = ir.FunctionType(ir.VoidType(), [I32]), "llvm.aarch64.hint", [I32(1)]
        else:
            return context.get_dummy_value()
        b.call(cgutils.get_or_insert_function(b.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), codegen


if hasattr(os, "sched_yield"):
    give_way = types.ExternalFunction("sched_yield", types.int32())
else:
    give_way = relax


def _nopython(signature):
    """Compile at first use, without the interpreter lock, kept in the kernel cache."""
    return lambda function: _Lazy(signature, function)


_lock = threading.Lock()


class _Lazy:
    def __init__(self, signature, function):
        self.signature, self.function, self.compiled = signature, function, None

    def __call__(self, *args):
        return (self.compiled or self.load())(*args)

    def load(self):
        with _lock:
            if self.compiled is None:
                self.compiled = self._compile()
        return self.compiled

    def _compile(self):
        options = {"nogil": True, "error_model": "numpy"}
        return kernel_cache.through(
            self.function, lambda cache: numba.njit(self.signature, cache=cache, **options)(self.function)
        )


@numba.njit(nogil=True, error_model="numpy")
def _take_items(control, thread):
    function, args = ld_i64(control + JOB), ld_i64(control + JOB + 8)
    n, grain = ld_i64(control + JOB + 16), ld_i64(control + JOB + 24)
    while True:
        lo = atomic_add(control + NEXT, grain)
        if lo >= n:
            return
        call(function, args, lo, min(lo + grain, n), thread)


@_nopython("intp(intp, intp, intp, intp, intp, intp)")
def _run(control, workers, function, args, n, grain):
    """Returns 0, or 1 without having done anything: there are parked workers to wake first."""
    workers = min(workers, (n - 1) // grain)
    for i in range(workers):
        if atomic_load(control + STATES + LINE * i) == PARKED:
            return 1
    _set_job(control, function, args, n, grain)
    for i in range(workers):
        swap_if(control + STATES + LINE * i, IDLE, POSTED)
    _take_items(control, 0)
    for i in range(workers):
        state = control + STATES + LINE * i
        if not swap_if(state, POSTED, IDLE):
            spins = 0
            while atomic_load(state) == RUNNING:
                relax()
                spins += 1
                if spins > SPINS:
                    give_way()
    return 0


@_nopython("void(intp, intp, intp)")
def _alone(function, args, n):
    call(function, args, 0, n, 0)


@numba.njit(nogil=True)
def _set_job(control, function, args, n, grain):
    atomic_store(control + JOB, function)
    atomic_store(control + JOB + 8, args)
    atomic_store(control + JOB + 16, n)
    atomic_store(control + JOB + 24, grain)
    atomic_store(control + NEXT, 0)


@_nopython("void(intp, intp)")
def _serve(control, worker):
    """Take part in jobs until none has come for a while."""
    state = control + STATES + LINE * worker
    spins = 0
    while spins < SPINS:
        if swap_if(state, POSTED, RUNNING):
            _take_items(control, worker + 1)
            atomic_store(state, IDLE)
            spins = 0
        relax()
        spins += 1
        if spins % 512 == 0:
            give_way()
        if spins >= SPINS and not swap_if(state, IDLE, PARKED):
            spins = 0  # a job came in the last moment


class Pool:
    """`n_threads - 1` workers; the thread that calls `run` is the other one."""

    def __init__(self, n_threads):
        self.n_workers = n_threads - 1
        self.words = np.zeros((STATES + LINE * MAX_THREADS + LINE) // 8, np.int64)
        self.control = -(-self.words.ctypes.data // LINE) * LINE
        first = (self.control - self.words.ctypes.data) // 8 + STATES // 8
        self.states = self.words[first :: LINE // 8][: self.n_workers]
        self.states[:] = PARKED
        self.busy = threading.Lock()
        self.wakers = []

    def run(self, function, args, n, grain, n_threads):
        if not self.busy.acquire(blocking=False):
            _alone(function, args, n)  # somebody else has the workers: same bytes, no waiting
            return
        try:
            while _run(self.control, min(self.n_workers, n_threads - 1), function, args, n, grain):
                self._wake()
        finally:
            self.busy.release()

    def _wake(self):
        if not self.wakers:
            self.wakers = [_start(self, worker) for worker in range(self.n_workers)]
        for worker in np.flatnonzero(self.states == PARKED):
            self.states[worker] = IDLE
            self.wakers[worker].release()


def _start(pool, worker):
    """Start a parked worker; returns the lock whose release wakes it.  It ends when its pool is gone."""
    waker = threading.Semaphore(0)
    _serve.load()
    control, alive = pool.control, weakref.ref(pool)

    def live():
        while True:
            waker.acquire()
            keep = alive()
            if keep is None:
                return
            words = keep.words  # the memory stays while compiled code looks at it
            del keep
            _serve(control, worker)
            del words

    threading.Thread(target=live, name=f"twinpath-{worker + 1}", daemon=True).start()
    # not at exit: a worker that is woken then would spin until the process is gone
    weakref.finalize(pool, waker.release).atexit = False
    return waker


def available():
    """How many threads this process may use: its CPUs, or its share of them inside a container."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no such file, or "max": no limit
    return min(n, MAX_THREADS)


_PACK = [struct.Struct(f"{n}q").pack_into for n in range(MAX_ARGS + 1)]
_pool = None
_local = threading.local()


def set_num_threads(n_threads):
    """Compute on so many threads from now on."""
    global _pool
    if not 1 <= n_threads <= MAX_THREADS:
        raise ValueError(
            f"threads: got {n_threads}, expected 1 to {MAX_THREADS}; this machine offers {available()}"
        )
    if _pool is None or _pool.n_workers != n_threads - 1:
        _pool = Pool(n_threads)


def num_threads():
    return _current().n_workers + 1


def _current():
    if _pool is None:
        set_num_threads(available())
    return _pool


def run(kernel, args, n, grain=1, n_threads=MAX_THREADS):
    """Compute work items 0 .. n-1 of a kernel in pieces of `grain`.

    args       the kernel's words.  The caller keeps the arrays behind addresses alive.
    n_threads  at most so many take part: whoever has made scratch memory for each thread says for how many,
               since another Python thread may set another number meanwhile
    """
    if n <= 0:
        return
    try:
        block = _local.block
    except AttributeError:
        block = _new_block()
    _PACK[len(args)](block, 0, *args)
    pool = _pool or _current()
    if n <= grain or not pool.n_workers:
        _alone(kernel.address, _local.address, n)
    else:
        pool.run(kernel.address, _local.address, n, max(1, grain), n_threads)


def _new_block():
    """Memory for the argument words of this thread's calls."""
    _local.block = ctypes.create_string_buffer(8 * MAX_ARGS)
    _local.address = ctypes.addressof(_local.block)
    return _local.block


def load():
    """Compile or load the functions of this file (part of warming up)."""
    for function in (_run, _alone, _serve):
        function.load()


def _settle():
    """At exit: let the workers park, so that none is in compiled code when that is taken away."""
    for _ in range(100):
        if _pool is None or not _pool.wakers or np.all(_pool.states == PARKED):
            return
        time.sleep(0.001)


atexit.register(_settle)


def _forget():
    global _pool
    _pool = None  # a forked child has no workers; it starts its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
