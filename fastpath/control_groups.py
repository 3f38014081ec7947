"""The control groups (version 2) that bound this process: those of a container, for one."""

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def groups() -> list[Path]:
    """Folders of the process's group and of those around it; none where the system has no such thing."""
    for line in lines(_OWN):
        if line.startswith("0::/"):
            path = _ROOT / line.removeprefix("0::/")
            return [path, *(parent for parent in path.parents if _ROOT in (parent, *parent.parents))]
    return []


def cpus() -> int | None:
    """How many CPUs' time the process may use, at least 1; None: no limit."""
    limits = []
    for group in groups():
        quota, *period = " ".join(lines(group / "cpu.max")).split() or ("max",)
        if quota.isdigit() and period and period[0].isdigit() and int(period[0]):
            limits.append(max(1, int(quota) // int(period[0])))
    return min(limits, default=None)


def lines(path: Path) -> list[str]:
    """Of one of the system's files; none if it is not there."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
