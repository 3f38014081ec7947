"""`--profile`: where the time of forward calls goes, by kind of op and of layer, and how far each is from the
limit that memory and multipliers set.

    limit of a row = the longest of bytes / plain read, int8 operations / their peak, and the same of float32
    % of limit     = that, as part of the time it took

The peaks are those of vectors, measured from registers. Ops that read nothing from memory have no limit.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastpath.bench import rates
from fastpath.bench.table import markdown
from fastpath.bench.traffic import Call, Watched, layer_kind, totals, weight_places

TOKEN_TABLE = (
    "token_embd",
    "output",
)  # fields of the table that a forward call begins with; tied, it is both


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    ops_per_s: float
    float_ops_per_s: float

    def seconds(self, call: Call) -> float:
        """The least that a call can take here."""
        return max(
            call.nbytes / self.bytes_per_s,
            call.n_ops / self.ops_per_s,
            call.n_float_ops / self.float_ops_per_s,
        )


@dataclass(frozen=True)
class Profiled:
    """n forward calls of one size: their parts, and the time from beginning to end.

    `calls` of a replay are of two kinds: steps, which know their time, and the ops that they were recorded
    from, which know their bytes and have no time.
    """

    name: str
    calls: list[Call]
    wall_ns: int
    n: int
    is_replay: bool = False

    def text(self, limits: Limits) -> str:
        n = f" ({self.n} calls)" if self.n > 1 else ""
        head = f"{self.name}: {self.wall_ns / self.n / 1e6:.2f} ms a call{n}"
        return head + "\n\n" + _table(self, limits)


def of_ops(name: str, calls: list[Call]) -> Profiled:
    """From ops that were called from Python, of one or more forward calls."""
    forwards = _forwards(calls)
    wall_ns = sum(each[-1].begin_ns + each[-1].ns - each[0].begin_ns for each in forwards)
    return Profiled(f"{name}, ops called from Python", calls, wall_ns, len(forwards))


def _forwards(calls: list[Call]) -> list[list[Call]]:
    """Cut where a forward call begins: at the lookup in the token table."""
    found: list[list[Call]] = []
    for call in calls:
        if (call.op == "embed" and call.field in TOKEN_TABLE) or not found:
            found.append([])
        found[-1].append(call)
    return found


REPLAYS = 9  # of which the middle one counts


def of_replay(name: str, program: Any, model: Any, ops: list[Call]) -> Profiled:
    """From a recorded program, replayed where it stands (it writes the same keys again).

    ops  one forward call of the same size: what its parts read
    """
    places = {w.name: place for w, place in weight_places(model.weights) if hasattr(w, "format")}
    runs = sorted((program.timed() for _ in range(REPLAYS)), key=_seconds)
    middle = runs[REPLAYS // 2]
    steps = [_step(timing, places, model.config) for timing in middle]
    untimed = [replace(call, ns=0) for call in ops]
    return Profiled(f"{name}, replayed", steps + untimed, round(1e9 * _seconds(middle)), 1, is_replay=True)


# module of a kernel -> what the profile calls it, where it is not its own name
MODULES = {
    "norm": "rms_norm",
    "rotary": "rope",
    "elementwise": "add, scale",
    "activation": "activations",
    "softmax": "attention",
    "attention_few": "attention",
    "attention_many": "attention",
    "moe": "route, sum of experts",
    "grouping": "route, sum of experts",
    "quantize": "rounding to int8",
    "embedding": "embed",
    "host": "host steps",  # tables of angles, and lookups without a kernel: Python, before the compiled steps
}


def _seconds(timings: list[Any]) -> float:
    return sum(timing.seconds for timing in timings)


def _step(timing: Any, places: dict[str, tuple[int | None, str]], config: Any) -> Call:
    ns = round(1e9 * timing.seconds)
    if timing.label in places:
        layer, field = places[timing.label]
        return Call("linear", field, "" if layer is None else layer_kind(config.layers[layer]), ns)
    module = timing.kernel.split(".")[0]
    _, _, layer_of_mark = timing.mark.partition("-")
    kind = layer_kind(config.layers[int(layer_of_mark)]) if layer_of_mark.isdigit() else ""
    return Call(MODULES.get(module, module), "", kind, ns)


COLUMNS = ("op", "layers", "steps", "ms", "% of time", "MB", "GB/s", "TOPS", "% of limit")
OTHER = "outside of these"  # Python around the ops or the program, and waiting for threads


def _table(profiled: Profiled, limits: Limits) -> str:
    """Averages of a forward call, the longest first, and the sum."""
    calls, wall_ns, n = profiled.calls, profiled.wall_ns, profiled.n
    with_bytes = {call.op_class for call in calls if call.nbytes}
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.op_class, call.kind if call.op_class in with_bytes else "all"].append(call)
    sums = {key: totals(group) for key, group in groups.items()}
    lines = [list(COLUMNS)]
    for (op, kind), total in sorted(sums.items(), key=lambda item: -item[1].ns):
        count = sum(call.ns > 0 for call in groups[op, kind])
        lines.append(_line(op, kind or "-", count, total, total.ns, profiled, limits))
    rest = wall_ns - sum(total.ns for total in sums.values())
    if rest > 0.001 * wall_ns:
        lines.append([OTHER, "-", "", f"{rest / n / 1e6:.3f}", f"{100 * rest / wall_ns:.1f}", *[""] * 4])
    count = sum(call.ns > 0 for call in calls)
    lines.append(_line("all", "", count, totals(calls), wall_ns, profiled, limits))
    return markdown(lines, n_texts=2)


def _line(
    op: str, kind: str, count: int, total: Call, ns: int, profiled: Profiled, limits: Limits
) -> list[str]:
    n, n_ops, ns = profiled.n, total.n_ops + total.n_float_ops, max(1, ns)
    return [
        op, kind, f"{count / n:.0f}", f"{ns / n / 1e6:.3f}", f"{100 * ns / profiled.wall_ns:.1f}",
        f"{total.nbytes / n / 1e6:.1f}" if total.nbytes else "",
        f"{total.nbytes / ns:.1f}" if total.nbytes else "",
        f"{n_ops / ns / 1e3:.2f}" if n_ops else "",
        f"{100e9 * limits.seconds(total) / ns:.0f}" if total.nbytes else "",
    ]  # fmt: skip


class Profile:
    """Watches an engine from now on:  profile = Profile(engine); ...; say(profile.text())

    What is replayed is timed at the end, by replaying it once more.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.watched = Watched(engine.ops, engine.model)
        engine.ops = self.watched

    def text(self) -> str:
        """Measures the limits, on the memory of the weights, and judges by them."""
        plain = rates.PlainRead(rates.weight_memory(self.engine.model.weights))
        limits = Limits(plain.best(), rates.int8_ops_per_s(), rates.fma_ops_per_s())
        return "\n\n".join(part.text(limits) for part in self._parts())

    def _parts(self) -> Iterator[Profiled]:
        calls, model = self.watched.calls, self.engine.model
        one, more = ([c for c in calls if (c.n_rows == 1) == is_one] for is_one in (True, False))
        if more:
            yield of_ops("calls of several tokens", more)
        replay = self.engine.replay
        program = replay and replay.program(1)
        if program:
            yield of_replay("one token", program, model, _forwards(one)[-1])
        elif one:
            yield of_ops("one token", one)
