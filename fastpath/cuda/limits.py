"""What a card can do, and from that the time that a launch should take.

A prediction, to be tested on a device (`device-check`), not a measurement.  Its assumptions:

    a launch    `gap_s` behind the one it depends on, in a graph; then its trips to cache or memory, one after
                another, of which each lasts as long as it does while nobody else reads; then whichever is
                slowest of reading on, issuing instructions, and multiplying
    memory      does one thing after the other, in the order in which it is asked, at `reached` of its rate
                (Queue); each byte once
    asking      what a launch asks for ahead (read_ahead.py) stands in that queue one trip after the launch
                before it has ended, though its blocks have been there longer; so before its own reading
                Pages are asked for likewise, in whole blocks of 32 positions.  Weights of chosen experts
                stand in the queue when the launch that asks has ended, though most of its blocks ask before
    reading     what nobody has asked for, from memory; all of it, from the second-level cache; or what is on
                its way at any time once per trip under load (Little's law), the first trip being counted
                above.  A launch ends no sooner than what was asked for on its behalf is there.  No line
                leaves the cache before it is read (read_ahead.BUDGET)
    bringing    a launch that starts early has brought its first weights when the launch ahead of it ends
                (Kernel.early): as many as its warps hold, as far as they find room beside that launch's
                blocks, which at the end of a grid of more than one wave is a tenth of the card, and as the
                cache can give them while it runs
    the end     blocks end one after the other for as long as a block takes: half of that is lost for
                issuing; for reading, what goes by when too few are left to keep memory busy
    issuing     `sustained` of four instructions a cycle and multiprocessor: PTX as counted on executor two,
                times what the assembler makes of an instruction of that kernel (tests/gpu_on_cpu/predict.py)
    caches      what kernels of one call hand on stays in the second-level cache; vectors that norms multiply
                by come from memory, if nobody has asked for them
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fastpath.cuda import attention, grouping, layout, linear_some, many_places, read_ahead
from fastpath.cuda.planned import Planned
from fastpath.cuda.program import Launch
from fastpath.cuda.rehearsal import Call, Rehearsal, n_blocks
from refimpl.kv_types import STEP


@dataclass(frozen=True)
class Card:
    """Rates per second; sizes in bytes.  Without a source: an assumption, which a device must test."""

    name: str = "H200"
    memory: float = 4.8e12  # data sheet, like bf16_ops and int8_ops
    reached: float = 0.92  # of it, by who only reads; a copy of a H200 moved 4.3 TB/s, 0.90
    # gpu-benches (gpu-l2-cache) read 9.7e12 on a H200 at 1.98e9, sets of 20 to 40 MB, and 6.9e12 on a H100
    # PCIe, where Chips and Cheese read 5.6e12: the first times what the last is of it, and what `clock` is
    cache: float = 7.2e12
    port: float = 64.0  # bytes a cycle from the second-level cache to a multiprocessor
    bf16_ops: float = 990e12
    int8_ops: float = 1979e12
    clock: float = 1.83e9  # that of the data sheet's 990e12: 132 * 4096 a cycle; at most it is 1.98e9
    multiprocessors: int = 132
    warps: int = 64  # of a multiprocessor, as the following: tuning guide for compute capability 9.0
    registers: int = 65536
    shared: int = 228 << 10
    blocks: int = 32
    reserved_shared: int = 1 << 10  # per block
    sustained: float = 0.65
    # From the end of a kernel to the work of the next, which is there and waits (early.py): an assumption
    gap_s: float = 0.6e-6
    loaded_trip_s: float = 0.65e-6  # to memory that is busy: an assumption
    # To idle memory: 690 cycles on a GH200 at 1.98e9 (AI_kernels/latency), 650 on a H100 PCIe at 1.755e9
    # (gpu-benches): 0.35 to 0.37
    memory_trip_s: float = 0.40e-6
    cache_trip_s: float = 0.20e-6  # 281 and 265 cycles in the same tables: 0.15; the other half is farther
    reduction_s: float = 0.15e-6  # of a block: shuffles of 25 cycles each, and two barriers

    @property
    def dp4a_ops(self) -> float:
        """Multiplications and additions: 64 dp4a a cycle and multiprocessor."""
        return 64 * 8 * self.multiprocessors * self.clock

    @property
    def issue(self) -> float:
        return 4 * self.multiprocessors * self.clock * self.sustained

    @property
    def wanted_in_flight(self) -> float:
        """Bytes on their way that keep memory busy."""
        return self.memory * self.loaded_trip_s


H200 = Card()
# Each kernel starts when the one before has ended.  A kernel that copies 32 KB took 1.3e-6 s in a graph on a
# H200 (gpu-benches, gpu-small-kernels), trips and all
LATE = replace(H200, gap_s=1.2e-6)


class Code(NamedTuple):
    """Of a kernel: what the assembler, or the driver, says."""

    registers: int
    shared: int


CodeOf = Callable[[Any], Code]
# (kernel, tokens of a block) -> instructions of a warp's step; (attention_part_..., H) -> of a block
Issued = Callable[[str, int], float]


class Prediction(NamedTuple):
    """
    memory_bytes  weights, keys and values
    early_bytes   of them, asked for by launches before
    cache_bytes   the rest
    ops           multiplications and additions, of integers or numbers
    in_flight     bytes on their way at any time, in the whole card
    limit         what takes the longest
    """

    name: str
    memory_bytes: int
    early_bytes: int
    cache_bytes: int
    ops: int
    registers: int
    shared: int
    warps: int
    waves: float
    in_flight: float
    seconds: float
    limit: str


def blocks_per_multiprocessor(code: Code, threads: int, card: Card = H200) -> int:
    """Registers are given out by 8 to a thread, warps by whole ones."""
    warps = -(-threads // 32)
    by_registers = card.registers // (-(-max(1, code.registers) // 8) * 8 * 32 * warps)
    by_shared = card.shared // (code.shared + card.reserved_shared)
    return max(1, min(card.warps // warps, card.blocks, by_registers, by_shared))


class Work(NamedTuple):
    """What a launch does, from shapes."""

    memory_bytes: int = 0
    cache_bytes: int = 0
    int_ops: int = 0
    float_ops: int = 0
    tensor_ops: int = 0
    instructions: float = 0.0  # of all warps
    warp_bytes: float = 0.0  # on their way for each warp
    has_stack: bool = False  # of experts: which weights it reads, it reads first


def work(launch: Launch, noted: Rehearsal, call: Call, issued: Issued) -> Work:
    """Of a launch, fused or not: products by the weights that it is given, the rest by its arrays."""
    total, seen = _of_arrays(launch, noted), set()
    for plane in _arrays(launch):
        weight = noted.planes.get(plane.buffer)
        if weight is not None and id(weight) not in seen:
            seen.add(id(weight))
            total = _sum(total, _of_weight(launch, noted, weight, call, issued))
    if "attention_part" in launch.kernel.name:
        total = _sum(total, _of_attention(launch, call, issued))
    return total


class Few(NamedTuple):
    """How products of few rows are built (linear.py, linear_some.py, linear_float.py).

    tokens    that weights are read for once
    sharing   warps that share the columns of a tile of layout.ROWS rows
    ahead     steps of a warp whose weights are on their way
    tiles     of a warp
    """

    tokens: int
    sharing: int
    ahead: int
    tiles: int = 1


def few(kind: str, tokens: int) -> Few:
    """A warp has all columns of its tiles; two steps' weights are on their way, for more tokens one's."""
    if kind == "some":
        return Few(grouping.TOKENS, sharing=1, ahead=1, tiles=linear_some.TILES_OF_WARP)
    return Few(grouping.TOKENS, sharing=1, ahead=2 if kind == "float" or tokens == 1 else 1)


def _of_weight(
    launch: Launch, noted: Rehearsal, weight: layout.DeviceMatrix, call: Call, issued: Issued
) -> Work:
    name, T = launch.kernel.name, call.n_rows
    M, C = weight.shape[-2:]
    E = weight.shape[0] if len(weight.shape) == 3 else 1
    if not name.startswith("fused"):  # the last layers and the head may meet the last tokens only
        T = _arrays(launch)[-1].shape[0] // (noted.n_active if E > 1 else 1)
    if "embed" in name:
        return Work(memory_bytes=T * weight.read_bytes // M)
    steps = -(-C // layout.COLUMNS) * -(-M // layout.ROWS)  # of one matrix
    of_matrix = weight.read_bytes // E
    step_bytes = of_matrix / steps
    coding = weight.coding_name.lower()
    if "many_" in name:
        return _of_many(weight, T, noted.n_active, issued)
    of_integers = any(word in name for word in ("linear_", "some_"))
    is_float = "float_" in name and (weight.coding.is_plain or not of_integers)
    is_some = E == 1 and f"some_{coding}" in name
    kind = "float" if is_float else "some" if is_some else "linear"
    built = few(kind, T)
    if E > 1:
        used, slots, tokens, share = _experts(E, noted.n_active, T, built.tokens)
    else:
        slots = -(-T // built.tokens)
        used, tokens, share = slots if of_matrix > L2_BYTES // 2 else 1, min(T, built.tokens), T
    ops = 2 * share * M * C
    of_warp = -(-C // layout.COLUMNS) / built.sharing
    return Work(
        memory_bytes=int(of_matrix * used),
        cache_bytes=int(of_matrix * max(0, slots - used)),
        int_ops=ops if kind == "linear" else 0, float_ops=ops if is_float else 0,
        # all tokens of a group, whether they are there or not; half of what is multiplied are zeros
        tensor_ops=2 * 2 * slots * built.tokens * M * C if is_some else 0,
        instructions=slots * steps * issued(f"{kind}_{coding}", tokens),
        warp_bytes=step_bytes * built.tiles * min(built.ahead, max(1, of_warp)), has_stack=E > 1,
    )  # fmt: skip


def _of_many(weight: layout.DeviceMatrix, T: int, n_active: int, issued: Issued) -> Work:
    """Tiles of rows and tokens, or entries; warps whose tokens are not there only help with the weights."""
    M, C = weight.shape[-2:]
    E = weight.shape[0] if len(weight.shape) == 3 else 1
    of_warp, of_tile = many_places.OF_WARP, many_places.MANY_TOKENS
    shares = _binomial(T, n_active / E) if E > 1 else {T: 1.0}  # entries of a matrix -> how many are so
    whole = E * sum(share * (n // of_tile + (n % of_tile > of_warp)) for n, share in shares.items())
    half = E * sum(share * (0 < n % of_tile <= of_warp) for n, share in shares.items())
    row_tiles, columns = -(-M // many_places.MANY_ROWS), layout.padded_columns(C)
    steps = row_tiles * many_places.MANY_ROWS / layout.ROWS * columns / layout.COLUMNS
    kernel, tokens = f"many_{weight.coding_name.lower()}", of_tile * whole + of_warp * half
    of_matrix = weight.read_bytes // E
    used = E * (1 - shares.get(0, 0.0))
    passes = max(0.0, whole + half - used)  # of one matrix over its weights, behind the first
    from_memory = passes if of_matrix > L2_BYTES // 2 else 0.0
    return Work(
        memory_bytes=int(of_matrix * (used + from_memory)),
        cache_bytes=int(of_matrix * (passes - from_memory) + row_tiles * tokens * columns),
        tensor_ops=int(2 * tokens * row_tiles * many_places.MANY_ROWS * columns),
        instructions=steps * (whole * issued(kernel, of_tile) + half * issued(kernel, of_warp)),
        warp_bytes=of_matrix / -(-M // layout.ROWS) * PADDED_STEP / columns * many_places.TILES_OF_WARP,
    )


PADDED_STEP = 256  # columns of a step of many tokens


def _binomial(n: int, p: float) -> dict[int, float]:
    """{k: probability of k hits in n}"""
    log = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    return {k: math.exp(log[k] + k * math.log(p) + (n - k) * math.log1p(-p)) for k in range(n + 1)}


L2_BYTES = 50 << 20
ATTENTION_IN_FLIGHT = 16 * 32 * 16  # bytes of a warp of attention: 64 words a lane, of keys and of values


def _experts(E: int, n_active: int, T: int, most: int) -> tuple[float, float, int, int]:
    """(experts that are read, slots, tokens of a slot, rows of the result), if all are chosen alike."""
    n = T * n_active
    used = E * (1 - (1 - n_active / E) ** T)
    slots = max(used, n / most)
    return used, slots, max(1, min(most, round(n / slots))), n


def _of_attention(launch: Launch, call: Call, issued: Issued) -> Work:
    arrays = _arrays(launch)
    q, k_pages = arrays[:2]
    T, N, H = q.shape
    n_pieces = arrays[-1].shape[2]
    K, *_, window = (int(a) for a in launch.arguments if np.isscalar(a))
    end = call.depth + call.n_tokens
    mean = min(window, call.depth + (call.n_tokens + 1) / 2)  # keys that a token sees
    per_key = 2 * K * H * k_pages.dtype.itemsize
    once = int(call.n_seqs * min(end, window + call.n_tokens - 1) * per_key)
    parts = max(1, n_blocks(launch) // n_pieces // T // K)  # of a group of heads, each with a block
    blocks, name = T * K * parts * (mean / attention.PIECE + 1), launch.kernel.name
    ops = int(4 * T * N * H * mean)
    if is_tensor := attention.on_tensor_cores(name):  # 16 rows; of float16, half as many as of int8
        ops = int(2 * 4 * 16 * blocks * attention.PIECE * H)
    return Work(
        memory_bytes=once, cache_bytes=int(max(0, T * parts * mean * per_key - once)),
        float_ops=0 if is_tensor else ops, tensor_ops=ops if is_tensor else 0,
        instructions=blocks * issued(name[name.index("attention_part") :], H),
        warp_bytes=ATTENTION_IN_FLIGHT,
    )  # fmt: skip


def _of_arrays(launch: Launch, noted: Rehearsal) -> Work:
    """Of what is neither a matrix nor a page, each array once: constants from memory, the rest from cache."""
    found: dict[Any, int] = {}
    for array in _arrays(launch):
        if array.buffer not in noted.planes and array.buffer not in noted.pages:
            found[array.buffer] = max(found.get(array.buffer, 0), array.nbytes)
    constant = noted.constants
    memory_bytes = sum(n for buffer, n in found.items() if buffer in constant)
    return Work(memory_bytes, sum(found.values()) - memory_bytes)


def _arrays(launch: Launch) -> list[Planned]:
    return [argument for argument in launch.arguments if isinstance(argument, Planned)]


def _sum(a: Work, b: Work) -> Work:
    summed = (x + y for x, y in zip(a[:-2], b[:-2], strict=True))
    return Work(*summed, max(a.warp_bytes, b.warp_bytes), a.has_stack or b.has_stack)


@dataclass
class Queue:
    """What memory is asked for, one thing after the other, while launches follow each other.

    now    when the launch before has ended
    free   when memory has done all that it was asked for
    early  number of a launch -> (bytes that were asked for on its behalf, when they are there)
    room   share of the card that the launch before leaves free
    last   seconds that it took
    """

    now: float = 0.0
    free: float = 0.0
    room: float = 0.0
    last: float = 0.0
    early: dict[int, tuple[int, float]] = field(default_factory=dict)

    def read(self, start: float, n_bytes: float, rate: float) -> float:
        """When so many bytes are there that are wanted from `start` on."""
        if n_bytes:
            self.free = max(self.free, start) + n_bytes / rate
        return self.free if n_bytes else start

    def ask(self, start: float, wanted: Sequence[tuple[int, int]], rate: float) -> None:
        """wanted: (number of a launch, bytes)"""
        for use, n_bytes in wanted:
            before, _ = self.early.get(use, (0, 0.0))
            self.early[use] = before + n_bytes, self.read(start, n_bytes, rate)


def asked_first(asks: read_ahead.Asks, call: Call) -> list[tuple[int, int]]:
    """(launch, bytes) before a launch waits: pieces; pages as far as the call's sequences reach."""
    return [
        *((piece.use, piece.n_bytes) for piece in asks.pieces),
        *((pages.use, _page_bytes(pages, call)) for pages in asks.pages),
    ]


