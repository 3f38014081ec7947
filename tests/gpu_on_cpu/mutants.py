"""Kernels without one of their barriers, waits or commits: executor one must notice each of them.

What is taken out is taken out of the IR, so that it is found in every kernel and in all that it calls; and a
mutant is compiled without Numba.
"""

import numpy as np

from fastpath.cuda import device
from tests.gpu_on_cpu import devices, ir_executor, launching


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
    whole = _bytes_of(call, kernel, None)
    return [wait for number, wait in enumerate(found) if _bytes_of(call, kernel, number) == whole]


def _bytes_of(call, kernel, without):
    """What the call gives with this kernel changed; None where an executor refuses to go on."""
    image = ir_executor.IrImage(kernel.function, kernel.signature, kernel.bounds, without)
    executor = devices.executor_one(kind=devices.OnHostArrays)
    of_others = executor.image_of
    executor.image_of = lambda other: image if other == kernel else of_others(other)
    with np.errstate(all="ignore"), device.use(executor):
        try:
            result = call()
        except launching.KernelError:
            assert without is not None, f"{kernel.name} is wrong with all of its barriers"
            return None
    assert executor.launched.get(kernel.name), f"the case does not launch {kernel.name}"
    return tuple(array.tobytes() for array in (result if isinstance(result, tuple) else (result,)))
