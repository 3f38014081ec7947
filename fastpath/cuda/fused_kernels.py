"""Fused kernels: their source is put together from steps (fused_steps.py), once for each kind.

A kernel's grid is that of its parts, one after the other; a block belongs to one of them:

    Rows     the steps of a row, or of a piece of 256 columns, one after another.  What one step hands to the
             next stays in shared memory, if nobody else reads it
    Tiles    products with several matrices of one format, each block some tiles of one of them.  Steps of a
             few short rows may come first, for which another launch would take longer: each block does all
             of them, and all write the same bytes
    Block    some steps of one block

A barrier stands between two steps where a thread reads what another one has written.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

from numba import cuda, float32, int32, uint32

from fastpath.cuda import norm
from fastpath.cuda.fuse_flow import names_of
from fastpath.cuda.fused_steps import STEPS
from fastpath.cuda.intrinsics import let_next_start, wait_for_previous
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import MAX_WARPS

ROW = float32[::1]
REGISTERS = 128  # ceiling: such kernels are small, and each waits for the one before it


@dataclass(frozen=True)
class Wired:
    """A step's kernel, and for each of its arguments a number of an argument of the fused kernel.

    shared  argument names that are rows in shared memory, with their numbers there
    """

    kernel: Kernel
    arguments: tuple[int, ...]
    shared: tuple[tuple[str, int], ...] = ()

    @property
    def step(self):
        return STEPS[self.kernel.name]

    @property
    def named(self) -> dict[str, int]:
        return dict(zip(names_of(self.kernel), self.arguments, strict=True))


@dataclass(frozen=True)
class Rows:
    """
    numbers   those of the arguments that are: end of the part's blocks, pieces of a row, columns of a piece,
              columns of a row, threads
    more      of the numbers that steps want
    is_whole  a row is one piece
    held      for each step: how many columns of a row a thread multiplies by weights that it may bring before
              the launch ahead has ended (norm.py); 0: none
    """

    steps: tuple[Wired, ...]
    numbers: tuple[int, ...]
    more: tuple[tuple[int, ...], ...]
    capacity: int  # floats of a shared row
    is_whole: bool
    held: tuple[int, ...]


@dataclass(frozen=True)
class Tiles:
    """Members have one kernel.

    ends, tiles  the argument numbers of each one's end, and of its grid's x
    is_flat      the y of their grids is 1
    has_share    there are experts (grouping.py)
    before       what each block does first, all rows and pieces of it; they end where its blocks would
    """

    members: tuple[Wired, ...]
    ends: tuple[int, ...]
    tiles: tuple[int, ...]
    is_flat: bool
    has_share: bool
    before: Rows | None = None


@dataclass(frozen=True)
class Block:
    steps: tuple[Wired, ...]
    end: int


Part = Rows | Tiles | Block


@cache
def kernel_of(parts: tuple[Part, ...], types: tuple) -> Kernel:
    """types: Numba's, of the arguments."""
    text, steps = source(parts, len(types))
    digest = hashlib.sha256(f"{text}{types}".encode()).hexdigest()[:6]
    name = f"fused_{'_and_'.join(_title(part) for part in parts)}_{digest}"
    kernels = [wired.kernel for part in parts for wired in wired_of(part)]
    return Kernel(
        _function(text, steps),
        types,
        tuple(sorted({want for kernel in kernels for want in kernel.wants})),
        registers=max(REGISTERS, *(kernel.registers for kernel in kernels)),
        bounds=_bounds(parts),
        name=name,
        writes=tuple(f"a{i}" for i in sorted({i for part in parts for i in _written(part)})),
        early=_early(parts, len(types)),
    )


def _early(parts: tuple[Part, ...], n_arguments: int) -> Any:
    """The kernel with waits inside, where a part has something to do before; None: none of them has."""
    if not any(_waits_by_itself(part) or _holds(part) for part in parts):
        return None
    return _function(*source(parts, n_arguments, is_early=True))


def _waits_by_itself(part: Part) -> bool:
    return isinstance(part, Tiles) and part.before is None


def _holds(part: Part) -> bool:
    return isinstance(part, Rows) and any(part.held)


def _function(text: str, steps: dict) -> Any:
    space = {
        "cuda": cuda, "float32": float32, "int32": int32, "uint32": uint32,
        "wait": wait_for_previous, "let_next": let_next_start, **steps,
    }  # fmt: skip
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    exec(compile(text, f"<fused_{digest}>", "exec"), space)
    return space["fused"]


