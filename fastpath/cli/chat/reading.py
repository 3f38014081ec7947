"""What a person types, or what a pipe brings: one message at a time.

A message is a line. Several lines are one message between lines of three quotes; on a terminal with
prompt_toolkit also with Alt+Enter, and as pasted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from fastpath.cli import arguments

QUOTES = '"""'
PROMPT, MORE = "> ", ". "


class Reader(Protocol):
    def read(self, prompt: str = PROMPT) -> str | None:
        """The next message; None when there are no more. Raises KeyboardInterrupt."""
        ...

    def hushed(self) -> AbstractContextManager[None]:
        """While an answer is drawn: keys are not echoed into it, ^C neither."""
        ...


def open_reader(words: Callable[[], Iterable[str]], path_words: frozenset[str], *, history: bool) -> Reader:
    """
    words       commands, for completion
    path_words  those that are followed by a path
    """
    if is_terminal(sys.stdin) and is_terminal(sys.stdout) and has("prompt_toolkit"):
        return Keys(words, path_words, history_file() if history else None)
    return Lines()


def is_terminal(stream: Any) -> bool:
    """One that understands more than letters."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def has(library: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # stands in sys.modules as None
        return False


def could_be_nicer() -> bool:
    """The terminal understands what a library that is not installed would do with it."""
    is_able = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    return is_able and not (has("prompt_toolkit") and has("rich"))


def history_file() -> Path | None:
    """Where what is typed is kept, for nobody else to read; None without a place."""
    from fastpath import user_cache

    folder = user_cache.folder()
    if folder is None:
        return None
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return None
    return path


class Lines:
    """Of a pipe, or of a terminal of a kind that knows nothing else. Prompts are for people only."""

    def __init__(self, stream: Any = None):
        self.stream = stream if stream is not None else sys.stdin
        self.is_shown = self.stream is not None and self.stream.isatty()

    def read(self, prompt: str = PROMPT) -> str | None:
        line = self._line(prompt)
        if line is None or not line.startswith(QUOTES):
            return line
        text = [line.removeprefix(QUOTES)]
        while not text[-1].rstrip().endswith(QUOTES) or (
            len(text) == 1 and len(text[0].strip()) < len(QUOTES)
        ):
            more = self._line(MORE)
            if more is None:
                break
            text.append(more)
        return unquoted("\n".join(text))

    def hushed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _line(self, prompt: str) -> str | None:
        if self.stream is None:
            return None
        if self.is_shown:
            print(prompt, end="", flush=True, file=sys.stderr)
        raw = self.stream.buffer.readline()
        if not raw:
            if self.is_shown:
                print(file=sys.stderr)
            return None
        try:
            return raw.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: {arguments.not_utf8(error.start)}.") from error


def unquoted(text: str) -> str:
    """Without the quotes behind it, and without the empty line that they make."""
    text = text.rstrip()
    return text.removesuffix(QUOTES).removeprefix("\n").rstrip()


class Keys:
    """Of a terminal: history, editing, completion of commands and paths.

    Enter sends, Alt+Enter begins a line. Ctrl+C empties the line, and leaves where it is empty.
    """

    def __init__(
        self,
        words: Callable[[], Iterable[str]],
        path_words: frozenset[str],
        history: Path | None,
        **session: Any,  # input and output of tests
    ):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self.session: Any = PromptSession(
            multiline=True,
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=_completer(words, path_words),
            complete_while_typing=False,
            key_bindings=_bindings(),
            prompt_continuation=MORE,
            enable_open_in_editor=True,
            **session,
        )

    def read(self, prompt: str = PROMPT) -> str | None:
        try:
            text = self.session.prompt(prompt)
        except EOFError:
            return None
        return unquoted(text.removeprefix(QUOTES)) if text.startswith(QUOTES) else text

    @contextmanager
    def hushed(self) -> Iterator[None]:
        import termios

        try:
            before = termios.tcgetattr(sys.stdin)
        except (OSError, ValueError, termios.error):  # a test's
            yield
            return
        silent = [*before]
        silent[3] &= ~termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        text = buffer.text
        if text.startswith(QUOTES) and not text[len(QUOTES) :].rstrip().endswith(QUOTES):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def _completer(words: Callable[[], Iterable[str]], path_words: frozenset[str]) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        paths = PathCompleter(expanduser=True)

        def get_completions(self, document: Document, event: Any) -> Iterable[Completion]:
            text = document.text_before_cursor
            word, space, rest = text.partition(" ")
            if not text.startswith("/"):
                return
            if space and word in path_words:
                yield from self.paths.get_completions(Document(rest), event)
            elif not space:
                yield from (Completion(each, -len(text)) for each in words() if each.startswith(text))

    return Commands()
