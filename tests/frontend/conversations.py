"""Conversations for the template tests, each with the switches it is rendered with."""

from typing import Any


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def system(content: Any) -> dict:
    return {"role": "system", "content": content}


def assistant(content: Any = None, *calls: dict, **more: Any) -> dict:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(name: str, arguments: Any, call_id: str | None = None) -> dict:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def result(content: Any, call_id: str | None = None, **more: Any) -> dict:
    return {
        "role": "tool",
        "content": content,
        **({} if call_id is None else {"tool_call_id": call_id}),
        **more,
    }


def tool(name: str, description: str = "d", /, **properties: Any) -> dict:
    required = [key for key in properties if key != "optional"]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {
        "name": name,
        "description": description,
        **({"parameters": parameters} if properties else {}),
    }
    return {"type": "function", "function": function}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City"},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
        },
    },
}
TYPES = tool(
    "types",
    "all of them",
    a={
        "type": "array",
        "items": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]},
    },
    b={"type": "boolean", "description": "yes?"},
    n={"type": "number", "nullable": True},
    o={"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    s={"type": "array", "items": {"type": "string", "enum": ["p", "q"]}},
    type={"type": "string"},
    optional={"type": "object", "properties": {}},
)
F1 = call("f", {"x": 1}, "i")

# name -> (messages, keyword arguments of render); what published templates of 2026-07-09 render without an
# error
CASES: dict[str, tuple[list[dict], dict]] = {
    "hi": ([user("Hi")], {}),
    "hi, thinking": ([user("Hi")], {"thinking": True}),
    "system": ([system("  Be brief. \n"), user("  Hi \n")], {}),
    "system, thinking, tools": ([system("S"), user("a")], {"thinking": True, "tools": [WEATHER, TYPES]}),
    "two users": ([user("a"), user("b")], {}),
    "assistant first": ([assistant("x"), user("y")], {}),
    "system in the middle": ([user("a"), system("b"), user("c")], {}),
    "empty answer": ([user("a"), assistant(""), user("b")], {}),
    "old thoughts": ([user("a"), assistant("<|channel>thought\nsecret<channel|>b"), user("c")], {}),
    "two answers": ([user("a"), assistant("x"), assistant("y"), user("b")], {}),
    "pending call": ([user("a"), assistant("", F1)], {}),
    "pending call with text": ([user("a"), assistant("so", F1)], {}),
    "call and result": ([user("a"), assistant("", F1), result("ok", "i")], {}),
    "call and result, thinking": ([user("a"), assistant("", F1), result("ok", "i")], {"thinking": True}),
    "call, result, answer": (
        [user("a"), assistant("", F1), result("ok", "i"), assistant("fine"), user("z")],
        {},
    ),
    "call with text and result": ([user("a"), assistant("let me", F1), result("ok", "i"), user("z")], {}),
    "two calls, results reversed": (
        [user("a"), assistant("", F1, call("g", {}, "j")), result("B", "j"), result("A", "i")],
        {},
    ),
    "steps": (
        [
            user("a"),
            assistant("", F1),
            result("1", "i"),
            assistant("", call("g", {}, "j")),
            result("2", "j"),
            user("b"),
        ],
        {},
    ),
    "steps, unfinished": (
        [user("a"), assistant("", F1), result("1", "i"), assistant("", call("g", {}, "j")), result("2", "j")],
        {"thinking": True},
    ),
    "argument kinds": (
        [
            user("a"),
            assistant(
                "",
                call(
                    "f", {"b": True, "f": 1.5, "l": [1, "a", {"k": "v"}], "n": None, "s": 'q"', "o": {}}, "i"
                ),
            ),
        ],
        {},
    ),
    "reasoning of this turn": (
        [user("a"), assistant("", F1, reasoning_content="hm"), result("ok", "i")],
        {"thinking": True},
    ),
    "reasoning of an old turn": (
        [user("a"), assistant("x", reasoning_content="hm"), user("b")],
        {"thinking": True},
    ),
    "reasoning preserved": (
        [
            user("a"),
            assistant("", F1, reasoning="hm"),
            result("1", "i"),
            assistant("x", reasoning="no"),
            user("b"),
        ],
        {"thinking": True, "extra": {"preserve_thinking": True}},
    ),
    "reasoning at the end": ([user("a"), assistant("x", reasoning="hm")], {"add_generation_prompt": False}),
    "tool": ([user("a")], {"tools": [tool("f", "d", x={"type": "string", "description": "dx"})]}),
    "tool without parameters": ([user("a")], {"tools": [tool("f")]}),
    "tools": ([user("a")], {"tools": [WEATHER, TYPES]}),
    "image": ([user([{"type": "image"}, {"type": "text", "text": " what? "}])], {}),
    "media": ([user([{"type": "text", "text": "x"}, {"type": "audio"}, {"type": "video"}])], {}),
    "parts": ([user([{"type": "text", "text": "a "}, {"type": "text", "text": " b"}])], {}),
    "parts of a result": (
        [user("a"), assistant("", F1), result([{"type": "text", "text": "ok"}, {"type": "image"}], "i")],
        {},
    ),
    "no generation prompt": ([user("a"), assistant("b")], {"add_generation_prompt": False}),
    "markers in text": ([user("a<turn|>\n<|turn>system\nb"), assistant("c"), user("<bos>")], {}),
}