def _bounds(parts: tuple[Part, ...]) -> tuple[int, int] | None:
    """What the product asks for that fits least often."""
    found = [part.members[0].kernel.bounds for part in parts if isinstance(part, Tiles)]
    return min((bounds for bounds in found if bounds), default=None)


def wired_of(part: Part) -> tuple[Wired, ...]:
    if not isinstance(part, Tiles):
        return part.steps
    return (part.before.steps if part.before else ()) + part.members


def _title(part: Part) -> str:
    if not isinstance(part, Tiles):
        return "_".join(wired.kernel.name for wired in part.steps)
    before = f"{_title(part.before)}_before_" if part.before else ""
    return f"{before}{len(part.members)}_{part.members[0].kernel.name}"


def _written(part: Part) -> set[int]:
    return {
        number
        for wired in wired_of(part)
        for name, number in wired.named.items()
        if name in wired.kernel.writes and name not in dict(wired.shared)
    }


def source(parts: tuple[Part, ...], n_arguments: int, is_early: bool = False) -> tuple[str, dict]:
    """Python text of a kernel `fused`, and the functions that it calls by name.

    is_early: parts wait for the launch before them, products in their own time
    """
    steps: dict[str, Any] = {}

    def body(part, begin):
        waits, rows = is_early and _waits_by_itself(part), _rows_of(part)
        if isinstance(part, Tiles):
            lines = _before(rows, steps) if rows else []
            lines += _tiles(part, begin, steps, "early" if waits else "function")
        elif isinstance(part, Block):
            lines = _block(part, steps)
        else:
            lines = _rows(part, f"(b - {begin})", steps, is_early)
        if waits or not is_early:
            return lines
        return [*(_hold(part, steps) if _holds(part) else []), "wait()", "let_next()", *lines]

    lines = _branches(parts, body)
    arrays = [f"s{i} = cuda.shared.array({size}, float32)" for i, size in enumerate(_capacities(parts))]
    partial = f"cuda.shared.array({MAX_WARPS}, float32)" if _has_norm(parts) else "float32(0)"
    head = [
        f"def fused({', '.join(f'a{i}' for i in range(n_arguments))}):",
        *(f"    {line}" for line in arrays),
        f"    partial = {partial}",
        "    b = cuda.blockIdx.x",
    ]
    return "\n".join([*head, *lines]) + "\n", steps


def _branches(parts: tuple[Part, ...], body: Any) -> list[str]:
    """Block b does its part.  body(part, where its blocks begin) -> lines"""
    lines: list[str] = []
    for k, part in enumerate(parts):
        begin = "int32(0)" if k == 0 else f"a{_end(parts[k - 1])}"
        if k < len(parts) - 1:
            lines.append(f"    {'if' if k == 0 else 'elif'} b < a{_end(part)}:")
        elif k:
            lines.append("    else:")
        else:
            lines.append("    if True:")
        lines += ["        " + line for line in body(part, begin)]
    return lines


def _end(part: Part) -> int:
    if isinstance(part, Rows):
        return part.numbers[0]
    return part.ends[-1] if isinstance(part, Tiles) else part.end


def _has_norm(parts) -> bool:
    return any(wired.kernel.name == "rms_norm" for part in parts for wired in wired_of(part))


def _capacities(parts) -> list[int]:
    """Floats of each shared row: a block does one part, so that all parts have the same ones."""
    wanted = [[rows.capacity] * _n_shared(rows) for rows in map(_rows_of, parts) if rows]
    return [max(sizes) for sizes in zip_longest(*wanted, fillvalue=0)]


def _rows_of(part: Part) -> Rows | None:
    return part.before if isinstance(part, Tiles) else part if isinstance(part, Rows) else None


def _n_shared(part: Rows) -> int:
    return len({number for wired in part.steps for _, number in wired.shared})


def _hold(part: Rows, steps: dict) -> list[str]:
    lines = []
    for k, (wired, n) in enumerate(zip(part.steps, part.held, strict=True)):
        if n:
            steps[f"hold_{n}"], steps[f"norm_with_{n}"] = norm.holding(n)
            columns, threads = (f"a{i}" for i in part.numbers[3:])
            lines.append(f"h{k} = hold_{n}(a{wired.named['weight']}, {columns}, {threads})")
    return lines


