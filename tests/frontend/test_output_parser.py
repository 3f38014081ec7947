"""Output parser and tool calls: what models write, what they write wrongly, and that arrival does not
matter.
"""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.chat_template import ChatTemplate
from refimpl.frontend.output_parser import Event, OutputParser, joined
from refimpl.frontend.tool_call import ToolCallError, parse_tool_call, typed
from tests.frontend.conversations import assistant, call, tool, user
from tests.frontend.vocab import needs_real, real, small

TEMPLATE = ChatTemplate(None, small_family=True, bos="<bos>")


def ids_of(text: str) -> list[int]:
    return small().encode(text, parse_special=True)


def read(text: str, prompt: str = "", **switches) -> list:
    """[(kind, text) or (name, arguments), ...] of an answer given as text with markers."""
    events = OutputParser(small(), ids_of(prompt), **switches).parse(ids_of(text))
    return [(e.name, e.arguments) if e.kind == "tool_call" else (e.kind, e.text) for e in events]


def in_call(text: str) -> str:
    return f"<|tool_call>{text}<tool_call|>"


# -- calls -----------------------------------------------------------------------------------------

CALLS = {
    'call:get_weather{city:<|"|>Paris<|"|>,days:2,o:{k:true},x:[1,<|"|>a<|"|>]}': (
        "get_weather",
        {"city": "Paris", "days": 2, "o": {"k": True}, "x": [1, "a"]},
    ),
    "call:f{}": ("f", {}),
    'call:plan{id:7,steps:[{do:<|"|>mix<|"|>,qty:{n:2,unit:<|"|>g<|"|>}},{do:<|"|>bake<|"|>}],dry:false}': (
        "plan",
        {"id": 7, "steps": [{"do": "mix", "qty": {"n": 2, "unit": "g"}}, {"do": "bake"}], "dry": False},
    ),
    'call:run{cmd:<|"|>echo "a}" | sed \'s/{//\'\n\t\\<|"|>}': (
        "run",
        {"cmd": "echo \"a}\" | sed 's/{//'\n\t\\"},
    ),
    "call:my-srv:list.v2{n:1}": ("my-srv:list.v2", {"n": 1}),
    'call:f{a:null,b:true,c:42,d:-1.5e3,e:<|"|>null<|"|>,g:007,h:}': (
        "f",
        {"a": None, "b": True, "c": 42, "d": -1500.0, "e": "null", "g": "007", "h": ""},
    ),
    'call:w{body:<|"|>if (x) {,dest:<|"|>o.c<|"|>}': ("w", {"body": "if (x) {", "dest": "o.c"}),
    'call:mv{dir:<|"|>up<|"|>by:3}': ("mv", {"dir": "up", "by": 3}),
    'call:f(a=<|"|>x<|"|>, n=2)': ("f", {"a": "x", "n": 2}),
    'call:f{a:<|"|>1<|"|>b:<|"|>2<|"|>}': ("f", {"a": "1", "b": "2"}),
    'call:f{a:<|"|>x,b:<|"|>,c:3}': ("f", {"a": "x,b:", "c": 3}),  # odd, but all quotes are there
    'call:f{ a : <|"|>x<|"|> , l : [ 1 , 2 ] }': ("f", {"a": "x", "l": [1, 2]}),
    'call:f{<|"|>my key<|"|>:1}': ("f", {"my key": 1}),
    'call:f{"a":"b\\n"}': ("f", {"a": "b\n"}),
    "call:f{u:http://a.b/c?d=1}": ("f", {"u": "http://a.b/c?d=1"}),
    "call:f{a:[[],{}],b:{c:{}}}": ("f", {"a": [[], {}], "b": {"c": {}}}),
    "call:f{a:1": ("f", {"a": 1}),
    "call:f{a:[1,2": ("f", {"a": [1, 2]}),
    "call:f{a:1}}": ("f", {"a": 1}),
    "f{a:1}": ("f", {"a": 1}),
    ":f{a:1}": ("f", {"a": 1}),
    'call:größe{é:<|"|>ü<|"|>}': ("größe", {"é": "ü"}),
    "call:f{a:'b c',d:[ 'e, f' ,'']}": ("f", {"a": "b c", "d": ["e, f", ""]}),
    "call:f{a:'it\\'s'}": ("f", {"a": "it's"}),
    "call:f{a:it's,b:'s}": ("f", {"a": "it's", "b": "'s"}),  # apostrophes, not quotes
    'call:f{a:"line\nline"}': ("f", {"a": "line\nline"}),
    "call:f{k:INV-472,p:src/main.py,l:[INV-1, INV-2]}": (
        "f",
        {"k": "INV-472", "p": "src/main.py", "l": ["INV-1", "INV-2"]},
    ),
    "call:amount{orig:1.5e10,n:-7,x:3.14}": ("amount", {"orig": 1.5e10, "n": -7, "x": 3.14}),
}

