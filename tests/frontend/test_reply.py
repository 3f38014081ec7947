"""One answer on its way to a client: stop strings, how it ended, the message, the ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.output_parser import Event, joined
from refimpl.frontend.reply import Reply
from refimpl.frontend.splice import Written
from tests.frontend.vocab import small

MODEL = "<|turn>model\n"
CALL = '<|tool_call>call:f{a:<|"|>the<|"|>}<tool_call|>'


def ids_of(text: str) -> list[int]:
    return small().encode(text, parse_special=True)


def read(text: str, *, at_limit: bool = False, prompt: str = MODEL, **switches):
    reply = Reply(small(), ids_of(prompt), **switches)
    events = [event for token in ids_of(text) for event in reply.push(token)]
    return reply, joined(events + reply.finish(at_limit=at_limit))


def shown(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in events]


def test_a_whole_answer():
    reply, events = read(f"<|channel>thought\nhm\n<channel|>so{CALL}<|tool_response>")
    assert shown(events) == [("thought", "hm"), ("content", "so"), ("tool_call", '{"a": "the"}')]
    assert reply.reason == "tool_calls"
    message = reply.message()
    [call] = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "the"}'},
    }
    assert reply.n_thought == len(ids_of("<|channel>thought\nhm\n<channel|>"))


@pytest.mark.parametrize(
    ("text", "at_limit", "reason"),
    [
        ("the<turn|>", False, "stop"),
        ("the", False, "stop"),
        ("the", True, "length"),
        ("the<turn|>", True, "stop"),  # it ended with its last token
        ("<|channel>thought\nhm", True, "length"),
        (CALL, False, "tool_calls"),
        (CALL + "<|tool_response>", True, "tool_calls"),
        (CALL + "the", True, "length"),
        ("<|tool_call>call:x<tool_call|>", False, "stop"),  # no call that can be read is no call
    ],
)
def test_reasons(text, at_limit, reason):
    assert read(text, at_limit=at_limit)[0].reason == reason


def test_nothing_said():
    reply, events = read("<turn|>")
    assert (events, reply.message()) == ([], {"role": "assistant", "content": None})


def test_stop_strings_end_the_text_only():
    thought = "<|channel>thought\nab the\n<channel|>"
    reply, events = read(f"{thought}hello ab the{CALL}", stops=["ab the"])
    assert shown(events) == [("thought", "ab the"), ("content", "hello ")]
    assert (reply.reason, reply.is_stopped) == ("stop", True)
    reply, events = read('<|tool_call>call:f{a:<|"|>ab the<|"|>}<tool_call|>ab the', stops=["ab the"])
    assert [event.kind for event in events] == ["tool_call"]
    assert reply.reason == "tool_calls"


def test_what_was_withheld_comes_before_a_call_and_at_the_end():
    _, events = read(f"hello ab{CALL} ab", stops=["ab the"])
    assert shown(events) == [("content", "hello ab"), ("tool_call", '{"a": "the"}'), ("content", "ab")]


def test_a_stop_across_tokens_is_cut_exactly():
    reply = Reply(small(), ids_of(MODEL), stops=["EN"])
    told = [reply.push(token) for token in small().encode("the END")]
    assert "".join(event.text for events in told for event in events) == "the "
    assert reply.push(5) == reply.finish() == []
    assert 5 not in reply.ids


def test_no_tools_were_offered():
    reply, events = read(CALL, parse_calls=False)
    assert shown(events) == [("content", 'call:f{a:"the"}')]
    assert reply.reason == "stop"


@pytest.mark.parametrize("prompt", [MODEL, MODEL + "<|channel>thought\n"])
def test_ids_for_later(prompt):
    text = "the<channel|>hello<turn|>"
    reply, _ = read(text, prompt=prompt)
    assert reply.written() == Written(tuple(ids_of(text)), in_thought=prompt != MODEL)


pieces = ["<|channel>", "thought\n", "<channel|>", "the", " ", "ab", "\n", CALL, "hello", "<|tool_call>", "a"]


@given(
    st.lists(st.sampled_from(pieces), max_size=10),
    st.lists(st.sampled_from(["ab", "the h", "a\n"]), max_size=2),
)
def test_events_add_up_to_the_message(parts, stops):
    reply, events = read("".join(parts), stops=stops)
    message = reply.message()
    assert "".join(e.text for e in events if e.kind == "content") == (message["content"] or "")
    assert "".join(e.text for e in events if e.kind == "thought") == message.get("reasoning_content", "")
    calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert calls == [e.arguments for e in events if e.kind == "tool_call"]
    assert all(e.text for e in events)
    if not any("<|tool_call>" in part for part in parts):
        assert not any(stop in (message["content"] or "") for stop in stops)
