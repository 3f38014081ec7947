"""`device-check` as a whole: its parts in order of weight, within a time; results as JSON and as text."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastpath.bench import device as op_checks
from fastpath.bench import device_models, device_rates
from fastpath.bench.table import markdown
from fastpath.cuda import device, limits

SECONDS = 110.0


@dataclass
class Budget:
    """Time for all parts together; what did not fit is named.

    clock  seconds
    """

    seconds: float = SECONDS
    clock: Callable[[], float] = time.perf_counter
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.begin = self.clock()

    @property
    def used(self) -> float:
        return self.clock() - self.begin

    def allows(self, what: str, share: float) -> bool:
        """Is less than this share of the time used?  Otherwise `what` is skipped."""
        if self.used < share * self.seconds:
            return True
        self.skipped.append(what)
        return False


def run(budget: Budget) -> dict[str, Any]:
    """Everything; "ok" says whether all of it is right."""
    found: dict[str, Any] = {"device": device.describe(), "predicted_for": limits.H200.name}
    found["ceilings"] = _guarded("ceilings", device_rates.ceilings)
    found["launches"] = _guarded("launches", lambda: device_rates.launch_overhead(budget.clock))
    found["models"] = list(_models(budget))
    found["speed"] = list(_speeds(budget))
    found["ops"] = list(_ops(budget))
    found["skipped"] = budget.skipped
    found["seconds"] = round(budget.used, 1)
    found["ok"] = all(r["ok"] for r in [*found["ops"], *found["models"]]) and not _faults(found)
    return found


def _guarded(what: str, function: Callable[[], Any]) -> dict[str, Any]:
    """An exception of a compiler or a driver is a result: the other parts still run."""
    try:
        return function()
    except Exception as error:
        return {"what": what, "fault": f"{type(error).__name__}: {error}"[:300], "ok": False}


def _ops(budget: Budget) -> Iterator[dict[str, Any]]:
    for op, case, one in op_checks.checks():
        if budget.allows(f"{op} {case}".strip(), 1.0):
            yield one()


def _models(budget: Budget) -> Iterator[dict[str, Any]]:
    for name in device_models.SMALL:
        for recipe, activations in device_models.CASES:
            what = f"model {name}, {recipe}, {activations}"
            if budget.allows(what, 0.5):
                yield _guarded(what, lambda: device_models.model_parity(name, recipe, activations))  # noqa: B023  at once


def _speeds(budget: Budget) -> Iterator[dict[str, Any]]:
    for spec in device_models.SPEEDS:
        if budget.allows(f"speed {spec}", 0.6):
            code_of = getattr(device.real(), "code_of", None)
            yield _guarded(spec, lambda: device_models.speed(spec, budget.clock, code_of=code_of))  # noqa: B023


def _faults(found: dict[str, Any]) -> list[str]:
    parts = [found["ceilings"], found["launches"], *found["models"], *found["speed"]]
    return [f"{part.get('what', '')}: {part['fault']}" for part in parts if "fault" in part]


def text(found: dict[str, Any]) -> str:
    """For people."""
    n, bad = len(found["ops"]), sum(not r["ok"] for r in found["ops"])
    lines = [
        f"device      {found['device']}, {found['seconds']} s",
        f"ops         {n - bad} of {n} cases agree with their definitions",
        *map(_model_line, (model for model in found["models"] if "fault" not in model)),
        *(f"fault       {fault}" for fault in _faults(found)),
    ]
    if "copy" in (rates := found["ceilings"]):
        lines.append(
            f"ceilings    copy {rates['copy'] / 1e9:.0f} GB/s, dp4a {rates['dp4a'] / 1e12:.1f} TOP/s, "
            f"mma int8 {rates['mma_s8'] / 1e12:.0f} TOP/s, mma bf16 {rates['mma_bf16'] / 1e12:.0f} TFLOP/s"
        )
    if "launch" in (costs := found["launches"]):
        in_graph, in_turn = costs.get("graph"), costs.get("graph_in_turn", math.nan)
        graph = (
            f"no graph: {costs['graph_error']}"
            if in_graph is None
            else f"{1e6 * in_graph:.2f} us in a graph, {1e6 * in_turn:.2f} in turn"
        )
        assumed = f"predictions assume {1e6 * limits.H200.gap_s:.1f}"
        lines.append(f"a launch    {1e6 * costs['launch']:.2f} us alone, {graph} ({assumed})")
    if skipped := found["skipped"]:
        lines.append(f"skipped     {len(skipped)} for want of time: {', '.join(skipped[:8])}")
    for speed in found["speed"]:
        lines += ["", *_speed_lines(speed, found["ceilings"].get("copy"))]
    return "\n".join(lines)


def _model_line(model: dict[str, Any]) -> str:
    word = "agrees" if model["ok"] else "DIFFERS"
    what = f"{model['model']}, {model['recipe']}, {model['activations']}"
    return f"model       {what}: {word}, error {model['error']:.1e} of {model['limit']:.1e}"


def _speed_lines(speed: dict[str, Any], copy: float | None) -> list[str]:
    lines = []
    for name, value in speed.items():
        if name.startswith("kernels"):
            lines += [f"{speed['model']}, {name}", _kernel_table(value, copy), ""]
        elif isinstance(value, dict):
            lines.append(f"{speed['model']}, {name}: {value['tokens_per_s']:.1f} tokens/s")
    return lines


def _kernel_table(rows: list[dict[str, Any]], copy: float | None) -> str:
    head = ["kernel", "times", "us", "predicted us", "GB/s", "% of copy", "TFLOP/s"]
    cells = [
        [
            row["kernel"], str(row["times"]), f"{1e6 * row['seconds'] / row['times']:.2f}",
            f"{1e6 * row['predicted_s']:.2f}", f"{row['gb_s']:.0f}",
            "" if copy is None else f"{100e9 * row['gb_s'] / copy:.0f}", f"{row['tflop_s']:.2f}",
        ]
        for row in rows[:16]
    ]  # fmt: skip
    return markdown([head, *cells])
