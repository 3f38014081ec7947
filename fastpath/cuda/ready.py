"""When a block may read what the kernel before it has written: `ready()`, which product tiles are made with.

A tile calls it once, behind the first loads of its weights, which nobody writes (early.py).
"""

from numba import cuda

from fastpath.cuda.intrinsics import let_next_start, wait_for_previous


@cuda.jit(device=True)
def at_once():
    """The kernel before has ended."""


@cuda.jit(device=True)
def when_previous_ended():
    """It may still run; from here on the next kernel may come, too."""
    wait_for_previous()
    let_next_start()
