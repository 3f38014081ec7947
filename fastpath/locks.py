"""Locks that a forked child finds free: the thread that held one is not there to give it back.

Take them with `with`.  Between `lock.acquire()` and a `try` a Ctrl+C can strike, and nobody gives the lock
back; between taking a lock of C and entering the `with` none can.
"""

import os
import threading
import weakref
from typing import Any

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    return _kept(threading.Lock())


def reentrant() -> Any:
    """A thread that holds it may take it again."""
    return _kept(threading.RLock())


def _kept(made: Any) -> Any:
    _made.add(made)
    return made


def _free() -> None:
    for each in _made:
        is_mine = hasattr(each, "_is_owned") and each._is_owned()  # forked by a callback under the lock
        if not is_mine:
            each._at_fork_reinit()  # as the standard library does with its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
