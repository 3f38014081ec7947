"""The anthropic client against the demo checkpoint."""

import json

import anthropic
import jsonschema
import pytest

from tests.server.conftest import WEATHER
from tests.server.test_openai import ANSWER, QUESTION

TOOLS = [{"name": "get_weather", "description": "of a city", "input_schema": WEATHER}]


@pytest.fixture(scope="module")
def messages(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0).messages


def ask(messages, said=QUESTION, **options):
    # the demo's own temperature is given by hand: this client's parameters vary between versions
    body = {"temperature": 0, **options.pop("extra_body", {})}
    return messages.create(**{"model": "demo", "max_tokens": 100, **options}, messages=said, extra_body=body)


def test_an_answer(messages):
    made = ask(messages)
    [block] = made.content
    assert (block.type, block.text, made.stop_reason) == ("text", ANSWER, "end_turn")
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == 12 and usage.output_tokens == 56


def test_a_stream_says_the_same(messages):
    events = list(ask(messages, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == ANSWER and events[-2].delta.stop_reason == "end_turn"


def test_a_tool_is_called_and_its_result_read(messages):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    made = ask(messages, tools=TOOLS, tool_choice=choice)
    [call] = made.content
    assert made.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "get_weather"
    jsonschema.validate(call.input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    said = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]},
        {"role": "user", "content": [result]},
    ]
    after = ask(messages, said, tools=TOOLS, max_tokens=5)
    first = made.usage.input_tokens + made.usage.cache_read_input_tokens
    assert after.usage.cache_read_input_tokens >= first + made.usage.output_tokens - 1


def test_a_streamed_call_is_json_in_pieces(messages):
    events = list(ask(messages, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"}, stream=True,
                      max_tokens=400))  # fmt: skip
    begun = [e.content_block for e in events if e.type == "content_block_start"]
    assert begun[0].type == "tool_use" and begun[0].input == {}
    parts = [e.delta.partial_json for e in events if e.type == "content_block_delta" and e.index == 0]
    jsonschema.validate(json.loads("".join(parts)), WEATHER)


def test_thoughts_are_blocks(messages):
    options = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    made = ask(messages, **options)
    events = list(ask(messages, stream=True, **options))
    begun = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert begun == [block.type for block in made.content]
    assert begun[0] == "thinking", "the demo thinks when it is asked to"


def test_a_stop_sequence_is_named(messages):
    made = ask(messages, stop_sequences=["Python", "4 in"])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "4 in")
    assert made.content[0].text == "Twinpath is Gemma "


def test_the_beginning_of_an_answer_is_gone_on_with(messages):
    made = ask(messages, [*QUESTION, {"role": "assistant", "content": "Twinpath is Gemma 4"}])
    assert "Twinpath is Gemma 4" + made.content[0].text == ANSWER


def test_tokens_are_counted_without_an_answer(messages):
    assert messages.count_tokens(model="demo", messages=QUESTION).input_tokens == 12
    assert messages.count_tokens(model="demo", messages=QUESTION, system="Be brief.").input_tokens > 12


def test_the_model_is_listed(served):
    models = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0).models
    [model] = models.list()
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert models.retrieve("demo").created_at.year >= 2024
    with pytest.raises(anthropic.NotFoundError) as caught:
        models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_the_answer_names_the_model_that_was_asked(messages):
    assert ask(messages, model="claude-of-any-kind", max_tokens=1).model == "demo"


def test_faults_have_this_apis_shape(messages):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(messages, [{"role": "robot", "content": "Hi"}])
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "messages.0: " in caught.value.body["error"]["message"]
