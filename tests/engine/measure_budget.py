"""What the error budget is made from: `python -m tests.engine.measure_budget` prints measured values.

For every name and column the largest normalised error over the tiny models of all families (in float32, in
32-value and in 256-value blocks) and over the demo checkpoint, each divided by sqrt(1 + layer); then the
largest error of one row, in units of the name's limit. The table is that of docs/numerics.md.
"""

import math
import tempfile
from collections import defaultdict
from pathlib import Path

import refimpl.ops
from fastpath.backend import ops_for
from fastpath.error_budget import COLUMNS, TABLE, growth, split_name
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from fastpath.trace import TraceFile, compare, record
from tests import tiny
from tests.engine.conftest import FORMATS

TALK = "What is 47+38? And who are you?"


def traces(model, ids) -> list[tuple[str, TraceFile, TraceFile]]:
    """Columns, each with two traces that it is about."""

    def trace(ops, activations, kv_type="f16"):
        return TraceFile(record(Lanes(model, ops, activations=activations, kv_type=kv_type), ids))

    kernels = ops_for("cpu")
    exact, rounded = trace(refimpl.ops, "float", "f32"), trace(kernels, "int8")
    halves, brains = trace(kernels, "float"), trace(kernels, "float", "bf16")
    return [
        ("float", exact, trace(kernels, "float", "f32")),
        ("half", trace(refimpl.ops, "float"), halves),
        ("half", trace(refimpl.ops, "float", "bf16"), brains),
        ("half", exact, halves),
        ("int8", trace(refimpl.ops, "int8"), rounded),
        ("different", exact, rounded),
        ("different", exact, brains),
    ]


def measure(model, ids, worst) -> None:
    """worst[base name][column] = the largest error so far, in units of the growth with depth."""
    for column, a, b in traces(model, ids):
        for d in compare(a, b, column):
            base, at_layer_0 = split_name(d.name)[0], d.normalised / growth(d.name, model.config.n_layers)
            worst[base][column] = max(worst[base][column], at_layer_0)
            if d.limit and math.isfinite(d.limit):
                worst[base][f"row {column}"] = max(worst[base][f"row {column}"], d.row_error / d.limit)


def main() -> None:
    worst_tiny, worst_demo = defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float))
    with tempfile.TemporaryDirectory() as folder:
        for family in tiny.FAMILIES:
            ids = tiny.prompt(family) + tiny.prompt(family, seed=2)
            for size, formats in FORMATS.items():
                path = tiny.make(Path(folder) / "m.gguf", family, size=size, formats=formats)
                measure(load_model(path), ids, worst_tiny)
    if DEMO.exists():
        demo = load_model(DEMO)
        messages = [{"role": "user", "content": TALK}]
        measure(demo, demo.template.render_ids(demo.tokenizer, messages, thinking=True), worst_demo)
    print(
        "| name | "
        + " | ".join(f"{column}: tiny, demo" for column in COLUMNS)
        + " | worst row: "
        + ", ".join(COLUMNS)
        + " |"
    )
    print("|---|---|---|---|---|---|")
    for base in TABLE:
        if base in worst_tiny:
            cells = (f"{worst_tiny[base][c]:.1e}, {_cell(worst_demo, base, c)}" for c in COLUMNS)
            rows = (max(worst_tiny[base][f"row {c}"], worst_demo[base][f"row {c}"]) for c in COLUMNS)
            print(f"| `{base}` | {' | '.join(cells)} | {', '.join(f'{row:.2f}' for row in rows)} |")


def _cell(worst, base: str, column: str) -> str:
    return f"{worst[base][column]:.1e}" if column in worst[base] else "-"


if __name__ == "__main__":
    main()
