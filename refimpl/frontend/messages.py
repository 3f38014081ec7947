"""Chat messages and tool declarations as clients send them -> as every Gemma 4 template understands them.

The templates in circulation stumble over what the APIs allow: content that is null or a list of parts,
arguments as a JSON string, tool results without ids, JSON types as lists.  Each rule below changes only what
a template would print wrongly or not at all; messages in the plain form come out as they went in.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

PART_TYPES = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "text",
    "image": "image", "image_url": "image", "input_image": "image",
    "audio": "audio", "input_audio": "audio", "audio_url": "audio",
    "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {"developer": "system", "model": "assistant", "function": "tool"}
_TEXTS = ("reasoning_content", "reasoning", "name", "tool_name")  # of a message, beside its content
_MAX_SCHEMA_DEPTH = 32
_ANY_TYPE = "string"  # of a schema that allows everything: templates want one type, and a string can hold any


class Placed(dict[str, Any]):
    """A message, part, call or schema that came in another place than where it lies now.

    where  the field, as its API names it; of a part with an image or sound, the field with the content
    """

    def __init__(self, given: Mapping[str, Any], where: str):
        super().__init__(given)
        self.where = where


def place_of(value: Any, default: str) -> str:
    """The field that a value came in. default: where it lies."""
    return value.where if isinstance(value, Placed) else default


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], *, null: Any, fold_results: bool
) -> list[Message]:
    """The messages in plain form; what no template could print is a `ValueError` of one line.

    null          what stands for JSON's null inside arguments and results (some templates print Python's
                  None)
    fold_results  hand tool results to the template as `tool_responses` of the assistant message before them,
                  for templates that know nothing of messages with role "tool"
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages: {shown(messages)}, expected a list with at least one message")
    wheres = [place_of(message, f"messages[{k}]") for k, message in enumerate(messages)]
    plain = [_plain(message, where, null) for message, where in zip(messages, wheres, strict=True)]
    _pair_results(plain)
    return _folded(plain, wheres, fold_results)


