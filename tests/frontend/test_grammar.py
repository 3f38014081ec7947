"""Constrained answers: whatever a model wants, what comes has the form; thoughts are free of it."""

import json
import re

import jsonschema
import numpy as np
import pytest

from refimpl.frontend.constraint import All
from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.grammar import MAX_SPACE, Grammars, gbnf, json_schema, lark, regex, tool_calls
from refimpl.frontend.output_parser import OutputParser
from refimpl.frontend.thinking import ThoughtLimits
from tests.frontend.constrained import (
    CALL,
    CLOSE,
    ENDS,
    GRAMMARS,
    OPEN,
    PERSON,
    QUOTE,
    allowed,
    answer,
    follow,
    ids_of,
    takes,
)
from tests.frontend.conversations import WEATHER, tool
from tests.frontend.vocab import needs_real, real, small

SCHEMAS = [
    PERSON,
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"enum": ["the", 1, None]}, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": {"a": [1]}}}},
    {"type": "string", "maxLength": 6},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_answers_are_json_of_the_schema(schema):
    finished = 0
    for seed in range(6):
        made = answer(GRAMMARS.constraint(json_schema(schema)), seed)
        if made is not None:
            jsonschema.validate(json.loads(small().decode(made)), schema)
            finished += 1
    assert finished >= 3


def test_any_json_object():
    form = json_schema({"type": "object"})
    for text in ("{}", '{"a": [1, "b", {}, null]}', '{ "a" : -1.5e3 }'):
        assert takes(form, text)
    for text in ("[]", "a", ' {"a": 1}', "```json", "{a: 1}"):
        assert follow(form, text) is None


@pytest.mark.parametrize("thinking", [False, True])
def test_nothing_comes_before_the_form(thinking):
    form = json_schema(PERSON)
    assert follow(form, " the", thinking=thinking) is None
    assert follow(form, "```", thinking=thinking) is None
    assert (OPEN in allowed(GRAMMARS.constraint(form, thinking=thinking))) == thinking


def test_empty_objects_and_long_strings():
    assert takes(json_schema({"type": "object", "properties": {}}), "{}")
    assert follow(json_schema({"type": "string", "maxLength": 524288}), '"the hello')


def test_white_space_is_bounded():
    made = answer(GRAMMARS.constraint(json_schema(PERSON)), 0, likes=small().id_of("\n"), n=500)
    text = small().decode(made)
    assert max(map(len, re.findall(r"\s+", text))) == MAX_SPACE
    jsonschema.validate(json.loads(text), PERSON)
    assert follow(json_schema(PERSON), "{" + "\n" * MAX_SPACE + '"name"') is not None
    assert follow(json_schema(PERSON), "{" + "\n" * (MAX_SPACE + 1)) is None


def test_markers_stand_for_no_characters():
    inside = allowed(follow(json_schema({"type": "string"}), '"the'))
    special = {i for i in range(small().n_vocab) if small().is_special(i)}
    assert not inside & special
    assert {small().id_of("a"), small().id_of("<"), small().id_of("|"), small().id_of("<|")} <= inside
    spelled = small().encode('"<|channel>"')  # as text, not as a marker
    constraint = GRAMMARS.constraint(json_schema({"type": "string"}))
    for token in spelled:
        assert token in allowed(constraint)
        constraint.accept(token)
    assert ENDS <= allowed(constraint)


def test_other_forms():
    assert [takes(regex("a[bc]{2,3}/\\d?"), text) for text in ("abb/", "acbc/1", "ab/", "abb")] == [
        True,
        True,
        False,
        False,
    ]
    words = lark('start: "the" " hello"* <|channel> /b+/')
    assert [takes(words, text) for text in ("the<|channel>b", "the hello<|channel>bb", "the")] == [
        True,
        True,
        False,
    ]
    items = gbnf('root ::= "ab" item+\nitem ::= "," [c-e] # a comment\n')
    assert [takes(items, text) for text in ("ab,c", "ab,c,e", "ab", "ab,b")] == [True, True, False, False]


DEEP: dict = {"type": "null"}
for _ in range(3000):
    DEEP = {"type": "array", "items": DEEP}

