"""Where things are kept between runs: compiled kernels, tables of vocabularies.  First usable place wins:

$NUMBA_CACHE_DIR    if the user set it
the user's cache folder ($XDG_CACHE_HOME, ~/.cache, ~/Library/Caches, %LOCALAPPDATA%)
a private folder of this user in the system's temporary folder
none: everything is made again in each process
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

KEEP_DAYS = 30


@cache
def folder() -> Path | None:
    """The place of this process."""
    return next((place for place, is_named in places() if usable(place, is_named)), None)


def places() -> Iterator[tuple[Path, bool]]:
    """(folder, whether the user named it)."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named), True
    if base := _user_cache():
        yield Path(base) / "twinpath", False
    user = os.getuid() if hasattr(os, "getuid") else "user"
    with contextlib.suppress(OSError):  # no usable temporary folder at all
        yield Path(tempfile.gettempdir()) / f"twinpath-{user}", False


def _user_cache() -> str | None:
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA")
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification: a relative one is to be ignored
        return named
    home = os.path.expanduser("~")
    if not (os.path.isabs(home) and os.path.isdir(home)):  # a home that is not there is not ours to make
        return None
    return os.path.join(home, "Library/Caches" if sys.platform == "darwin" else ".cache")


def usable(place: Path, is_named: bool) -> bool:
    """Make the folder; True if we can write to it and, unless the user named it, nobody else can.

    A cache holds code that we run.  In a shared temporary folder somebody may have made ours before us.
    """
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and not is_named:
            status = place.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return False
        tempfile.TemporaryFile(dir=place).close()
        return True
    except OSError:
        return False


def remove_old(found: Iterable[Path], keep: int, remove: Callable[[Path], object]) -> None:
    """Remove what was not used for KEEP_DAYS, and the least recently used of more than `keep`."""
    limit, used = time.time() - KEEP_DAYS * 86400, []
    for path in found:
        with contextlib.suppress(OSError):
            used.append((path.stat().st_mtime, path))
    for n, (when, path) in enumerate(sorted(used, reverse=True)):
        if n >= keep or when < limit:
            with contextlib.suppress(OSError):
                remove(path)