def _page_bytes(pages: read_ahead.Pages, call: Call) -> int:
    """Tokens of a sequence share its blocks."""
    last = (call.depth + call.n_tokens - 1) // STEP
    there = last - max(0, call.depth - pages.window + 1) // STEP + 1
    n = min(pages.end, there) - min(pages.begin, there)
    return n * pages.size // pages.T * call.n_seqs


def asked_last(asks: read_ahead.Asks, noted: Rehearsal, call: Call) -> list[tuple[int, int]]:
    """(launch, bytes) behind its work: of chosen experts, each once."""
    chosen = asks.chosen
    if chosen is None:
        return []
    used, *_ = _experts(chosen.E, noted.n_active, call.n_rows, 1)
    return [(chosen.use, int(used * sum(piece.n_bytes for piece, _ in chosen.pieces)))]


def trips(name: str, card: Card, is_there: bool, has_stack: bool) -> float:
    """Seconds that a launch waits before and behind its stream: trips that depend on each other.

    is_there: what it reads first was asked for before it waited for the launch ahead of it
    """
    seconds = card.cache_trip_s if is_there else card.memory_trip_s
    if (
        "attention_part" in name
    ):  # positions, tables, keys and values; scores and weights are added up, without tensor cores values too
        reductions = 2 if attention.on_tensor_cores(name) else 3
        return 2 * card.cache_trip_s + seconds + reductions * card.reduction_s
    if has_stack:  # who is chosen, and then the weights
        seconds += card.cache_trip_s
    if any(word in name for word in ("linear_", "some_", "float_", "many_", "embed")):
        seconds += card.reduction_s
    if "_before_" in name:  # steps of rows in each block of a product
        seconds += card.cache_trip_s + card.reduction_s
    if name.endswith(("expert_sum", "geglu_round_32")) and "linear" in name:
        seconds += card.reduction_s  # a barrier between products and what comes of them
    norms = max(part.count("rms_norm") for part in name.split("_and_"))  # parts stand side by side
    return seconds + card.reduction_s * norms + card.cache_trip_s * name.count("route")


