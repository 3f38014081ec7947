"""What `--stats` prints: times, rates, bytes."""

import re
import resource
import sys
from pathlib import Path

from fastpath.cli.parts import Parts, process_seconds
from fastpath.cli.setup import say

MB = 1e6


def print_stats(args, lanes, generation, parts: Parts, n_compiled: int, files=None) -> None:
    """To standard error, so that the answer can be piped away from it."""
    model = lanes.model
    n_prompt = generation.n_prefilled
    say(f"load     {_parts(parts, generation)}")
    say(f"backend  {args.backend}: {args.backend_choice.reason}")
    say(f"kernels  {_kernels(args, n_compiled)}")
    say(f"weights  {model.file.nbytes / MB:.1f} MB file{_packed(model)}")
    for line in files.lines if files else ():
        say(f"media    {line}")
    say(f"prefill  {_rate(n_prompt, generation.prefill_s)}")
    say(f"decode   {_rate(generation.n_decoded, generation.decode_s)}, ended by: {generation.reason}")
    say(
        f"cache    {lanes.cache_bytes / MB:.1f} MB for {n_prompt + generation.n_decoded} tokens, "
        f"{lanes.max_cache_bytes / MB:.1f} MB at most (context {lanes.context_len})"
    )
    say(f"memory   {memory_line()}")


def _parts(parts: Parts, generation) -> str:
    """Each part of the time up to the first token; the rest is what no part covers."""
    seconds = dict(parts.seconds)
    total, after = process_seconds(), generation.prefill_s + generation.decode_s
    if total is not None:
        before = sum(seconds.values())
        seconds = {"interpreter": max(0.0, total - after - before)} | seconds
    listed = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    return f"{sum(seconds.values()):.2f} s: {listed}"


def _kernels(args, n_compiled: int) -> str:
    if args.backend == "cuda":
        from fastpath.cuda import device

        return device.describe()
    if args.backend != "cpu":
        return "the reference's definitions, in NumPy"
    from fastpath.cpu import machine

    return machine.describe() + (f", {n_compiled} compiled" if n_compiled else ", all from the kernel cache")


def _packed(model) -> str:
    if model.arena is None:
        return ", read as it lies"
    huge = model.arena.huge_bytes()
    percent = 0 if huge is None else min(100, 100 * huge // max(1, model.private_bytes))
    pages = "" if huge is None else f", {percent} % of it in huge pages"
    return f", {model.private_bytes / MB:.1f} MB packed{pages}"


def _rate(n: int, seconds: float) -> str:
    per_s = f"{n / seconds:.1f} tokens/s" if seconds > 0 else "-"
    return f"{n} tokens in {seconds:.2f} s, {per_s}"


def peak_bytes() -> int:
    """Largest resident size of this process so far, with the pages of the model file that were read."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_line() -> str:
    own, of_files = own_bytes(), _status_bytes("RssFile")
    line = f"peak {peak_bytes() / MB:.0f} MB"
    if own is None or of_files is None:
        return line
    return f"{line}; now {own / MB:.0f} MB private, {of_files / MB:.0f} MB pages of files"


def own_bytes() -> int | None:
    """Resident bytes that belong to no file, where the system says so (Linux)."""
    return _status_bytes("RssAnon")


def _status_bytes(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
