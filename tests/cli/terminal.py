"""A command on a pseudo-terminal: what it shows, and keys for it."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()=>][0-9A-B]?|[A-Z])")
ENTER, CTRL_C, CTRL_D, ALT_ENTER, UP = "\r", "\x03", "\x04", "\x1b\r", "\x1b[A"


class Terminal:
    def __init__(
        self, *words, term: str = "xterm-256color", rows: int = 24, columns: int = 80, **variables: str
    ):
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(self.master, (rows, columns))
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastpath.cli", *map(str, words)],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env=environment | {"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"} | variables,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.raw, self.seen = "", 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, timeout: float = 120) -> str:
        """What came behind the last match, until this pattern did."""
        deadline = time.monotonic() + timeout
        while True:
            plain = self.text[self.seen :]
            if match := re.search(pattern, plain):
                self.seen += match.end()
                return plain[: match.end()]
            assert time.monotonic() < deadline, f"no {pattern!r} in {plain!r}"
            if not self._read(0.2) and self.process.poll() is not None:
                self._read(0.2)
                assert re.search(pattern, self.text[self.seen :]), f"ended without {pattern!r}: {self.text!r}"

    def resize(self, rows: int, columns: int) -> None:
        """The terminal itself tells its process of it."""
        termios.tcsetwinsize(self.master, (rows, columns))

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.wait(timeout=1)

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw)

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)


def _own_terminal() -> None:
    """So that Ctrl+C is a signal for this process."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
