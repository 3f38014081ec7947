"""The ollama client against the demo checkpoint."""

import json

import httpx
import jsonschema
import ollama
import pytest

from tests.server.conftest import WEATHER
from tests.server.test_openai import ANSWER, QUESTION, TOOLS

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(served):
    return ollama.Client(host=served.url)


def test_a_chat(client):
    made = client.chat("demo", QUESTION, options=GREEDY)
    assert made.message.content == ANSWER and made.done and made.done_reason == "stop"
    assert made.eval_count == 56 and made.prompt_eval_count == 12
    parts = list(client.chat("demo", QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_answer_names_the_model_that_answered(client):
    assert client.chat("any:13b", QUESTION, options={"num_predict": 1}).model == "demo"


def test_generate(client):
    assert client.generate("demo", "What is Twinpath?", options=GREEDY).response == ANSWER
    parts = client.generate("demo", "What is Twinpath?", options={**GREEDY, "num_predict": 4}, stream=True)
    *_, last = parts
    assert last.done_reason == "length" and last.eval_count == 4


def test_a_schema(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    made = client.chat("demo", QUESTION, format=schema, options=GREEDY)
    jsonschema.validate(json.loads(made.message.content), schema)


def test_tools_and_results(client):
    """Ollama has no tool_choice: whether the demo calls is its own affair, so the call is given."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}}
    said = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "20 degrees"},
    ]
    made = client.chat("demo", said, tools=TOOLS, options={**GREEDY, "num_predict": 8})
    assert made.prompt_eval_count > 12 and made.eval_count
    assert jsonschema.validate(call["function"]["arguments"], WEATHER) is None


def test_what_there_is(client):
    [model] = client.list().models
    assert model.model == "demo" and model.size > 1e6
    assert "completion" in client.show("demo").capabilities
    assert client.show("demo:latest").template == client.show("demo").template
    with pytest.raises(ollama.ResponseError, match="model: other is not here, expected demo") as caught:
        client.show("other")
    assert caught.value.status_code == 404
    [running] = client.ps().models
    assert running.model == "demo"


def test_faults_have_this_apis_shape(client):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("demo", QUESTION, options={"top_p": 7})
    assert caught.value.status_code == 400 and caught.value.error.startswith("options.top_p: 7")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("images", {"raw": True, "images": ["aGk="]}),
        ("system", {"raw": True, "system": "Be brief."}),
        ("think", {"think": "false"}),
    ],
)
def test_what_would_be_passed_over_is_refused(served, field, more):
    answer = httpx.post(f"{served.url}/api/generate", json={"prompt": "Hi", "stream": False, **more})
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"{field}: ")
