"""How much memory a process may still take: of the machine, and of the container it runs in."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """None where the system does not say (only Linux does).

    Pages of files that could be dropped count as available: Linux drops them when somebody needs the memory.
    """
    limits = [_of_machine(), *map(_of_group, _groups())]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


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
