"""Ctrl+C that does not get lost.

Python raises KeyboardInterrupt wherever it happens to be.  In a destructor or a callback, of which a compiler
has many, it is printed and forgotten; an import may make an ImportError of it, with advice of its own, as
NumPy's does.

    with Noticed() as ctrl_c:
        ...                     # interrupted as ever, but nothing is printed
    ctrl_c.check()              # KeyboardInterrupt, if one came and was lost
"""

import signal
import sys
import threading


class Noticed:
    """While it is entered: whether a Ctrl+C came. Only where one raises KeyboardInterrupt in this thread."""

    def __init__(self):
        self.came = False
        self._before = None  # what handled it before

    def __enter__(self):
        before = signal.getsignal(signal.SIGINT)
        raises = before is signal.default_int_handler or isinstance(
            getattr(before, "__self__", None), Noticed
        )
        if raises and threading.current_thread() is threading.main_thread():
            self._hook, self._before = sys.unraisablehook, before
            sys.unraisablehook = self._unraisable
            signal.signal(signal.SIGINT, self._notice)
        return self

    def __exit__(self, *error):
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            sys.unraisablehook = self._hook

    def check(self):
        if self.came:
            raise KeyboardInterrupt

    def _notice(self, number, frame):
        self.came = True
        self._before(number, frame)

    def _unraisable(self, seen):
        if not (self.came and seen.exc_type is KeyboardInterrupt):
            self._hook(seen)
