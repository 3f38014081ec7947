"""Kernels without one of their barriers, waits or commits: executor one must notice each of them.

What is taken out is taken out of the IR, so that it is found in every kernel and in all that it calls; and a
mutant is compiled without Numba.
"""

import numpy as np

from fastpath.cuda import device
from tests.gpu_on_cpu import devices, ir_executor, launching

# One after another until a mutant is noticed.  Where a warp runs ahead, forward or backward, most are.
SCHEDULES = (*launching.SCHEDULES[2:4], *launching.SCHEDULES[:2], *launching.SCHEDULES[4:])


def waits(kernel):
    """[(device function, statement)] of a fastpath.cuda.kernel.Kernel."""
    return ir_executor.waits(kernel.function, kernel.signature, kernel.bounds)


def unnoticed(kernel, call):
    """The waits of a kernel without which `call` still gives the same bytes under every schedule.

    call  () -> an array, or a tuple of arrays; it launches the kernel
    """
    found = waits(kernel)
    if not found:
        return []
    whole = bytes_of(call, kernel)
    assert whole is not None, f"{kernel.name} is wrong with all of its barriers"
    return [wait for number, wait in enumerate(found) if not noticed_by(kernel, call, number, whole)]


def noticed_by(kernel, call, without, whole, schedules=SCHEDULES):
    """The first schedule under which a mutant gives other bytes, or an executor refuses to go on."""
    mutant = ir_executor.IrImage(kernel.function, kernel.signature, kernel.bounds, without)
    return next((s for s in schedules if bytes_of(call, kernel, mutant, s) != whole), None)


def bytes_of(call, kernel, image=None, schedule=launching.LOCKSTEP):
    """What the call gives with another image of this kernel; None where an executor refuses to go on."""
    executor = devices.executor_one((schedule,), devices.OnHostArrays)
    of_table = executor.image_of
    executor.image_of = lambda other: image if image and other == kernel else of_table(other)
    with np.errstate(all="ignore"), device.use(executor):
        try:
            result = call()
        except launching.KernelError:
            return None
    assert executor.launched.get(kernel.name), f"the case does not launch {kernel.name}"
    return tuple(array.tobytes() for array in (result if isinstance(result, tuple) else (result,)))
