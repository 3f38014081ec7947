"""The worker threads, and `run`: a kernel's work items over all of them.

Workers are Python threads that sit inside compiled code without the interpreter lock.  While work keeps
coming they spin on a word of memory, so that handing out a job costs well under a microsecond; after a
while without work they park on a Python lock.  Each worker has one word:

    IDLE -> POSTED   the caller offers the job            POSTED -> RUNNING   the worker takes part
    POSTED -> IDLE   the caller finished alone            RUNNING -> IDLE     the worker is done
    IDLE -> PARKED   nothing came for a while

A job is a table of steps, each a kernel with its arguments and its number of items: one step when an op is
called, a whole forward call when a program is replayed.  The steps are computed one after the other; the
items of a step are handed out in pieces, large ones first.  One word, NEXT, says which step runs and how
many of its items are taken; DONE counts those that are computed.  Who computes the last item of a step
goes on: steps too small to share it computes itself, at once, and the next large one it opens by writing
NEXT, which the others watch.  Thus nobody waits for a thread, only for items that are being computed: a
worker that the system does not schedule, or that comes late, holds up nothing.  No item's result depends
on who computes it.
"""

import atexit
import ctypes
import os
import struct
import threading
import time
import weakref

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastpath import control_groups, locks
from fastpath.cpu import kernel_cache, machine, recording
from fastpath.cpu.kernel import call
from fastpath.cpu.simd import I32, I64, ld_i64, st_i64

IDLE, POSTED, RUNNING, PARKED = 0, 1, 2, 3
LINE = 64  # bytes: each word that threads share has its own cache line
JOB, NEXT, DONE, STATES = 0, LINE, 2 * LINE, 3 * LINE  # job: steps, their number, threads, stamps
STEP = 32  # bytes of a step: function, args, n, grain
ALL = (1 << 32) - 1  # NEXT is  step << 32 | items taken
MAX_THREADS = 256
MAX_ARGS = 32
SPINS = 4000  # about 0.1 to 0.2 ms of waiting before a thread lets others have its core
PATIENCE = 50_000  # about 2 ms before a worker parks: longer than what lies between two tokens
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


@intrinsic
def ticks(typingctx):
    """A counter that grows evenly: of the core on x86, of nanoseconds elsewhere."""

    def codegen(context, b, signature, args):
        return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, []), name), [])

    name = "llvm.readcyclecounter" if machine.IS_X86 else "llvm.readsteadycounter"
    return types.int64(), codegen


if hasattr(os, "sched_yield"):
    give_way = types.ExternalFunction("sched_yield", types.int32())
else:
    give_way = relax


def _nopython(signature):
    """Compiled at first use and kept in the kernel cache; runs without the interpreter lock."""
    return lambda function: _Lazy(signature, function)


_lock = locks.lock()


class _Lazy:
    """A function of integers, called as C."""

    def __init__(self, signature, function):
        self.signature, self.function, self.compiled, self._code = signature, function, None, None

    def __call__(self, *args):
        return (self.compiled or self.load())(*args)

    def load(self):
        with _lock:
            if self.compiled is None:
                self._code = kernel_cache.machine_code(self.function, self.signature)
                result = None if self.signature.return_type == types.void else ctypes.c_ssize_t
                arguments = [ctypes.c_ssize_t] * len(self.signature.args)
                self.compiled = ctypes.CFUNCTYPE(result, *arguments)(self._code.address)
        return self.compiled


