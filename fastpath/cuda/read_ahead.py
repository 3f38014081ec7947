"""Weights that are asked for before their turn: plan(launches, weights) -> what each launch asks for.

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

Rates are those of a H200.  On another card, what is asked for comes sooner or later than thought: on a slower
one it is still on its way when a product wants it, which waits for it as if it had asked by itself.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastpath.cuda.fuse_flow import is_array, span
from fastpath.cuda.layout import DeviceMatrix
from fastpath.cuda.program import Launch

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


def plan(launches: Sequence[Launch], weights: Weights) -> list[list[Piece]]:
    """What each launch asks for."""
    sources = weights.sources(launches)
    asked: list[list[Piece]] = [[] for _ in launches]
    for source, takes in zip(sources, _shares(launches, sources), strict=True):
        n, taken = sum(n for _, n in takes), 0
        for launch, k in takes:
            for m in range(taken, taken + k):
                asked[launch] += source.slab((2 * m + 1) * source.n // (2 * n))
            taken += k
    return asked


def _shares(launches: Sequence[Launch], sources: Sequence[Source]) -> list[list[tuple[int, int]]]:
    """Of each source: (launch, how many slabs of it it asks for)."""
    takes: list[list[tuple[int, int]]] = [[] for _ in sources]
    left = [source.n for source in sources]
    read, early = [0] * len(launches), [0] * len(launches)  # bytes of a launch, and those asked for before it
    for source in sources:
        read[source.use] += source.n_bytes
    coming, ahead = deque(range(len(sources))), 0
    for i in range(len(launches)):
        while coming and sources[coming[0]].use <= i:
            coming.popleft()
        ahead -= early[i]
        room = min(BUDGET - ahead, idle_bytes(read[i], early[i]))
        while coming:
            s = coming[0]
            size = sum(sources[s].steps)
            k = min(left[s], int(room) // size)
            if not k:
                break
            n_bytes = k * size
            takes[s].append((i, k))
            left[s], room, ahead = left[s] - k, room - n_bytes, ahead + n_bytes
            early[sources[s].use] += n_bytes
            if not left[s]:
                coming.popleft()
    return takes


def idle_bytes(n_bytes: int, early: int) -> float:
    """What memory can bring while a launch runs which reads so many bytes, some of them from the cache."""
    reads = max((n_bytes - early) / MEMORY_RATE, n_bytes / CACHE_RATE)
    return MEMORY_RATE * (START_S + reads) - (n_bytes - early)


def table(asked: Sequence[Sequence[Piece]]) -> np.ndarray:
    """i32[4 n]: of all pieces, one after the other, lower and upper half of the address, bytes, 0."""
    pieces = [(piece.address, piece.n_bytes) for each in asked for piece in each] or [(0, 0)]
    return np.array(pieces, np.uint64).view(np.int32).copy().reshape(-1)


def calls(launches: Sequence[Launch], asked: Sequence[Sequence[Piece]], pieces: Any) -> Iterator[tuple]:
    """(launch, its grid, its arguments) of kernels that start early; pieces: `table` on the device."""
    first = 0
    for launch, mine in zip(launches, asked, strict=True):
        n = len(mine)
        more = pieces, first, n, n_blocks(launch.grid)
        yield launch, grid_of(launch.grid, n), (*launch.arguments, *more)
        first += n


def grid_of(grid: Any, n_pieces: int) -> tuple[int, int, int]:
    """A grid with blocks behind its own (in z) where these are too few to ask for so many pieces."""
    x, y, z = (*((int(grid),) if np.isscalar(grid) else map(int, grid)), 1, 1)[:3]
    missing = min(BLOCKS, n_pieces) - x * y * z
    return x, y, z + max(0, -(-missing // (x * y)))


def n_blocks(grid: Any) -> int:
    return int(grid) if np.isscalar(grid) else math.prod(map(int, grid))
