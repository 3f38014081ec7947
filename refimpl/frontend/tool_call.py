"""The text of one tool call -> its name and arguments.

    call      = "call:" name "{" [pair {"," pair}] "}"
    pair      = key ":" value
    value     = Q text Q | "{" ... "}" | "[" value {"," value} "]" | bare          Q is the token <|"|>
    bare      = true | false | null | a JSON number, each of its type; anything else is a string without its
              quotes, or in ' or " instead of them

Slips of models that have one reading are mended: a missing comma after a string, `name(key=value)`, missing
closers at an end that the model itself has set, one missing Q at the end of a string if exactly one place for
it makes the rest parse.  Everything else is a `ToolCallError`: better the raw text than a wrong argument.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from refimpl.frontend.tokenizer import unused_character

QUOTE = '<|"|>'
MAX_DEPTH = 64
MAX_REPAIRS = 32  # strings tried as the one that lacks its closing quote

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_KEY = r"[\w.$@/-]+"
_KEY_FOLLOWS = re.compile(rf"\s*{_KEY}\s*:")
_ENDS_WITH_KEY = re.compile(rf",\s*{_KEY}\s*:\s*$")
_KEY_REACH = 200  # characters before a quote in which such a key is looked for
_SPACE = re.compile(r"\s*")
_SINGLE_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'(?=\s*(?:[,})\]]|$))", re.S)
_CLOSER = {"{": "}", "(": ")"}


class ToolCallError(ValueError):
    """The text is no call that can be read."""


def parse_tool_call(
    parts: Sequence[str | None], tools: Sequence[Mapping[str, Any]] = (), *, may_lack_end: bool = False
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call.

    parts         what stands between `<|tool_call>` and `<tool_call|>`: text, and None for the token <|"|>
    tools         declarations, if known: the parameters of type string take bare values as they are written
    may_lack_end  accept a call whose last braces are missing
    """
    quote = unused_character(part for part in parts if part is not None)  # stands for Q in one string
    text = "".join(quote if part is None else part for part in parts)
    start = min((k for k in (text.find("{"), text.find("(")) if k >= 0), default=-1)
    name = text[: max(start, 0)].strip().removeprefix("call:").lstrip(":").strip()
    if start < 0 or not name or quote in name or re.search(r"\s", name):
        raise ToolCallError("no name with arguments")
    return name, _parse_with_repairs(text, start, quote, _string_parameters(name, tools), may_lack_end)


def _parse_with_repairs(
    text: str, start: int, quote: str, strings: set[str], may_lack_end: bool
) -> dict[str, Any]:
    if text.count(quote) % 2 == 0:
        return _Parser(text, start, quote, strings, may_lack_end).arguments()
    marks = [k for k, character in enumerate(text) if character == quote]
    suspects = [left for left, right in pairwise(marks) if _key_before(text, left + 1, right)]
    if len(suspects) > MAX_REPAIRS:
        raise ToolCallError("a string without end")
    readings: list[dict[str, Any]] = []
    for left in suspects:
        try:
            readings.append(_Parser(text, start, quote, strings, may_lack_end, unclosed=left).arguments())
        except ToolCallError:
            continue
    if len(readings) != 1:
        raise ToolCallError("a string without end")
    return readings[0]


def _key_before(text: str, start: int, end: int) -> re.Match[str] | None:
    """`,key:` at the end of a string that runs from `start` to `end`: its closing quote may be missing."""
    return _ENDS_WITH_KEY.search(text, max(start, end - _KEY_REACH), end)


