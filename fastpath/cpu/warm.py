"""Compile ahead: which kernels calls will use, and their compilation with progress.

    plan = kernels_of(lambda: engine.forward(batch))      # nothing is computed
    warm(plan, report=lambda i, n, name: print(f"compiling kernels {i}/{n}: {name}"))

Without this the same happens at first use, one kernel at a time and silently.
"""

from collections.abc import Callable

import numpy as np

from fastpath.cpu import kernel_cache, recording, threads


class _DryRun:
    """Stands where a program would record (program.py): notes the kernels, and no kernel runs.

    Recordable ops do not look at values between kernels, so that they do not mind arrays of zeros.
    """

    is_dry = True

    def __init__(self):
        self.kernels = {}
        self.workspaces, self.host_steps = {}, []

    def append(self, kernel, args, n, grain, n_threads, label):
        self.kernels[kernel] = None

    def keep(self, array):
        pass

    def array(self, shape, dtype, is_new=False):
        return np.zeros(shape, dtype)


def kernels_of(call: Callable[[], object]) -> list:
    """The kernels that a call of ops uses, each once, in order; those up to an op that cannot be recorded."""
    dry = _DryRun()
    before = recording.current()
    try:
        recording.of_thread.program = dry
        call()
    except recording.UnableError:
        pass  # the rest is compiled at first use
    finally:
        recording.of_thread.program = before
    return list(dry.kernels)


def warm(plan, report=None) -> int:
    """Load these kernels, compiling those that the cache does not hold; how many were compiled.

    report(i, n, name) is called before each compilation, i of n; never when all come from the cache.
    """
    stored = kernel_cache.stored()
    new = [kernel for kernel in plan if not kernel.is_loaded]
    missing = [kernel for kernel in new if kernel.name not in stored]
    for i, kernel in enumerate(missing):
        if report:
            report(i + 1, len(missing), kernel.function.__name__.strip("_"))
        kernel.load()
    for kernel in plan:
        kernel.load()
    threads.load()
    return sum(not kernel.was_cached for kernel in new)  # files that were damaged count
