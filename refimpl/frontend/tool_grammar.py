"""The declared tools -> a grammar of the calls that may be made of them, in Gemma's own syntax.

    call  = <|tool_call> "call:" name "{" key ":" value "," ... "}" <tool_call|>

Arguments stand in the order in which templates print them (by name), each as its schema says; strings stand
between the tokens `<|"|>`, which no text can be.  Every call that the grammar lets through is one that
tool_call.py reads, with arguments that the tool's schema accepts.

The grammar is in llguidance's dialect of Lark.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refimpl.frontend.messages import shown

MAX_CALLS = 32  # of one answer; a grammar of calls without end could fill any context
ANY_DEPTH = 6  # nesting of values that no schema describes
_DIGITS = 17
_QUOTE = '<|"|>'

_SCALARS = {
    "integer": rf"/-?(0|[1-9][0-9]{{0,{_DIGITS - 1}}})/",
    "number": rf"/-?(0|[1-9][0-9]{{0,{_DIGITS - 1}}})(\.[0-9]{{1,{_DIGITS}}})?([eE][+-]?[0-9]{{1,2}})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
_TEXT = "/(?s:.*)/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_.$@-]{0,63}/"
_PLAIN_KEY = re.compile(r"[^\s,{}()\[\]:\"'=<>|]+")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SAYS_NOTHING = frozenset(
    """$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly
    format nullable strict additionalProperties contentEncoding contentMediaType""".split()
)
_UNDERSTOOD = {
    "string": frozenset(["pattern", "minLength", "maxLength"]),
    "integer": frozenset(_RANGES),
    "number": frozenset(_RANGES),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "object": frozenset(["properties", "required"]),
}


def calls_grammar(
    tools: Sequence[Mapping[str, Any]], *, name: str = "", parallel: bool = True, schema: Any = None
) -> str:
    """A grammar of an answer that is one call or more, and nothing else.

    name    the only tool that may be called; "": any
    schema  JSON of this schema is an answer, too
    What a schema asks for and the grammar cannot hold is a `ValueError` that names it.
    """
    functions = [_function(tool) for tool in tools]
    chosen = [function for function in functions if name in ("", function["name"])]
    if not chosen:
        names = ", ".join(str(function["name"]) for function in functions) or "none"
        raise ValueError(f"tool_choice: {shown(name)} is no declared tool, expected one of: {names}")
    many = f"{{1,{MAX_CALLS}}}" if parallel else ""
    answer = "" if schema is None else f" | %json {json.dumps(schema)}"
    return _Grammar(strict=True).of(
        chosen, f"start: call{many}{answer}\ncall: <|tool_call> body <tool_call|>"
    )


def body_grammar(tools: Sequence[Mapping[str, Any]]) -> str:
    """A grammar of what follows a `<|tool_call>` that the model wrote by itself; keywords that it cannot hold
    are passed over.
    """
    return _Grammar(strict=False).of([_function(tool) for tool in tools], "start: body <tool_call|>")


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool.get("function", tool)


class _Grammar:
    """Collects rules.  A rule's body is made when its name is known, so that schemas may hold themselves.

    strict  keywords that cannot be held are errors
    """

    def __init__(self, *, strict: bool):
        self._strict = strict
        self._rules: list[str] = []
        self._named: dict[str, str] = {}
        self._n = 0
        self._where = ""  # of the tool at hand
        self._root: Any = {}

    def of(self, functions: Sequence[Mapping[str, Any]], start: str) -> str:
        try:
            return self._of(functions, start)
        except RecursionError:
            raise ValueError(f"{self._where}: nested too deeply, expected a few hundred levels") from None

    def _of(self, functions: Sequence[Mapping[str, Any]], start: str) -> str:
        bodies = []
        for function in functions:
            self._where = f"tools: {function['name']}"
            self._root = function.get("parameters") or {"type": "object", "properties": {}}
            arguments = self._object({"type": "object", **self._root}, self._where)
            bodies.append(f"{_literal('call:' + function['name'])} {arguments}")
        return "\n".join(["%llguidance {}", start, "body: " + "\n  | ".join(bodies), *self._rules])

    def _rule(self, key: str, body: Callable[[], str]) -> str:
        """The rule for `key`, made once."""
        if key not in self._named:
            self._n += 1
            name = self._named[key] = f"r{self._n}"
            self._rules.append(f"{name}: {body()}")
        return self._named[key]

    def _fresh(self, body: str) -> str:
        self._n += 1
        self._rules.append(f"r{self._n}: {body}")
        return f"r{self._n}"

    def _text(self, pattern: str = _TEXT) -> str:
        name = f"T{self._n}"
        self._n += 1
        self._rules.append(f"{name}: {pattern}")
        return f"{_QUOTE} {name} {_QUOTE}"

    # -- schemas -----------------------------------------------------------------------------------

    def _value(self, schema: Any, where: str) -> str:
        """What may stand for a value of this schema."""
        if schema is True or schema is None or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where}: {shown(schema)}, expected a JSON schema (an object)")
        if "$ref" in schema:
            return self._reference(schema, where)
        if schema.get("nullable") and "null" not in _types(schema):
            rest = {key: value for key, value in schema.items() if key != "nullable"}
            return f'("null" | {self._value(rest, where)})'
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: v for k, v in schema.items() if k != key}
                kinds = [{**rest, **_mapping(kind, where)} for kind in _listed(schema[key], f"{where}.{key}")]
                return "(" + " | ".join(self._value(kind, where) for kind in kinds) + ")"
        if "allOf" in schema:
            return self._value(self._merged(schema, where), where)
        if "const" in schema:
            return self._fixed(schema["const"])
        if "enum" in schema:
            values = _listed(schema["enum"], f"{where}.enum")
            return "(" + " | ".join(map(self._fixed, values)) + ")"
        types = _types(schema) or _guessed(schema)
        if not types:
            self._refuse_unknown(schema, where)
            return self._any()
        return "(" + " | ".join(self._typed(kind, schema, where) for kind in types) + ")"

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> str:
        self._refuse_unknown(schema, where)
        if kind == "string":
            return self._string(schema, where)
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind in _SCALARS:
            limits = {key: schema[key] for key in _RANGES if key in schema}
            return f"%json {json.dumps({'type': kind, **limits})}" if limits else _SCALARS[kind]
        raise ValueError(f"{where}.type: {shown(kind)}, expected a type of JSON")

    def _refuse_unknown(self, schema: Mapping[str, Any], where: str) -> None:
        known = {"type"} | _SAYS_NOTHING | set().union(*_UNDERSTOOD.values())
        unknown = sorted(schema.keys() - known)
        if unknown and self._strict:
            raise ValueError(
                f"{where}: keyword {unknown[0]} cannot be guaranteed; leave it out, or use tool_choice auto"
            )

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        pattern = schema.get("pattern")
        low, high = _count(schema, "minLength", where) or 0, _count(schema, "maxLength", where)
        has_length = low != 0 or high is not None
        if pattern is None and not has_length:
            return f"{_QUOTE} {self._named_text()} {_QUOTE}"
        parts = []
        if pattern is not None:
            parts.append(_regex(pattern, f"{where}.pattern"))
        if has_length:
            parts.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        return self._text(" & ".join(parts))

    def _named_text(self) -> str:
        if "any text" not in self._named:
            self._named["any text"] = "TEXT"
            self._rules.append(f"TEXT: {_TEXT}")
        return "TEXT"

    def _array(self, schema: Mapping[str, Any], where: str) -> str:
        prefix = _listed(schema.get("prefixItems") or [], f"{where}.prefixItems")
        first = [self._value(each, f"{where}.prefixItems") for each in prefix]
        low, high = _count(schema, "minItems", where) or 0, _count(schema, "maxItems", where)
        if schema.get("items") is False:
            high = min(len(first), high) if high is not None else len(first)
            item = '"null"'
        else:
            item = self._value(schema.get("items", True), f"{where}.items")
        if not first:
            item = self._fresh(item)
            rest_high = "" if high is None else max(high - 1, 0)
            more = f'{item} ("," {item}){{{max(low - 1, 0)},{rest_high}}}'
            inner = "" if high == 0 else f"({more})" if low > 0 else f"({more})?"
            return f'"[" {inner} "]"'
        rest = f'("," {item})' + f"{{{max(low - len(first), 0)},{'' if high is None else high - len(first)}}}"
        return f'"[" {_joined(first)} {rest if high is None or high > len(first) else ""} "]"'

    def _object(self, schema: Mapping[str, Any], where: str) -> str:
        if "allOf" in schema or "$ref" in schema:
            schema = self._merged(schema, where)
        self._refuse_unknown(schema, where)
        properties = schema.get("properties")
        if properties is None:
            extra = schema.get("additionalProperties", True)
            return '"{" "}"' if extra is False else self._free_object(self._value(extra, where))
        properties = _mapping(properties or {}, f"{where}.properties")
        required = set(_names(schema.get("required") or [], f"{where}.required"))
        missing = sorted(required - properties.keys())
        if missing and self._strict:
            raise ValueError(
                f"{where}.required: {missing[0]!r} is not among the properties, expected it there"
            )
        keys = sorted(properties, key=lambda key: key.lower())
        pairs = [
            (f"{_key(key)} {self._value(properties[key], f'{where}.{key}')}", key in required) for key in keys
        ]
        return f'"{{" {self._pairs(pairs)} "}}"'

    def _pairs(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in order, optional ones left out or not, with a comma between any two.

        Two rules for each place in the list: the rest with something before it, and the rest with nothing.
        """
        after, first = "", ""  # rules for the rest behind each pair; "" is the empty rest
        for pair, is_required in reversed(pairs):
            piece = self._fresh(pair)
            begun = f"{piece} {after}"
            new_first = begun if is_required else f"({begun} | {first})" if first else f"({begun})?"
            new_after = f'"," {piece} {after}' if is_required else f'("," {piece})? {after}'
            first, after = self._fresh(new_first), self._fresh(new_after)
        return first

    def _reference(self, schema: Mapping[str, Any], where: str) -> str:
        name = schema["$ref"]
        return self._rule(
            f"$ref {self._where} {name}", lambda: self._value(self._resolved(name, where), where)
        )

    def _resolved(self, name: Any, where: str) -> Any:
        target: Any = self._root
        for step in str(name).removeprefix("#").strip("/").split("/") if name != "#" else []:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if target is None or not str(name).startswith("#"):
            raise ValueError(f"{where}.$ref: {shown(name)}, expected a definition of the same schema")
        return target

    def _merged(self, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A schema with its `allOf` and `$ref` merged in: properties and required names together."""
        merged = {key: value for key, value in schema.items() if key not in ("allOf", "$ref")}
        parts = [*_listed(schema.get("allOf", []), f"{where}.allOf")]
        parts += [self._resolved(schema["$ref"], where)] if "$ref" in schema else []
        for part in parts:
            part = _mapping(part, f"{where}.allOf")
            if "allOf" in part or "$ref" in part:
                part = self._merged(part, where)
            both = (part, merged)
            inner = [_mapping(each.get("properties") or {}, f"{where}.properties") for each in both]
            properties = {**inner[0], **inner[1]}
            lists = [_names(each.get("required") or [], f"{where}.required") for each in both]
            required = [*lists[1], *lists[0]]
            merged = {**part, **merged}
            merged |= {"properties": properties} if properties else {}
            merged |= {"required": required} if required else {}
        return merged

    # -- values that no schema describes -----------------------------------------------------------

    def _any(self, depth: int = ANY_DEPTH) -> str:
        def body() -> str:
            kinds = [
                f"{_QUOTE} {self._named_text()} {_QUOTE}",
                *(_SCALARS[k] for k in ("number", "boolean", "null")),
            ]
            if depth > 0:
                inner = self._any(depth - 1)
                kinds += [f'"[" ({inner} ("," {inner})*)? "]"', self._free_object(inner)]
            return " | ".join(kinds)

        return self._rule(f"any {depth}", body)

    def _free_object(self, value: str) -> str:
        if "any key" not in self._named:
            self._named["any key"] = "KEY"
            self._rules.append(f"KEY: {_KEY}")
        return f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"'

    def _fixed(self, value: Any) -> str:
        """One value, as templates write it."""
        if isinstance(value, str):
            return f"({_QUOTE} {_literal(value)} {_QUOTE})" if value else f"({_QUOTE} {_QUOTE})"
        if isinstance(value, Mapping):
            pairs = [f"{_key(key)} {self._fixed(value[key])}" for key in sorted(value, key=str.lower)]
            return f'("{{" {_joined(pairs)} "}}")'
        if isinstance(value, list | tuple):
            return f'("[" {_joined([self._fixed(item) for item in value])} "]")'
        return _literal(json.dumps(value))


def _joined(parts: Sequence[str]) -> str:
    return ' "," '.join(parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _key(key: str) -> str:
    """A key and its colon; one that could be read otherwise stands in quotes."""
    if _PLAIN_KEY.fullmatch(key):
        return _literal(f"{key}:")
    return f'{_QUOTE} {_literal(key)} {_QUOTE} ":"' if key else f'{_QUOTE} {_QUOTE} ":"'


def _regex(pattern: Any, where: str) -> str:
    """A pattern of a JSON schema, which may lie anywhere in a text, as one for the whole text."""
    if not isinstance(pattern, str):
        raise ValueError(f"{where}: {shown(pattern)}, expected a regular expression")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    core = pattern.removeprefix("^")
    core = core.removesuffix("$") if not after else core
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", core)
    return f"/{before}({escaped}){after}/"


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type")
    return (
        []
        if kinds is None
        else [str(kind) for kind in kinds]
        if isinstance(kinds, list | tuple)
        else [str(kinds)]
    )


def _guessed(schema: Mapping[str, Any]) -> list[str]:
    """The kinds that a schema without a type describes: those whose keywords it has."""
    return [kind for kind, words in _UNDERSTOOD.items() if words & schema.keys() and kind != "integer"]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {shown(value)}, expected an object")
    return value


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: {shown(value)}, expected a list")
    return list(value)


def _names(value: Any, where: str) -> list[str]:
    names = _listed(value, where)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: {shown(value)}, expected a list of names")
    return names


def _count(schema: Mapping[str, Any], key: str, where: str) -> int | None:
    """A limit of lengths; None: there is none."""
    value = schema.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < 1 << 31 and value == int(value)):
        raise ValueError(f"{where}.{key}: {shown(value)}, expected a whole number of at least 0")
    return int(value)
