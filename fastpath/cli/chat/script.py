"""Requests of JSON lines, and a line of JSON for each.

--input-jsonl       every line is a request of its own
--multi-turn-jsonl  every line is the next turn of one conversation

A line is a text, or an object: `prompt` (a text) or `messages` (a whole conversation; not for turns) or a
message with `role` and `content`, with `image`, `audio`, `video` (paths), and any of `id`, `system`, `think`,
`max_tokens`, `stop`, `tools`, `tool_choice`, `json_schema` and the names of sampling.  What a line does not
say is as the command line says; in a conversation `system` and `tools` stay as the last line that said them.

Out comes, for each line in its order: its `id` if it has one, `content`, `reasoning_content` and `tool_calls`
where there are some, `finish_reason` and `usage`; or `error`, one line, where it is no request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastpath.cli import arguments, output
from fastpath.cli.chat.conversation import SAMPLING, Conversation, read_file, sampling_of
from fastpath.cli.chat.opening import begin, open_exchange
from fastpath.cli.setup import say
from fastpath.talk.events import Finish, Options
from fastpath.talk.exchange import Exchange
from refimpl.frontend.dialects import openai_choice
from refimpl.frontend.messages import Message, normalize_messages, normalize_tools, shown

FILES = ("image", "audio", "video")
KEYS = (
    "id", "prompt", "messages", "role", "content", "name", "tool_call_id", *FILES, "system", "think",
    "max_tokens", "stop", "tools", "tool_choice", "json_schema", *SAMPLING,
)  # fmt: skip


@dataclass
class Line:
    """One line of a file: what it says, or why it says nothing."""

    number: int
    value: Any = None
    error: str = ""

    @property
    def id(self) -> Any:
        return self.value.get("id") if isinstance(self.value, Mapping) else None


def run_script(args: argparse.Namespace) -> int:
    """Status 2 if a line was no request or had no answer; the others are answered all the same."""
    base = begin(args, is_script=True)
    source = args.input_jsonl if args.input_jsonl is not None else args.multi_turn_jsonl
    lines = read_lines(source)
    reads = [Path(path) for path in (source, args.model) if path and Path(path).exists()]
    with output.writing(args.output or "-", reads, what="a file that is read") as stream:
        n_failed, interrupt = _answer_all(args, base, lines, stream)
    if interrupt is not None:
        raise interrupt
    if n_failed:
        raise ValueError(
            f"{source}: {n_failed} of {len(lines)} lines have no answer: see `error` in their output."
        )
    return 0


def read_lines(source: str) -> list[Line]:
    """The lines that say something."""
    found = []
    for number, text in enumerate(arguments.read_text(source).splitlines(), start=1):
        if text.strip():
            try:
                found.append(
                    Line(number, arguments.parse_json(text, f"{source}, line {number}", "its contents"))
                )
            except ValueError as error:
                found.append(Line(number, error=str(error)))
    if not found:
        raise ValueError(f"{source}: no lines in it, expected a JSON text or object on each.")
    return found


def _answer_all(
    args: argparse.Namespace, base: Conversation, lines: list[Line], stream: Any
) -> tuple[int, BaseException | None]:
    """How many lines have no answer; a Ctrl+C, after which what was answered still stands in the output."""
    exchange, _ = open_exchange(args, n_seqs=args.parallel or 1)
    answers = _turns if args.input_jsonl is None else _requests
    n_failed, n_done = 0, 0
    try:
        for said in answers(exchange, base, lines, args.parallel or 1):
            stream.write(json.dumps(said, ensure_ascii=False).encode() + b"\n")
            stream.flush()
            n_failed, n_done = n_failed + ("error" in said), n_done + 1
    except KeyboardInterrupt as interrupt:
        say(f"{n_done} of {len(lines)} lines were answered")
        return n_failed, interrupt
    finally:
        exchange.worker.close(timeout=0)
    return n_failed, None


def _requests(exchange: Exchange, base: Conversation, lines: list[Line], parallel: int) -> Iterator[Message]:
    def answer(line: Line) -> Message:
        talk = deepcopy(base)
        return _guarded(line, lambda: _go_on(exchange, talk, line))

    pool = ThreadPoolExecutor(parallel, "request")
    try:
        yield from pool.map(answer, lines) if parallel > 1 else map(answer, lines)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _turns(exchange: Exchange, talk: Conversation, lines: list[Line], _: int) -> Iterator[Message]:
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        if _role(line) == "system" or (_role(line) == "tool" and _role(after) == "tool"):
            failed = _guarded(line, lambda: _heard(talk, line))  # noqa: B023
            if failed:
                yield failed
            continue
        yield _guarded(line, lambda: _go_on(exchange, talk, line, is_turn=True))  # noqa: B023


def _role(line: Line | None) -> Any:
    return line.value.get("role") if line is not None and isinstance(line.value, Mapping) else None


def _guarded(line: Line, answer: Callable[[], Message]) -> Message:
    """What an answer says, or the error, with the line's id or number."""
    name = {"line": line.number} if line.id is None else {"id": line.id}
    if line.error:
        return {**name, "error": line.error}
    try:
        said = answer()
    except ValueError as error:
        return {**name, "error": arguments.one_line(f"line {line.number}: {error}")}
    return {**({} if line.id is None else name), **said} if said else {}


