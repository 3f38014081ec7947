"""Fewer launches for the same bytes: fuse(launches) -> launches.

A dependent launch costs a GPU about a microsecond, whatever it computes, and a decode step is a thousand
small ones.  Eight passes, each driven by who reads and who writes what (fuse_flow.py):

    without_repeats   what the same kernel has computed from the same inputs is computed once: activations
                      rounded for q, k and v; experts grouped for gate, up and down
    with_sums         products of a token's experts and their weighted sum are one launch (linear_summed.py)
    with_gates        two products of one row, their gate and its rounding are one launch (linear_gated.py)
    in_rows           a launch that works on rows, and reads rows of another such one, becomes a step of it:
                      norm + sum + norm + rounding; gated product + rounding; norm + rotation + storing
    apart             steps of a row that go several ways stand side by side, each with what comes before all
    before_tiles      steps of a few short rows go into the one product that reads them
    in_waves          launches that wait for nobody else stand side by side in one grid: q, k and v; gate and
                      up; the rows of heads
    emit              a fused kernel (fused_kernels.py) for each group; what found no company stays as it was

Every array that somebody outside of a group reads has the bytes that it had; others are not written.  Arrays
that no launch reads are results, and so is what `results` names.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import int32

from fastpath.cuda import activation, kv_types, linear, linear_gated, linear_summed, moe, norm, quantize
from fastpath.cuda.fuse_flow import (
    Call,
    Regions,
    Span,
    blocks_of,
    call_of,
    is_array,
    names_of,
    renamed,
    same,
    span,
)
from fastpath.cuda.fused_kernels import ROW, Block, Rows, Tiles, Wired, kernel_of
from fastpath.cuda.fused_steps import MOST_TOKENS, STEPS, BlockStep, RowStep, TileStep, write_half
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import ROWS, padded_columns
from fastpath.cuda.program import Launch

WINDOW = 40  # launches that are looked back over
PIECE = 256  # columns of a piece of a row
WIDE = 256  # threads of a block that has no row to itself
CAPACITIES = (256, 512, 1536, 3072, 4608, 6144, 8192)  # floats of a row in shared memory
SHARED = 40 << 10  # bytes that the rows of a kernel may take there
MOST_BEFORE = 512  # columns of rows, 2 at most, that each block of a product makes itself
FORMATS = {kernel.name: name for name, kernel in linear.PRODUCTS.items()}
WRITES = {f"write_kv_{k}_{v}": (k, v) for k in kv_types.STORES for v in kv_types.STORES}
REPEATABLE = {"rms_norm", "round_32", "round_256", "spread", "group_by_expert"}


def fuse(launches: Sequence[Launch], results: Sequence[Any] = ()) -> list[Launch]:
    known = [span(array) for array in results]
    calls = without_repeats([call_of(launch) for launch in launches], set(known))
    calls = with_sums(calls, Flow(calls, known))
    calls = with_gates(calls, Flow(calls, known))
    calls = [half for call in calls for half in _halves(call)]
    flow = Flow(calls, known)
    nodes = before_tiles(apart(in_rows(calls, flow), flow), flow)
    return [emit(group, flow) for wave in in_waves(nodes, flow) for group in wave]


# -- once is enough


def without_repeats(calls: Sequence[Call], results: set[Span]) -> list[Call]:
    regions = Regions(calls)
    written, read = (
        defaultdict(list),
        defaultdict(set),
    )  # region -> numbers of its writers; spans that are read
    for number, call in enumerate(calls):
        for name, s in call.spans.items():
            for region in regions.of([s]):
                if name in call.writes:
                    written[region].append(number)
                else:
                    read[region].add(s)
    seen: dict[str, list[tuple[int, Call]]] = defaultdict(list)
    arrays: dict[Span, Any] = {}
    kept = []
    for number, original in enumerate(calls):
        call = renamed(original, arrays)
        for before, first in seen[call.kernel.name]:
            outputs = regions.of([*call.writes.values(), *first.writes.values()])
            inputs = regions.of(first.reads.values())
            if (
                _repeats(call, first)
                and not results & set(call.writes.values())
                and all(len(written[region]) == 1 for region in outputs)
                and all(
                    read[region] <= set(call.writes.values()) for region in regions.of(call.writes.values())
                )
                and not any(before < i < number for region in inputs for i in written[region])
            ):
                arrays |= {mine: first.argument(name) for name, mine in call.writes.items()}
                break
        else:
            kept.append(call)
            if call.kernel.name in REPEATABLE:
                seen[call.kernel.name] = [*seen[call.kernel.name][-3:], (number, call)]
    return kept


def _repeats(call: Call, first: Call) -> bool:
    if (call.kernel, call.launch.grid, call.launch.threads) != (
        first.kernel,
        first.launch.grid,
        first.launch.threads,
    ):
        return False
    pairs = zip(names_of(call.kernel), call.launch.arguments, first.launch.arguments, strict=True)
    return all(name in call.writes or name in _ignored(call) or same(a, b) for name, a, b in pairs)


def _ignored(call: Call) -> set[str]:
    """Arrays that the kernel does not look at."""
    return {
        name for name in names_of(call.kernel) if is_array(call.argument(name)) and name not in call.spans
    }


def _halves(call: Call) -> list[Call]:
    """write_kv as its keys and its values, each of which goes with the step that makes them."""
    kinds = WRITES.get(call.kernel.name)
    if kinds is None or call.argument("k").shape[0] > MOST_TOKENS:
        return [call]
    rest = [call.argument(n) for n in ("blocks", "table", "seq_ids", "positions")]
    return [
        call_of(
            Launch(
                write_half(kind, x), call.launch.grid, call.launch.threads,
                (call.argument(x), call.argument(f"{x}_pages"), *rest), call.launch.mark,
            )
        )
        for x, kind in zip("kv", kinds, strict=True)
    ]  # fmt: skip


# -- products, and what comes of them


def with_sums(calls: Sequence[Call], flow: "Flow") -> list[Call]:
    return _replaced(calls, flow, moe.EXPERT_SUM, _summed)


def with_gates(calls: Sequence[Call], flow: "Flow") -> list[Call]:
    """Not where there are experts: gates of those that all tokens use stand beside the choice, and cost no
    launch there."""
    if any(call.kernel is moe.ROUTE for call in calls):
        return list(calls)
    return _replaced(calls, flow, quantize.ROUND_32, _gated)


def _replaced(calls: Sequence[Call], flow: "Flow", last: Kernel, made_of: Callable) -> list[Call]:
    """made_of(calls, number of one with the kernel `last`, flow) -> (numbers of others, the call that stands
    in the place of all), or None."""
    found: dict[int, Call | None] = {}
    for number, call in enumerate(calls):
        if call.kernel is last and (made := made_of(calls, number, flow)):
            parts, whole = made
            inputs = flow.regions.of(whole.reads.values())
            between = [c for i, c in enumerate(calls[:number]) if i > min(parts) and i not in parts]
            if not inputs & flow.regions.of(s for c in between for s in c.writes.values()):
                found |= dict.fromkeys(parts, None) | {number: whole}
    kept = (found.get(number, call) for number, call in enumerate(calls))
    return [call for call in kept if call is not None]


def _maker(calls: Sequence[Call], number: int, s: Span) -> int | None:
    """The last of the calls before that writes a span."""
    before = range(number - 1, max(-1, number - 1 - WINDOW), -1)
    return next((i for i in before if s in calls[i].writes.values()), None)


PLANES = "low", "high", "sub", "block"
ROUNDED = "q", "scale", "sums"


def _summed(calls: Sequence[Call], number: int, flow: "Flow") -> tuple[list[int], Call] | None:
    """The products with a token's experts, and their sum."""
    total = calls[number]
    maker, weights = _maker(calls, number, total.reads["y"]), total.argument("weights")
    if maker is None or calls[maker].kernel.name not in FORMATS or not linear_summed.fits(*weights.shape):
        return None
    product = calls[maker]
    grouped = [call for call in calls[:maker] if product.reads.get("slots") in call.writes.values()]
    if not grouped or not flow.is_only_for(product.writes["out"], [total]):
        return None
    T, A = weights.shape
    M = product.argument("out").shape[1]
    given = [product.argument(name) for name in (*PLANES, *ROUNDED)]
    more = (
        grouped[-1].argument("ids"),
        product.argument("share"),
        weights,
        total.argument("out").reshape(T, M),
    )
    kernel, grid = linear_summed.kernel_of(FORMATS[product.kernel.name]), (-(-M // ROWS), T)
    return [maker], call_of(Launch(kernel, grid, 32 * A, (*given, *more), total.launch.mark))


def _gated(calls: Sequence[Call], number: int, flow: "Flow") -> tuple[list[int], Call] | None:
    """Two products of one row, their gate, and its rounding."""
    rounding = calls[number]
    gate = _maker(calls, number, rounding.reads["x"])
    if gate is None or calls[gate].kernel is not activation.GEGLU or len(rounding.argument("x")) != 1:
        return None
    parts = [_maker(calls, gate, calls[gate].reads[name]) for name in ("gate", "up")]
    if None in parts or parts[0] == parts[1]:
        return None
    one, other = (calls[i] for i in parts)
    if one.kernel is not other.kernel or one.kernel.name not in FORMATS or one.argument("share"):
        return None
    made = zip([*(call.writes["out"] for call in (one, other)), rounding.reads["x"]],
               [calls[gate], calls[gate], rounding], strict=True)  # fmt: skip
    if any(one.reads[name] != other.reads[name] for name in ROUNDED) or not all(
        flow.is_only_for(s, [reader]) for s, reader in made
    ):
        return None
    M = rounding.argument("x").shape[1]
    planes = [call.argument(name) for call in (one, other) for name in PLANES]
    given = (one.argument(name) for name in ROUNDED)
    results = (rounding.argument(name) for name in ROUNDED)
    kernel = linear_gated.kernel_of(FORMATS[one.kernel.name])
    grid = padded_columns(M) // linear_gated.BLOCK, 1
    arguments = (*planes, *given, np.int32(M), *results)
    launch = Launch(kernel, grid, linear_gated.THREADS, arguments, rounding.launch.mark)
    return [*parts, gate], call_of(launch)


# -- one row after the other


class Flow:
    """Regions of the calls, and who reads each span."""

    def __init__(self, calls: Sequence[Call], results: Sequence[Span]):
        self.calls, self.regions, self.results = calls, Regions(calls), results
        self._readers = defaultdict(set)
        for call in calls:
            for region in self.regions.of(call.reads.values()):
                self._readers[region].add(id(call))

    def is_only_for(self, s: Span, calls: Sequence[Call]) -> bool:
        """Nobody but these calls reads what is written to a span, and somebody does."""
        readers = set().union(*(self._readers[region] for region in self.regions.of([s])))
        is_result = any(map(s.overlaps, self.results))
        return bool(readers) and not is_result and readers <= {id(call) for call in calls}


@dataclass(eq=False)
class Node:
    """Calls that one part of a kernel does.

    shape     (rows, columns), (None, n): n numbers, None: no rows
    before    of a product: the steps of rows that each of its blocks does first
    repeated  calls that another node does as well, and writes for both
    """

    calls: list[Call]
    shape: Any
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    before: "Node | None" = None
    repeated: Sequence[Call] = ()

    @property
    def steps(self):
        return [STEPS[call.kernel.name] for call in self.calls]

    @property
    def kind(self):
        step = STEPS.get(self.calls[0].kernel.name)
        if isinstance(step, BlockStep) and not all(STEPS[c.kernel.name].fits(c) for c in self.calls):
            return None
        return None if step is None else type(step)

    def is_in_the_way(self, other: "Node") -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


def node_of(call: Call, flow: Flow) -> Node:
    step = STEPS.get(call.kernel.name)
    shape = step.shape(call) if isinstance(step, RowStep) else None
    return Node([call], shape, flow.regions.of(call.reads.values()), flow.regions.of(call.writes.values()))


def in_rows(calls: Sequence[Call], flow: Flow) -> list[Node]:
    nodes: list[Node] = []
    for call in calls:
        nodes.append(node_of(call, flow))
        place: int | None = len(nodes) - 1
        while place is not None:
            place = _merged(nodes, place, flow)
    return nodes


def _merged(nodes: list[Node], b: int, flow: Flow) -> int | None:
    """Merge a node with one before it that makes what it reads; where both are then."""
    second = nodes[b]
    if second.kind not in (RowStep, BlockStep):
        return None
    for a in range(b - 1, max(-1, b - 1 - WINDOW), -1):
        first, between = nodes[a], nodes[a + 1 : b]
        if not first.writes & second.reads or not _is_one_unit(first, second, flow):
            continue
        whole = Node(
            first.calls + second.calls,
            second.shape if first.shape is None or first.shape[0] is None else first.shape,
            first.reads | second.reads,
            first.writes | second.writes,
        )
        place = None
        if not any(node.is_in_the_way(second) for node in between):
            place = a
        elif not any(node.is_in_the_way(first) for node in between):
            place = b - 1
        if place is not None:
            del nodes[b], nodes[a]
            nodes.insert(place, whole)
            return place
    return None


def _is_one_unit(first: Node, second: Node, flow: Flow) -> bool:
    """Can a block that has done its part of the first go on with the second?"""
    if first.kind is not second.kind or first.reads & second.writes or first.writes & second.writes:
        return False
    if first.kind is BlockStep:
        return True
    if not _agree(first.shape, second.shape):
        return False
    made = {
        s for call in first.calls for name, s in call.writes.items() if name in STEPS[call.kernel.name].rows
    }
    return all(
        name in STEPS[call.kernel.name].rows and s in made
        for call in second.calls
        for name, s in call.reads.items()
        if flow.regions.of([s]) & first.writes
    )


def _agree(one, other) -> bool:
    if one[0] is None or other[0] is None:
        return (one[0] or 1) * one[1] == (other[0] or 1) * other[1]
    return one == other


# -- several ways


def apart(nodes: Sequence[Node], flow: Flow) -> list[Node]:
    """A norm takes longer than to compute what it starts from twice: norms of one sum, which products of
    several kinds read, each have a block of their own."""
    return [part for node in nodes for part in _ways(node, flow)]


def _ways(node: Node, flow: Flow) -> list[Node]:
    if node.kind is not RowStep or not _is_whole(node) or _rows_and_columns(node)[0] > 2:
        return [node]
    needs = _needs(node.calls, flow)
    ends = [i for i in needs if not any(i in needs[j] for j in needs if j != i)]
    common = set.intersection(*(needs[i] for i in ends))
    ways: list[set[int]] = []
    for i in ends:
        mine = needs[i] - common
        joined = [way for way in ways if way & mine]
        ways = [way for way in ways if not way & mine] + [mine.union(*joined)]
    if len(ways) < 2 or not all(any(node.calls[i].kernel is norm.RMS_NORM for i in way) for way in ways):
        return [node]
    made = [_way(node, sorted(common), sorted(way), k > 0, flow) for k, way in enumerate(ways)]
    return made if all(_keeps_repeated(one, flow) for one in made) else [node]


def _needs(calls: Sequence[Call], flow: Flow) -> dict[int, set[int]]:
    """For each call: itself, and those that must come before."""
    needs: dict[int, set[int]] = {}
    for i, call in enumerate(calls):
        read = flow.regions.of(call.reads.values())
        makers = [j for j in range(i) if read & flow.regions.of(calls[j].writes.values())]
        needs[i] = {i}.union(*(needs[j] for j in makers))
    return needs


def _way(node: Node, common: Sequence[int], way: Sequence[int], is_another: bool, flow: Flow) -> Node:
    calls = [node.calls[i] for i in sorted([*common, *way])]
    repeated = [node.calls[i] for i in common] if is_another else []
    made = flow.regions.of(s for call in repeated for s in call.writes.values())
    reads = flow.regions.of(s for call in calls for s in call.reads.values()) - made
    writes = flow.regions.of(s for call in calls for s in call.writes.values()) - made
    return Node(calls, node.shape, reads, writes, repeated=repeated)


def _keeps_repeated(node: Node, flow: Flow) -> bool:
    """There is room in shared memory for what this node computes and does not write."""
    shared = _shared_rows(node, flow)
    return all(s in shared for call in node.repeated for s in call.writes.values())


# -- in each block of a product


def before_tiles(nodes: Sequence[Node], flow: Flow) -> list[Node]:
    kept = list(nodes)
    for node in nodes:
        second = kept.index(node)
        maker = [one for one in kept[max(0, second - WINDOW) : second] if one.writes & node.reads][-1:]
        if node.kind is not TileStep or not maker or not _is_short(maker[0], node, flow):
            continue
        first = kept.index(maker[0])
        if any(one.is_in_the_way(maker[0]) for one in kept[first + 1 : second]):
            continue
        reads, writes = maker[0].reads | node.reads, maker[0].writes | node.writes
        kept[second] = Node(node.calls, None, reads, writes, maker[0])
        del kept[first]
    return kept


def _is_short(first: Node, product: Node, flow: Flow) -> bool:
    """Steps that cost each block of a product less than a launch of their own."""
    if first.kind is not RowStep or any("norm" in call.kernel.name for call in first.calls):
        return False
    (call,) = product.calls
    rows, columns = _rows_and_columns(first)
    made = [s for one in first.calls for s in one.writes.values()]
    return (
        rows <= 2
        and columns <= MOST_BEFORE
        and not call.argument("share")  # where it is used, a product has many more blocks
        and all(flow.is_only_for(s, [*first.calls, call]) for s in made)
    )


# -- side by side


def in_waves(nodes: Sequence[Node], flow: Flow) -> list[list[list[Node]]]:
    """Groups of nodes, wave after wave: a wave needs those before it, and nothing of its own."""
    written: dict[int, int] = {}  # region -> the wave that wrote it last
    read: dict[int, int] = {}
    waves: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        before = [written.get(region, -1) for region in node.reads | node.writes]
        before += [read.get(region, -1) for region in node.writes]
        wave = 1 + max(before, default=-1)
        waves[wave].append(node)
        written |= dict.fromkeys(node.writes, wave)
        read |= {region: max(wave, read.get(region, -1)) for region in node.reads}
    return [_groups(waves[wave], flow) for wave in sorted(waves)]


def _groups(nodes: Sequence[Node], flow: Flow) -> list[list[Node]]:
    """Products with products, as their blocks are small; rows, and what one block does, with their like."""
    alone = [[node] for node in nodes if node.kind is None or node.before]
    tiles = [node for node in nodes if node.kind is TileStep and not node.before]
    small = [node for node in nodes if node.kind in (RowStep, BlockStep)]
    return [*alone, *(group for group in (tiles, small) if group)]


# -- kernels


def emit(group: Sequence[Node], flow: Flow) -> Launch:
    calls = [call for node in group for call in node.calls]
    if len(calls) == 1 and not group[0].before:
        return calls[0].launch
    made = Arguments()
    of_tiles = [node for node in group if node.kind is TileStep]
    of_blocks = [node for node in group if node.kind is BlockStep]
    of_rows = [node for node in group if node.kind is RowStep]
    parts: list[Rows | Tiles | Block] = list(_tiles(of_tiles, made, flow))
    parts += [_block(node, made) for node in of_blocks]
    parts += [_rows(node, made, flow, _threads(node), made.end) for node in of_rows]
    if of_tiles:
        threads = calls[0].launch.threads
    else:
        threads = WIDE if of_blocks else max(map(_threads, of_rows))
    kernel = kernel_of(tuple(parts), tuple(made.types))
    return Launch(kernel, made.n_blocks, threads, tuple(made.values), calls[-1].launch.mark)


class Arguments:
    """Of a fused launch: an array stands there once, however often it is used."""

    def __init__(self):
        self.values: list[Any] = []
        self.types: list[Any] = []
        self.n_blocks = 0

    def number(self, value: int) -> int:
        return self._append(np.int32(value), int32)

    def end(self, n_blocks: int) -> int:
        """The end of some more blocks."""
        self.n_blocks += n_blocks
        return self.number(self.n_blocks)

    def of(self, value: Any, kind: Any) -> int:
        if not is_array(value):
            return self._append(value, kind)
        for i, (other, its) in enumerate(zip(self.values, self.types, strict=True)):
            if its == kind and is_array(other) and same(value, other):
                return i
        return self._append(value, kind)

    def _append(self, value, kind):
        self.values.append(value)
        self.types.append(kind)
        return len(self.values) - 1


def _tiles(nodes: Sequence[Node], made: Arguments, flow: Flow):
    """Products by kernel."""
    calls = defaultdict(list)
    for node in nodes:
        calls[node.calls[0].kernel].extend(node.calls)
    slots: dict[str, Any] = {}  # that nobody looks at: the same for all
    for kernel, members in calls.items():
        wired, ends, tiles = [], [], []
        for call in members:
            ends.append(made.end(blocks_of(call.launch)))
            tiles.append(made.number(call.launch.grid[0]))
            names = names_of(kernel)
            values = [
                slots.setdefault(name, call.argument(name)) if name in _ignored(call) else value
                for name, value in zip(names, call.launch.arguments, strict=True)
            ]
            wired.append(Wired(kernel, tuple(map(made.of, values, kernel.signature))))
        before, threads = nodes[0].before, members[0].launch.threads
        yield Tiles(
            tuple(wired),
            tuple(ends),
            tuple(tiles),
            is_flat=all(call.launch.grid[1] == 1 for call in members),
            has_share=any(call.argument("share") for call in members),
            before=before and _rows(before, made, flow, threads, made.number),
        )


def _block(node: Node, made: Arguments) -> Block:
    end = made.end(1)
    return Block(tuple(_wired(call, made) for call in node.calls), end)


def _wired(call: Call, made: Arguments) -> Wired:
    return Wired(call.kernel, tuple(map(made.of, call.launch.arguments, call.kernel.signature)))


def _rows(node: Node, made: Arguments, flow: Flow, threads: int, number_of_blocks: Callable) -> Rows:
    R, C = _rows_and_columns(node)
    padded = padded_columns(C)
    width = padded if _is_whole(node) else PIECE
    pieces = padded // width
    numbers = [number_of_blocks(R * pieces), *map(made.number, (pieces, width, C, threads))]
    shared = _shared_rows(node, flow)
    steps, more = [], []
    for call in node.calls:
        step, inside, numbers_of = STEPS[call.kernel.name], [], []
        for name, value, kind in zip(
            names_of(call.kernel), call.launch.arguments, call.kernel.signature, strict=True
        ):
            if name not in step.rows:
                numbers_of.append(made.of(value, kind))
                continue
            if (s := call.spans[name]) in shared:
                inside.append((name, shared[s]))
                numbers_of.append(-1)
            else:
                numbers_of.append(made.of(value.reshape(-1), ROW))
        steps.append(Wired(call.kernel, tuple(numbers_of), tuple(inside)))
        more.append(tuple(map(made.number, step.more(call))))
    held = tuple(_held(call, C, threads) for call in node.calls)
    return Rows(tuple(steps), tuple(numbers), tuple(more), _capacity(node), _is_whole(node), held)


def _held(call: Call, C: int, threads: int) -> int:
    """Columns of a row that a thread multiplies by the weights of a norm."""
    is_weighted = call.kernel is norm.RMS_NORM and call.argument("is_weighted")
    return -(-C // threads) if is_weighted else 0


def _rows_and_columns(node: Node) -> tuple[int, int]:
    R, C = node.shape
    return (R or 1), C


def _is_whole(node: Node) -> bool:
    return any(step.whole for step in node.steps)


def _threads(node: Node) -> int:
    return norm.threads_for(node.shape[1]) if _is_whole(node) else WIDE


def _capacity(node: Node) -> int:
    """Floats of a shared row; 0: too long a row."""
    width = padded_columns(node.shape[1]) if _is_whole(node) else PIECE
    return next((size for size in CAPACITIES if size >= width), 0)


def _shared_rows(node: Node, flow: Flow) -> dict[Span, int]:
    """What only this node's steps read, as numbers of rows in shared memory."""
    capacity = _capacity(node)
    shared: dict[Span, int] = {}
    for call in node.calls:
        for name, s in call.writes.items():
            is_mine = call in node.repeated or flow.is_only_for(s, node.calls)
            if name in STEPS[call.kernel.name].rows and is_mine:
                if capacity and 4 * capacity * (len(shared) + 1) <= SHARED:
                    shared[s] = len(shared)
    return shared