@numba.njit(nogil=True, error_model="numpy")
def _take_part(control, thread):
    """Compute pieces until the last step of the job is done."""
    steps, n_steps = ld_i64(control + JOB), ld_i64(control + JOB + 8)
    n_threads = ld_i64(control + JOB + 16)
    spins = 0
    while True:
        seen = atomic_load(control + NEXT)
        step, lo = seen >> 32, seen & ALL
        if step >= n_steps:
            return
        row = steps + STEP * step
        n = ld_i64(row + 16)
        if lo >= n:
            relax()
            spins += 1
            if spins > SPINS:
                give_way()
            continue
        # three quarters of a fair share: few pieces, and small ones at the end, where they even things out
        count = min(n - lo, max(ld_i64(row + 24), (n - lo) * 3 // (4 * n_threads)))
        if swap_if(control + NEXT, seen, seen + count):
            call(ld_i64(row), ld_i64(row + 8), lo, lo + count, thread)
            if atomic_add(control + DONE, count) + count == n:
                _advance(control, step, thread)
            spins = 0


@numba.njit(nogil=True, error_model="numpy")
def _advance(control, step, thread):
    """Step `step` is done: compute the small ones that follow, then open the next that is worth sharing."""
    steps, n_steps = ld_i64(control + JOB), ld_i64(control + JOB + 8)
    n_threads, stamps = ld_i64(control + JOB + 16), ld_i64(control + JOB + 24)
    while True:
        step += 1
        if stamps:
            st_i64(stamps + 8 * step, ticks())
        if step == n_steps:
            break
        row = steps + STEP * step
        n = ld_i64(row + 16)
        if n > ld_i64(row + 24) and n_threads > 1:
            break
        call(ld_i64(row), ld_i64(row + 8), 0, n, thread)
    atomic_store(control + DONE, 0)
    atomic_store(control + NEXT, step << 32)


@_nopython(types.intp(*[types.intp] * 5))
def _run(control, workers, steps, n_steps, stamps):
    """Returns 0, or 1 without having done anything: there are parked workers to wake first."""
    for i in range(workers):
        if atomic_load(control + STATES + LINE * i) == PARKED:
            return 1
    atomic_store(control + JOB, steps)
    atomic_store(control + JOB + 8, n_steps)
    atomic_store(control + JOB + 16, workers + 1)
    atomic_store(control + JOB + 24, stamps)
    atomic_store(control + NEXT, ALL)  # step 0, nothing left to take
    for i in range(workers):
        swap_if(control + STATES + LINE * i, IDLE, POSTED)
    _advance(control, -1, 0)
    _take_part(control, 0)
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


@_nopython(types.void(*[types.intp] * 3))
def _alone(function, args, n):
    call(function, args, 0, n, 0)


@_nopython(types.void(*[types.intp] * 2))
def _serve(control, worker):
    """Take part in jobs until none has come for a while."""
    state = control + STATES + LINE * worker
    spins = 0
    while spins < PATIENCE:
        if swap_if(state, POSTED, RUNNING):
            _take_part(control, worker + 1)
            atomic_store(state, IDLE)
            spins = 0
        relax()
        spins += 1
        if spins % 512 == 0:
            give_way()
        if spins >= PATIENCE and not swap_if(state, IDLE, PARKED):
            spins = 0  # a job came in the last moment


class Pool:
    """`n_threads - 1` workers; the thread that calls `run` is the other one."""

    def __init__(self, n_threads):
        self.n_workers = n_threads - 1
        self.words, self.control = _control(MAX_THREADS)
        first = (self.control - self.words.ctypes.data) // 8 + STATES // 8
        self.states = self.words[first :: LINE // 8][: self.n_workers]
        self.states[:] = PARKED
        self.busy = locks.lock()
        self.wakers = []

    def run(self, steps, n_steps, n_threads, stamps=0):
        if self.busy.locked():
            _run(_own_control(), 0, steps, n_steps, stamps)  # somebody else has the workers: same bytes
            return
        with self.busy:  # of two threads that find it free at once the second waits
            while _run(self.control, min(self.n_workers, n_threads - 1), steps, n_steps, stamps):
                self._wake()

    def _wake(self):
        """Python looks for a Ctrl+C when a call returns and at the end of a loop: never between a worker's
        word and its lock, so that none is left asleep whose word says otherwise."""
        while len(self.wakers) < self.n_workers:
            self.wakers.append(_start(self, len(self.wakers)))
        for worker in np.flatnonzero(self.states == PARKED):
            wake = self.wakers[worker].release
            self.states[worker] = IDLE
            wake()


def _start(pool, worker):
    """Start a parked worker; returns the lock whose release wakes it.  It ends when its pool is gone.

    The lock is free only from a release until the worker takes it, which it has done before it parks again.
    """
    waker = threading.Lock()
    waker.acquire()
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

    def end():
        if waker.locked():  # otherwise the worker is about to look whether its pool is there
            waker.release()

    # not at exit: a worker that is woken then would spin until the process is gone
    weakref.finalize(pool, end).atexit = False
    threading.Thread(target=live, name=f"twinpath-{worker + 1}", daemon=True).start()
    return waker


def available():
    """How many threads this process may use: its logical CPUs, or its share of them inside a container."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(n, control_groups.cpus() or n, MAX_THREADS)


_PACK = [struct.Struct(f"{4 + n}q").pack_into for n in range(MAX_ARGS + 1)]
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


def run(kernel, args, n, grain=1, n_threads=MAX_THREADS, label=None):
    """Compute work items 0 .. n-1 of a kernel in pieces of `grain` or more.

    args       the kernel's words.  The caller keeps the arrays behind addresses alive.
    grain      items below which a piece is not worth a second thread; up to here one thread computes alone
    n_threads  at most so many take part: whoever has made scratch memory for each thread says for how many,
               since another Python thread may set another number meanwhile
    label      what the step works on (a weight's name), for profiles

    A program that records appends the call to its steps.
    """
    if n <= 0:
        return
    grain = max(1, grain)
    program = recording.current()
    if program is not None:
        program.append(kernel, args, n, grain, n_threads, label)
        if program.is_dry:
            return
    try:
        block = _local.block
    except AttributeError:
        block = _new_block()
    step = _local.address
    _PACK[len(args)](block, 0, kernel.address, step + STEP, n, grain, *args)
    pool = _pool or _current()
    if n <= grain or not pool.n_workers:
        _alone(kernel.address, step + STEP, n)
    else:
        pool.run(step, 1, n_threads)


def run_steps(steps, n_steps, n_threads, stamps=0):
    """Compute a table of steps (address, rows of STEP bytes) in one compiled call.

    n_threads  at most so many take part
    stamps     0, or the address of i64[n_steps + 1] for `ticks`: at the beginning, and after each step
    """
    _current().run(steps, n_steps, n_threads, stamps)


def _new_block():
    """Memory for one step of this thread's calls and its argument words."""
    _local.block = ctypes.create_string_buffer(STEP + 8 * MAX_ARGS)
    _local.address = ctypes.addressof(_local.block)
    return _local.block


def _control(n_workers):
    """(array, aligned address) of the words of a pool."""
    words = np.zeros((STATES + LINE * n_workers + LINE) // 8, np.int64)
    return words, -(-words.ctypes.data // LINE) * LINE


def _own_control():
    """Of a pool without workers: for a thread that finds the workers busy."""
    if not hasattr(_local, "control"):
        _local.words, _local.control = _control(0)
    return _local.control


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
    """A forked child has no workers: it starts its own, as many."""
    global _pool
    if _pool is not None:
        _pool = Pool(_pool.n_workers + 1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
