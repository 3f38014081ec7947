"""Where compiled kernels are kept between runs.

Numba checks only the file that defines a cached function, not the files it was built from.  So the folder's
name is a hash of all kernel sources, the compiler's version and the CPU: an edit, an upgrade or another
machine gets another folder, and stale code cannot run.  Candidates, first usable one wins:

    $NUMBA_CACHE_DIR    if the user set it
    the user's cache folder ($XDG_CACHE_HOME, ~/.cache, ~/Library/Caches, %LOCALAPPDATA%)
    a private folder of this user in the system's temporary folder
    none: kernels are compiled in each process
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import llvmlite
import numba
from numba.core import config

from fastpath.cpu import machine

KEEP_DAYS = 30  # folders of older sources are removed when they have not been used for so long
_SOURCES = Path(__file__).parent


def source_hash():
    """Hash of everything that decides what a kernel compiles to."""
    state = hashlib.blake2b(digest_size=10)
    for path in sorted(_SOURCES.glob("*.py")):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, config.CPU_NAME)
    state.update(repr((versions, machine.KERNELS, sorted(machine.FEATURES))).encode())
    return state.hexdigest()


def _user_cache():
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA")
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification: a relative one is to be ignored
        return named
    home = os.path.expanduser("~")
    if not (os.path.isabs(home) and os.path.isdir(home)):  # a home that is not there is not ours to make
        return None
    return os.path.join(home, "Library/Caches" if sys.platform == "darwin" else ".cache")


def _candidates():
    """(folder, whether the user named it)."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR), True
    if base := _user_cache():
        yield Path(base) / "twinpath", False
    user = os.getuid() if hasattr(os, "getuid") else "user"
    with contextlib.suppress(OSError):  # no usable temporary folder at all
        yield Path(tempfile.gettempdir()) / f"twinpath-{user}", False


def _usable(folder, is_named):
    """Make the folder; True if we can write to it and, unless the user named it, nobody else can.

    A cache holds code that we run.  In a shared temporary folder somebody may have made ours before us.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and not is_named:
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o002:
                return False
        tempfile.TemporaryFile(dir=folder).close()
        return True
    except OSError:
        return False


def _remove_old(parent, current):
    limit = time.time() - KEEP_DAYS * 86400
    for folder in parent.glob("kernels-*"):
        with contextlib.suppress(OSError):
            if folder != current and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def find():
    """The folder for this process's kernels, or None when there is no place to keep them."""
    name = f"kernels-{source_hash()}"
    for parent, is_named in _candidates():
        folder = parent / name
        known = folder.exists()
        if _usable(parent, is_named) and _usable(folder, is_named):
            if not known:
                _remove_old(parent, folder)
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use: `_remove_old` of other versions lets it live
            return folder
    return None


FOLDER = find()
_changing = threading.RLock()  # of numba's setting, which is one for the process


def through(function, build):
    """build(cache=True) in our folder; without a cache if there is no folder, or if it fails.

    A full disk, a truncated file or an entry from a module that is gone costs time, never an answer.
    """
    if FOLDER is not None:
        for _ in range(2):
            try:
                with _active():
                    return build(True)
            except (
                Exception
            ):  # whatever unpickling and file systems come up with; a fault of ours comes again below
                _forget(function)
    return build(False)


@contextlib.contextmanager
def _active():
    """Numba's cache is our folder for a moment; other users of Numba keep theirs."""
    with _changing:
        before, config.CACHE_DIR = config.CACHE_DIR, str(FOLDER)
        try:
            yield
        finally:
            config.CACHE_DIR = before


def name_of(function):
    """'module.function', as Numba names the files of a function."""
    return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__qualname__}"


def _forget(function):
    for path in FOLDER.glob(f"*/{name_of(function)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


def stored():
    """Names of the kernels that the folder holds: 'module.function'."""
    if FOLDER is None:
        return frozenset()
    return frozenset(path.name.rsplit("-", 1)[0] for path in FOLDER.glob("*/*.nbi"))
