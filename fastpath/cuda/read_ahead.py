"""What is asked for before its turn: plan(launches, weights) -> what each launch asks for.

A decode step is a row of products, between which small kernels run while memory is idle: norms, rotation,
attention, gated products.  Nobody writes weights, so anybody may ask for them, at any time: each launch asks
for some that later products read, before it waits for the launch ahead of it (early.py), and memory brings
them into the second-level cache.  No number depends on it.

How much     what memory can bring while the launch runs, beyond what the launch itself reads from there; and
             never more than BUDGET for launches that are still to come
Of what      matrices of products and what norms multiply by, in the order of use, each byte once in a step.
             Not of stacks of experts, of which nobody knows yet who is chosen, nor of embeddings
Which part   slabs at equal distances, of a matrix that is asked for in part: so a product reads from cache
             and memory at the same time, and not from one after the other
Pages        keys and values that a launch of attention reads, in their turn: which ones, its inputs say,
             which no launch writes.  Blocks of 32 positions, the first that a token sees first, as far as
             tables reach; how far a sequence reaches, the device looks up (asking.py).  The last block of a
             sequence is still to be written to: that happens in the same cache
The chosen   experts' weights that a launch reads together with the ids of the chosen ones (linear_summed.py):
             the last launch before it that reads a stack asks for them, each block when it has done its own
             work.  That is late, but nobody else wants memory as soon

Rates are those of a H200.  On another card, what is asked for comes sooner or later than thought: on a slower
one it is still on its way when a product wants it, which waits for it as if it had asked by itself.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fastpath.cuda.fuse_flow import Span, call_of, is_array, names_of, span
from fastpath.cuda.layout import DeviceMatrix
from fastpath.cuda.program import Launch
from refimpl.kv_types import STEP, TILE_BYTES

# Bytes that were asked for and not used when a launch ends: what it uses makes room for what it asks for.  A
# H200 reads sets of up to 40 MB at its cache's full rate, larger ones from memory (gpu-benches,
# gpu-l2-cache/h200.txt; by its data sheet it has 50 MB in two halves).  A third of that is left to the rest;
# predictions hardly rise with more.
BUDGET = 26 << 20
SLAB = 32 << 10  # bytes of a matrix: some blocks' worth, and few enough instructions
MEMORY_RATE = 4.4e12  # bytes a second
CACHE_RATE = 7.2e12  # limits.Card.cache
# Of a launch, in which it reads nothing: the gap before it, about.  With more, what is wanted next waits
# behind what is wanted later.
START_S = 0.65e-6
BLOCKS = 128  # ask together: one on nearly each multiprocessor; one alone passes on 64 bytes a cycle at best
LARGEST_VECTOR = 1 << 20  # bytes of what is no matrix
UNIT, LINE = 16, 128  # bytes: what a prefetch counts in, and where it begins


class Piece(NamedTuple):
    """use: number of the launch that reads it"""

    address: int
    n_bytes: int
    use: int


@dataclass(frozen=True)
class Pages:
    """Blocks of 32 positions that a launch of attention reads: begin .. end - 1 of each token, counted from
    the first that it sees.

    keys, values              their addresses, and the bytes of a block of one head
    K, blocks, window         heads, blocks of a page, positions that a token sees
    table                     address, numbers from one row to the next, columns
    ids, positions, ends, T   addresses, and how many numbers stand there
    use                       number of the launch
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    K: int
    blocks: int
    window: int
    table: tuple[int, int, int]
    ids: int
    positions: int
    ends: int
    T: int
    use: int
    begin: int = 0
    end: int = 0

    @property
    def size(self) -> int:
        """Bytes of a block of every token and head."""
        return self.T * self.K * (self.keys[1] + self.values[1])

    @property
    def n(self) -> int:
        """Blocks of a token, at most."""
        return min(self.table[2] * self.blocks, (self.window + STEP - 2) // STEP + 1)

    def rows(self) -> list[tuple[int, int, int]]:
        """asking.PAGE_ROWS rows of the list: address and two numbers."""
        return [
            (*self.keys, self.K), (*self.values, self.blocks), self.table,
            (self.ids, self.T, self.window), (self.positions, self.begin, self.end), (self.ends, 0, 0),
        ]  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Weights of chosen experts.

    ids     address of their numbers, and how many there are
    E       experts in all
    pieces  of the first one, with the bytes from one expert to the next
    """

    ids: tuple[int, int]
    E: int
    pieces: tuple[tuple[Piece, int], ...]
    use: int

    def rows(self) -> list[tuple[int, int, int]]:
        return [(*self.ids, 0), *((piece.address, piece.n_bytes, stride) for piece, stride in self.pieces)]


@dataclass
class Asks:
    """What a launch asks for: pieces and pages before it waits, chosen experts when it has done its work."""

    pieces: list[Piece] = field(default_factory=list)
    pages: list[Pages] = field(default_factory=list)
    chosen: Chosen | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.pieces), len(self.pages), len(self.chosen.pieces) if self.chosen else 0

    @property
    def n(self) -> int:
        """Prefetches at most, so that there are enough threads for them."""
        of_pages = sum(2 * p.T * p.K * (p.end - p.begin) for p in self.pages)
        return len(self.pieces) + of_pages

    def rows(self) -> list[tuple[int, int, int]]:
        rows = [(piece.address, piece.n_bytes, 0) for piece in self.pieces]
        rows += [row for pages in self.pages for row in pages.rows()]
        return rows + (self.chosen.rows() if self.chosen else [])


NOTHING = Asks()


@dataclass(frozen=True)
class Source:
    """A matrix, or a vector, in n slabs.

    planes  (address, bytes)
    use     number of the launch that reads it
    """

    planes: tuple[tuple[int, int], ...]
    use: int

    @property
    def n_bytes(self) -> int:
        return sum(n for _, n in self.planes)

    @property
    def n(self) -> int:
        return -(-self.n_bytes // SLAB)

    @property
    def size(self) -> int:
        """Bytes of a slab."""
        return sum(self.steps)

    @property
    def steps(self) -> list[int]:
        """Bytes of a slab in each plane: of each the same share, in whole lines."""
        return [-(-n_bytes // self.n // LINE) * LINE for _, n_bytes in self.planes]

    def slab(self, i: int) -> Iterable[Piece]:
        """What is no whole unit at the end of a plane is left out."""
        for (address, n_bytes), step in zip(self.planes, self.steps, strict=True):
            length = min(n_bytes, (i + 1) * step) - i * step
            if length >= UNIT:
                yield Piece(address + i * step, length // UNIT * UNIT, self.use)


class Weights:
    """What may be asked for, by address.

    Args:
        matrices: of the device
        vectors: other arrays that nobody writes
    """

    def __init__(self, matrices: Iterable[DeviceMatrix], vectors: Iterable[Any] = ()):
        self._vectors = {span(v).start for v in vectors if 0 < v.nbytes <= LARGEST_VECTOR}
        self._matrices = {span(p).start: made for made in matrices for p in made.planes if p.size > 1}

    def sources(self, launches: Sequence[Launch]) -> list[Source]:
        """In the order of use, each at its first one."""
        found, seen = [], set()
        for use, launch in enumerate(launches):
            if launch.kernel.name.startswith("embed"):
                continue
            for array in filter(is_array, launch.arguments):
                address = span(array).start
                matrix = self._matrices.get(address)
                if matrix is not None:
                    address, planes = id(matrix), [p for p in matrix.planes if p.size > 1]
                    is_wanted = len(matrix.shape) == 2
                else:
                    planes, is_wanted = [array], address in self._vectors
                if is_wanted and address not in seen:
                    found.append(Source(tuple((span(p).start, p.nbytes) for p in planes), use))
                seen.add(address)
        return found

    def chosen(self, launches: Sequence[Launch]) -> list["Stack"]:
        """What launches read of stacks together with the ids of those that are chosen."""
        found: list[Stack] = []
        stacks = [i for i, launch in enumerate(launches) if self._stack_of(launch)]
        for use in stacks:
            names, (matrix, planes) = names_of(launches[use].kernel), self._stack_of(launches[use])
            by = max((i for i in stacks if i < use), default=None)
            if by is None or "ids" not in names or any(stack.by == by for stack in found):
                continue
            ids = launches[use].arguments[names.index("ids")]
            if not is_made_before(ids, by, launches[:use]):
                continue
            E = matrix.shape[0]
            of_one = [(span(p).start, p.nbytes // E) for p in planes]
            of_one = [(at, n) for at, n in of_one if at % UNIT == 0 and n % UNIT == 0]
            if of_one:
                found.append(Stack(tuple(of_one), use, by, (span(ids).start, ids.size), E))
        return found

    def _stack_of(self, launch: Launch) -> tuple[DeviceMatrix, list[Any]] | None:
        """The last one that a launch reads."""
        if launch.kernel.name.startswith("embed"):
            return None
        matrices = [self._matrices.get(span(a).start) for a in launch.arguments if is_array(a) and a.size > 1]
        stacks = [m for m in matrices if m is not None and len(m.shape) == 3]
        return (stacks[-1], [p for p in stacks[-1].planes if p.size > 1]) if stacks else None


def is_made_before(array: Any, by: int, launches: Sequence[Launch]) -> bool:
    """Does nobody write an array from launch `by` on?"""
    s = span(array)
    return not any(
        s.overlaps(written) for launch in launches[by:] for written in call_of(launch).writes.values()
    )


@dataclass(frozen=True)
class Stack(Source):
    """Planes of one expert.  by: number of the launch that asks for those that are chosen"""

    by: int
    ids: tuple[int, int]
    E: int

    def of_chosen(self, k: int) -> Chosen:
        """k slabs of each."""
        pieces = [p for m in range(k) for p in self.slab((2 * m + 1) * self.n // (2 * k))]
        strides = [next(n for at, n in self.planes if at <= p.address < at + n) for p in pieces]
        return Chosen(self.ids, self.E, tuple(zip(pieces, strides, strict=True)), self.use)


def pages_of(launches: Sequence[Launch]) -> list[Pages]:
    """Of launches of attention whose inputs nobody writes in these launches."""
    attending = [i for i, one in enumerate(launches) if one.kernel.name.startswith("attention_part_")]
    if not attending:
        return []
    written = {s for launch in launches for s in call_of(launch).writes.values()}

    @cache
    def is_written(s: Span) -> bool:
        return any(map(s.overlaps, written))

    found = []
    for use in attending:
        of = dict(zip(names_of(launches[use].kernel), launches[use].arguments, strict=True))
        inputs = [of[name] for name in ("table", "seq_ids", "positions", "ends")]
        starts = [span(array).start for array in inputs]
        keys, values = (
            (span(of[f"{x}_pages"]).start, n) for x, n in zip("kv", block_bytes(launches[use]), strict=True)
        )
        table = of["table"]
        if (
            any(is_written(span(array)) for array in inputs)
            or table.strides[1] != table.dtype.itemsize
            or any(n % UNIT for n in (*keys, *values))
        ):
            continue
        found.append(
            Pages(
                keys, values, int(of["K"]), int(of["blocks"]), int(of["window"]),
                (starts[0], table.strides[0] // table.dtype.itemsize, table.shape[1]), *starts[1:],
                len(of["positions"]), use,
            )
        )  # fmt: skip
    return found


def block_bytes(launch: Launch) -> tuple[int, int]:
    """Of 32 positions of one head: keys, values."""
    H, kinds = launch.arguments[0].shape[2], launch.kernel.name.removeprefix("attention_part_")
    columns = -(-H // STEP)
    k_kind = next(kind for kind in ("f32", "f16", "bf16", "q8_0", "q4_0") if kinds.startswith(f"{kind}_"))
    kinds_of = k_kind, kinds.removeprefix(f"{k_kind}_")
    tiles = [TILE_BYTES.get(kind) for kind in kinds_of]
    numbers = [STEP * array.dtype.itemsize for array in launch.arguments[1:3]]
    return (
        columns * tiles[0] if tiles[0] else H * numbers[0],
        columns * (tiles[1] or STEP * numbers[1]),
    )


def plan(launches: Sequence[Launch], weights: Weights) -> list[Asks]:
    """What each launch asks for."""
    sources: list[Source | Pages] = [*weights.sources(launches), *pages_of(launches)]
    sources.sort(key=lambda source: source.use)
    asked = [Asks() for _ in launches]
    stacks = {stack.by: stack for stack in weights.chosen(launches)}
    takes, of_chosen = _shares(len(launches), sources, stacks)
    for source, its in zip(sources, takes, strict=True):
        n, taken = sum(n for _, n in its), 0
        for launch, k in its:
            if isinstance(source, Pages):
                asked[launch].pages.append(replace(source, begin=taken, end=taken + k))
            else:
                for m in range(taken, taken + k):
                    asked[launch].pieces += source.slab((2 * m + 1) * source.n // (2 * n))
            taken += k
    for by, k in of_chosen.items():
        asked[by].chosen = stacks[by].of_chosen(k)
    return asked


@dataclass
class _Bytes:
    """Of launches: those that each reads, and those of them that were asked for before it and are there.

    late  [use, bytes] that were asked for by launches that had done their work, and are on their way
    """

    read: list[int]
    early: list[int]
    late: deque[list[int]] = field(default_factory=deque)

    def spend(self, i: int, idle: float) -> float:
        """What is left of what memory can bring meanwhile."""
        for one in self.late:
            brought = min(one[1], max(0, int(idle)))
            one[1] -= brought
            self.early[one[0]] += brought
            idle -= brought
        return idle


def _shares(
    n: int, sources: Sequence[Source | Pages], stacks: dict[int, Stack]
) -> tuple[list[list[tuple[int, int]]], dict[int, int]]:
    """Of each source: (launch, how many slabs of it it asks for); of launches: how many of chosen experts."""
    takes: list[list[tuple[int, int]]] = [[] for _ in sources]
    left, of_chosen = [source.n for source in sources], {}
    b = _Bytes([0] * n, [0] * n)
    for source in sources:
        b.read[source.use] += source.n * source.size if isinstance(source, Pages) else source.n_bytes
    coming, ahead = deque(range(len(sources))), 0
    for i in range(n):
        while coming and sources[coming[0]].use <= i:
            coming.popleft()
        while b.late and b.late[0][0] <= i:
            ahead -= b.late.popleft()[1]
        ahead -= b.early[i]
        room = b.spend(i, idle_bytes(b.read[i], b.early[i]))
        if stack := stacks.get(i):
            size = stack.size * stack.ids[1]
            if k := min(stack.n, max(0, BUDGET - ahead) // size):
                of_chosen[i], ahead = k, ahead + k * size
                b.read[stack.use] += stack.n_bytes * stack.ids[1]
                b.late.append([stack.use, k * size])
        room = min(BUDGET - ahead, room)
        while coming:
            s = coming[0]
            size = sources[s].size
            k = min(left[s], int(room) // size)
            if k <= 0:
                break
            n_bytes = k * size
            takes[s].append((i, k))
            left[s], room, ahead = left[s] - k, room - n_bytes, ahead + n_bytes
            b.early[sources[s].use] += n_bytes
            if not left[s]:
                coming.popleft()
    return takes, of_chosen


def idle_bytes(n_bytes: int, early: int) -> float:
    """What memory can bring while a launch runs which reads so many bytes, some of them from the cache."""
    reads = max((n_bytes - early) / MEMORY_RATE, n_bytes / CACHE_RATE)
    return MEMORY_RATE * (START_S + reads) - (n_bytes - early)


def table(asked: Sequence[Asks]) -> np.ndarray:
    """i32[4 n]: what launches ask for, one after the other, as asking.py reads it."""
    rows = [row for each in asked for row in each.rows()] or [(0, 0, 0)]
    made = np.zeros((len(rows), 4), np.int32)
    made.view(np.uint64)[:, 0] = [address for address, _, _ in rows]
    made[:, 2:] = [numbers for _, *numbers in rows]
    return made.reshape(-1)


def calls(launches: Sequence[Launch], asked: Sequence[Asks], listed: Any) -> Iterator[tuple]:
    """(launch, its grid, its arguments) of kernels that start early; listed: `table` on the device."""
    first = 0
    for launch, mine in zip(launches, asked, strict=True):
        more = more_of(listed, first, mine, launch.grid)
        yield launch, grid_of(launch.grid, mine.n), (*launch.arguments, *more)
        first += len(mine.rows())


def more_of(listed: Any, first: int, asks: Asks, grid: Any) -> tuple:
    """The arguments of a kernel that starts early, behind its own (early.MORE)."""
    return listed, first, *asks.counts, n_blocks(grid)


def grid_of(grid: Any, n_pieces: int) -> tuple[int, int, int]:
    """A grid with blocks behind its own (in z) where these are too few to ask for so many pieces."""
    x, y, z = (*((int(grid),) if np.isscalar(grid) else map(int, grid)), 1, 1)[:3]
    missing = min(BLOCKS, n_pieces) - x * y * z
    return x, y, z + max(0, -(-missing // (x * y)))


def n_blocks(grid: Any) -> int:
    return int(grid) if np.isscalar(grid) else math.prod(map(int, grid))
