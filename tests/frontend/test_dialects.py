"""What other APIs call messages, tools and choices, and what a prompt makes of it."""

import base64

import pytest

from refimpl.frontend import dialects
from refimpl.frontend.chat_template import ChatTemplate
from refimpl.frontend.dialects import (
    Media,
    ToolChoice,
    anthropic_choice,
    anthropic_messages,
    anthropic_tools,
    media_of,
    ollama_messages,
    openai_choice,
    responses_messages,
    responses_tools,
)
from tests.frontend.conversations import WEATHER, assistant, call, result, system, user

SMALL = ChatTemplate(None, small_family=True, bos="<bos>")
PIXEL = base64.b64encode(b"\x89PNG pixel").decode()
DATA_URL = f"data:image/png;base64,{PIXEL}"
CITY = call("get_weather", {"city": "Paris"}, "t1")
LOOP = [user("a"), assistant(None, CITY), result("20", "t1"), assistant("Mild."), user("b")]


def same(messages, expected, **switches):
    assert SMALL.render(messages, **switches) == SMALL.render(expected, **switches)


# -- Anthropic -------------------------------------------------------------------------------------


def text(said):
    return {"type": "text", "text": said}


def test_anthropic_loop():
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": [text("2"), text("0")]}
    messages = [
        user("a"),
        assistant([use]),
        user([answer]),
        assistant([text("Mi"), text("ld.")]),
        user([text("b")]),
    ]
    assert [m["role"] for m in anthropic_messages(messages)] == "user assistant tool assistant user".split()
    same(anthropic_messages(messages), LOOP)


def test_anthropic_results_and_text_in_one_message():
    uses = [{"type": "tool_use", "id": i, "name": i, "input": {}} for i in "fg"]
    answers = [{"type": "tool_result", "tool_use_id": i, "content": i.upper()} for i in "gf"]
    plain = anthropic_messages([user("a"), assistant([text("so"), *uses]), user([*answers, text("and?")])])
    expected = [user("a"), assistant("so", call("f", {}, "f"), call("g", {}, "g"))]
    same(plain, [*expected, result("G", "g"), result("F", "f"), user("and?")])


def test_anthropic_system_is_text_or_blocks():
    cached = {**text("S"), "cache_control": {"type": "ephemeral"}}
    for given in ("S", [text("S")], [cached]):
        same(anthropic_messages([user("a")], given), [system("S"), user("a")])
    same(anthropic_messages([user("a")], [text("S"), text("T")]), [system("S\nT"), user("a")])
    same(anthropic_messages([user("a")], None), [user("a")])


def test_anthropic_thoughts():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
    ]
    use = {"type": "tool_use", "id": "i", "name": "f", "input": {}}
    plain = anthropic_messages([user("a"), assistant([*blocks, use])])
    assert plain[1]["reasoning_content"] == "hm"
    assert "<|channel>thought\nhm\n<channel|><|tool_call>" in SMALL.render(plain, thinking=True)


def test_anthropic_errors_of_tools_are_told():
    use = {"type": "tool_use", "id": "i", "name": "f", "input": {}}
    for content in ("no such file", [text("no such file")]):
        answer = {"type": "tool_result", "tool_use_id": "i", "content": content, "is_error": True}
        plain = anthropic_messages([user("a"), assistant([use]), user([answer])])
        assert 'response:f{error:<|"|>no such file<|"|>}' in SMALL.render(plain)


def test_anthropic_images():
    sources = [
        {"type": "base64", "media_type": "image/png", "data": PIXEL},
        {"type": "url", "url": "https://a.b/c.png"},
    ]
    plain = anthropic_messages([user([{"type": "image", "source": s} for s in sources] + [text("what?")])])
    assert "<|turn>user\n<|image|><|image|>what?<turn|>" in SMALL.render(plain)
    first, second = media_of(plain)
    assert (first.kind, first.data) == ("image", b"\x89PNG pixel")
    assert (second.data, second.url) == (None, "https://a.b/c.png")


