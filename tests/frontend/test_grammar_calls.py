"""Calls of tools that have to come, or may: each is one that the tool takes."""

import json

import jsonschema
import pytest

from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.grammar import json_schema, tool_calls
from refimpl.frontend.output_parser import OutputParser
from tests.frontend.constrained import (
    CALL,
    ENDS,
    GRAMMARS,
    PERSON,
    QUOTE,
    TOOLS,
    allowed,
    answer,
    follow,
    ids_of,
    takes,
)
from tests.frontend.conversations import WEATHER, tool
from tests.frontend.vocab import small


def schema_of(name: str) -> dict:
    [declared] = [t["function"] for t in TOOLS if t["function"]["name"] == name]
    text = json.dumps(declared.get("parameters", {"type": "object"}))
    return json.loads(text.replace('"type": "number", "nullable": true', '"type": ["number", "null"]'))


def check_calls(made: list[int]) -> int:
    """Every call of an answer is one that its tool takes; how many there are."""
    events = OutputParser(small(), tools=TOOLS).parse(made)
    for event in events:
        assert event.kind == "tool_call", (small().decode(made), event)
        jsonschema.validate(event.arguments, schema_of(event.name))
    return len(events)


@pytest.mark.parametrize("name", ["", *(t["function"]["name"] for t in TOOLS)])
def test_required_calls_are_calls_that_the_tools_take(name):
    form = tool_calls(TOOLS, ToolChoice("required", name))
    finished = 0
    for seed in range(12):
        made = answer(GRAMMARS.constraint(form), seed, n=500)
        if made is not None:
            assert check_calls(made) >= 1
            finished += 1
            named = {event.name for event in OutputParser(small()).parse(made)}
            assert name == "" or named == {name}
    assert finished >= 3


def test_a_model_that_wants_prose_calls():
    form = tool_calls([WEATHER], ToolChoice("required", parallel=False))
    made = answer(GRAMMARS.constraint(form), 3, likes=small().id_of("the"), n=40)
    assert made is None or check_calls(made) == 1  # inside the string it says what it likes
    assert allowed(GRAMMARS.constraint(form)) == {CALL}


def test_one_call_if_only_one_is_wanted():
    form = tool_calls(TOOLS, ToolChoice("required", "none", parallel=False))
    assert allowed(follow(form, "<|tool_call>call:none{}<tool_call|>")) == ENDS
    many = tool_calls(TOOLS, ToolChoice("required", "none"))
    assert allowed(follow(many, "<|tool_call>call:none{}<tool_call|>")) == ENDS | {CALL}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "null"}}, "required": ["a"]}}},
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
    ],
)
def test_parameters_that_refer_to_others(schema):
    """As Pydantic and others write them."""
    form = tool_calls([{"name": "f", "parameters": schema}], ToolChoice("required", parallel=False))
    assert allowed(follow(form, "<|tool_call>call:f{a:null}<tool_call|>")) == ENDS
    assert follow(form, "<|tool_call>call:f{}") is None


def test_enums_leave_their_spellings_and_then_the_quote():
    form = tool_calls([WEATHER], ToolChoice("required"))
    begin = '<|tool_call>call:get_weather{city:<|"|>the<|"|>,unit:<|"|>'
    assert [small().piece(i) for i in allowed(follow(form, begin))] == ["c"] or {
        small().piece(i) for i in allowed(follow(form, begin))
    } == {"c", "<0x63>", "<0x66>"}
    assert allowed(follow(form, begin + "c")) == {QUOTE}


def test_strings_hold_everything_but_the_quote():
    form = tool_calls([WEATHER], ToolChoice("required"))
    inside = allowed(follow(form, '<|tool_call>call:get_weather{city:<|"|>'))
    assert inside & {i for i in range(small().n_vocab) if small().is_special(i)} == {QUOTE}
    said = 'a"}] {,b:\n<|'
    assert takes(form, f'<|tool_call>call:get_weather{{city:<|"|>{said}<|"|>}}<tool_call|>')


def test_arguments_stand_in_the_templates_order():
    form = tool_calls(
        [tool("f", "d", b={"type": "null"}, A={"type": "null"}, optional={"type": "null"})],
        ToolChoice("required"),
    )
    for inner, is_taken in {
        "A:null,b:null": True,
        "A:null,b:null,optional:null": True,
        "b:null,A:null": False,
        "A:null": False,
        "A:null,,b:null": False,
    }.items():
        assert takes(form, f"<|tool_call>call:f{{{inner}}}<tool_call|>") == is_taken


def test_the_optional_ones_may_all_be_left_out():
    properties = {key: {"type": "null"} for key in "abc"}
    declared = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    form = tool_calls([declared], ToolChoice("required"))
    for k in range(8):
        inner = ",".join(f"{key}:null" for bit, key in enumerate("abc") if k >> bit & 1)
        assert takes(form, f"<|tool_call>call:f{{{inner}}}<tool_call|>")


UNHELD = [
    ({"type": "array", "uniqueItems": True}, "tools: f.x: keyword uniqueItems cannot be guaranteed"),
    ({"type": "object", "properties": {"k": {"not": {}}}}, "tools: f.x.k: keyword not cannot be guaranteed"),
    ({"type": "strin"}, "tools: f.x.type: 'strin', expected a type of JSON"),
    ({"$ref": "#/$defs/nope"}, "tools: f.x.$ref: '#/$defs/nope', expected a definition"),
    ({"type": "string", "pattern": 5}, "tools: f.x.pattern: 5, expected a regular expression"),
    ({"anyOf": 5}, "tools: f.x.anyOf: 5, expected a list"),
    (5, "tools: f.x: 5, expected a JSON schema"),
]


@pytest.mark.parametrize(("schema", "message"), UNHELD)
def test_what_cannot_be_guaranteed_is_said(schema, message):
    with pytest.raises(ValueError) as caught:
        GRAMMARS.constraint(tool_calls([tool("f", "d", x=schema)], ToolChoice("required")))
    assert str(caught.value).startswith(message)


def test_keywords_that_are_not_held_do_not_stop_a_model_that_may_choose():
    declared = tool("f", "d", x={"type": "array", "uniqueItems": True, "items": {"type": "null"}})
    constraint = follow(
        tool_calls([declared], ToolChoice()), "so <|tool_call>call:f{x:[null,null]}<tool_call|> the"
    )
    assert constraint is not None


def test_auto_holds_in_calls_only():
    form = tool_calls(TOOLS, ToolChoice())
    constraint = GRAMMARS.constraint(form)
    everything = set(range(small().n_vocab))
    for token in ids_of("the <|channel>thought\nhm<channel|>"):
        assert allowed(constraint) == everything
        constraint.accept(token)
    constraint.accept(CALL)
    assert len(allowed(constraint)) < 9
    for token in ids_of("call:none{}<tool_call|>"):
        assert token in allowed(constraint)
        constraint.accept(token)
    assert allowed(constraint) == everything
    assert follow(form, "the<|tool_call>call:get_weather{city:1") is None
    assert tool_calls([], ToolChoice()) is None
    assert tool_calls(TOOLS, ToolChoice("none")) is None


def test_a_call_or_json():
    form = tool_calls(
        [WEATHER], ToolChoice(), {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    )
    assert takes(form, '{"a": null}')
    assert takes(form, '<|tool_call>call:get_weather{city:<|"|>a<|"|>}<tool_call|>')
    assert follow(form, "the") is None
    assert tool_calls([], ToolChoice(), PERSON) == json_schema(PERSON)