class _Parser:
    """Recursive descent over one text; `at` is the place of the next character."""

    def __init__(
        self,
        text: str,
        start: int,
        quote: str,
        strings: set[str],
        may_lack_end: bool,
        unclosed: int | None = None,
    ):
        self._text, self._at, self._quote = text, start, quote
        self._strings = strings
        self._may_lack_end = may_lack_end
        self._unclosed = unclosed  # where the string begins that lacks its closing quote

    def arguments(self) -> dict[str, Any]:
        opener = self._text[self._at]
        separator = "=" if opener == "(" else ":"
        found = self._pairs(_CLOSER[opener], separator, depth=0)
        if self._text[self._at :].strip("}) \t\r\n"):
            raise ToolCallError("text after the arguments")
        return found

    def _pairs(self, closer: str, separator: str, depth: int) -> dict[str, Any]:
        """{key: value, ...} from its opener on."""
        if depth > MAX_DEPTH:
            raise ToolCallError("nested too deeply")
        self._at += 1
        found: dict[str, Any] = {}
        while not self._ends(closer):
            key = self._key(separator)
            as_text = depth == 0 and key in self._strings
            found[key] = self._value(closer, depth, as_text)
            self._comma(closer)
        return found

    def _list(self, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise ToolCallError("nested too deeply")
        self._at += 1
        found: list[Any] = []
        while not self._ends("]"):
            found.append(self._value("]", depth, False))
            self._comma("]")
        return found

    def _key(self, separator: str) -> str:
        self._skip_space()
        if self._peek() == self._quote:
            key = self._string()
            self._skip_space()
            if self._peek() != separator:
                raise ToolCallError("no value after a key")
        else:
            end = self._text.find(separator, self._at)
            key = self._text[self._at : end].strip()
            if end < 0 or not key or re.search(rf"[,{{}}()\[\]\n{self._quote}]", key):
                raise ToolCallError("no key where one should be")
            self._at = end
            if key[0] == key[-1] == '"' and len(key) > 2:
                key = key[1:-1]
        self._at += 1
        return key

    def _value(self, closer: str, depth: int, as_text: bool) -> Any:
        self._skip_space()
        first = self._peek()
        if first == self._quote:
            return self._string()
        if first == "{":
            return self._pairs("}", ":", depth + 1)
        if first == "[":
            return self._list(depth + 1)
        if first == '"':
            return self._json_string()
        if first == "'" and (match := _SINGLE_QUOTED.match(self._text, self._at)):
            self._at = match.end()
            return match[1].replace("\\'", "'")
        return self._bare(closer, as_text)

    def _string(self) -> str:
        """Everything up to the closing quote, or, for the one that lacks it, up to the key that follows."""
        start = self._at + 1
        end = self._text.find(self._quote, start)
        if end < 0:
            raise ToolCallError("a string without end")
        next_key = _key_before(self._text, start, end)
        if self._at == self._unclosed and next_key:
            self._at = next_key.start()
            return self._text[start : self._at]
        self._at = end + 1
        follows = self._text[self._at : self._at + 200].lstrip()
        if next_key and follows and follows[0] not in ",}])":
            raise ToolCallError("a string without end")  # its text runs into the next key
        return self._text[start:end]

    def _json_string(self) -> str:
        try:
            value, self._at = json.JSONDecoder(strict=False).raw_decode(self._text, self._at)
        except ValueError:
            raise ToolCallError("a string without end") from None
        return value

    def _bare(self, closer: str, as_text: bool) -> Any:
        end = self._at
        while end < len(self._text) and self._text[end] not in f",{closer}":
            if self._text[end] == self._quote:
                raise ToolCallError("a string inside a bare value")
            end += 1
        text = self._text[self._at : end].strip()
        self._at = end
        return text if as_text else typed(text)

    def _comma(self, closer: str) -> None:
        """Go past the comma between two items; it may be missing after a string, where only a key can
        follow.
        """
        self._skip_space()
        if self._peek() == ",":
            self._at += 1
        elif self._peek() not in (closer, ""):
            after_string = self._text[: self._at].rstrip()[-1:] == self._quote
            if closer == "]" or not after_string or not _KEY_FOLLOWS.match(self._text, self._at):
                raise ToolCallError("no comma between two arguments")

    def _ends(self, closer: str) -> bool:
        self._skip_space()
        if self._peek() == closer:
            self._at += 1
            return True
        if self._peek() == "" and not self._may_lack_end:
            raise ToolCallError("the end is missing")
        return self._peek() == ""

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at


def typed(text: str) -> Any:
    """A bare value: JSON's constants and numbers by their type; 007, 1e999 and all other text are strings."""
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return constants[text]
    number = _NUMBER.fullmatch(text)
    if not number or len(text) > 400:
        return text
    if not (number[1] or number[2]):
        return int(text)
    value = float(text)
    return value if isfinite(value) else text


def _string_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of a tool's parameters that are declared as strings."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            schemas = ((key, schema) for key, schema in properties.items() if isinstance(schema, Mapping))
            return {key for key, schema in schemas if schema.get("type") == "string"}
    return set()
