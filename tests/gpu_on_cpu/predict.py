"""The page of predictions: what each kernel should take on a card that nobody here has.

    python -m tests.gpu_on_cpu.predict           prints it
    python -m tests.gpu_on_cpu.predict --write   puts it into docs/gpu.md

The model is fastpath/cuda/limits.py.  Registers and shared memory come from the assembler, of kernels as they
start early, launches from calls on arrays without memory (fastpath/cuda/rehearsal.py).  Instructions are
those of PTX that executor two counts, times how many the assembler makes of one: in the loops of a product,
which its steps are; in all of attention.  One part of a loop may grow more than another.
"""

import functools
import re
import sys
from pathlib import Path

import numpy as np

from fastpath.bench.blank import blank
from fastpath.bench.table import markdown
from fastpath.cuda import (
    attention,
    device,
    early,
    layout,
    limits,
    linear,
    linear_some,
    many_places,
    quantize,
)
from fastpath.cuda.rehearsal import Call
from quant import FORMATS, QTensor
from tests.gpu_on_cpu import sass
from tests.gpu_on_cpu.traffic import Profiler

PAGE = Path(__file__).parents[2] / "docs/gpu.md"
BEGIN, END = "<!-- predictions: written by tests.gpu_on_cpu.predict -->", "<!-- end of predictions -->"
MODELS = ("E4B:Q8_0", "26B-A4B:Q4_K_M")
DEPTH = 1024
CALLS = {
    "1 row": Call(1, 1, DEPTH), "8 rows": Call(1, 8, DEPTH), "prefill of 512": Call(512),
}  # fmt: skip
ARCHITECTURE = (9, 0)
LEAST_SHARE = 0.005  # of a step's time, for a line of its own


@functools.cache
def code_of(kernel) -> limits.Code:
    made = sass.code(early.kernel_of(kernel), ARCHITECTURE)
    return limits.Code(made.registers, made.shared)


@functools.cache
def issued(kernel: str, tokens: int) -> float:
    """Instructions of all warps for a step: 16 more steps, divided.  Of attention: for a piece."""
    if kernel.startswith("attention"):
        one, two = (_count_attention(kernel, tokens, n * attention.PIECE) for n in (1, 2))
        return two - one
    kind, _, coding = kernel.partition("_")
    name = next(name for name in layout.CODINGS if name.lower() == coding)
    few, many = (_count(kernel, kind, name, tokens, steps) for steps in (16, 32))
    return (many - few) / 16 / (_rows(kind) // layout.ROWS)


def _rows(kind):
    """Of a block of 'many', or of a warp."""
    return {"many": many_places.MANY_ROWS, "some": linear_some.ROWS_OF_WARP}.get(kind, layout.ROWS)


def _count(kernel, kind, name, tokens, steps):
    rows = _rows(kind)
    rng = np.random.default_rng(0)
    columns = steps * layout.COLUMNS
    weight = QTensor.from_array(rng.standard_normal((rows, columns), np.float32), FORMATS[name])
    x = rng.standard_normal((tokens, columns), np.float32)
    with device.use(Profiler(log=False)) as profiler:
        matrix = layout.device_matrix(weight)
        if kind == "linear":  # of an expert, however many tokens it has
            rounded = quantize.round_activations(x, 256 if matrix.coding.is_256 else 32)
            linear.multiply_few(matrix, rounded, np.zeros((tokens, rows), np.float32))
        else:
            linear.linear(x, matrix, "float" if kind == "float" else "int8")
    return profiler.issued[kernel] * _code(profiler.kernels[kernel]).growth_of_loops


def _count_attention(kernel, H, n_positions):
    """One head of keys and values, as many positions."""
    rng = np.random.default_rng(0)
    pages = tuple(
        np.zeros((1, 1, n_positions // 32, *rest), np.float16) for rest in ((H, 32), (H // 32, 32, 32))
    )
    heads, _ = attention.shape_of(attention.part_kernel("f16", "f16"), H)
    q, last = rng.standard_normal((1, heads, H), np.float32), np.array([n_positions - 1], np.int32)
    zero = np.zeros(1, np.int32)
    with device.use(Profiler(log=False)) as profiler:
        attention.attention(q, *pages, zero[None], zero, last, None)
    return profiler.issued[kernel] * _code(profiler.kernels[kernel]).growth


@functools.cache
def _code(kernel):
    return sass.code(kernel, ARCHITECTURE)


def page() -> str:
    steps = {}
    for spec in MODELS:
        for name, call in CALLS.items():
            if call.n_rows > limits.MOST_FUSED:
                steps[spec, name + ", not fused"] = step_of(spec, call, fused=False)
                continue
            steps[spec, name] = step_of(spec, call)
            steps[spec, name + ", nothing asked for ahead"] = step_of(spec, call, asks=False)
            late = {"card": limits.LATE, "asks": False}
            steps[spec, name + ", kernels start late"] = step_of(spec, call, **late)
            steps[spec, name + ", late, not fused"] = step_of(spec, call, fused=False, **late)
    parts = [_summary(steps)]
    for (spec, name), step in steps.items():
        if "late" not in name and "ahead" not in name:
            parts += [f"#### {spec.replace(':', ' ')}, {name}", _kernels(step)]
    return "\n\n".join(parts)


def step_of(spec, call, **how):
    return limits.predict_step(blank(spec), call, code_of, issued, **how)


def _summary(steps) -> str:
    head = ["model", "call", "launches", "GB", "roofline ms", "predicted ms", "share %", "tokens/s"]
    lines = [
        [
            spec.replace(":", " "), name, str(len(step.predictions)),
            f"{step.memory_bytes / 1e9:.2f}", f"{1e3 * step.roofline_s():.2f}", f"{1e3 * step.seconds:.2f}",
            f"{100 * step.share():.0f}", f"{step.tokens_per_s:.0f}",
        ]
        for (spec, name), step in steps.items()
    ]  # fmt: skip
    return markdown([head, *lines], 2)


def _kernels(step) -> str:
    groups: dict[tuple, list] = {}
    for p in step.predictions:
        groups.setdefault((title(p.name), p.memory_bytes, p.ops), []).append(p)
    head = "kernel limit times MB early-MB Mop registers shared warps waves in-flight-MB us ms-in-all".split()
    lines, rest, n_rest = [], 0.0, 0
    for (name, _, _), found in sorted(groups.items(), key=lambda item: -sum(p.seconds for p in item[1])):
        p, total = found[0], sum(p.seconds for p in found)
        early, us = (sum(getattr(p, name) for p in found) / len(found) for name in ("early_bytes", "seconds"))
        if total < LEAST_SHARE * step.seconds:
            rest, n_rest = rest + total, n_rest + len(found)
            continue
        lines.append([
            name, p.limit, str(len(found)), f"{(p.memory_bytes + p.cache_bytes) / 1e6:.2f}",
            f"{early / 1e6:.2f}", f"{p.ops / 1e6:.1f}", str(p.registers), str(p.shared), str(p.warps),
            f"{p.waves:.2f}", f"{p.in_flight / 1e6:.2f}", f"{1e6 * us:.2f}", f"{1e3 * total:.3f}",
        ])  # fmt: skip
    lines.append(["others", "", str(n_rest), *[""] * 9, f"{1e3 * rest:.3f}"])
    return markdown([[word.replace("-", " ") for word in head], *lines], 2)


def title(name: str) -> str:
    """Without the digest of a fused kernel."""
    return re.sub(r"(^fused_.*)_[0-9a-f]{6}$", r"\1", name)


def between_markers(text: str) -> str:
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    made = page()
    if "--write" not in sys.argv:
        print(made)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
