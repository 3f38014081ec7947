"""What `--stats` prints: times, rates, bytes."""

import re
import resource
import sys
from pathlib import Path

from fastpath.cli.setup import say

MB = 1e6


def print_stats(engine, generation, load_s: float) -> None:
    """To standard error, so that the answer can be piped away from it."""
    n_prompt = min(len(generation.prompt_ids), engine.length())  # fewer if interrupted
    say(f"load     {load_s:.2f} s, {engine.model.file.nbytes / MB:.1f} MB file")
    say(f"prefill  {_rate(n_prompt, generation.prefill_s)}")
    say(f"decode   {_rate(generation.n_decoded, generation.decode_s)}, ended by: {generation.reason}")
    say(
        f"cache    {engine.cache_bytes / MB:.1f} MB for {engine.length()} tokens, "
        f"{engine.max_cache_bytes / MB:.1f} MB at full context ({engine.context_len})"
    )
    say(f"memory   {memory_line()}")


def _rate(n: int, seconds: float) -> str:
    per_s = f"{n / seconds:.1f} tokens/s" if seconds > 0 else "-"
    return f"{n} tokens in {seconds:.2f} s, {per_s}"


def peak_bytes() -> int:
    """Largest resident size of this process so far, with the pages of the model file that were read."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_line() -> str:
    line = f"peak {peak_bytes() / MB:.0f} MB"
    own = own_bytes()
    return line if own is None else f"{line}, of which {own / MB:.0f} MB now are not pages of files"


def own_bytes() -> int | None:
    """Resident bytes that belong to no file, where the system says so (Linux)."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