def _plain(message: Any, where: str, null: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: {shown(message)}, expected an object with a role and a content")
    plain = dict(message)
    plain["role"] = _OTHER_NAMES.get(plain["role"], plain["role"])
    if plain["role"] not in _ROLES:
        raise ValueError(f"{where}.role: {shown(plain['role'])}, expected one of {', '.join(_ROLES)}")
    for key in _TEXTS:
        if not isinstance(plain.get(key), str | None):
            raise ValueError(f"{where}.{key}: {shown(plain[key])}, expected a string")
    _check_id(plain.get("tool_call_id"), f"{where}.tool_call_id")
    plain["content"] = _content(plain.get("content"), plain["role"], f"{where}.content", null)
    calls = plain.pop("tool_calls", None)
    if not calls and plain.get("function_call"):  # how the API of 2023 wrote the one call it knew
        calls = [{"type": "function", "function": plain.pop("function_call")}]
    if calls:
        if not isinstance(calls, list | tuple):
            raise ValueError(f"{where}.tool_calls: {shown(calls)}, expected a list")
        plain["tool_calls"] = [
            _tool_call(call, place_of(call, f"{where}.tool_calls[{k}]"), null) for k, call in enumerate(calls)
        ]
    if plain["role"] == "assistant":
        content = _map_text(plain["content"], strip_thoughts)
        plain["content"] = content if not isinstance(content, str) or content.strip() else ""
    if plain["role"] == "tool" and plain.get("tool_name") and not plain.get("name"):
        plain["name"] = plain["tool_name"]  # Ollama's word
    return plain


def _content(content: Any, role: str, where: str, null: Any) -> Any:
    """A string, or a list of parts where the message has media or several texts (templates print those one by
    one).
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if role == "tool" and isinstance(content, Mapping):
        return _with_null(content, null)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        if role == "tool":
            return json.dumps(content, ensure_ascii=False)
        raise ValueError(f"{where}: {shown(content)}, expected a string, null or a list of parts")
    parts = [_part(part, place_of(part, f"{where}[{k}]")) for k, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        if role in ("assistant", "system"):
            raise ValueError(f"{where}: an image, sound or video; expected those in role user or tool")
        return parts
    texts = [part["text"] for part in parts]
    if role == "tool":
        return "".join(texts)
    if role == "system":
        return "\n".join(texts)
    return texts[0] if len(texts) == 1 else parts or ""


def _part(part: Any, where: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in PART_TYPES:
        raise ValueError(f"{where}: {shown(part)}, expected an object with type text, image, audio or video")
    if PART_TYPES[kind] != "text":
        return {"type": PART_TYPES[kind]}  # templates write a placeholder; the data itself goes another way
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key, "")
    if not isinstance(text, str):
        raise ValueError(f"{where}.{key}: {shown(text)}, expected a string")
    return {"type": "text", "text": text}


def _tool_call(call: Any, where: str, null: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: {shown(call)}, expected an object with function.name and function.arguments"
        )
    _check_id(call.get("id"), f"{where}.id")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}.function.arguments: no JSON ({error}), expected a JSON object"
            ) from None
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"{where}.function.arguments: {shown(arguments)}, expected a JSON object")
    return {**call, "function": {**function, "arguments": _with_null(arguments or {}, null)}}


def _check_id(id: Any, where: str) -> None:
    """Of a call. Numbers are let through: only whether two of them are equal counts."""
    if not isinstance(id, str | int | None):
        raise ValueError(f"{where}: {shown(id)}, expected a string")


def strip_thoughts(text: str) -> str:
    """An old answer without its `<|channel>...<channel|>` parts, as templates cut them (and trim it)."""
    if "<|channel>" not in text and "<channel|>" not in text:
        return text
    return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))


# -- tool results ----------------------------------------------------------------------------------


def _pair_results(messages: list[Message]) -> None:
    """Give every tool result the name of the call it answers: by id, by its own name, by order, or "unknown".

    Templates compare ids, and two missing ones are equal: so each call whose id is missing or taken gets one
    of its own, and each result the id of its call, or one that no call has.
    """
    taken = {
        str(call.get("id"))
        for message in messages
        for call in message.get("tool_calls", ())
        if call.get("id")
    }
    fresh = (name for k in range(1 << 30) if (name := f"call_{k}") not in taken)
    k = 0
    while k < len(messages):
        calls = messages[k].get("tool_calls", [])
        k += 1
        end = k
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        if calls:
            open_calls = [{"asked": call.get("id") or None, "call": call} for call in calls]
            seen: set[Any] = set()
            for item in open_calls:
                if item["asked"] is None or item["asked"] in seen:
                    item["call"]["id"] = next(fresh)
                seen.add(item["asked"])
            for result in messages[k:end]:
                _answer(result, open_calls, calls, fresh)
        k = end


def _answer(result: Message, open_calls: list[dict[str, Any]], calls: list[Message], fresh: Any) -> None:
    asked, name = result.get("tool_call_id") or None, result.get("name") or None
    if asked is not None:
        match = [item["call"] for item in open_calls if item["asked"] == asked]
        match += [call for call in calls if call["id"] == asked]  # a second result of one call keeps its name
        call = match[0] if match else None
    elif name is not None:
        call = next((item["call"] for item in open_calls if item["call"]["function"]["name"] == name), None)
    else:
        call = open_calls[0]["call"] if open_calls else None
    open_calls[:] = [item for item in open_calls if item["call"] is not call]
    result["tool_call_id"] = next(fresh) if call is None else call["id"]
    result["name"] = (name or "unknown") if call is None else call["function"]["name"]


def _folded(messages: list[Message], wheres: Sequence[str], always: bool) -> list[Message]:
    """Tool results that the template cannot print itself become `tool_responses` of the message before."""
    folded: list[Message] = []
    k = 0
    while k < len(messages):
        message = messages[k]
        k += 1
        folded.append(message)
        end = k
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[k:end]
        if not (message.get("tool_calls") and results):
            continue
        if not always and not any(isinstance(result["content"], Mapping) for result in results):
            continue  # the template reads them itself
        message["tool_responses"] = [
            {"name": result["name"], "response": _only_text(result["content"], where)}
            for result, where in zip(results, wheres[k:end], strict=True)
        ]
        k = end
        after = messages[k] if k < len(messages) else {"role": "none"}
        if always and after["role"] == "assistant" and not (message["content"] or after.get("tool_calls")):
            message["content"] = after["content"]  # what the model said after the results: the same turn
            k += 1
    return folded


def _only_text(content: Any, where: str) -> Any:
    if isinstance(content, list) and any(part["type"] != "text" for part in content):
        raise ValueError(
            f"{where}: a tool's result with an image or sound, which this model's template has no place for; "
            "expected text. Send it in a message of role user after the results"
        )
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


# -- tools -----------------------------------------------------------------------------------------


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool declarations in the form {"type": "function", "function": {name, description, parameters}}, one
    type per schema.
    """
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise ValueError(f"tools: {shown(tools)}, expected a list of declarations")
    return [_tool(tool, place_of(tool, f"tools[{k}]")) for k, tool in enumerate(tools or ())]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: {shown(tool)}, expected an object with function.name")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise ValueError(
            f"{where}.function.parameters: {shown(parameters)}, expected a JSON schema (an object)"
        )
    plain = {**function, "description": function.get("description") or ""}
    if parameters:
        definitions = {**_mapping(parameters.get("definitions")), **_mapping(parameters.get("$defs"))}
        at = place_of(parameters, f"{where}.function.parameters")
        plain["parameters"] = _schema(parameters, definitions, 0, at)
    else:
        plain.pop("parameters", None)
    outer = {} if function is tool else tool
    return {"type": "function", **outer, "function": plain}


