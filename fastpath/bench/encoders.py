"""The measurements of `bench --image` and `--audio`: how long encoders take, and of how many operations.

From pixels of the right size, or samples of 16 kHz, to soft tokens; nothing is read from a file and nothing
is kept.  Both are of one kind each: a smooth picture with noise, and a sound with all frequencies.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastpath.backend import ops_for
from fastpath.bench import parity, rates, report
from fastpath.bench.table import markdown
from fastpath.model.audio import encode_audio
from fastpath.model.vision import encode_image
from refimpl.frontend.audio import SAMPLE_RATE
from refimpl.frontend.image import fit
from refimpl.media_tensors import Media, load_media

DEFAULT = "E2B:F16"  # the synthetic file that is measured when none is named


class Counted:
    """An op table that notes the time of each op, and the multiplications and additions of products."""

    def __init__(self, ops: Any):
        self._ops = ops
        self.ns: Counter[str] = Counter()
        self.n_ops: Counter[str] = Counter()

    def __getattr__(self, op: str) -> Callable[..., Any]:
        function = getattr(self._ops, op)

        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            result = function(*args, **options)
            name = op
            if op == "linear":
                M, C = args[1].shape
                name = f"linear {M} x {C} {args[1].format.name}"
                self.n_ops[name] += 2 * len(args[0]) * M * C
            elif op == "attention":  # every query sees every key
                T, N, H = args[0].shape
                self.n_ops[op] += 4 * T * T * N * H
            elif op == "conv2d":
                self.n_ops[op] += 2 * result.size * args[1][0].size
            self.ns[name] += time.perf_counter_ns() - begin
            return result

        return call


@dataclass(frozen=True)
class Encoding:
    """One test: its name, how many soft tokens it gives, and a call over an op table."""

    name: str
    n_tokens: int
    call: Callable[[Any], np.ndarray]


def picture(n_tokens: int) -> np.ndarray:
    """u8[h, w, 3]: a canvas of about that many soft tokens, 10 : 7, which makes 280 of a budget of 280."""
    y, x = np.mgrid[:896, :1280]
    smooth = np.stack([x % 256, y % 256, (x * y // 1000) % 256], -1)
    noise = np.random.default_rng(0).integers(0, 64, smooth.shape)
    return fit(((3 * smooth + noise) // 4).astype(np.uint8), n_tokens)


def sound(seconds: float) -> np.ndarray:
    """f32[n]: a tone that rises from 100 Hz to 4 kHz, and noise."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tone = np.sin(2 * np.pi * (100 * t + 1950 * t * t / max(seconds, 1e-9)))
    return (0.4 * tone + 0.05 * np.random.default_rng(0).standard_normal(len(t))).astype(np.float32)


def _encode(encode, config, weights, x, ops):
    return encode(ops, config, weights, x)


def tests(media: Media, n_tokens: list[int], seconds: list[float]) -> list[Encoding]:
    found = []
    for n in n_tokens:
        vision, weights = media.need_vision()
        canvas = picture(n)
        count = canvas.shape[0] * canvas.shape[1] // (vision.patch * vision.pool) ** 2
        found.append(
            Encoding(f"image of {count}", count, partial(_encode, encode_image, vision, weights, canvas))
        )
    for s in seconds:
        audio, weights = media.need_audio()
        samples = sound(s)
        count = len(encode_audio(ops_for("cpu"), audio, weights, samples))
        found.append(
            Encoding(f"audio of {s:g} s", count, partial(_encode, encode_audio, audio, weights, samples))
        )
    return found


def run(
    path: Path, n_tokens: list[int], seconds: list[float], repetitions: int, *, profile: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Rows, and the same as text; ParityError where a kernel is wrong."""
    from fastpath.cpu import machine, threads

    media, ops = load_media(path), ops_for("cpu")
    vision, audio = media.need_vision() if n_tokens else None, media.need_audio() if seconds else None
    n_cases = parity.check_encoders(ops, vision, audio)
    rows, parts, peak = [], [], rates.fma_ops_per_s()
    for test in tests(media, n_tokens, seconds):
        counted = Counted(ops)
        test.call(ops)  # compiles, and reads the weights from the disk
        test.call(counted)
        samples = []
        for _ in range(repetitions):
            begin = time.perf_counter_ns()
            test.call(ops)
            samples.append(time.perf_counter_ns() - begin)
        n_ops, median = sum(counted.n_ops.values()), statistics.median(samples)
        rows.append({
            "cpu_info": report.cpu_name(), "backends": f"CPU, {machine.describe()}",
            "model_filename": str(path), "n_threads": threads.num_threads(), "test": test.name,
            "n_tokens": test.n_tokens, "samples_ns": samples, "median_ns": median,
            "tokens_per_s": 1e9 * test.n_tokens / median, "n_ops": n_ops,
            "peak_gflops": peak / 1e9, "peak_percent": 100 * n_ops / median * 1e9 / peak,
            "parity_cases": n_cases,
        })  # fmt: skip
        if profile:
            parts.append(f"\n\n{test.name}, by op\n\n{_by_op(counted)}")
    head = f"machine  {report.cpu_name()}; kernels {machine.describe()}; fma {peak / 1e9:.0f} GFLOP/s\n"
    head += (
        f"encoders {path.name}, {path.stat().st_size / 1e6:.1f} MB; parity of {n_cases} cases is green\n\n"
    )
    return rows, head + _table(rows) + "".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [["test", "ms", "soft tokens/s", "GFLOP", "GFLOP/s", "% of fma"]]
    cells += (
        [
            r["test"],
            f"{r['median_ns'] / 1e6:.0f}",
            f"{r['tokens_per_s']:.1f}",
            f"{r['n_ops'] / 1e9:.0f}",
            f"{r['n_ops'] / r['median_ns']:.0f}",
            f"{r['peak_percent']:.0f}",
        ]
        for r in rows
    )
    return markdown(cells)


def _by_op(counted: Counted) -> str:
    cells = [["op", "ms", "GFLOP/s"]]
    for name, ns in counted.ns.most_common():
        n_ops = counted.n_ops[name]
        cells.append([name, f"{ns / 1e6:.1f}", f"{n_ops / ns:.0f}" if n_ops else ""])
    return markdown(cells)