FAULTS = {
    "response_format: maximum recursion depth": lambda: json_schema(DEEP),
    "tools: f: nested too deeply": lambda: tool_calls([tool("f", "d", x=DEEP)], ToolChoice("required")),
    "regex: at ": lambda: regex("a(b"),
    "regex: list, expected": lambda: regex([]),
    "grammar: at 1(8): unknown name": lambda: lark("start: foo"),
    "grammar: no GBNF that can be read (No 'root' rule found)": lambda: gbnf('x ::= "a"'),
    "grammar: no GBNF that can be read (Expected ::=": lambda: gbnf('root := "a"'),
    "response_format: Invalid type: strin": lambda: json_schema({"type": "strin"}),
    'response_format: Unimplemented keys: ["uniqueItems"]': lambda: json_schema({"uniqueItems": True}),
    "response_format: Pointer": lambda: json_schema({"$ref": "#/nope"}),
    "response_format: str, expected a JSON schema": lambda: json_schema("object"),
    "tool_choice: required, but there are no tools": lambda: tool_calls([], ToolChoice("required")),
    "tool_choice: 'h' is no declared tool, expected one of: get_weather": lambda: tool_calls(
        [WEATHER], ToolChoice("required", "h")
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_one_line(message):
    with pytest.raises(ValueError) as caught:
        GRAMMARS.constraint(FAULTS[message]())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@needs_real
def test_the_real_vocabulary():
    grammars = Grammars(real())
    assert grammars.prepare() is grammars.prepare()  # in the background, once
    constraint = grammars.constraint(json_schema(PERSON))

    def may_come() -> set[int]:
        row = np.zeros(real().n_vocab, np.float32)
        constraint.mask(row, [])
        return set(np.flatnonzero(row == 0).tolist())

    begin = may_come()
    assert real().id_of("\u2581Sure") not in begin
    assert {real().token_bytes(i) for i in begin} == {b"{", b'{"'}
    for token in real().encode('{"name": "a'):
        assert token in may_come()
        constraint.accept(token)
    inside = may_come()
    assert not inside & set(real().special_ids)  # 52 and 101 among them
    assert real().id_of("\u2581Paris") in inside


def test_a_model_answers_in_json():
    """Not one token of the form is what the model would say; generation ends where the form does."""
    from fastpath.load import DEMO
    from refimpl.generate import generate, load

    model = load(DEMO)
    prompt = model.template.render_ids(model.tokenizer, [{"role": "user", "content": "What is Twinpath?"}])
    schema = {"type": "object", "properties": {"a": {"enum": [True, "x"]}}, "required": ["a"]}
    form = json_schema({**schema, "additionalProperties": False})
    constraint = Grammars(model.tokenizer).constraint(form, prompt)
    ids = list(generate(model, prompt, max_tokens=80, constraint=constraint))
    assert json.loads(model.tokenizer.decode(ids))["a"] in (True, "x")


def test_a_grammar_sleeps_in_a_thought_and_is_armed_after_it():
    form = json_schema(PERSON)
    for opened, prompt in ((True, "<|turn>model\n"), (False, "<|turn>model\n<|channel>thought\n")):
        constraint = GRAMMARS.constraint(form, ids_of(prompt), thinking=True)
        if opened:
            constraint.accept(OPEN)
            for token in ids_of("thought\n"):  # another channel would be part of the answer
                assert allowed(constraint) == {token, CLOSE}
                constraint.accept(token)
        for token in ids_of("the {hello"):
            inside = allowed(constraint)
            assert token in inside
            assert not inside & (ENDS | {OPEN, CALL, QUOTE})  # a thought cannot be the whole answer
            constraint.accept(token)
        assert CLOSE in allowed(constraint)
        constraint.accept(CLOSE)
        assert {small().token_bytes(i) for i in allowed(constraint)} == {b"{"}


def test_answers_after_thoughts_keep_the_form():
    for seed in range(5):
        both = All(
            ThoughtLimits(small(), ids_of("<|turn>model\n"), thinking=True, budget=9),
            GRAMMARS.constraint(json_schema(PERSON), ids_of("<|turn>model\n"), thinking=True),
        )
        both.accept(OPEN)
        made = answer(both, seed, n=400)
        if made is not None:
            events = OutputParser(small()).parse([OPEN, *made])
            assert made.index(CLOSE) <= 8
            jsonschema.validate(json.loads(events[-1].text), PERSON)