def _schema(schema: Any, definitions: Mapping[str, Any], depth: int, where: str) -> dict[str, Any]:
    """One schema with one type: references and unions resolved, null as `nullable`, a missing type guessed
    from the keywords.
    """
    schema = _resolved(schema, definitions, where) if depth < _MAX_SCHEMA_DEPTH else {"type": "object"}
    if depth == 0:
        schema.setdefault("type", "object")
    kinds = schema.get("type")
    if isinstance(kinds, list | tuple):
        named = [kind for kind in kinds if kind != "null"]
        schema["type"] = named[0] if named else "null"
        if len(named) < len(kinds) and named:
            schema["nullable"] = True
    if not isinstance(schema.get("type"), str):
        schema["type"] = _guessed_type(schema)
    if schema.get("properties", "") is None:
        del schema["properties"]
    if "properties" in schema:
        properties = schema["properties"]
        if properties == []:  # how some languages write an empty object
            properties = {}
        if not isinstance(properties, Mapping):
            raise ValueError(f"{where}.properties: {shown(properties)}, expected an object of schemas")
        schema["properties"] = {
            key: _schema(value, definitions, depth + 1, f"{where}.properties.{shown(key)}")
            for key, value in properties.items()
        }
    if isinstance(schema.get("items"), Mapping):
        schema["items"] = _schema(schema["items"], definitions, depth + 1, f"{where}.items")
    if schema.get("description", "") is None:
        del schema["description"]
    return schema


def _resolved(schema: Any, definitions: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of a schema with its `$ref`, `allOf` and the first real alternative of its `anyOf` or `oneOf`
    merged in.
    """
    merged = dict(_mapping(schema))
    for _ in range(_MAX_SCHEMA_DEPTH):
        for key in ("allOf", "anyOf", "oneOf"):
            if merged.get(key) and not isinstance(merged[key], list | tuple):
                raise ValueError(f"{where}.{key}: {shown(merged[key])}, expected a list of schemas")
        if isinstance(merged.get("$ref"), str):
            name = re.sub(r"^#/(\$defs|definitions)/", "", merged.pop("$ref"))
            merged = {**_mapping(definitions.get(name)), **merged}
        elif merged.get("allOf"):
            for part in merged.pop("allOf"):
                merged = {**_mapping(part), **merged}
        elif merged.get("anyOf") or merged.get("oneOf"):
            alternatives = [_mapping(part) for part in merged.pop("anyOf", None) or merged.pop("oneOf")]
            named = [part for part in alternatives if part.get("type") != "null"]
            merged = {**(named[0] if named else {"type": "null"}), **merged}
            if len(named) < len(alternatives):
                merged["nullable"] = True
        else:
            break
    return merged


def _guessed_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, bool) for value in values):
        return "boolean"
    if values and all(isinstance(value, int | float) for value in values):
        return "number"
    return _ANY_TYPE


# -- small things ----------------------------------------------------------------------------------


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _map_text(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]


def _with_null(value: Any, null: Any) -> Any:
    if value is None:
        return null
    if isinstance(value, Mapping):
        return {str(key): _with_null(item, null) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(item, null) for item in value]
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