UNREADABLE = [
    "call:x:\nBEGIN_ARG...",
    "call:f",
    "",
    "{a:1}",
    "call:{a:1}",
    "call:two words{a:1}",
    "call:f{a}",
    "call:f{:1}",
    "call:f{a:hello, world}",
    'call:f{a:<|"|>x}',
    'call:f{a:<|"|>x,b:<|"|>y,c:<|"|>z<|"|>}',  # two quotes are missing: more than one reading
    'call:f{a:<|"|>x<|"|> and more}',
    'call:f{a:b<|"|>c<|"|>}',
    'call:f{a:<|"|>x<|"|>} and text',
    "call:f{a:[1 2],}{",
    'call:f{a:"x}',
    "call:f{a:" + "[" * 100 + "]" * 100 + "}",
]


@pytest.mark.parametrize("text", CALLS)
def test_calls(text):
    assert read(in_call(text)) == [CALLS[text]]


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_call_comes_as_text(text):
    assert read(in_call(text)) == ([("content", text)] if text else [])


def test_a_call_that_the_budget_cut_is_no_call():
    assert read("<|tool_call>call:f{a:1}") == [("f", {"a": 1})]
    assert read("<|tool_call>call:f{a:1") == [("content", "call:f{a:1")]
    # here the model itself said that it was over
    assert read("<|tool_call>call:f{a:1<turn|>") == [("f", {"a": 1})]


def test_declared_strings_take_bare_values_as_written():
    declared = [tool("f", "d", zip={"type": "string"}, n={"type": "integer"})]
    assert read(in_call("call:f{zip:04109,n:3}"), tools=declared) == [("f", {"zip": "04109", "n": 3})]
    assert read(in_call("call:f{zip:4109,n:3}"), tools=declared) == [("f", {"zip": "4109", "n": 3})]
    assert read(in_call("call:g{zip:4109}"), tools=declared) == [("g", {"zip": 4109})]


def test_markers_inside_a_string_are_its_text():
    assert read(in_call('call:f{a:<|"|>x<|channel>y<|"|>}')) == [("f", {"a": "x<|channel>y"})]


def test_calls_are_counted_in_the_reply():
    text = in_call("call:f{}") + in_call("call:f{a:1}") + "\n" + in_call("call:g{}")
    events = OutputParser(small()).parse(ids_of(text))
    assert [(e.name, e.index, json.loads(e.text)) for e in events] == [
        ("f", 0, {}),
        ("f", 1, {"a": 1}),
        ("g", 2, {}),
    ]


def test_every_call_has_an_id_of_its_own():
    text = in_call("call:f{}") * 3
    first, second = (OutputParser(small()).parse(ids_of(text)) for _ in range(2))
    assert len({event.id for event in first + second}) == 6
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", event.id) for event in first)
    numbered = OutputParser(small(), new_id=iter("abc").__next__).parse(ids_of(text))
    assert [event.id for event in numbered] == ["a", "b", "c"]
    assert [event.id for event in OutputParser(small()).parse(ids_of("the"))] == [""]


