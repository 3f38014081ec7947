"""The rows of `make bench-peers`: which commands are compared, what they say, and what ours should reach."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]  # what one command said: figure -> value, and details of ours


@dataclass(frozen=True)
class Figure:
    """One figure of a row. floor: ours, in multiples of llama.cpp's, or of its reciprocal for costs."""

    name: str
    title: str
    floor: float
    unit: str = "tokens/s"
    is_cost: bool = False
    least_read: float = 0.0  # percent of a plain read; the page marks what is less


@dataclass(frozen=True)
class Row:
    name: str
    model: str  # SIZE:RECIPE
    figures: tuple[Figure, ...]
    peer: str  # the program, beside llama-bench
    peer_words: str  # its arguments, {m} is the file and {t} the number of threads
    our_words: str
    read_peer: Callable[[str, Run], Run]
    read_ours: Callable[[str, Run], Run]


def _speeds(out: str, _: Run) -> Run:
    """Of llama-bench's rows, and of ours: pp512, tg64 -> tokens/s."""
    rows = json.loads(out[out.index("[") :])
    found: Run = {}
    for r in rows:
        n_seqs = r.get("n_seqs", 1)
        name = f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}" + f"x{n_seqs}" * (n_seqs > 1)
        found[name] = r["avg_ts"]
        if "read_percent" in r:
            kept = ("read_gb_s", "plain_read_gb_s", "read_percent", "tops", "peak_tops", "peak_percent")
            found.setdefault("details", {})[name] = {key: r[key] for key in kept}
            found |= {key: r[key] for key in ("backends", "load_s", "private_bytes", "cpu_info")}
        else:
            found["build"] = r["build_commit"]
    return found


def _batched(out: str, _: Run) -> Run:
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {f"tg{r['tg']}x{r['pl']}": r["speed_tg"] for r in rows}


def _start(_: str, usage: Run) -> Run:
    return {"start": usage["seconds"], "peak": usage["peak_bytes"] / 1e9}


BENCH = "llama-bench", "-m {m} -t {t} -r 1 -o json"
LEAST_READ = 85.0  # of decoding one sequence, which is reading
OURS = "bench -m {m} --threads {t} -r 1 --json"


def _bench(name: str, model: str, prompt: tuple[int, float], gen: tuple[int, float], depth: int = 0) -> Row:
    """A row of llama-bench: (tokens, floor) of a prompt, of an answer; 0 tokens: without."""
    titles = ((prompt, "pp", "prefill"), (gen, "tg", "decode"))
    at = f" at depth {depth}" if depth else ""
    figures = tuple(
        Figure(f"{short}{n}", f"{title} {n}{at}", floor, least_read=LEAST_READ if short == "tg" else 0.0)
        for (n, floor), short, title in titles
        if n
    )
    tests = f" -p {prompt[0]} -n {gen[0]}" + (f" -d {depth}" if depth else "")
    return Row(name, model, figures, BENCH[0], BENCH[1] + tests, OURS + tests, _speeds, _speeds)


ROWS = (
    _bench("e2b-q4_0", "E2B:Q4_0", (512, 2.5), (64, 1.35)),
    _bench("e2b-q8_0", "E2B:Q8_0", (512, 2.5), (64, 1.2)),
    _bench("e2b-q4_k_m", "E2B:Q4_K_M", (512, 3.0), (64, 2.0)),
    _bench("e2b-q4_0-long", "E2B:Q4_0", (2048, 2.5), (0, 0)),
    _bench("e2b-q4_0-deep", "E2B:Q4_0", (0, 0), (64, 1.6), depth=4096),
    Row(
        "e2b-q4_0-rows", "E2B:Q4_0",
        tuple(Figure(f"tg64x{n}", f"decode 64, {n} rows in one call", 2.0) for n in (4, 8)),
        "llama-batched-bench", "-m {m} -t {t} -c 1024 -npp 16 -ntg 64 -npl 4,8 --output-format jsonl",
        OURS + " -p 0 -n 64 -d 16 --batch 4,8", _batched, _speeds,
    ),
    Row(
        "e2b-q4_0-start", "E2B:Q4_0",
        (Figure("start", "one token from process start", 1.0, "s", is_cost=True),
         Figure("peak", "peak memory of that", 1.0, "GB", is_cost=True)),
        "llama-completion", "-m {m} -t {t} -p Hello -n 1 -no-cnv --no-warmup",
        "--model {m} --threads {t} --prompt Hello --raw --max-tokens 1", _start, _start,
    ),
    _bench("e4b-q4_0", "E4B:Q4_0", (512, 2.5), (64, 1.3)),
    _bench("e4b-q8_0", "E4B:Q8_0", (512, 2.2), (64, 1.1)),
    _bench("e4b-q4_k_m", "E4B:Q4_K_M", (512, 3.0), (64, 2.0)),
    _bench("26b-q4_k_m", "26B-A4B:Q4_K_M", (512, 2.5), (64, 2.0)),
)  # fmt: skip
