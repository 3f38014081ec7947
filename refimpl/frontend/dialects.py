"""Messages, tools and choices as the APIs of Anthropic, Ollama and OpenAI (Responses) spell them -> as the
chat API of OpenAI does, which is what messages.py reads.

Nothing is dropped in silence: what has no place in a prompt is a `ValueError` of one line that names the
field.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

from refimpl.frontend.messages import PART_TYPES, Message, Placed, place_of, shown

BASE64_PIECE = 1 << 20  # characters

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether and which tools are to be called.

    mode      "none", "auto" or "required" (at least one call)
    name      the only tool that may be called; "": any
    parallel  more than one call in one answer is allowed
    """

    mode: Choice = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class Media:
    """One image, sound or video that stands in a conversation.

    kind   image, audio or video
    where  the field it came in
    data   its bytes, if it came with the messages
    url    where it lies, if not
    detail  of an image, how closely it is looked at: low, high, or "" for what is usual
    """

    kind: str
    where: str
    data: bytes | None = None
    url: str = ""
    detail: str = ""


# -- OpenAI ----------------------------------------------------------------------------------------


def openai_choice(choice: Any, *, parallel: bool | None = None) -> ToolChoice:
    """`tool_choice` of the chat and the Responses API: a word, or an object that names a function."""
    many = parallel is not False
    if choice is None:
        return ToolChoice(parallel=many)
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice, parallel=many)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = (choice.get("function") or choice).get("name")
        if isinstance(name, str) and name:
            return ToolChoice("required", name, many)
    raise ValueError(f"tool_choice: {shown(choice)}, expected none, auto, required or a function's name")


def responses_messages(items: Any, instructions: Any = None) -> list[Message]:
    """`input` and `instructions` of the Responses API: a text, or messages, calls, results and reasoning as
    items of one list.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append(Placed({"role": "system", "content": instructions}, "instructions"))
    if isinstance(items, str):
        return [*messages, Placed({"role": "user", "content": items}, "input")]
    if items == []:
        raise ValueError("input: [], expected a text or a list with at least one item")
    for k, item in enumerate(_listed(items, "input")):
        where = f"input[{k}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            kept = {key: item[key] for key in ("role", "content") if key in item}
            _add(messages, Placed(kept, where))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            _check_call(function, f"{where}.name", f"{where}.arguments")
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            _add(messages, Placed({"role": "assistant", "tool_calls": [Placed(call, where)]}, where))
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(Placed(result, where))
        elif kind == "reasoning":
            parts = [
                *_listed(item.get("content") or [], f"{where}.content"),
                *_listed(item.get("summary") or [], f"{where}.summary"),
            ]
            texts = [str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part]
            _add(messages, Placed({"role": "assistant", "reasoning_content": "\n".join(texts)}, where))
        else:
            raise ValueError(
                f"{where}: {shown(item)}, expected a message, function_call, "
                "function_call_output or reasoning"
            )
    return messages


def responses_tools(tools: Any) -> list[Message]:
    """`tools` of the Responses API, whose functions lie flat."""
    declared = []
    for k, tool in enumerate(_listed(tools or [], "tools")):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise ValueError(f"tools[{k}]: {shown(tool)}, expected type function (no other tool runs here)")
        keys = ("name", "description", "parameters")
        function = tool.get("function") or {key: tool[key] for key in keys if key in tool}
        _check_declared(function, f"tools[{k}]", "parameters")
        declared.append({"type": "function", "function": function})
    return declared


def _check_declared(function: Any, where: str, parameters: str) -> None:
    """A function's declaration whose members lie elsewhere than in OpenAI's chat API; `parameters` is the
    name of its schema there."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.name: {shown(function)}, expected a declaration with a name")
    schema, at = function.get("parameters"), f"{where}.{parameters}"
    if not isinstance(schema, Mapping | None):
        raise ValueError(f"{at}: {shown(schema)}, expected a JSON schema (an object)")
    if schema and isinstance(function, dict):
        function["parameters"] = Placed(schema, at)


def _check_call(function: Mapping[str, Any], name: str, arguments: str) -> None:
    """A call in a conversation. name, arguments: the fields that it came in."""
    if not isinstance(function["name"], str):
        raise ValueError(f"{name}: {shown(function['name'])}, expected a function's name")
    given = function["arguments"]
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{arguments}: no JSON ({error}), expected a JSON object") from None
    if (given and not isinstance(given, Mapping)) or isinstance(given, list):
        raise ValueError(f"{arguments}: {shown(given)}, expected a JSON object")


def _add(messages: list[Message], part: Message) -> None:
    """Append a message, or join it to the assistant's that is being put together from items."""
    last = messages[-1] if messages else {}
    if part.get("role") == "assistant" and last.get("role") == "assistant":
        calls = [*last.get("tool_calls", ()), *part.get("tool_calls", ())]
        is_new_step = part.keys() & last.keys() & {"content", "reasoning_content"} or (
            last.get("tool_calls") and "tool_calls" not in part
        )
        if not is_new_step:
            last.update(part)
            if calls:
                last["tool_calls"] = calls
            return
    messages.append(part)