def test_a_call_without_end_before_the_next():
    assert read("<|tool_call>call:f{}<|tool_call>call:g{}<tool_call|>") == [("f", {}), ("g", {})]


def test_generation_ends_at_a_tool_response():
    assert read(in_call("call:f{}") + "<|tool_response><|tool_response>the") == [("f", {})]


def test_without_tools_markup_is_spelled_without_markers():
    assert read(in_call('call:f{a:<|"|>the<|"|>}'), parse_calls=False) == [("content", 'call:f{a:"the"}')]


def test_long_arguments_take_linear_time():
    value = ('x"\\\n<|{},a:' + " " * 50) * 2000
    parts = ["call:f{a:", None, value, None, "}"]
    assert parse_tool_call(parts) == ("f", {"a": value})
    with pytest.raises(ToolCallError):
        parse_tool_call([*parts[:-2], "}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-0", 0), ("12", 12), ("-1", -1), ("1.5", 1.5), ("1e3", 1000.0), ("1E-2", 0.01),
        ("01", "01"), ("+1", "+1"), (".5", ".5"), ("1.", "1."), ("1e999", "1e999"), ("NaN", "NaN"),
        ("True", "True"), ("nul", "nul"),
    ],
)  # fmt: skip
def test_bare_values(text, value):
    assert typed(text) == value
    assert type(typed(text)) is type(value)


names = st.text(alphabet="abcXYZ_09é-", min_size=1, max_size=6).filter(lambda name: name.strip() == name)
texts = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=20
).filter(lambda text: '<|"|>' not in text and not text.endswith(("<", "<|", '<|"', '<|"|')))
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(names, values, max_size=4))
def test_what_the_template_writes_is_read_back(arguments):
    ids = TEMPLATE.render_ids(small(), [user("a"), assistant(None, call("f", arguments))])
    begin = ids.index(small().id_of("<|tool_call>"))
    [event] = OutputParser(small()).parse(ids[begin:])
    assert (event.name, event.arguments) == ("f", arguments)
    assert json.loads(event.text) == arguments


@given(
    st.lists(
        st.one_of(st.none(), st.sampled_from(["call:f{", "}", "{", "[", "]", ",", ":", "a", "b:", "1", " "])),
        max_size=12,
    )
)
def test_any_parts_are_a_call_or_an_error(parts):
    try:
        name, arguments = parse_tool_call(["call:f{", *parts])
    except ToolCallError:
        return
    assert name
    json.dumps(arguments)


# -- thoughts --------------------------------------------------------------------------------------

