"""Constrained answers: whatever a model wants, what comes has the form; thoughts are free of it."""

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.constraint import All
from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.grammar import MAX_SPACE, Grammar, Grammars, gbnf, json_schema, lark, regex, tool_calls
from refimpl.frontend.output_parser import OutputParser
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.frontend.thinking import ThoughtLimits
from tests.frontend.conversations import TYPES, WEATHER, tool
from tests.frontend.vocab import needs_real, real, small

GRAMMARS = Grammars(small())
OPEN, CLOSE, CALL, CALL_END, QUOTE = map(
    small().id_of, ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
)
ENDS = set(small().eog_ids)
# What a random model likes more than other tokens, so that its answers come to an end.
CLOSERS = [i for text in '"}]' for i in small().encode(text)] + [QUOTE, CALL_END, CLOSE, *ENDS]


def ids_of(text: str) -> list[int]:
    return small().encode(text, parse_special=True)


def answer(constraint, seed: int, *, n: int = 300, likes: int | None = None) -> list[int] | None:
    """What a random model says under a constraint, without the end; None: it found no end.

    likes  a token that it always prefers
    """
    rng = np.random.default_rng(seed)
    made: list[int] = []
    for k in range(n):
        row = rng.standard_normal(small().n_vocab).astype(np.float32)
        row[CLOSERS] += 4
        if likes is not None:
            row[likes] = 30
        token = sample(row, SamplingParams(temperature=1.0, seed=seed), made, k, constraint=constraint)
        constraint.accept(token)
        if token in ENDS:
            return made
        made.append(token)
    return None


def allowed(constraint) -> set[int]:
    row = np.zeros(small().n_vocab, np.float32)
    constraint.mask(row, [])
    return set(np.flatnonzero(row > -np.inf).tolist())


def follow(grammar: Grammar, text: str, **switches):
    """A constraint that a text was accepted by, token by token; None where it is not let through."""
    constraint = GRAMMARS.constraint(grammar, **switches)
    for token in ids_of(text):
        if token not in allowed(constraint):
            return None
        constraint.accept(token)
    return constraint


def takes(grammar: Grammar, text: str) -> bool:
    """The text is let through, and the answer may end there."""
    constraint = follow(grammar, text)
    return constraint is not None and ENDS <= allowed(constraint)


# -- forms -----------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
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


# -- thoughts --------------------------------------------------------------------------------------


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


# -- calls -----------------------------------------------------------------------------------------

NESTED = tool(
    "plan",
    "d",
    steps={"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/Step"}},
    mode={"enum": ["fast", "", 3, None, {"a": [True]}]},
    pair={"prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2, "items": False},
    code={"type": "string", "pattern": "^[a-c]{2}/$", "maxLength": 5},
    optional={"allOf": [{"type": "object", "properties": {"q": {"type": "null"}}}, {"required": ["q"]}]},
    free={},
    map={"type": "object", "additionalProperties": {"type": "integer", "minimum": 3, "maximum": 99}},
)
NESTED["function"]["parameters"]["$defs"] = {
    "Step": {
        "type": "object",
        "properties": {"do": {"type": "string"}, "then": {"$ref": "#/$defs/Step"}},
        "required": ["do"],
    }
}
ODD = tool(
    "my-srv:list.v2",
    "d",
    **{"a b": {"type": ["number", "null"]}, "Z": {"type": "boolean"}, "a": {"const": 1}},
)
TOOLS = [WEATHER, TYPES, NESTED, ODD, tool("none")]


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


# -- the protocol ----------------------------------------------------------------------------------

TEXTS = ['{"name": "the", "age": 12}', '{ "name":"a",\n"age":-3,"ok":true}']


@given(st.sampled_from(TEXTS), st.data())
def test_rollback_leads_to_the_same_masks(text, data):
    """Drafts that were taken back leave no trace."""
    ids = ids_of(text)
    masks = []
    straight = GRAMMARS.constraint(json_schema(PERSON))
    for token in ids:
        masks.append(allowed(straight))
        straight.accept(token)
    at, constraint = 0, GRAMMARS.constraint(json_schema(PERSON))
    for _ in range(6):
        ahead = data.draw(st.integers(0, min(len(ids) - at, 9)))
        for token in ids[at : at + ahead]:
            constraint.accept(token)
        back = data.draw(st.integers(0, ahead))
        constraint.rollback(back)
        at += ahead - back
        assert allowed(constraint) == (masks[at] if at < len(ids) else ENDS)


