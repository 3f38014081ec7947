"""Kernels that start before the one ahead of them has ended (programmatic dependent launch, from sm_90 on).

In a graph a kernel begins about a microsecond after the last block of the one before has ended.  Launched
early, its blocks come to stand on multiprocessors as soon as there is room, and wait there.  So that this
changes no byte, a kernel gets three lines in front of it, in this order, and one behind it:

    ask       for weights of later kernels, and for the keys and values that one of them attends to: they
              come to the second-level cache meanwhile (read_ahead.py)
    wait      until the kernel before has ended and all that it wrote can be seen; as that one waited too, the
              same holds for all before it
    let next  from here on the next kernel may come: two are under way at any time, not three
    ask       for weights of the experts that were chosen: earlier kernels have said who is

A kernel that has something to do before it waits brings a function of its own with the last two lines in it
(Kernel.early): products load their first weights.  Blocks beyond the grid that a kernel knows only ask.

The driver launches a kernel early only if its PTX waits before it touches memory (`waits_first`), but for
what nobody writes while a program runs, by the read-only path: weights; the list of what to ask for; and the
program's inputs, tables and positions, which are copied before its graph starts.  Loads of what others wrote
are plain ones: the read-only path promises nothing about them (intrinsics.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from numba import cuda, int32

from fastpath.cuda.asking import ask, ask_for_chosen, block_number
from fastpath.cuda.fuse_flow import names_of
from fastpath.cuda.intrinsics import let_next_start, wait_for_previous
from fastpath.cuda.kernel import Kernel

FROM = (9, 0)  # compute capability
# what a kernel is given behind its own arguments: the list of what is asked for (asking.py), the first row of
# its own part and how much of each kind stands there, and its own blocks
MORE = (int32[::1], int32, int32, int32, int32, int32)


@cache
def function_of(kernel: Kernel) -> Callable:
    """The kernel as it starts early: a function of its arguments and of MORE."""
    names = ", ".join(names_of(kernel))
    first = [] if kernel.early else ["wait()", "let_next()"]
    lines = [
        "ask(_list, _first, _pieces, _pages)",
        *first,
        "if block_number() < _blocks:",
        f"    kernel({names})",
        *(["wait()"] if kernel.early else []),  # blocks that only ask, and warps that had nothing to do
        "ask_for_chosen(_list, _first, _pieces, _pages, _chosen)",
    ]
    space: dict[str, Any] = {
        "ask": ask, "ask_for_chosen": ask_for_chosen, "block_number": block_number,
        "wait": wait_for_previous, "let_next": let_next_start,
        "kernel": cuda.jit(device=True)(kernel.early or kernel.function),
    }  # fmt: skip
    more = "_list, _first, _pieces, _pages, _chosen, _blocks"
    exec("\n    ".join([f"def early({names}, {more}):", *lines]), space)
    return space["early"]


@cache
def kernel_of(kernel: Kernel) -> Kernel:
    """What the driver compiles, as a kernel of its own."""
    return replace(kernel, function=function_of(kernel), signature=(*kernel.signature, *MORE), early=None)


WAIT = "griddepcontrol.wait"
TOUCHES = re.compile(
    r"(?:ld|st|ldu|atom|red|cp|ldmatrix|stmatrix|mbarrier|tex|suld|sust|sured)\.|(?:call|brx)\b"
)
HARMLESS = ("ld.param", "ld.global.nc.", "cp.async.bulk.prefetch.")


def waits_first(ptx: str) -> bool:
    """Does a kernel wait for the one before it, whatever way it goes, before it reads or writes anything?

    Before the wait there may be arithmetic, parameters, read-only loads, prefetches, and jumps.  Read-only
    loads are of what is written before the graph starts, and by none of its kernels: weights, lists, inputs
    (read_ahead.py asks for pages only where that is so).  Ways are what guards allow: one that is asked
    twice, and not made anew between, says the same twice.
    """
    labels: dict[str, int] = {}
    code = instructions(ptx, labels)
    seen: set[tuple[int, frozenset[str]]] = set()
    ways: list[tuple[int, frozenset[str]]] = [
        (0, frozenset())
    ]  # (where nobody has waited yet, guards that hold)
    while ways:
        way = ways.pop()
        if way in seen:
            continue
        seen.add(way)
        i, known = way
        if i >= len(code):
            return False
        guard, text = code[i]
        guard = guard.strip().removeprefix("@")
        is_jump, opcode = text.startswith("bra"), text.split()[0]
        if _not(guard) in known:
            ways.append((i + 1, known))
        elif opcode == WAIT:
            if guard and guard not in known:
                ways.append((i + 1, known | {_not(guard)}))
        elif opcode in ("ret", "exit", "griddepcontrol.launch_dependents") or (
            TOUCHES.match(text) and not text.startswith(HARMLESS)
        ):
            return False
        elif is_jump:
            ways.append((labels[text.split()[1]], known | {guard} if guard else known))
            if guard and guard not in known:
                ways.append((i + 1, known | {_not(guard)}))
        else:
            made = set(re.findall(r"%\w+", text.partition(",")[0]))
            ways.append((i + 1, frozenset(one for one in known if one.removeprefix("!") not in made)))
    return any(text.startswith(WAIT) for _, text in code)


def _not(guard: str) -> str:
    return guard.removeprefix("!") if guard.startswith("!") else f"!{guard}"


def instructions(ptx: str, labels: dict[str, int] | None = None) -> list[tuple[str, str]]:
    """(guard or "", instruction) of the first kernel of a text.

    labels  gets the number of the instruction behind each
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx[ptx.index(".entry") :], flags=re.S)
    text = re.sub(r"^\s*\.[^\n]*|[{}]\s*$", "", text[text.index("{") + 1 :], flags=re.M)
    text = re.sub(r"^\s*([$\w]+):", r"\1:;", text, flags=re.M)
    code = []
    for statement in map(str.strip, text.split(";")):
        if statement.endswith(":"):
            (labels if labels is not None else {})[statement[:-1]] = len(code)
        elif statement:
            guard, instruction = re.fullmatch(r"(@\S+\s+)?(.*)", statement, re.S).groups()  # type: ignore[union-attr]
            code.append((guard or "", instruction))
    return code