def test_anthropic_tools_and_choices():
    declared = WEATHER["function"]
    given = {
        "name": declared["name"],
        "description": declared["description"],
        "input_schema": declared["parameters"],
    }
    same([user("a")], [user("a")], tools=anthropic_tools([given]))
    assert SMALL.render([user("a")], tools=anthropic_tools([given])) == SMALL.render(
        [user("a")], tools=[WEATHER]
    )
    assert anthropic_choice(None) == anthropic_choice({"type": "auto"}) == ToolChoice("auto")
    assert anthropic_choice({"type": "any"}) == ToolChoice("required")
    assert anthropic_choice({"type": "none"}) == ToolChoice("none")
    named = anthropic_choice({"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert named == ToolChoice("required", "f", parallel=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages: 'Hi', expected a list"),
        (
            [{"role": "tool", "content": "x"}],
            "messages[0]: {'role': 'tool', 'content': 'x'}, expected an object",
        ),
        (
            [user([{"type": "document"}])],
            "messages[0].content[0]: {'type': 'document'}, expected type text, image or",
        ),
        (
            [assistant([{"type": "tool_result"}])],
            "messages[0].content[0]: {'type': 'tool_result'}, expected type text,",
        ),
        (
            [user([{"type": "image", "source": {"type": "file"}}])],
            "messages[0].content[0].source: {'type': 'file'}",
        ),
        ([user([{"type": "text"}])], "messages[0].content[0].text: None, expected a string"),
        ([user(5)], "messages[0].content: 5, expected a list"),
    ],
)
def test_anthropic_faults_name_the_field(messages, message):
    with pytest.raises(ValueError) as caught:
        anthropic_messages(messages)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# -- Ollama ----------------------------------------------------------------------------------------


def test_ollama_loop():
    ask = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": [ask]},
        {"role": "tool", "tool_name": "get_weather", "content": "20"},
        assistant("Mild."),
        user("b"),
    ]
    same(ollama_messages(messages), LOOP)


def test_ollama_results_by_name_in_any_order():
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    results = [{"role": "tool", "tool_name": name, "content": name.upper()} for name in "gf"]
    rendered = SMALL.render(
        ollama_messages([user("a"), {"role": "assistant", "tool_calls": calls}, *results])
    )
    assert (
        'response:g{value:<|"|>G<|"|>}<tool_response|><|tool_response>response:f{value:<|"|>F<|"|>}'
        in rendered
    )


def test_ollama_images_and_thoughts():
    plain = ollama_messages([{**user("what?"), "images": [PIXEL, DATA_URL]}])
    assert "<|turn>user\n<|image|><|image|>what?<turn|>" in SMALL.render(plain)
    assert [m.data for m in media_of(plain)] == [b"\x89PNG pixel"] * 2
    plain = ollama_messages([user("a"), {**assistant("", CITY), "thinking": "hm"}])
    assert "thought\nhm\n" in SMALL.render(plain)


# -- OpenAI ----------------------------------------------------------------------------------------


def test_the_responses_api():
    items = [
        user([{"type": "input_text", "text": "a"}]),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "t1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "20"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Mild."}]},
        user("b"),
    ]
    plain = responses_messages(items)
    assert plain[1]["reasoning_content"] == "hm"
    same(plain, LOOP)
    same(responses_messages("Hi", "S"), [system("S"), user("Hi")])


def test_calls_of_one_step_are_one_message():
    def ask(name):
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def answer(name):
        return {"type": "function_call_output", "call_id": name, "output": name.upper()}

    said = {"role": "assistant", "content": "so"}
    plain = responses_messages(
        [user("a"), said, ask("f"), ask("g"), answer("g"), answer("f"), ask("h"), answer("h")]
    )
    assert [m["role"] for m in plain] == "user assistant tool tool assistant tool".split()
    same(
        plain,
        [
            user("a"),
            assistant("so", call("f", {}, "f"), call("g", {}, "g")),
            result("G", "g"),
            result("F", "f"),
            assistant(None, call("h", {}, "h")),
            result("H", "h"),
        ],
    )


