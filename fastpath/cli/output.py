"""The file that a command writes: whole at its name, or not there. "-" is standard output."""

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from refimpl.frontend.terminal import visible


class _OneWay:
    """Standard output as zip files need it: bytes go on, and nobody asks where they are."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def read(self, *size: int) -> bytes:  # NumPy takes what can read for a file
        raise io.UnsupportedOperation("read")


@contextlib.contextmanager
def writing(out: str, never: Sequence[Path] = (), *, what: str = "the model") -> Iterator[Any]:
    """A binary stream for `out`, which has the name when the block has ended without a fault.

    Until then the bytes are in a file beside it, so that an interruption or a full disk leaves what
    was there. Devices and pipes are written as they are. Faults are met before the block, which may take
    minutes.

    never  files that are being read, and must not be replaced; `what` they are
    """
    if not out:
        raise ValueError("the name of the file to write is empty. Name a file, or - for standard output.")
    if is_stdout(out):
        with _named("standard output"):
            yield _OneWay(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(out))  # a link stays a link
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and any(target.samefile(path) for path in never):
        raise ValueError(f"{out}: is {what} itself. Write to another file.")
    if mode is not None and not stat.S_ISREG(mode):
        with _named(out), open(target, "wb") as device:  # a folder is refused here
            yield _OneWay(device)
        return
    if mode is not None:
        open(target, "r+b").close()  # may it be written?
    part = target.with_name(f".twinpath-{os.getpid()}.part")
    try:
        stream = open(part, "xb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, out) from None
    try:
        with _named(out), stream:
            yield stream
        if mode is not None:
            part.chmod(stat.S_IMODE(mode))
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """A write that fails says nothing of where: the name is added."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno in (None, errno.ENOMEM):
            raise
        raise OSError(error.errno, error.strerror, out) from error


def is_stdout(out: str) -> bool:
    """ "-", or a name of what standard output is, such as /dev/stdout."""
    if out == "-":
        return True
    with contextlib.suppress(OSError, ValueError):  # no such file; no descriptor behind sys.stdout
        return os.path.samestat(os.stat(out), os.fstat(sys.stdout.fileno()))
    return False


def summarise(out: str, text: str) -> None:
    """What was written, on standard output unless the file itself went there."""
    if is_stdout(out):
        print(text, file=sys.stderr)
    else:
        tell(f"{out}: {text}")


def tell(line: str) -> None:
    """A line on standard output that names files or what is in them."""
    print(visible(line))