def test_rollback_across_thoughts_calls_and_the_end():
    form = tool_calls(TOOLS, ToolChoice())
    ids = ids_of("a<|tool_call>call:none{}<tool_call|>b<|tool_call>call:none{}<tool_call|><|tool_response>")
    masks, constraint = [], GRAMMARS.constraint(form)
    for token in ids:
        masks.append(allowed(constraint))
        constraint.accept(token)
    for k in range(len(ids) - 1, -1, -1):
        constraint.rollback(1)
        assert allowed(constraint) == masks[k]
    with pytest.raises(ValueError, match="rollback: 1 tokens, at most 0"):
        constraint.rollback(1)


def test_forks_go_their_own_ways():
    one = follow(json_schema(PERSON), '{"name": "')
    other = one.fork()
    for token in ids_of('a"'):
        one.accept(token)
    assert [small().piece(i) for i in allowed(one) if small().piece(i) in ",}"] == [","]
    assert small().id_of("a") in allowed(other)


def test_a_token_that_is_not_allowed_is_an_error():
    constraint = GRAMMARS.constraint(json_schema(PERSON))
    with pytest.raises(ValueError, match=r"^response_format: token \d+ came, which it forbids"):
        constraint.accept(small().id_of("a"))


def test_rows_longer_and_shorter_than_the_vocabulary():
    for n in (small().n_vocab + 40, small().n_vocab - 3):
        row = np.ones(n, np.float64)
        follow(json_schema({"type": "string"}), '"').mask(row, [])
        assert np.isneginf(row[small().n_vocab :]).all()
        assert (row > 0).sum() > 30


def test_a_model_file_that_forbids_what_must_come():
    only_brace = [i for i in range(small().n_vocab) if small().token_bytes(i) == b"{"]
    with pytest.raises(ValueError, match=r"^constraint: all .* tokens of the vocabulary are forbidden"):
        sample(
            np.zeros(small().n_vocab, np.float32),
            SamplingParams(),
            suppress=only_brace,
            constraint=GRAMMARS.constraint(json_schema(PERSON)),
        )


def test_without_the_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="llguidance is not installed"):
        Grammars(small()).constraint(json_schema(PERSON))


def test_a_grammar_that_is_never_done_keeps_nobody_waiting(monkeypatch):
    """Each pattern that must hold at once doubles the library's time; others are compiled meanwhile."""
    monkeypatch.setattr("refimpl.frontend.grammar.COMPILE_S", 0.2)
    monkeypatch.setattr("refimpl.frontend.grammar.PATIENCE_S", 0.1)
    grammars = Grammars(small())
    grammars.prepare().result()
    slow = [{"allOf": [{"pattern": f"a{{{k}}}.*b{{{k}}}"} for k in range(1, n)]} for n in (20, 21)]
    with pytest.raises(ValueError, match=r"^response_format: not compiled after 0.2 s, expected fewer"):
        grammars.constraint(json_schema({"type": "string", **slow[0]}))
    assert grammars.constraint(regex("b+")) is not None
    with pytest.raises(ValueError, match="not compiled"):
        grammars.constraint(json_schema({"type": "string", **slow[1]}))
    with pytest.raises(ValueError, match=r"^regex: 2 grammars are being compiled. Try again later$"):
        grammars.constraint(regex("c+"))
    assert grammars.constraint(regex("b+")) is not None  # it is kept


@pytest.mark.parametrize(
    "divisors",
    [[10**400 + 1], [2**31], [1000003], [101, 103, 107], [k**2 + 1 for k in range(40)], [0.001, 100.003]],
)
def test_divisors_whose_remainders_are_too_many(divisors):
    schema = {"anyOf": [{"type": "integer", "multipleOf": n} for n in divisors]}
    with pytest.raises(ValueError, match=r"^response_format: multipleOf .*, expected (at most 32|a common)"):
        json_schema(schema)


@pytest.mark.parametrize("divisors", [[0.01], [3], [10**9], [0.05, 7, 2.5], [1e-7]])
def test_divisors_that_can_be_followed(divisors):
    GRAMMARS.constraint(json_schema({"anyOf": [{"type": "number", "multipleOf": n} for n in divisors]}))