THOUGHT_PROMPT = "<bos><|turn>user\na<turn|>\n<|turn>model\n<|channel>thought\n"
ANSWERS = {
    "plain": ("42<turn|>", "", [("content", "42")]),
    "plain, after a turn": ("42<turn|>", "<|turn>model\n", [("content", "42")]),
    "thought": (
        "<|channel>thought\nreasoning\n<channel|>The answer<turn|>",
        "",
        [("thought", "reasoning"), ("content", "The answer")],
    ),
    "white space at the border": (
        "<|channel>thought\n\n a \n<channel|>\n7",
        "",
        [("thought", "a"), ("content", "7")],
    ),
    "empty thought": ("<|channel>thought\n<channel|>\n7", "", [("content", "7")]),
    "no line after the name": ("<|channel>thought<channel|>7", "", [("content", "7")]),
    "the prompt opened the thought": (
        "plan<channel|>ok",
        THOUGHT_PROMPT,
        [("thought", "plan"), ("content", "ok")],
    ),
    "the prompt opened it after a result": (
        "plan<channel|>ok",
        '<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>response:f{value:<|"|>x<|"|>}<tool_response|>'
        "<|channel>thought\n",
        [("thought", "plan"), ("content", "ok")],
    ),
    "the prompt closed it": ("\nok", THOUGHT_PROMPT + "<channel|>", [("content", "ok")]),
    "the prompt opened it, the model again": (
        "<|channel>thought\nx<channel|>y",
        THOUGHT_PROMPT,
        [("thought", "x"), ("content", "y")],
    ),
    "the prompt stops inside the name": (
        "ught\nx<channel|>y",
        "<|turn>model\n<|channel>tho",
        [("thought", "x"), ("content", "y")],
    ),
    "an old thought in the prompt": (
        "ok",
        THOUGHT_PROMPT + "x<channel|>y<turn|>\n<|turn>model\n",
        [("content", "ok")],
    ),
    "repeated openers": (
        "<|channel><|channel>thought\nx<channel|>I will<channel|><|tool_call>call:f{}<tool_call|>",
        "",
        [("thought", "x"), ("content", "I will"), ("f", {})],
    ),
    "opener inside": (
        "<|channel>thought\na\n<|channel>thought\nb<channel|>c",
        "",
        [("thought", "a\nb"), ("content", "c")],
    ),
    "opener without a name": ("<|channel>The answer", "", [("content", "The answer")]),
    "empty channel": ("<|channel><channel|>the", "", [("content", "the")]),
    "two thoughts": (
        "<|channel>thought\na<channel|>b\n<|channel>thought\nc<channel|>d",
        "",
        [("thought", "a"), ("content", "b"), ("thought", "c"), ("content", "d")],
    ),
    "empty thought at the end": ("the\n<|channel>thought\n<channel|>", "", [("content", "the")]),
    "closer alone": ("a<channel|>b", "", [("content", "ab")]),
    "a call ends a thought": (
        "<|channel>thought\na<|tool_call>call:f{}<tool_call|> done",
        "",
        [("thought", "a"), ("f", {}), ("content", "done")],
    ),
    "cut inside a thought": ("<|channel>thought\nabc\n", "", [("thought", "abc")]),
    "cut inside the name": ("<|channel>thou", "", []),
    "turn said again": ("<|turn>model\nhe", "<|turn>model\n", [("content", "he")]),
    "white space before a call": ("I will\n" + in_call("call:f{}"), "", [("content", "I will"), ("f", {})]),
    "white space at the end": ("the\n\n", "", [("content", "the\n\n")]),
    "stray markers": ('a <|"|>b<|"|> <|think|>c<tool_call|>', "", [("content", 'a "b" c')]),
    "spelled markers": ("<end_of_turn> goes on", "", [("content", "<end_of_turn> goes on")]),
    "nothing": ("<turn|>", "<|turn>model\n", []),
    "everything at the end": (
        "<|channel>thought\n<channel|>the<|channel>thought\n<channel|><channel|>",
        "",
        [("content", "the")],
    ),
    "a thought, text and two calls": (
        "<|channel>thought\na\nb<channel|>the" + in_call("call:f{a:1}") + in_call('call:g{a:<|"|>b<|"|>}'),
        "",
        [("thought", "a\nb"), ("content", "the"), ("f", {"a": 1}), ("g", {"a": "b"})],
    ),
    "the prompt began the answer": (" c<turn|>", "<|turn>model\nab", [("content", " c")]),
    "the prompt began the thought": (
        " b<channel|>c",
        "<|turn>model\n<|channel>thought\na",
        [("thought", " b"), ("content", "c")],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    text, prompt, expected = ANSWERS[name]
    assert read(text, prompt) == expected


def test_spelled_markers_are_text():
    spelled = "<|tool_call>call:f{}<tool_call|> <|channel>thought\nx<channel|>"
    parser = OutputParser(small())
    assert parser.parse(small().encode(spelled)) == [Event("content", spelled)]


@needs_real
def test_the_reported_ids():
    call_ids = real().encode("call:f{}")
    assert [e.kind for e in OutputParser(real()).parse([48, *call_ids, 49, 50, 50])] == ["tool_call"]
    spelled = [236820, 236909, 13205, 236779, 6639]
    assert [e.kind for e in OutputParser(real()).parse(spelled)] == ["content"]
    tail = OutputParser(real(), [2, 105, 4368, 107, 100, 45518, 107])
    assert tail.parse([*real().encode("plan"), 101, *real().encode("ok")]) == [
        Event("thought", "plan"),
        Event("content", "ok"),
    ]


def test_thought_tokens_are_counted():
    parser = OutputParser(small(), ids_of(THOUGHT_PROMPT))
    parser.parse(ids_of("hello<channel|>the"))
    assert parser.n_thought == 2
    assert OutputParser(small(), ids_of(THOUGHT_PROMPT)).n_thought == 0


def test_unfinished_characters():
    smile = small().encode("\U0001f600")
    events = [OutputParser(small()).parse(smile[:k]) for k in range(1, 5)]
    assert events == [[Event("content", "\ufffd")]] * 3 + [[Event("content", "\U0001f600")]]
    parser = OutputParser(small())
    assert [parser.push(i) for i in smile] == [[], [], [], [Event("content", "\U0001f600")]]


PIECES = [
    "<|channel>",
    "<channel|>",
    "thought\n",
    "thought",
    "<|tool_call>",
    "<tool_call|>",
    "call:f{",
    "a:",
    '<|"|>',
    "}",
]
PIECES += ["the", " ", "\n", "hello", ",", "é", "<|turn>", "model\n", "<|think|>", "thou", "ght\n", "<0x"]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.data())
def test_arrival_does_not_matter(pieces, data):
    """The same ids, pushed one by one from any prompt-like start, give the same joined events; nothing is
    lost silently.
    """
    ids = [i for piece in pieces for i in ids_of(piece)]
    whole = OutputParser(small()).parse(ids)
    cut = data.draw(st.integers(0, len(ids)))
    parser = OutputParser(small())
    streamed = [e for i in ids[:cut] for e in parser.push(i)]
    assert all(e.text for e in streamed if e.kind != "tool_call")
    streamed += [e for i in ids[cut:] for e in parser.push(i)] + parser.finish()
    assert joined(streamed) == whole
    assert parser.finish() == []
    if "<|tool_call>" not in pieces:  # what cannot be read of a call is shown as it came
        shown = "".join(e.text for e in whole if e.kind != "tool_call")
        assert not any(marker in shown for marker in small().markers)


def parser() -> OutputParser:
    return OutputParser(small(), new_id=lambda: "id")


@given(
    st.lists(st.sampled_from([*PIECES, "<", "<|", "|>", '<|"', "<eos>"]), max_size=14).map("".join), st.data()
)
def test_any_pieces_of_a_text_are_read_as_its_tokens(text, data):
    """The same text, cut anywhere, gives the events that its tokens give."""
    whole = parser().parse(ids_of(text))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for given_pieces in (pieces, list(text), [text]):
        reader = parser()
        events = [event for piece in given_pieces for event in reader.push_text(piece)]
        assert joined(events + reader.finish()) == whole


@given(
    st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(["", THOUGHT_PROMPT, "<|turn>model\n"])
)
def test_events_are_complete_when_they_come(pieces, prompt):
    """What was told is never taken back: the events of a beginning are a beginning of the events."""
    ids = [i for piece in pieces for i in ids_of(piece)]
    reader = OutputParser(small(), ids_of(prompt), new_id=lambda: "id")
    told = [event for token in ids for event in reader.push(token)]
    whole = joined(told + reader.finish())
    for shown, final in zip(joined(told), whole, strict=False):
        assert shown.kind == final.kind
        assert final.text.startswith(shown.text)


@given(st.lists(st.sampled_from(["the ", "hello", "\n", " ", "é"]), max_size=8).map("".join))
def test_plain_text_comes_whole(text):
    assert "".join(e.text for e in OutputParser(small()).parse(ids_of(text))) == text
