"""What was said, and how it goes on. Images, sounds and videos are in it by the paths of their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fastpath.cli import arguments, output
from fastpath.talk.events import Options
from refimpl.frontend.dialects import Media, media_of
from refimpl.frontend.messages import Message, normalize_messages, normalize_tools, shown
from refimpl.frontend.sampling import SamplingParams

RECOMMENDED = SamplingParams(temperature=1.0, top_k=64, top_p=0.95)
GREEDY = SamplingParams()
KIND = "twinpath conversation"
VERSION = 1
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "seed",
)  # fmt: skip


@dataclass
class Conversation:
    """
    messages   in the shapes of OpenAI's chat API, the system's left out
    schema     of answers in JSON
    n_retries  of the last answer: each has a seed of its own
    """

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    schema: Mapping[str, Any] | None = None
    sampling: SamplingParams = RECOMMENDED
    max_tokens: int | None = None
    n_retries: int = 0

    @property
    def prompt(self) -> list[Message]:
        """Everything, as a request has it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def options(self) -> Options:
        params = replace(self.sampling, seed=(self.sampling.seed + self.n_retries) % (1 << 64))
        return Options(
            params=params,
            max_tokens=self.max_tokens,
            tools=self.tools,
            thinking=self.thinking,
            schema=self.schema,
        )

    def say(self, text: str, files: Sequence[tuple[str, Path]] = ()) -> None:
        """A message of the user, behind the (kind, path) of what is shown and played with it."""
        self.n_retries = 0
        self.messages.append({"role": "user", "content": with_files(text, files)})

    def undo(self) -> Message | None:
        """Takes the user's last message back, with all that came of it."""
        for k in range(len(self.messages) - 1, -1, -1):
            if self.messages[k]["role"] == "user":
                message = self.messages[k]
                del self.messages[k:]
                self.n_retries = 0
                return message
        return None

    def retry(self) -> bool:
        """Takes back what came of the user's last message. False: there is none."""
        n, message = self.n_retries, self.undo()
        if message is None:
            return False
        self.messages.append(message)
        self.n_retries = n + 1
        return True

    # -- files --------------------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        value = {
            "kind": KIND,
            "version": VERSION,
            "system": self.system,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
            "sampling": {name: value for name, value in asdict(self.sampling).items() if name in SAMPLING},
            "tools": self.tools,
            "schema": self.schema,
            "messages": self.messages,
        }
        with output.writing(path, what="a file in use") as stream:
            stream.write(json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str) -> Conversation:
        """What `save` wrote, or a bare list of messages.

        Raises:
            ValueError: one line that begins with the path
        """
        value = arguments.read_json(path, "its contents")
        if isinstance(value, list):
            value = {"kind": KIND, "version": VERSION, "messages": value}
        try:
            return cls._of(value)
        except ValueError as error:
            raise ValueError(
                f"{path}: {error}. Load a file that /save wrote, or a list of messages."
            ) from None
        except RecursionError:
            raise ValueError(f"{path}: the conversation is nested too deeply to be read.") from None

    @classmethod
    def _of(cls, value: Any) -> Conversation:
        if not isinstance(value, Mapping) or value.get("kind") != KIND:
            raise ValueError(f"no conversation: {shown(value)}")
        if value.get("version") != VERSION:
            raise ValueError(f"version {shown(value.get('version'))}, expected {VERSION}")
        messages, system = list(_typed(value, "messages", list, [])), _typed(value, "system", str, "")
        if messages:
            normalize_messages(messages, null=None, fold_results=False)
            media_of(messages)
            if messages[0]["role"] in ("system", "developer"):
                system = normalize_messages(messages[:1], null=None, fold_results=False)[0]["content"]
                del messages[0]
        tools = _typed(value, "tools", list, [])
        normalize_tools(tools)
        schema, most = value.get("schema"), value.get("max_tokens")
        if not isinstance(schema, Mapping | None):
            raise ValueError(f"schema: {shown(schema)}, expected an object")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"max_tokens: {shown(most)}, expected a whole number of at least 1")
        sampling = sampling_of(_typed(value, "sampling", dict, {}), RECOMMENDED)
        thinking = _typed(value, "thinking", bool, False)
        return cls(system, messages, thinking, tools, schema, sampling, most)


def _typed(value: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    found = value.get(key, default)
    if not isinstance(found, kind):
        raise ValueError(f"{key}: {shown(found)}, expected {kind.__name__}")
    return found


def sampling_of(given: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Parameters by name, each checked; those that are not named as in `base`."""
    known = {each.name for each in fields(SamplingParams)} & set(SAMPLING)
    if unknown := next((name for name in given if name not in known), None):
        raise ValueError(f"sampling: {shown(unknown)}, expected one of {', '.join(SAMPLING)}")
    return replace(base, **given)


# -- messages with files ----------------------------------------------------------------------------------


def with_files(text: str, files: Sequence[tuple[str, Path]]) -> Any:
    """The content of a message: files in front of its text, which is a question of their kind if empty."""
    if not files:
        return text
    from refimpl.frontend.media_prompt import DEFAULT_QUESTIONS

    asked = text if text.strip() else DEFAULT_QUESTIONS[files[0][0]]  # type: ignore[index]
    parts: list[Message] = []
    for kind, path in files:
        parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": path.resolve().as_uri()}})
    return [*parts, {"type": "text", "text": asked}]


def read_file(media: Media) -> bytes:
    """What lies at a file: URL; a conversation of this machine may name its files."""
    parts = urlsplit(media.url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"{media.where}: {shown(media.url)}, expected a file of this machine. Download it first."
        )
    path = Path(unquote(parts.path))
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}, expected the file of an earlier message there."
        ) from None


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says, files by their names."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    said = []
    for part in content:
        kind = str(part.get("type", ""))
        value = part.get(kind)
        url = value.get("url", "") if isinstance(value, Mapping) else ""
        said.append(part.get("text", "") if kind == "text" else f"[{Path(unquote(url)).name or kind}]")
    return " ".join(filter(None, said))


# -- files of the command line ----------------------------------------------------------------------------


def read_tools(path: str) -> list[dict[str, Any]]:
    tools = arguments.read_json(path, "tools")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"{path}: {shown(tools)}, expected a non-empty list of function declarations.")
    try:
        normalize_tools(tools)
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from error
    return tools


def read_schema(path: str) -> Mapping[str, Any]:
    schema = arguments.read_json(path, "its contents")
    if not isinstance(schema, Mapping):
        raise ValueError(f"{path}: {shown(schema)}, expected a JSON schema (an object).")
    return schema
