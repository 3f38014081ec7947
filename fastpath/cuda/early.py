"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, from sm_90 on).

In a graph a kernel begins about a microsecond after the last block of the one before has ended.  Launched
early, its blocks come to stand on multiprocessors as soon as there is room, and wait there.  So that this
changes no byte, a kernel gets three lines in front of it, in this order:

    ahead     products only: their first weights come to the second-level cache (ahead.py)
    wait      until the kernel before has ended and all that it wrote can be seen; as that one waited too, the
              same holds for all before it
    let next  from here on the next kernel may come: two are under way at any time, not three

The driver launches a kernel early only if its PTX waits before it touches memory (`waits_first`).  Loads of
what others wrote are plain ones: the read-only path promises nothing about them (intrinsics.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from numba import cuda

from fastpath.cuda.fuse_flow import names_of
from fastpath.cuda.fused_steps import STEPS
from fastpath.cuda.intrinsics import let_next_start, wait_for_previous
from fastpath.cuda.kernel import Kernel

FROM = (9, 0)  # compute capability


@cache
def function_of(kernel: Kernel) -> Callable:
    """The kernel with the three lines in front: a function with its signature."""
    names = ", ".join(names_of(kernel))
    first, ahead = "pass", kernel.ahead
    if ahead:
        first = f"ahead({names})"
    elif ahead := getattr(STEPS.get(kernel.name), "ahead", None):
        first = f"if cuda.blockIdx.y == 0: ahead(cuda.blockIdx.x, {names})"
    space: dict[str, Any] = {
        "cuda": cuda, "ahead": ahead, "wait": wait_for_previous, "let_next": let_next_start,
        "kernel": cuda.jit(device=True)(kernel.function),
    }  # fmt: skip
    exec("\n    ".join([f"def early({names}):", first, "wait()", "let_next()", f"kernel({names})"]), space)
    return space["early"]


def kernel_of(kernel: Kernel) -> Kernel:
    """What the driver compiles, as a kernel of its own: for those who check it."""
    return replace(kernel, function=function_of(kernel))


WAIT = "griddepcontrol.wait;"
# before the wait: memory but for parameters and prefetches, other ways out, the next one's start
NOT_BEFORE = re.compile(
    r"\b(?:ld|st|atom|red|cp|ldmatrix)\.(?!param\b|async\.bulk\.prefetch\.)|\b(?:ret|exit|call)\b"
    r"|launch_dependents"
)


def waits_first(ptx: str) -> bool:
    """Does a kernel wait for the one before it, whatever way it goes, before it reads or writes anything?

    Before the wait there may be arithmetic, loads of parameters, prefetches, and jumps that end before it.
    """
    before, wait, _ = ptx[ptx.index(".entry") :].partition(WAIT)
    jumps = set(re.findall(r"\bbra(?:\.uni)?\s+(\S+);", before))
    labels = set(re.findall(r"^\s*(\S+):", before, re.M))
    return bool(wait) and not NOT_BEFORE.search(before) and jumps <= labels