def test_flat_tools():
    flat = {"type": "function", **WEATHER["function"]}
    assert SMALL.render([user("a")], tools=responses_tools([flat])) == SMALL.render(
        [user("a")], tools=[WEATHER]
    )
    with pytest.raises(ValueError, match=r"tools\[0\]: .*web_search"):
        responses_tools([{"type": "web_search"}])


def test_choices():
    assert openai_choice(None) == openai_choice("auto") == ToolChoice("auto")
    assert openai_choice("required", parallel=False) == ToolChoice("required", parallel=False)
    assert openai_choice("none") == ToolChoice("none")
    for named in ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}):
        assert openai_choice(named) == ToolChoice("required", "f")
    for bad in ("any", {"type": "function"}, 5):
        with pytest.raises(ValueError, match=r"^tool_choice: "):
            openai_choice(bad)


def test_the_functions_of_2023():
    messages = [
        user("a"),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "ok"},
    ]
    same(messages, [user("a"), assistant(None, call("f", {"x": 1}, "i")), result("ok", "i")])


def test_refusals_are_text():
    part = {"type": "refusal", "refusal": "No."}
    same([user("a"), assistant([part]), user("b")], [user("a"), assistant("No."), user("b")])


def test_media_in_the_order_of_the_prompt():
    messages = [
        user(
            [
                {"type": "image_url", "image_url": DATA_URL},
                "x",
                {"type": "input_audio", "input_audio": {"data": PIXEL}},
            ]
        ),
        assistant("y"),
        user([{"type": "video_url", "video_url": {"url": "https://a.b/v.mp4"}}]),
    ]
    assert media_of(messages) == [
        Media("image", "messages[0].content[0].image_url", b"\x89PNG pixel"),
        Media("audio", "messages[0].content[2].input_audio.data", b"\x89PNG pixel"),
        Media("video", "messages[2].content[0].video_url.url", None, "https://a.b/v.mp4"),
    ]
    text = SMALL.render(messages)
    assert text.index("<|image|>") < text.index("<|audio|>") < text.index("<|video|>")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url: None, expected a URL or base64"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png"}},
            "messages[0].content[0].image_url.url: ",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "%%"}},
            "messages[0].content[0].input_audio.data: no base64",
        ),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url: 5, expected"),
    ],
)
def test_media_faults_name_the_field(part, message):
    with pytest.raises(ValueError) as caught:
        media_of([user([part])])
    assert str(caught.value).startswith(message)


def test_media_where_no_template_has_a_place_for_it():
    picture = [{"type": "image_url", "image_url": {"url": DATA_URL}}]
    for message in (assistant(picture), system(picture)):
        with pytest.raises(ValueError, match=r"messages\[1\].content: an image, sound or video"):
            SMALL.render([user("a"), message])
    template = ChatTemplate("{{ messages[1].tool_responses }}", small_family=True, bos="<bos>")
    with pytest.raises(ValueError, match="a tool's result with an image"):
        template.render([user("a"), assistant(None, CITY), result(picture, "t1")])


@pytest.mark.parametrize("piece", [1, 4, 7, 100])
def test_base64_is_read_in_pieces(monkeypatch, piece):
    monkeypatch.setattr(dialects, "BASE64_PIECE", piece)
    for n in range(20):
        data = bytes(range(n))
        text = base64.b64encode(data).decode()
        for spelled in (text, "\n".join(text) + " ", text + "\n" * 9):
            if spelled.strip():
                part = {"type": "image", "image": spelled}
                [found] = dialects.media_of([{"role": "user", "content": [part]}])
                assert found.data == data, (n, spelled)
    for bad in ("A", "AA", "AAAAA", "AA=", "AA==A", "AA==AAAA", "A=AA", "AAA=AAAA", "é==="):
        part = {"type": "image", "image": bad}
        with pytest.raises(ValueError, match=r"^messages\[0\]\.content\[0\]\.image: no base64 "):
            dialects.media_of([{"role": "user", "content": [part]}])
