"""A conversation with a person, or with a pipe: message, answer, message, answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastpath.cli.arguments import one_line
from fastpath.cli.chat.commands import COMMANDS, run_command, sampling_line, thinking_line
from fastpath.cli.chat.conversation import Conversation, read_file
from fastpath.cli.chat.opening import begin, open_exchange
from fastpath.cli.chat.reading import Reader, could_be_nicer, open_reader
from fastpath.cli.chat.showing import Shower, open_shower, usage_line
from fastpath.cli.setup import warm_encoders
from fastpath.interrupts import Held
from fastpath.talk.events import Call, Finish, Said, Text, Thought
from fastpath.talk.exchange import Exchange
from refimpl.frontend.messages import Message

MAX_CALLS_IN_A_ROW = 16  # rounds of calls of one message


class Session:
    """
    why_blind  why there are no encoders
    warm       compiles what a file needs: of (encoders, the opened file)
    files      (kind, path) of what goes with the next message
    is_person  who stops an answer with Ctrl+C and goes on; a pipe ends with it
    n_failed   messages and commands that had no answer
    """

    def __init__(
        self,
        exchange: Exchange,
        talk: Conversation,
        reader: Reader,
        show: Shower,
        why_blind: str = "",
        warm: Callable[[Any, Any], None] | None = None,
        is_person: bool = True,
    ):
        self.exchange, self.talk, self.reader, self.show = exchange, talk, reader, show
        self.why_blind, self.warm, self.is_person = why_blind, warm, is_person
        self.files: list[tuple[str, Path]] = []
        self.is_over = False
        self.n_failed = 0

    def run(self) -> None:
        """Until there are no more messages. Ctrl+C at the prompt is a KeyboardInterrupt."""
        while not self.is_over:
            line = self.reader.read()
            if line is None:
                return
            if line.strip():
                self.take(line)

    def take(self, line: str) -> None:
        """A message or a command; what is wrong with it is said in a line."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                run_command(self, line.strip())
            else:
                self.talk.say(line.removeprefix("/") if line.startswith("//") else line, self.files)
                self.files = []
                self.answer()
        except KeyboardInterrupt:
            if not self.is_person:
                raise
            self.show.note("[stopped]")
        except OSError as error:
            if error.filename is None:  # of the answer's own way out: the next one has none either
                raise
            self._fault(f"{error.filename}: {error.strerror}")
        except ValueError as error:
            self._fault(str(error))

    def _fault(self, text: str) -> None:
        self.n_failed += 1
        self.show.note(f"twinpath: {one_line(text)}")

    # -- answers ------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """What the model says to the conversation, and the results of what it calls.

        A message that cannot be answered is taken back.
        """
        n_rounds = 0
        while True:
            before = len(self.talk.messages)
            try:
                message = self._said()
            except BaseException:
                if n_rounds == 0 and len(self.talk.messages) == before:
                    self.talk.undo()
                raise
            calls = message.get("tool_calls", []) if message else []
            n_rounds += 1
            if not calls or n_rounds > MAX_CALLS_IN_A_ROW or not self._ask_for(calls):
                return

    def _said(self) -> Message | None:
        """One answer, shown as it comes; None if Ctrl+C stopped it: what came until then stays."""
        so_far = _SoFar()
        try:
            with self.reader.hushed():
                for said in self._events():
                    self.show.said(said)
                    so_far.add(said)
                    if isinstance(said, Finish):
                        self.talk.messages.append(said.message)
                        self.show.ended()
                        self.show.note(usage_line(said.usage, said.reason))
                        return said.message
        except KeyboardInterrupt:
            self.show.ended()
            self.show.note("[stopped]")
            if message := so_far.message():
                self.talk.messages.append(message)
            else:
                self.talk.undo()
            if not self.is_person:
                raise
            return None
        finally:
            self.show.ended()
        return None

    def _events(self) -> Iterator[Said]:
        """What the model says, with Ctrl+C between two events only: drawing is not left half done."""
        with Held() as ctrl_c:
            with ctrl_c.free():
                prompt = self.exchange.prepare(self.talk.prompt, self.talk.options(), read_file)
                events = self.exchange.answer(prompt)
            while True:
                with ctrl_c.free():
                    said = next(events, None)
                if said is None:
                    return
                yield said

    def _ask_for(self, calls: list[Message]) -> bool:
        """Results of calls, from whoever answers the messages. False: there are none."""
        for call in calls:
            function = call["function"]
            text = self.reader.read(f"result of {function['name']}> ")
            if text is None:
                self.show.note(f"[no result of {function['name']}: the answer ends with its calls]")
                return False
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": function["name"],
                "content": _result(text),
            }
            self.talk.messages.append(result)
        return True

    # -- files and facts ----------------------------------------------------------------------------------

    def attach(self, kind: str, path: Path) -> None:
        """Goes with the next message, if it can be read."""
        encoders = self.exchange.encoders
        if encoders is None:
            raise ValueError(
                self.why_blind or "this model runs without its encoders. Start with --mmproj FILE"
            )
        opened = encoders.open(kind, str(path), budget=self.exchange.image_budget)  # type: ignore[arg-type]
        for note in opened.input.notes:
            self.show.note(f"note: {note}")
        if self.warm is not None:
            self.exchange.worker.call(partial(self.warm, encoders, opened)).result()
        self.files.append((kind, path))
        self.show.note(f"[{path.name}: {sum(opened.input.part.counts)} tokens]")

    def info(self) -> str:
        from fastpath.cli.stats import memory_line

        lanes = self.exchange.worker.engine.lanes
        talk, config = self.talk, lanes.model.config
        encoders = self.exchange.encoders
        n_tokens = len(self.exchange.render(talk.prompt, talk.options())) if self._is_text() else None
        used = "with media" if n_tokens is None else f"{n_tokens} of {lanes.context_len} tokens"
        return "\n".join(
            [
                f"model     {lanes.model.path}: {config.n_layers} layers, width {config.model_dim}",
                f"media     {encoders.media.path if encoders is not None else 'no encoders'}",
                f"context   {len(talk.messages)} messages, {used}",
                f"cache     {lanes.cache_bytes / 1e6:.1f} MB of keys and values in use",
                f"memory    {memory_line()}",
                f"system    {talk.system or 'none'}",
                f"thinking  {thinking_line(self)}",
                f"tools     {len(talk.tools) or 'none'}",
                f"answers   {'free' if talk.schema is None else 'JSON by a schema'}",
                f"sampling  {sampling_line(talk)}",
            ]
        )

    def _is_text(self) -> bool:
        messages = self.talk.messages
        return bool(messages) and not any(isinstance(message.get("content"), list) for message in messages)


class _SoFar:
    """An answer that may not come to its end."""

    def __init__(self) -> None:
        self.thought = self.text = ""
        self.calls: list[Message] = []

    def add(self, said: Any) -> None:
        if isinstance(said, Thought):
            self.thought += said.text
        elif isinstance(said, Text):
            self.text += said.text
        elif isinstance(said, Call):
            function = {"name": said.name, "arguments": said.arguments}
            self.calls.append({"id": said.id, "type": "function", "function": function})

    def message(self) -> Message | None:
        """Calls that nobody answers would only confuse the model: they are left out."""
        if not self.text.strip():
            return None
        thought = {"reasoning_content": self.thought} if self.thought else {}
        return {"role": "assistant", "content": self.text, **thought}


def _result(text: str) -> Any:
    """A JSON object as such, all else as the text it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def run_session(args: argparse.Namespace) -> int:
    """Status 0, also where a message had no answer and a person was told; from a pipe 2 then."""
    talk = begin(args, is_script=False)
    exchange, why_blind = open_exchange(args)
    warm = warm_encoders if args.backend == "cpu" else None
    is_person = sys.stdin is not None and sys.stdin.isatty()
    paths = frozenset(name for name, command in COMMANDS.items() if command.is_path)
    reader = open_reader(lambda: COMMANDS, paths, history=not args.no_history)
    session = Session(exchange, talk, reader, open_shower(), why_blind, warm, is_person)
    if is_person:
        name = exchange.worker.engine.lanes.model.path.name
        session.show.note(f"{name}: say something, or /help")
        if could_be_nicer():
            session.show.note("for keys, history and formatted answers: pip install 'twinpath[chat]'")
    try:
        session.run()
    finally:
        exchange.worker.close(timeout=0)
    if session.n_failed and not is_person:
        raise ValueError(f"{session.n_failed} of the lines that came had no answer. See above.")
    return 0