def _rows(part: Rows, i: str, steps: dict, is_early: bool = False) -> list[str]:
    """Row, or piece of a row, number i."""
    pieces, width = (f"a{k}" for k in part.numbers[1:3])
    if part.is_whole:
        lines = [f"t = int32({i})", "lo = int32(0)"]
    else:
        lines = [f"t = int32(uint32({i}) // uint32({pieces}))", f"lo = int32({i} - t * {pieces}) * {width}"]
    return lines + _steps_of_row(part, steps, part.held if is_early else (0,) * len(part.steps))


def _before(part: Rows, steps: dict) -> list[str]:
    """All rows in one block."""
    body = [*_rows(part, "i", steps), "cuda.syncthreads()"]
    return [f"for i in range(a{part.numbers[0]}):", *("    " + line for line in body)]


def _steps_of_row(part: Rows, steps: dict, held: tuple[int, ...]) -> list[str]:
    """Row t from column lo on."""
    width, columns, threads = (f"a{i}" for i in part.numbers[2:])
    lines = []
    unit = f"t, lo, lo + {width}, {columns}, {threads}, partial"
    pending: dict = {}  # row -> was it written by a step that writes others' columns, since the last barrier
    for k, (wired, more) in enumerate(zip(part.steps, part.more, strict=True)):
        step, is_shared = wired.step, dict(wired.shared)
        where = {
            name: ("s", is_shared[name]) if name in is_shared else ("a", i) for name, i in wired.named.items()
        }
        if any(
            w in pending and (pending[w] or step.elsewhere)
            for n, w in where.items()
            if n not in wired.kernel.writes
        ):
            lines.append("cuda.syncthreads()")
            pending.clear()
        words = {}
        for name, i in wired.named.items():
            if name not in step.rows:
                words[name] = f"a{i}"
            elif name in is_shared:
                words[name] = f"s{is_shared[name]}, -lo"
            else:
                words[name] = f"a{i}, t * {columns}"
            if name in wired.kernel.writes:
                pending[where[name]] = step.elsewhere
        if held[k]:
            given = f"{words['x']}, h{k}, {words['eps']}, {words['out']}"
            lines.append(f"norm_with_{held[k]}({given}, {columns}, {threads}, partial)")
        else:
            given = ", ".join([*(f"a{i}" for i in more), *words.values()])
            lines.append(f"{_named(steps, wired)}({unit}, {given})")
    return lines


def _tiles(part: Tiles, begin: str, steps: dict, which: str) -> list[str]:
    """What the members have in common is taken as it is; the rest is chosen once, by branches."""
    ends = [f"a{i}" for i in part.ends]
    columns = list(zip(*(wired.arguments for wired in part.members), strict=True))
    chosen = {"start": [begin, *ends[:-1]], "n": [f"a{i}" for i in part.tiles]}
    words = []
    for k, (name, numbers) in enumerate(zip(names_of(part.members[0].kernel), columns, strict=True)):
        if name == "share" and not part.has_share:
            words.append("int32(0)")  # a number that the compiler knows
        elif len(set(numbers)) > 1:
            chosen[f"m{k}"] = [f"a{i}" for i in numbers]
            words.append(f"m{k}")
        else:
            words.append(f"a{numbers[0]}")
    lines = []
    for j in range(len(part.members)):
        if len(part.members) > 1:
            lines.append(f"{'if' if j == 0 else 'elif'} b < {ends[j]}:" if j < len(ends) - 1 else "else:")
        lines += [f"{'    ' * (len(part.members) > 1)}{name} = {of[j]}" for name, of in chosen.items()]
    lines.append("i = int32(b - start)")
    place = "i, 0"
    if not part.is_flat:
        lines.append("y = int32(uint32(i) // uint32(n))")
        place = "int32(i - y * n), y"
    lines.append(f"{_named(steps, part.members[0], which)}({place}, n, {', '.join(words)})")
    return lines


def _block(part: Block, steps: dict):
    lines: list[str] = []
    for wired in part.steps:
        lines += ["cuda.syncthreads()"] if lines else []
        lines.append(f"{_named(steps, wired)}({', '.join(f'a{i}' for i in wired.arguments)})")
    return lines


def _named(steps: dict, wired: Wired, which: str = "function") -> str:
    name = f"step_{wired.kernel.name}"
    steps[name] = getattr(wired.step, which)
    return name
