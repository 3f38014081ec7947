"""What `bench` prints: rows with llama-bench's field names, and a table of them for people."""

import datetime
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpath.bench.measure import Result, spread
from fastpath.bench.table import markdown

GB = 1e9


@dataclass(frozen=True)
class Setting:
    """What all rows of one run share."""

    model: Any
    model_size: int
    n_params: int
    kernels: str  # machine.describe()
    n_threads: int
    n_batch: int
    kv_types: tuple[str, str]
    is_packed: bool
    load_s: float
    read_gb_s: float  # plain read of the weights' memory, the best pass of the run
    peak_tops: float  # int8 dot products from registers
    own_bytes: int | None
    peak_bytes: int
    n_parity_cases: int


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def row(setting: Setting, result: Result) -> dict[str, Any]:
    """One result. Fields up to samples_ts are llama-bench's; the others say what was reached of what could
    be: bytes and operations of one repetition, counted from the tensors that were read."""
    test, samples_ns, samples_ts = result.test, result.samples_ns, result.samples_ts
    avg_ns, stddev_ns = spread(samples_ns)
    avg_ts, stddev_ts = spread(samples_ts)
    seconds = statistics.median(samples_ns) / 1e9
    traffic = result.traffic
    read_gb_s = traffic.nbytes / seconds / GB
    tops = traffic.n_ops / seconds / 1e12
    config = setting.model.config
    return {
        "cpu_info": cpu_name(),
        "backends": f"CPU, {setting.kernels}",
        "model_filename": str(setting.model.path),
        "model_type": config.name,
        "model_size": setting.model_size,
        "model_n_params": setting.n_params,
        "n_batch": setting.n_batch,
        "n_threads": setting.n_threads,
        "type_k": setting.kv_types[0],
        "type_v": setting.kv_types[1],
        "repack": setting.is_packed,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(avg_ns),
        "stddev_ns": round(stddev_ns),
        "avg_ts": avg_ts,
        "stddev_ts": stddev_ts,
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
        "n_seqs": test.n_seqs,
        "weight_bytes": traffic.weight_bytes,
        "kv_bytes": traffic.kv_bytes,
        "n_ops": traffic.n_ops,
        "read_gb_s": read_gb_s,
        "plain_read_gb_s": setting.read_gb_s,
        "read_percent": 100 * read_gb_s / setting.read_gb_s,
        "tops": tops,
        "peak_tops": setting.peak_tops,
        "peak_percent": 100 * tops / setting.peak_tops,
        "load_s": setting.load_s,
        "private_bytes": setting.own_bytes,
        "peak_bytes": setting.peak_bytes,
        "parity_cases": setting.n_parity_cases,
    }


COLUMNS = ("test", "t/s", "GB/s", "% of read", "TOPS", "% of peak", "MB a call")


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """A markdown table, one line a row."""
    cells = [list(COLUMNS)]
    for name, r in zip(names, rows, strict=True):
        n_calls = 1 if r["n_prompt"] else r["n_gen"]
        cells.append([
            name,
            f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
            f"{r['read_gb_s']:.1f}",
            f"{r['read_percent']:.0f}",
            f"{r['tops']:.2f}",
            f"{r['peak_percent']:.0f}",
            f"{(r['weight_bytes'] + r['kv_bytes']) / n_calls / 1e6:.1f}",
        ])  # fmt: skip
    return markdown(cells)


def head(s: Setting) -> str:
    """Machine, model and memory, in lines."""
    own = "" if s.own_bytes is None else f"{s.own_bytes / 1e6:.0f} MB private, "
    packed = "packed" if s.is_packed else "as in the file"
    return "\n".join((
        f"machine  {cpu_name()}, {os.cpu_count()} CPUs; kernels {s.kernels}",
        f"rates    plain read of the weights {s.read_gb_s:.1f} GB/s, int8 products {s.peak_tops:.2f} TOPS",
        f"model    {s.model.config.name or s.model.path.name}, {s.model_size / 1e6:.1f} MB, "
        f"{s.n_params / 1e6:.1f} M weights, {packed}, cache {s.kv_types[0]}, {s.kv_types[1]}",
        f"memory   {own}peak {s.peak_bytes / 1e6:.0f} MB; load {s.load_s:.2f} s; "
        f"parity of {s.n_parity_cases} cases is green",
    ))  # fmt: skip