def _heard(talk: Conversation, line: Line) -> Message:
    """A line that is not answered."""
    _take(talk, line, is_turn=True)
    return {}


def _go_on(exchange: Exchange, talk: Conversation, line: Line, *, is_turn: bool = False) -> Message:
    """The answer to a line, which is part of the conversation then; without one the line is not either."""
    before = talk.system, [*talk.messages], talk.tools
    try:
        options = _take(talk, line, is_turn=is_turn)
        prompt = exchange.prepare(talk.prompt, options, read_file)
        finish = next(said for said in exchange.answer(prompt) if isinstance(said, Finish))
    except BaseException:
        talk.system, talk.messages, talk.tools = before
        raise
    talk.messages.append(finish.message)
    usage = asdict(finish.usage) | {"tokens_per_second": round(finish.usage.per_second, 2)}
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in usage.items()}
    said = {key: value for key, value in finish.message.items() if key != "role"}
    return {**said, "finish_reason": finish.reason, "usage": rounded}


def _take(talk: Conversation, line: Line, *, is_turn: bool = False) -> Options:
    """Puts what a line says into the conversation; the options of the answer to it."""
    value = {"prompt": line.value} if isinstance(line.value, str) else line.value
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)}, expected a text or an object")
    if unknown := next((key for key in value if key not in KEYS), None):
        raise ValueError(f"{shown(unknown)}: unknown, expected some of {', '.join(KEYS)}")
    sources = [key for key in ("prompt", "messages", "content") if key in value]
    if not sources and any(key in value for key in FILES):
        value = {**value, "prompt": ""}
    elif len(sources) != 1:
        raise ValueError(
            f"{' and '.join(sources) or 'nothing to answer'}, expected one of prompt, messages, content"
        )
    if "system" in value:
        talk.system = _text(value, "system")
    if "messages" in value:
        if is_turn:
            raise ValueError("messages: a turn is one message, expected prompt, or role and content")
        messages: Any = value["messages"]
        normalize_messages(messages, null=None, fold_results=False)
        talk.messages = list(messages)
    elif "content" in value:
        _add(talk, {key: value[key] for key in ("role", "content", "name", "tool_call_id") if key in value})
    else:
        text, files = _text(value, "prompt"), _files(value)
        if not text.strip() and not files:
            raise ValueError("prompt: it is empty, expected some text")
        talk.say(text, files)
    return _options(talk, value)


def _add(talk: Conversation, message: Message) -> None:
    """A message with a role; the system's stands in front."""
    message.setdefault("role", "user")
    normalize_messages([message], null=None, fold_results=False)
    if message["role"] in ("system", "developer"):
        talk.system = normalize_messages([message], null=None, fold_results=False)[0]["content"]
    else:
        talk.messages.append(message)


def _files(value: Mapping[str, Any]) -> list[tuple[str, Path]]:
    files = []
    for kind in FILES:
        given = value.get(kind, [])
        for path in given if isinstance(given, list) else [given]:
            if not isinstance(path, str) or not path:
                raise ValueError(f"{kind}: {shown(path)}, expected a path or a list of paths")
            files.append((kind, Path(path)))
    return files


def _options(talk: Conversation, value: Mapping[str, Any]) -> Options:
    """As the conversation says, but for what the line says."""
    if "tools" in value:
        normalize_tools(value["tools"])
        talk.tools = list(value["tools"] or ())
    sampling = sampling_of({name: value[name] for name in SAMPLING if name in value}, talk.sampling)
    options = replace(talk.options(), params=sampling, choice=openai_choice(value.get("tool_choice")))
    if "think" in value:
        if not isinstance(value["think"], bool):
            raise ValueError(f"think: {shown(value['think'])}, expected true or false")
        options = replace(options, thinking=value["think"])
    if "max_tokens" in value:
        most = value["max_tokens"]
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_tokens: {shown(most)}, expected a whole number of at least 1")
        options = replace(options, max_tokens=most)
    if "json_schema" in value:
        if not isinstance(value["json_schema"], Mapping):
            raise ValueError(
                f"json_schema: {shown(value['json_schema'])}, expected a JSON schema (an object)"
            )
        options = replace(options, schema=value["json_schema"])
    stops = value.get("stop", ())
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop: {shown(stops)}, expected a text or a list of texts")
    return replace(options, stops=tuple(stops))


def _text(value: Mapping[str, Any], key: str) -> str:
    if not isinstance(value[key], str):
        raise ValueError(f"{key}: {shown(value[key])}, expected a text")
    return value[key]
