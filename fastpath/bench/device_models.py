"""Whole models on a device: the same logits as the definitions, and how fast.  For `device-check`.

Small models of every family have random weights.  Those whose speed is measured have a published size's
shapes and types; their weights are made on the device, where they look like numbers of a usual size.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from fastpath import error_budget
from fastpath.backend import ops_for
from fastpath.bench import sizes
from fastpath.bench.blank import Blank, assembled, blank
from fastpath.cuda import device, layout, limits, ops, probe
from fastpath.cuda.footprint import plane_sizes
from fastpath.cuda.program import record
from fastpath.cuda.rehearsal import Call
from fastpath.lanes import Lanes
from fastpath.model.text import forward
from quant import QTensor
from refimpl.batch import Batch, make_batch

SMALL = {
    "per-layer embeddings, shared keys": sizes.Size(
        "small-E", 4, 2, D=256, N=4, K_swa=1, K=1, F=512, window=64, context=4096, n_shared=2,
        double_wide=True, P=32,
    ),
    "dense, k = v": sizes.Size(
        "small-dense", 4, 2, D=288, N=4, K_swa=2, K=1, F=320, window=64, context=4096, k_is_v=True
    ),
    "experts": sizes.Size(
        "small-MoE", 2, 2, D=256, N=4, K_swa=2, K=1, F=160, window=64, context=4096, k_is_v=True, E=8, A=2,
        F_expert=96,
    ),
}  # fmt: skip
CASES = (("Q8_0", "int8"), ("Q4_K_M", "int8"), ("Q4_K_M", "float"))
VOCABULARY = 512
# Of fastpath/error_budget.py, where the limits are, with their reasons.  Keys and values are float16 on both
# sides.  Integer products have the definition's bits (device.py holds them to it), so that what the column
# int8 allows comes from float32 sums before them, whose last bits send some activations to the other side of
# a rounding.
COLUMN = {"float": "half", "int8": "int8"}
SPEEDS = ("E4B:Q8_0", "26B-A4B:Q4_K_M", "E2B:Q4_0")


def small_model(size: sizes.Size, recipe: str, seed: int = 0) -> Blank:
    rng = np.random.default_rng(seed)

    def matrix(fmt, shape, name):
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return QTensor.from_array(values, fmt, name)

    return assembled(size, recipe, matrix, VOCABULARY)


def model_parity(
    name: str, recipe: str, activations: str, *, n_prompt: int = 75, chunk: int = 40, n_new: int = 4
) -> dict[str, Any]:
    """Logits of two sequences on the device, against the definitions fed with the same greedy tokens."""
    model = small_model(SMALL[name], recipe)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, n_prompt).tolist()
    prompts, results = (ids, ids[: n_prompt // 2]), []
    tokens: list[list[int]] = [[], []]
    for table in (ops, ops_for("ref")):
        options: dict[str, Any] = {"n_seqs": 2, "page": 32, "activations": activations}
        lanes = Lanes(model, table, context_len=2 * n_prompt, chunk=chunk, **options)
        rows = [_prefill(lanes, prompt, lane) for lane, prompt in enumerate(prompts)]
        results.append([rows])
        for step in range(n_new - 1):
            if table is ops:
                for lane, row in enumerate(rows):
                    tokens[lane].append(int(row.argmax()))
            rows = list(_step(lanes, [len(p) + step for p in prompts], [t[step] for t in tokens]))
            results[-1].append(rows)
    got, want = (np.array(rows, np.float64) for rows in results)
    return {
        "model": name, "recipe": recipe, "activations": activations,
        **_agreement(got, want, COLUMN[activations], model.config.n_layers),
    }  # fmt: skip


def _agreement(got, want, column: str, n_layers: int) -> dict[str, Any]:
    """Logits of all rows, and of the worst one, against their limits; f64[..., V]."""
    of_rows, size = np.sqrt(np.mean((got - want) ** 2, axis=-1)), np.sqrt(np.mean(want**2))
    error, worst = float(np.sqrt(np.mean(of_rows**2)) / size), float(of_rows.max() / size)
    limit, of_row = (
        find("result_output", column, n_layers) or 0.0
        for find in (error_budget.limit_of, error_budget.row_limit_of)
    )
    return {
        "ok": error <= limit and worst <= of_row,
        "error": error, "limit": limit, "row_error": worst, "row_limit": of_row,
    }  # fmt: skip


def _prefill(lanes: Lanes, ids: list[int], lane: int, chunk: int | None = None):
    row = None
    for first in range(0, len(ids), chunk or lanes.chunk):
        row = lanes.forward(make_batch([(lane, first, ids[first : first + (chunk or lanes.chunk)], "last")]))[
            0
        ]
    return row


def _step(lanes: Lanes, positions: list[int], ids: list[int]):
    """One more token of every lane."""
    return lanes.forward(_one_each(positions, ids))


def _one_each(positions: list[int], ids: list[int]) -> Batch:
    pieces = enumerate(zip(positions, ids, strict=True))
    return make_batch([(lane, p, [token], "last") for lane, (p, token) in pieces])


def on_device(model: Blank) -> Blank:
    """The same model with weights made there."""
    known: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, QTensor):
            if id(value) not in known:
                known[id(value)] = made_up(value)
            return known[id(value)]
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if not is_dataclass(value) or isinstance(value, type):
            return value
        return replace(value, **{each.name: of(getattr(value, each.name)) for each in fields(value)})

    return replace(model, weights=of(model.weights))


# masks and ones of 32 bits: scales about 0.01 as float16, numbers about 0.03 as float32 and bfloat16
BITS = {
    "any": (-1, 0), "f16": (0x03FF03FF, 0x20002000), "f32": (-2139095041, 0x3D000000),
    "bf16": (-2139127681, 0x3D003D00), "f16 numbers": (-2080144897, 0x28002800), "e": (0, 0x3C003C00),
}  # fmt: skip


def made_up(weight: QTensor) -> layout.DeviceMatrix:
    name = weight.format.name if weight.format.name in layout.CODINGS else "F32"
    coding, planes = layout.CODINGS[name], []
    low = {"f32": "f32", "f16": "f16 numbers", "bf16": "bf16"}.get(coding.scales, "any")
    sub = "any" if coding.is_256 else "e" if coding.scales == "e" else "f16"
    dtypes = (np.int32, np.int32, np.uint16, np.uint16)
    for n, dtype, bits in zip(
        plane_sizes(coding, weight.shape), dtypes, (low, "any", sub, "f16"), strict=True
    ):
        memory = device.real().memory(-(-n * np.dtype(dtype).itemsize // 4) * 4)
        words = memory.view(np.int32)
        mask, ones = BITS[bits]
        device.real().launch(
            probe.FILL,
            min(4096, -(-len(words) // probe.THREADS)),
            probe.THREADS,
            np.int32(mask),
            np.int32(ones),
            words,
        )
        planes.append(memory.view(dtype)[:n])
    low_plane, high, of_blocks, of_256 = planes
    return layout.DeviceMatrix(name, weight.shape, low_plane, high, of_blocks, of_256, weight.name)


def speed(
    spec: str,
    clock: Callable[[], float],
    *,
    model: Blank | None = None,
    n_prompt: int = 512,
    depth: int = 1024,
    n_new: int = 32,
    rows: tuple[int, ...] = (1, 8),
    code_of: limits.CodeOf | None = None,
) -> dict[str, Any]:
    """Tokens per second of a prompt and of greedy steps behind `depth` others; seconds of their kernels."""
    shape = blank(spec) if model is None else model
    model = on_device(shape)
    end = depth + n_new + 2
    lanes = Lanes(model, ops, context_len=max(end, n_prompt), chunk=n_prompt, n_seqs=max(rows))
    found: dict[str, Any] = {"model": spec}
    V = model.config.vocab_size
    ids = np.random.default_rng(0).integers(0, V, max(depth, n_prompt)).tolist()
    _prefill(lanes, ids[:n_prompt], 0, n_prompt)
    begin = clock()
    _prefill(lanes, ids[:n_prompt], 0, n_prompt)
    found["prefill"] = {"tokens": n_prompt, "tokens_per_s": n_prompt / (clock() - begin)}
    for lane in range(max(rows)):
        _prefill(lanes, ids[:depth], lane, n_prompt)
    for n in rows:
        lanes.largest(_one_each([depth] * n, ids[:n]), 1)  # records the program, as an engine does
        begin = clock()
        for i in range(n_new):
            lanes.largest(_one_each([depth + 1 + i] * n, ids[i : i + n]), 1)
        taken = (clock() - begin) / n_new
        found[f"decode of {n}"] = {"tokens_per_s": n / taken, "ms": 1e3 * taken}
        found[f"kernels of {n}"] = kernel_times(model, lanes, shape, Call(1, n, depth), code_of)
    return found


def kernel_times(
    model, lanes: Lanes, shape: Blank, call: Call, code_of: limits.CodeOf | None
) -> list[dict[str, Any]]:
    """[{kernel, times, seconds, bytes, ...}] of a step, with what was predicted where that is known."""
    batch = make_batch([(lane, call.depth, [1], "last") for lane in range(call.n_seqs)])
    with record() as program:
        forward(ops, model.config, model.weights, lanes.cache, batch)
    timings = [t.seconds for t in program.timed()[1:]]
    step = limits.predict_step(shape, call, code_of or _no_code, lambda kernel, tokens: 0.0)
    if len(step.predictions) != len(timings):
        raise ValueError(
            f"{len(timings)} launches were timed, {len(step.predictions)} predicted. Both come from fuse.py: "
            "their order must be the same"
        )
    groups: dict[tuple, dict[str, Any]] = {}
    for p, seconds in zip(step.predictions, timings, strict=True):
        row = groups.setdefault((p.name, p.memory_bytes), {"kernel": p.name, "times": 0, "seconds": 0.0,
            "bytes": p.memory_bytes, "ops": p.ops, "predicted_s": p.seconds, "limit": p.limit})  # fmt: skip
        row["times"] += 1
        row["seconds"] += seconds
    for row in groups.values():
        each = max(row["seconds"] / row["times"], 1e-9)
        row |= {"gb_s": row["bytes"] / each / 1e9, "tflop_s": row["ops"] / each / 1e12}
    return sorted(groups.values(), key=lambda row: -row["seconds"])


def _no_code(_kernel: Any) -> limits.Code:
    """Where nobody says what a kernel takes: four blocks of 256 threads."""
    return limits.Code(64, 16 << 10)
