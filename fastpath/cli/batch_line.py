"""A line of --batch-file: read, checked, and made a request."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

from fastpath.cli import arguments
from fastpath.engine import Request
from fastpath.load import Model
from refimpl.frontend.media_prompt import MediaPart, expand, locate, soft_tokens, user_message
from refimpl.frontend.messages import normalize_messages
from refimpl.frontend.sampling import SamplingParams

MAX_LINE = 64 << 20  # bytes; of a longer line no more is read into memory
MEDIA = {"images": "image", "audio": "audio", "videos": "video"}
SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name != "penalty_window")
TEXTS, SWITCHES = ("prompt", "system"), ("think", "raw")
FIELDS = (
    *TEXTS, "messages", "id", *SWITCHES, "tools", *MEDIA, "max_tokens", "stop", *SAMPLING,
)  # fmt: skip

Line = tuple[int, bytes | None]


def lines_of(file: BinaryIO) -> Iterator[Line]:
    """(number, bytes) of the lines that are not blank; None for one that is longer than MAX_LINE."""
    number = 0
    while piece := file.readline(MAX_LINE + 1):
        number += 1
        is_whole = len(piece) <= MAX_LINE
        while not piece.endswith(b"\n") and (rest := file.readline(1 << 20)):
            piece = rest
        if not is_whole:
            yield number, None
        elif piece.strip():
            yield number, piece


@dataclass(frozen=True)
class Asked:
    """A line that can be answered. id: as it was given, or the line's number."""

    id: Any
    request: Request
    stops: tuple[str, ...]
    is_raw: bool
    shows_thought: bool


class Reader:
    """Makes requests of lines.

    args      what holds for lines that do not say otherwise
    where     the file's name, for messages
    encoders  called when the first line has media
    """

    def __init__(self, args: argparse.Namespace, where: str, model: Model, encoders: Callable[[], Any]):
        self.args, self.where, self.model, self._encoders = args, where, model, encoders

    @contextmanager
    def named(self, number: int) -> Iterator[None]:
        """Faults are one line that begins with the place."""
        where = f"{self.where}, line {number}"
        try:
            yield
        except OSError as error:
            raise ValueError(f"{where}: {error.filename or 'a file'}: {error.strerror or error}.") from error
        except RecursionError as error:
            raise ValueError(f"{where}: nested too deeply to be read.") from error
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).rstrip('.')}.") from error

    def parse(self, line: Line) -> dict[str, Any]:
        """The object of a line, its fields known and of the right kind.

        Raises:
            ValueError: one line, with file and line number
        """
        number, data = line
        where = f"{self.where}, line {number}"
        if data is None:
            raise ValueError(f"{where}: longer than {MAX_LINE} bytes. Make the request shorter.")
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
        value = arguments.parse_json(text, where, "its contents")
        with self.named(number):
            _check_fields(value)
        return value

    def asked(self, number: int, value: Mapping[str, Any]) -> Asked:
        """The request of a parsed line; its media are encoded.

        Raises:
            ValueError: one line, with file and line number
        """
        with self.named(number):
            return self._asked(number, value)

    def check_projector(self) -> None:
        """That of --mmproj, before any line asks for it."""
        self._encoders()

    def _asked(self, number: int, value: Mapping[str, Any]) -> Asked:
        args = self.args
        is_raw, think = value.get("raw", args.raw), value.get("think", args.think)
        system = value.get("system", None if "messages" in value or is_raw else args.system)
        if is_raw and (system or value.get("think") or "messages" in value or "tools" in value):
            raise ValueError("raw has no template, so no place for messages, tools, system or think")
        params = SamplingParams(**{name: value.get(name, getattr(args, name)) for name in SAMPLING})
        stops = value.get("stop", args.stop)
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        ids, soft = self._prompt(value, is_raw, think, system)
        max_tokens = value.get("max_tokens", args.max_tokens)
        request = Request(ids, soft, params, max_tokens)
        return Asked(value.get("id", number), request, stops, is_raw, think)

    def _prompt(self, value: Mapping[str, Any], is_raw: bool, think: bool, system: str | None):
        opened = self._opened(value)
        media = [each.input.part for each in opened]
        tokenizer = self.model.tokenizer
        if is_raw:
            text = expand(value["prompt"], media) if media else value["prompt"]
            ids = tokenizer.encode(text, add_bos=True, parse_special=True)
        else:
            messages = _messages(value, system, media)
            options = {"tools": value.get("tools"), "thinking": think, "media": media}
            ids = self.model.template.render_ids(tokenizer, messages, **options)
        if not opened:
            return ids, ()
        ids, starts = locate(ids, tokenizer, media)
        encoders = self._encoders()
        return ids, soft_tokens(starts, [encoders.encode(each) for each in opened])

    def _opened(self, value: Mapping[str, Any]) -> list:
        """The line's files, in the order of their places in the prompt."""
        waiting = {kind: iter(value.get(name, ())) for name, kind in MEDIA.items()}
        if "messages" in value:
            order = _kinds(value["messages"])
        else:
            order = [kind for name, kind in MEDIA.items() for _ in value.get(name, ())]
        opened = []
        for kind in order:
            path = next(waiting[kind], None)
            if path is None:
                raise ValueError(f"its messages have more parts of kind {kind} than it names files")
            opened.append(self._encoders().open(kind, path, **self._media_options()))
        if any(next(left, None) is not None for left in waiting.values()):
            raise ValueError("it names more files than its messages have parts for them")
        return opened

    def _media_options(self) -> dict[str, Any]:
        from fastpath.cli.media import sampling_of

        return {"budget": self.args.image_tokens, "sampling": sampling_of(self.args)}


def _messages(value: Mapping[str, Any], system: str | None, media: Sequence[MediaPart]) -> list:
    first = [{"role": "system", "content": system}] if system else []
    if "messages" not in value:
        if not value["prompt"].strip() and not media:
            raise ValueError("the prompt is empty. Give some text")
        return [*first, user_message(value["prompt"], media)]
    messages = value["messages"]
    if first and messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        raise ValueError("a system message, and messages that begin with one. Leave one out")
    return first + messages


def _kinds(messages: list) -> list[str]:
    """The kinds of media in messages, in order."""
    plain = normalize_messages(messages, null=None, fold_results=False)
    contents = [message["content"] for message in plain]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["type"] for part in parts if part["type"] != "text"]


def _check_fields(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f'{_shown(value)}, expected an object like {{"prompt": "Hi"}}')
    for name in value:
        if name not in FIELDS:
            raise ValueError(f"unknown field {name[:40]!r}, expected some of {', '.join(FIELDS)}")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("expected either a prompt or messages")
    for names, kind, what in (
        (TEXTS, str, "a text"),
        (SWITCHES, bool, "true or false"),
        (("messages", "tools", *MEDIA), list, "a list"),
    ):
        for name in names:
            if name in value and not isinstance(value[name], kind):
                raise ValueError(f"{name}: {_shown(value[name])}, expected {what}")
    for name in ("stop", *MEDIA):
        texts = value.get(name, ())
        if not isinstance(texts, str | list | tuple) or not all(isinstance(t, str) and t for t in texts):
            raise ValueError(f"{name}: {_shown(texts)}, expected texts that are not empty")
    if value.get("stop") == "":
        raise ValueError("stop: an empty text, expected at least one character. Leave it out instead")
    most = value.get("max_tokens", 1)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(f"max_tokens: {_shown(most)}, expected a whole number of at least 1")
    if not isinstance(value.get("id", 0), str | int | float):
        raise ValueError(f"id: {_shown(value['id'])}, expected a text or a number")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
