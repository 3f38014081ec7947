"""How much memory a process may still take: of the machine, and of the container it runs in."""

import mmap
from pathlib import Path

from fastpath.control_groups import groups, lines

_MEMINFO = Path("/proc/meminfo")
_OWN_SIZES = Path("/proc/self/statm")


def available_bytes() -> int | None:
    """None where the system does not say (only Linux does).

    Pages of files that could be dropped count as available: Linux drops them when somebody needs the memory.
    """
    limits = [_of_machine(), *map(_of_group, groups())]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def in_words() -> str:
    """For a message that memory is out: what is free, and how much is in use of which limit."""
    limit, used, free = _address_limit(), _address_space(), _of_machine()
    said = [] if free is None else [f"{free / 1e6:.0f} MB of the machine are free"]
    if limit is not None:
        used_words = "" if used is None else f", {used / 1e6:.0f} MB are in use"
        said.append(f"this process may have {limit / 1e6:.0f} MB of addresses (ulimit -v){used_words}")
    return "; ".join(said) or "How much is free the system does not say"


def _address_limit() -> int | None:
    """Of `ulimit -v`, which counts mapped files too, and what is reserved and never touched."""
    try:
        import resource
    except ImportError:  # not a system of POSIX
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _address_space() -> int | None:
    first = "".join(lines(_OWN_SIZES)).split()
    return int(first[0]) * mmap.PAGESIZE if first else None


def _of_machine() -> int | None:
    for line in lines(_MEMINFO):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_group(group: Path) -> int | None:
    """What is left under the group's limit; files read into memory are charged to it, and can be dropped."""
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    for line in lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "active_file"):
            used -= int(value)
    return max(0, limit - max(0, used))


def _number(path: Path) -> int | None:
    text = "".join(lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max": no limit
