"""How much memory a process may still take: of the machine, and of the container it runs in."""

import mmap
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_SIZES = Path("/proc/self/statm")


def available_bytes() -> int | None:
    """None where the system does not say (only Linux does).

    Pages of files that could be dropped count as available: Linux drops them when somebody needs the memory.
    """
    limits = [_of_machine(), *map(_of_group, _groups())]
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
    first = "".join(_lines(_OWN_SIZES)).split()
    return int(first[0]) * mmap.PAGESIZE if first else None


def _of_machine() -> int | None:
    for line in _lines(_MEMINFO):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _groups() -> list[Path]:
    """The process's control group and those around it, of version 2."""
    for line in _lines(_OWN_GROUP):
        if line.startswith("0::/"):
            path = _GROUPS / line.removeprefix("0::/")
            return [path, *(parent for parent in path.parents if _GROUPS in (parent, *parent.parents))]
    return []


def _of_group(group: Path) -> int | None:
    """What is left under the group's limit; files read into memory are charged to it, and can be dropped."""
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "active_file"):
            used -= int(value)
    return max(0, limit - max(0, used))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
