"""The openai client against the demo checkpoint."""

import json

import jsonschema
import openai
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.generate import generate
from refimpl.frontend.sampling import SamplingParams
from tests.server.conftest import ENDS, WEATHER

QUESTION = [{"role": "user", "content": "What is Twinpath?"}]
ANSWER = "Twinpath is Gemma 4 in Python: a readable NumPy reference and a fast Numba engine."
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]


@pytest.fixture(scope="module")
def chat(served):
    made = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def ask(messages=QUESTION, **options):
        return made.chat.completions.create(
            **{"model": "demo", "messages": messages, "temperature": 0, **options}
        )

    ask.client = made
    return ask


def test_the_model_is_listed(chat):
    [model] = chat.client.models.list().data
    assert model.id == "demo" and chat.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError) as caught:
        chat.client.models.retrieve("some/other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert chat(max_tokens=1, model="gpt-of-any-kind").model == "demo"


def test_an_answer(chat):
    made = chat()
    [choice] = made.choices
    assert choice.message.content == ANSWER and choice.finish_reason == "stop"
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 56)
    assert usage.total_tokens == 68


def test_a_stream_says_the_same(chat):
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 56 and not chunks[-1].choices
    assert len({c.id for c in chunks}) == 1


def test_the_next_turn_finds_the_whole_conversation_in_the_cache(chat):
    first = chat(seed=1)
    messages = [*QUESTION, first.choices[0].message.model_dump(exclude_none=True)]
    second = chat([*messages, {"role": "user", "content": "Why?"}])
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_a_limit_ends_an_answer(chat):
    made = chat(max_tokens=3)
    assert made.choices[0].finish_reason == "length" and made.usage.completion_tokens == 3
    assert ANSWER.startswith(made.choices[0].message.content)


def test_a_stop_string_across_tokens_ends_an_answer(chat):
    for stream in (False, True):
        made = chat(stop=["4 in P"], stream=stream)
        if stream:
            chunks = list(made)
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = made.choices[0].message.content, made.choices[0].finish_reason
        assert (text, reason) == ("Twinpath is Gemma ", "stop")


def test_several_answers_have_draws_of_their_own(chat):
    wild = {"temperature": 5, "top_p": 1, "seed": 5, "max_tokens": 12, "extra_body": {"top_k": 0}}
    made = chat(n=3, logit_bias=ENDS, **wild)
    texts = [choice.message.content for choice in made.choices]
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len(set(texts)) == 3 and made.usage.completion_tokens == 36
    alone = chat(logit_bias=ENDS, **wild)
    assert alone.choices[0].message.content == texts[0]


def test_logprobs_are_those_of_the_model(chat, demo):
    made = chat(logprobs=True, top_logprobs=2, max_tokens=4)
    ids = demo.template.render_ids(demo.tokenizer, QUESTION)
    engine = Engine(demo, ops_for("cpu"))
    for found in made.choices[0].logprobs.content:
        row = engine.lanes.prefill(ids).astype("f8")  # the definition, in its simplest form
        engine.lanes.reset()
        import numpy as np

        values = row - row.max() - np.log(np.exp(row - row.max()).sum())
        token = int(np.argmax(values))
        assert found.logprob == pytest.approx(values[token], abs=1e-9)
        assert bytes(found.bytes) == demo.tokenizer.token_bytes(token)
        assert [top.logprob for top in found.top_logprobs] == pytest.approx(sorted(values)[:-3:-1], abs=1e-9)
        ids = [*ids, token]


def test_a_tool_is_called_and_its_result_read(chat):
    made = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [choice] = made.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 20}'}
    messages = [*QUESTION, choice.message.model_dump(exclude_none=True), result]
    after = chat(messages, tools=TOOLS, max_tokens=8)
    assert after.usage.prompt_tokens_details.cached_tokens >= made.usage.total_tokens - 1


def test_calls_in_a_stream_have_id_type_name_and_index(chat):
    options = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    chunks = list(chat(stream=True, max_tokens=400, temperature=1.5, seed=3, **options))
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == list(range(len(calls))) and calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function" and call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_by_a_schema(chat):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for thinking in ("none", "low"):
        made = chat(response_format=form, temperature=1, seed=2, reasoning_effort=thinking,
                    extra_body={"thinking_budget": 5})  # fmt: skip
        jsonschema.validate(json.loads(made.choices[0].message.content), schema)


def test_thoughts_come_apart_and_are_counted(chat):
    options = {"reasoning_effort": "low", "extra_body": {"thinking_budget": 9}, "max_tokens": 40}
    made = chat(temperature=0, **options)
    assert made.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(chat(stream=True, **options))
    deltas = [c.choices[0].delta for c in chunks]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == getattr(made.choices[0].message, "reasoning_content", "")
    assert "".join(d.content or "" for d in deltas) == made.choices[0].message.content


def test_raw_completions(chat, demo):
    made = chat.client.completions.create(
        model="demo", prompt="Hi", max_tokens=5, temperature=0, echo=True, logprobs=1
    )
    ids = demo.tokenizer.encode("Hi", add_bos=True)
    want = list(generate(Engine(demo, ops_for("cpu")), ids, max_tokens=5))
    [choice] = made.choices
    assert choice.text == "Hi" + demo.tokenizer.decode(want)
    assert len(choice.logprobs.tokens) == len("Hi") + len(want) and made.usage.prompt_tokens == len(ids)
    stream = chat.client.completions.create(
        model="demo", prompt=ids, max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text[2:]


def test_answers_in_company_are_those_of_the_engine_alone(served, demo):
    """16 at once, on 4 lanes, each with sampling of its own."""
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def one(k):
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"Number {k}?"}], temperature=1.2, seed=k,
            top_p=0.9, max_tokens=24, stream=True, extra_body={"top_k": 50},
        )  # fmt: skip
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everybody():
        return await asyncio.gather(*map(one, range(16)))

    found = asyncio.run(everybody())
    alone = Engine(demo, ops_for("cpu"))
    for k, text in enumerate(found):
        ids = demo.template.render_ids(demo.tokenizer, [{"role": "user", "content": f"Number {k}?"}])
        params = SamplingParams(temperature=1.2, seed=k, top_p=0.9, top_k=50)
        want = demo.tokenizer.decode(list(generate(alone, ids, params, max_tokens=24)), skip_special=True)
        assert text == want.lstrip() or text == want, k
    served.engine.check_integrity()


def test_responses(served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    made = client.responses.create(model="demo", input="What is Twinpath?", temperature=0)
    assert made.output_text == ANSWER and made.status == "completed" and made.usage.input_tokens == 12
    events = list(
        client.responses.create(model="demo", input="What is Twinpath?", temperature=0, stream=True)
    )
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER
    assert [e.sequence_number for e in events] == list(range(len(events)))
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER}
    made = client.responses.create(
        model="demo",
        input="Hi",
        tools=[tool],
        tool_choice="required",
        temperature=0,
        parallel_tool_calls=False,
    )
    [call] = made.output
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
    items = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    after = client.responses.create(
        model="demo", input=items, tools=[tool], max_output_tokens=4, temperature=0
    )
    assert after.usage.input_tokens_details.cached_tokens > 0
