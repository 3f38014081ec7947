"""An answer as it comes: formatted on a terminal, plain elsewhere. Thoughts are folded into a line."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from fastpath.cli.chat.reading import has, is_terminal
from fastpath.talk.events import Call, Said, Text, Thought, Usage

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DRAW_S = 0.05
SHOWN_TAIL = 3  # lines of the screen that a block in the making leaves free


class Shower(Protocol):
    shows_thoughts: bool  # in full, not folded

    def said(self, said: Said) -> None: ...
    def ended(self) -> None:
        """No more of this answer comes; what was held back is shown."""
        ...

    def note(self, text: str) -> None:
        """A line about the conversation, not of it."""
        ...

    def text(self, text: str) -> None:
        """Something that was asked for: help, settings."""
        ...


def open_shower() -> Shower:
    """Formatted on a terminal, where rich is installed."""
    if is_terminal(sys.stdout) and has("rich"):
        return Formatted()
    return Plain()


def folded(thought: str) -> str:
    return f"[thought of {words(thought)}: /thought shows it]"


def words(text: str) -> str:
    n = len(text.split())
    return f"{n} word{'' if n == 1 else 's'}"


def call_line(call: Call) -> str:
    return f"[calls {call.name} {call.arguments}]"


def usage_line(usage: Usage, reason: str) -> str:
    """Tokens and rates of one answer; tokens of the prompt that were in the cache."""
    rate = f" at {usage.per_second:.1f}/s" if usage.per_second else ""
    thought = f", {usage.thought} of them thought" if usage.thought else ""
    cut = "; cut off: /sampling max_tokens=N, --context N" if reason == "length" else ""
    return (
        f"[{usage.generated} tokens{rate}{thought}; {usage.cached} of {usage.prompt} cached; "
        f"{usage.first_s:.2f} s to the first{cut}]"
    )


class Plain:
    """The answer on standard output, all else on standard error: a pipe gets what the model said.

    With tools, calls stand in the answer.
    """

    def __init__(self) -> None:
        self.shows_thoughts = False
        self.kind, self.thought = "", ""
        self._clean = _printable if sys.stdout.isatty() else str

    def said(self, said: Said) -> None:
        if isinstance(said, Thought):
            self.thought += said.text
            if self.shows_thoughts:
                self._write("thought", said.text)
        elif isinstance(said, Text):
            self._fold()
            self._write("text", said.text)
        elif isinstance(said, Call):
            self._fold()
            self._write("call", call_line(said))

    def ended(self) -> None:
        self._fold()
        if self.kind:
            print(flush=True)
        self.kind = ""

    def note(self, text: str) -> None:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)

    def text(self, text: str) -> None:
        print(text, flush=True)

    def _fold(self) -> None:
        if self.thought and not self.shows_thoughts:
            self.note(folded(self.thought))
        self.thought = ""

    def _write(self, kind: str, text: str) -> None:
        if not text:
            return
        if self.kind and (kind != self.kind or kind == "call"):
            print()
        if kind == "thought" and self.kind != "thought":
            print("[thought] ", end="")
        self.kind = kind
        print(self._clean(text), end="", flush=True)


class Formatted:
    """Markdown on a terminal. Blocks that are whole are printed for good; the one in the making is shown
    below them and drawn anew, so that an answer longer than the screen scrolls as any other text.
    """

    def __init__(self, console: Any = None):
        from rich.console import Console

        self.shows_thoughts = False
        self.console = console if console is not None else Console(highlight=False)
        self.live: Any = None
        self.drawn = 0.0
        self.pending, self.thought, self.kind = "", "", ""

    def said(self, said: Said) -> None:
        if isinstance(said, Thought):
            self.thought += said.text
            self._draw(self._thinking)
        elif isinstance(said, Text):
            self._fold()
            self.pending += said.text
            whole, self.pending = split_blocks(self.pending)
            if whole.strip():
                self._print(self._markdown(whole))
            self._draw(self._preview)
        elif isinstance(said, Call):
            self._flush()
            self._print(self._styled(call_line(said), "cyan"))

    def ended(self) -> None:
        self._flush()
        self._stop()

    def note(self, text: str) -> None:
        self._stop()
        self.console.print(self._styled(text, "dim"))

    def text(self, text: str) -> None:
        self._stop()
        self.console.print(self._styled(text, ""))

    # -- pieces

    def _fold(self) -> None:
        if self.thought:
            text = f"{self.thought.rstrip()}\n" if self.shows_thoughts else folded(self.thought)
            self._print(self._styled(text, "dim"))
        self.thought = ""

    def _flush(self) -> None:
        self._fold()
        if self.pending.strip():
            self._print(self._markdown(self.pending))
        self.pending = ""

    def _thinking(self) -> Any:
        if not self.shows_thoughts:
            return self._styled(f"thinking: {words(self.thought)}", "dim")
        return self._styled(self._tail(self.thought), "dim")

    def _preview(self) -> Any:
        """A block that fits the screen as it will look, the end of one that does not."""
        if self.pending.count("\n") < self._room() // 2:
            return self._markdown(self.pending)
        return self._styled(self._tail(self.pending), "")

    def _tail(self, text: str) -> str:
        width = max(1, self.console.width)
        lines = [line[k : k + width] for line in text.split("\n") for k in range(0, max(1, len(line)), width)]
        return "\n".join(lines[-self._room() :])

    def _room(self) -> int:
        return max(1, self.console.height - SHOWN_TAIL)

    @staticmethod
    def _styled(text: str, style: str) -> Any:
        from rich.text import Text as Styled

        return Styled(_printable(text), style=style)

    @staticmethod
    def _markdown(text: str) -> Any:
        from rich.markdown import Markdown

        return Markdown(_printable(text), hyperlinks=False)

    # -- drawing

    def _draw(self, make: Callable[[], Any]) -> None:
        """Not at every token: laying Markdown out takes as long as some models take for one."""
        now = time.monotonic()
        if self.live is not None and now - self.drawn < DRAW_S:
            return
        self.drawn = now
        if self.live is None:
            from rich.live import Live

            self.live = Live(
                console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop",
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.live.start()
        self.live.update(make(), refresh=True)

    def _print(self, what: Any) -> None:
        self._stop()
        self.console.print(what)

    def _stop(self) -> None:
        if self.live is not None:
            live, self.live = self.live, None
            live.update("", refresh=True)
            live.stop()


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown -> blocks that nothing behind them can change, and the rest: cut at the last empty line that
    is outside of fenced code.
    """
    fence, end, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
            end = at if line.endswith("\n") else end
        elif not fence and not line.strip() and line.endswith("\n"):
            end = at
    return text[:end], text[end:]


def _printable(text: str) -> str:
    """Without control characters: what a model writes does not move the cursor or colour the screen."""
    return _CONTROL.sub("\ufffd", text)