# -- Anthropic -------------------------------------------------------------------------------------


def anthropic_messages(messages: Any, system: Any = None) -> list[Message]:
    """`messages` and `system` of the Messages API: contents are texts or lists of blocks."""
    plain: list[Message] = []
    if system:
        plain.append(Placed({"role": "system", "content": _anthropic_text(system, "system")}, "system"))
    for k, message in enumerate(_listed(messages, "messages")):
        where = f"messages[{k}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
            raise ValueError(f"{where}: {shown(message)}, expected an object with role user or assistant")
        content = message.get("content")
        if content is None or isinstance(content, str):
            plain.append(Placed({"role": message["role"], "content": content or ""}, where))
        else:
            blocks = _listed(content, f"{where}.content")
            made = _anthropic_blocks(message["role"], blocks, f"{where}.content")
            plain += [Placed(each, place_of(each, where)) for each in made]
    return plain


def _anthropic_blocks(role: str, blocks: Sequence[Any], where: str) -> list[Message]:
    """The messages that one list of blocks makes: results of tools become messages of their own."""
    made: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for k, block in enumerate(blocks):
        at = f"{where}[{k}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in ("text", "image"):
            parts.append(_anthropic_part(block, at))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            _check_call(function, f"{at}.name", f"{at}.input")
            calls.append(Placed({"type": "function", "id": block.get("id"), "function": function}, at))
        elif kind == "tool_result" and role == "user":
            if parts:
                made.append({"role": role, "content": parts})
                parts = []
            made.append(_anthropic_result(block, at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking" and role == "assistant":
            pass  # another provider's cipher: it has no text
        else:
            raise ValueError(f"{at}: {shown(block)}, expected {_EXPECTED_BLOCKS.get(role, 'type text')}")
    if role == "assistant":
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if any(part["type"] != "text" for part in parts):
            raise ValueError(f"{where}: an image in an assistant's message, expected it in one of role user")
        message: Message = {"role": role, "content": text}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
        return [message]
    return [*made, {"role": role, "content": parts}] if parts or not made else made


_EXPECTED_BLOCKS = {
    "user": "type text, image or tool_result",
    "assistant": "type text, thinking or tool_use",
}


def _anthropic_part(block: Mapping[str, Any], where: str) -> Message:
    if block["type"] == "text":
        if not isinstance(block.get("text"), str):
            raise ValueError(f"{where}.text: {shown(block.get('text'))}, expected a string")
        return Placed({"type": "text", "text": block["text"]}, where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type') or 'image/png'};base64,{source['data']}"
        where = f"{where}.source.data"
    elif isinstance(source, Mapping) and kind == "url" and isinstance(source.get("url"), str):
        url = source["url"]
        where = f"{where}.source.url"
    else:
        raise ValueError(f"{where}.source: {shown(source)}, expected type base64 with data, or url with url")
    return Placed({"type": "image_url", "image_url": {"url": url}}, where)


def _anthropic_result(block: Mapping[str, Any], where: str) -> Message:
    content = block.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        inner = [_checked_block(part, f"{where}.content[{k}]") for k, part in enumerate(content)]
        content = [_anthropic_part(part, f"{where}.content[{k}]") for k, part in enumerate(inner)]
    if block.get("is_error"):
        if isinstance(content, list):
            if any(part["type"] != "text" for part in content):
                raise ValueError(f"{where}.content: an image in a result that is an error, expected text")
            content = "".join(part["text"] for part in content)
        content = {"error": content or ""}  # or the model would take a failure for an answer
    return Placed({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}, where)


def _anthropic_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = [_checked_block(part, f"{where}[{k}]") for k, part in enumerate(_listed(value, where))]
    texts = [_anthropic_part(part, f"{where}[{k}]") for k, part in enumerate(parts)]
    if any(part["type"] != "text" for part in texts):
        raise ValueError(f"{where}: an image, expected text")
    return "\n".join(part["text"] for part in texts)


def _checked_block(block: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or block.get("type") not in ("text", "image"):
        raise ValueError(f"{where}: {shown(block)}, expected type text or image")
    return block


def anthropic_tools(tools: Any) -> list[Message]:
    """`tools` of the Messages API."""
    declared = []
    for k, tool in enumerate(_listed(tools or [], "tools")):
        if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
            raise ValueError(f"tools[{k}]: {shown(tool)}, expected a tool with input_schema")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        _check_declared(function, f"tools[{k}]", "input_schema")
        function |= {"description": tool["description"]} if tool.get("description") else {}
        declared.append({"type": "function", "function": function})
    return declared


def anthropic_choice(choice: Any) -> ToolChoice:
    """`tool_choice` of the Messages API."""
    if choice is None:
        return ToolChoice()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    many = isinstance(choice, Mapping) and not choice.get("disable_parallel_tool_use")
    if kind in ("auto", "none", "any"):
        return ToolChoice("required" if kind == "any" else kind, parallel=many)
    if kind == "tool" and isinstance(choice.get("name"), str):
        return ToolChoice("required", choice["name"], many)
    raise ValueError(f"tool_choice: {shown(choice)}, expected type auto, any, none, or tool with a name")


# -- Ollama ----------------------------------------------------------------------------------------


def ollama_messages(messages: Any) -> list[Message]:
    """`messages` of /api/chat: images lie beside the text, as base64; results are found by `tool_name`."""
    plain = []
    for k, message in enumerate(_listed(messages, "messages")):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{k}]: {shown(message)}, expected an object with a role and a content")
        made = {key: value for key, value in message.items() if key not in ("images", "thinking")}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if message.get("images"):
            made["content"] = _with_images(message.get("content"), message["images"], f"messages[{k}].images")
        plain.append(made)
    return plain


def ollama_generated(prompt: str, system: str | None, images: Sequence[Any] | None) -> list[Message]:
    """The messages that a prompt of /api/generate stands for."""
    messages: list[Message] = [Placed({"role": "system", "content": system}, "system")] if system else []
    content = _with_images(prompt, images, "images") if images else prompt
    return [*messages, Placed({"role": "user", "content": content}, "prompt")]


def _with_images(text: Any, images: Any, where: str) -> list[Message]:
    parts: list[Message] = []
    for k, image in enumerate(_listed(images, where)):
        at = f"{where}[{k}]"
        if not isinstance(image, str) or not image:
            raise ValueError(f"{at}: {shown(image)}, expected base64")
        url = image if image.startswith("data:") else f"data:;base64,{image}"
        parts.append(Placed({"type": "image_url", "image_url": {"url": url}}, at))
    return [*parts, {"type": "text", "text": text or ""}]


# -- media -----------------------------------------------------------------------------------------


def media_of(messages: Iterable[Mapping[str, Any]]) -> list[Media]:
    """What stands in the media parts of messages (as OpenAI's API has them), in the order of the prompt."""
    found = []
    for k, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str | Mapping) or not isinstance(content, Sequence):
            continue
        for j, part in enumerate(content):
            kind = PART_TYPES.get(str(part.get("type"))) if isinstance(part, Mapping) else None
            if kind and kind != "text":
                where = place_of(message, f"messages[{k}]")
                found.append(_media(kind, part, f"{where}.content[{j}]"))
    return found


def _media(kind: str, part: Mapping[str, Any], where: str) -> Media:
    field = str(part["type"])
    if field not in part and f"{kind}_url" in part:
        field = f"{kind}_url"  # Responses API: {"type": "input_image", "image_url": ...}
    value = part.get(field)
    detail = _detail(part, where)
    where = f"{where}.{field}"
    if isinstance(value, Mapping):
        detail = _detail(value, where) or detail
        key = "url" if "url" in value else "data"
        value, where = value.get(key), f"{where}.{key}"
    where = place_of(part, where)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {shown(value)}, expected a URL or base64")
    if value.startswith("data:"):
        return Media(kind, where, data=_data_url(value, where), detail=detail)
    if value.startswith(("http://", "https://", "file:")):
        return Media(kind, where, url=value, detail=detail)
    return Media(kind, where, data=_base64(value, where), detail=detail)


def _detail(value: Mapping[str, Any], where: str) -> str:
    detail = value.get("detail")
    if detail not in (None, "auto", "low", "high"):
        raise ValueError(f"{where}.detail: {shown(detail)}, expected auto, low or high")
    return "" if detail in (None, "auto") else str(detail)


def _data_url(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{where}: {shown(url)}, expected data:TYPE;base64,DATA")
    return _base64(body, where) if head.endswith(";base64") else unquote_to_bytes(body)


def _base64(text: str, where: str) -> bytes:
    try:
        return b"".join(_decoded(text))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: no base64 ({error}); expected a URL or base64") from None


def _decoded(text: str) -> Iterator[bytes]:
    """A piece at a time: no other thread runs while one is decoded, and 20 MB at once take 0.1 s."""
    rest, is_over = "", False
    for k in range(0, len(text), BASE64_PIECE):
        rest += "".join(text[k : k + BASE64_PIECE].split())
        if is_over and rest:
            raise ValueError("characters after the padding")
        n = len(rest) if k + BASE64_PIECE >= len(text) else len(rest) & ~3
        whole, rest = rest[:n], rest[n:]
        is_over = is_over or whole.endswith("=")
        yield base64.b64decode(whole, validate=True)


def _listed(value: Any, where: str) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ValueError(f"{where}: {shown(value)}, expected a list")
    return list(value)