def predict(
    launch: Launch, noted: Rehearsal, call: Call, code_of: CodeOf, issued: Issued, card: Card = H200,
    queue: Queue | None = None, number: int = 0, asks: read_ahead.Asks = read_ahead.NOTHING,
) -> Prediction:  # fmt: skip
    """Of launch `number` of a call, which asks for something ahead."""
    code, done, queue = code_of(launch.kernel), work(launch, noted, call, issued), queue or Queue()
    blocks, threads = n_blocks(launch), launch.threads
    each = blocks_per_multiprocessor(code, threads, card)
    waves = blocks / (each * card.multiprocessors)
    warps = -(-threads // 32)
    resident = min(blocks, each * card.multiprocessors) * warps
    in_flight = resident * done.warp_bytes
    tail = 1 + 0.5 / waves if waves > 1 else 1.0
    enough = min(1.0, card.wanted_in_flight / in_flight) if in_flight else 1.0  # of the resident blocks
    busy = min(1.0, blocks / card.multiprocessors)
    # parts that stand side by side may read the same: as if their blocks were as many fewer
    used = max(1, min(blocks / len(launch.kernel.name.split("_and_")), card.multiprocessors))
    rate = card.memory * card.reached

    begin = queue.now
    queue.ask(begin + card.memory_trip_s, asked_first(asks, call), rate)
    early, arrived = queue.early.get(number, (0, 0.0))
    early = min(early, done.memory_bytes)
    rest = done.memory_bytes - early
    is_there = not rest or (launch.kernel.early is not None and not done.has_stack)
    waiting = card.gap_s + trips(launch.kernel.name, card, is_there, done.has_stack)
    start = begin + waiting
    read = queue.read(start, rest, rate) + rest / rate * (tail - 1) * enough
    brought = 0.0
    if launch.kernel.early and not done.has_stack:
        held = min(in_flight or done.memory_bytes, done.memory_bytes)
        room = min(1.0, queue.room / min(1.0, waves))
        brought = min(held * room, queue.last * card.cache, early if in_flight else held)
    moved = done.memory_bytes + done.cache_bytes - brought
    again = max(0.0, done.memory_bytes / in_flight - 1) if in_flight else 0.0
    mean_trip = (rest * card.loaded_trip_s + early * card.cache_trip_s) / max(1, done.memory_bytes)
    parts = {
        "memory": max(read, arrived) - start,
        "bytes on their way": again * mean_trip,
        "port": moved / (used * card.port * card.clock),
        "cache": moved / card.cache,
        "instructions": done.instructions / card.issue / busy * tail,
        "dp4a": done.int_ops / card.dp4a_ops / busy,
        "fma": done.float_ops / (2 * 128 * card.multiprocessors * card.clock) / busy,
        "tensor cores": done.tensor_ops / card.int8_ops / busy,
    }
    limit = max(parts, key=parts.__getitem__)
    seconds = waiting + parts[limit]
    queue.now, queue.last = begin + seconds, seconds
    queue.room = 1 - waves if waves <= 1 else LAST_ROOM
    queue.ask(queue.now, asked_last(asks, noted, call), rate)
    if parts[limit] < waiting:
        limit = "launch and trips"
    ops = done.int_ops + done.float_ops + done.tensor_ops
    return Prediction(
        launch.kernel.name, done.memory_bytes, early, done.cache_bytes, ops, *code, each * warps, waves,
        in_flight, seconds, limit,
    )  # fmt: skip


LAST_ROOM = 0.1  # of the card, that the end of a grid of more than one wave leaves free: an assumption


class Step(NamedTuple):
    """A forward call: its launches, and what a card would do that only reads."""

    predictions: list[Prediction]
    call: Call

    @property
    def seconds(self) -> float:
        return math.fsum(p.seconds for p in self.predictions)

    @property
    def memory_bytes(self) -> int:
        return sum(p.memory_bytes for p in self.predictions)

    def roofline_s(self, card: Card = H200) -> float:
        return self.memory_bytes / card.memory

    @property
    def tokens_per_s(self) -> float:
        return self.call.n_rows / self.seconds

    def share(self, card: Card = H200) -> float:
        """Of the bandwidth roofline."""
        return self.roofline_s(card) / self.seconds


def predict_step(
    model: Any, call: Call, code_of: CodeOf, issued: Issued, *, fused: bool = True, card: Card = H200,
    asks: bool = True,
) -> Step:  # fmt: skip
    """asks: launches of a fused call ask for weights and pages ahead of their use."""
    from fastpath.cuda import rehearsal

    noted = rehearsal.of(model, call)
    launches, asked = noted.launches, None
    if fused and call.n_rows <= MOST_FUSED:
        from fastpath.cuda.fuse import fuse

        launches = fuse(launches, noted.results)
        asked = read_ahead.plan(launches, noted.to_ask_for()) if asks else None
    queue = Queue()
    asked = asked or [read_ahead.NOTHING for _ in launches]
    return Step(
        [
            predict(launch, noted, call, code_of, issued, card, queue, i, pieces)
            for i, (launch, pieces) in enumerate(zip(launches, asked, strict=True))
        ],
        call,
    )


MOST_FUSED = 16  # tokens: what is recorded is fused, longer calls run op by op
