"""The table of `make bench-peers` as text, from its results."""

import statistics
from collections.abc import Iterable

from fastpath.bench import sizes
from fastpath.bench.peers_rows import ROWS, Figure, Row, Run
from fastpath.bench.table import markdown

SANE_READ = 102.0  # percent: nobody reads faster than a plain read; above, noise slowed the plain read
HEAD = ("file", "what", "llama.cpp", "ours", "ratio", "at least", "", "% of plain read", "% of int8 peak")


def page(results: Run) -> str:
    lines: list[list[str]] = [list(HEAD)]
    commands: list[str] = []
    for row in ROWS:
        kept = results["rows"].get(row.name, {})
        pairs = kept.get("pairs")
        if not pairs:
            continue
        lines += [_line(row, figure, pairs) for figure in row.figures]
        commands += [f"{row.name}", *(f"    {kept['commands'][who]}" for who in ("llama.cpp", "ours"))]
    missing = [f"- {name}: {kept['missing']}" for name, kept in results["rows"].items() if "missing" in kept]
    table = [_machine(results), "", markdown(lines, n_texts=2), "", *missing]
    return "\n".join(["", *table, "", "Commands:", "", "```", *commands, "```", ""])


def _line(row: Row, figure: Figure, pairs: list[Run]) -> list[str]:
    theirs, ours = (
        statistics.median(pair[who][figure.name] for pair in pairs) for who in ("llama.cpp", "ours")
    )
    ratio = theirs / ours if figure.is_cost else ours / theirs
    details = [pair["ours"].get("details", {}).get(figure.name) for pair in pairs]
    percents = ["", ""]
    if all(details):
        peak = statistics.median(d["peak_percent"] for d in details)
        percents = [_percent_of_read(figure, pairs), f"{peak:.0f}"]
    size, recipe = sizes.parse(row.model)
    speeds = [f"{theirs:.2f}", f"{ours:.2f}", f"{ratio:.2f}", f"{figure.floor:g}"]
    verdict = "" if ratio >= figure.floor else "missed"
    return [f"{size.name} {recipe}", f"{figure.title}, {figure.unit}", *speeds, verdict, *percents]


def _percent_of_read(figure: Figure, pairs: list[Run]) -> str:
    """Median over the pairs whose plain read is one: no test of them was faster.

    A run that the machine disturbed while it read plainly has a yardstick that is too short for all of its
    tests, so that none of its percentages counts; its speeds do, they are not measured by it.
    """
    details = [pair["ours"]["details"] for pair in pairs]
    sane = [d for d in details if max(test["read_percent"] for test in d.values()) <= SANE_READ]
    if not sane:
        return ""
    percent = statistics.median(d[figure.name]["read_percent"] for d in sane)
    return f"{percent:.0f}" + (f" (below {figure.least_read:.0f})" if percent < figure.least_read else "")


def _machine(results: Run) -> str:
    """Of the latest run; rows keep the commits and kernels that they were measured with: all are named."""
    m = results.get("machine")
    if not m:
        return ""
    pairs = [pair for row in results["rows"].values() for pair in row.get("pairs", ())]
    counts = sorted({len(row["pairs"]) for row in results["rows"].values() if row.get("pairs")})
    kernels = _every(pair["ours"].get("backends") for pair in pairs)
    builds = _every(pair["llama.cpp"].get("build") for pair in pairs) or "unknown"
    commits = _every(pair["commit"] for pair in pairs)
    return (
        f"Medians of {' to '.join(map(str, counts[:1] + counts[1:][-1:]))} runs in turn, {m['date']}. "
        f"{m['cpu']}, {m['n_cpus']} CPUs, {m['memory_gb']:.0f} GB, {m['threads']} threads; ours: {kernels}, "
        f"commit {commits}, Python {m['python']}, Numba {m['numba']}; llama.cpp: build {builds}."
    )


def _every(values: Iterable[str | None]) -> str:
    """Each of them once, in the order of the rows."""
    return " and ".join(dict.fromkeys(value for value in values if value))
