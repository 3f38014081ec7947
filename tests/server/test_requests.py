"""What a request may ask for beside its text, seen through plain HTTP: the server does just that."""

import json
import logging
import time

import httpx
import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.generate import generate
from fastpath.server import anthropic, completions, ollama, openai, responses
from tests.server.conftest import ENDS
from tests.server.serving import serving
from tests.server.test_openai import ANSWER, QUESTION, TOOLS

CHAT, RAW, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def ask(client, **options):
    answer = client.post(CHAT, json={"messages": QUESTION, "temperature": 0, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(made, k=0):
    return made["choices"][k]["message"]["content"]


def chunks_of(client, **options):
    body = {"messages": QUESTION, "temperature": 0, "stream": True, **options}
    with client.stream("POST", CHAT, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "kind", "asked"),
    [
        (CHAT, openai.ChatRequest, {"messages": QUESTION}),
        (RAW, completions.CompletionRequest, {"prompt": "What is Twinpath?"}),
        ("/v1/responses", responses.ResponsesRequest, {"input": QUESTION}),
        (MESSAGES, anthropic.MessagesRequest, {"messages": QUESTION, "max_tokens": 4}),
        ("/api/chat", ollama.ChatRequest, {"messages": QUESTION, "model": "demo"}),
    ],
)
def test_null_is_what_was_not_said(client, path, kind, asked):
    if path.startswith("/api"):
        asked |= {"options": {"temperature": 0, "num_predict": 4}, "stream": False}
    else:
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        asked |= {"temperature": 0, limit: 4}
    nulls = dict.fromkeys(kind.model_fields.keys() - asked.keys())
    plain, other = (client.post(path, json=body).json() for body in (asked, nulls | asked))
    same = ("choices", "content", "message", "status", "response")
    assert any(name in plain for name in same)
    for name in same:
        assert plain.get(name) == other.get(name), other


# -- sampling --------------------------------------------------------------------------------------


def test_a_bias_forbids_and_forces_tokens(client, demo):
    ids = demo.template.render_ids(demo.tokenizer, QUESTION)
    first, second, *_ = generate(Engine(demo, ops_for("cpu")), ids, max_tokens=2)
    other = ask(client, max_tokens=1, logprobs=True, logit_bias={str(first): -100})
    [content] = other["choices"][0]["logprobs"]["content"]
    assert bytes(content["bytes"]) != demo.tokenizer.token_bytes(first)
    forced = ask(client, max_tokens=3, logprobs=True, logit_bias={str(second): 100})
    found = [bytes(each["bytes"]) for each in forced["choices"][0]["logprobs"]["content"]]
    assert found == [demo.tokenizer.token_bytes(second)] * 3
    assert all(each["logprob"] <= 0 for each in forced["choices"][0]["logprobs"]["content"])


def test_log_probabilities_know_nothing_of_samplers(client):
    plain = ask(client, max_tokens=1, logprobs=True, top_logprobs=3)
    wild = ask(client, max_tokens=1, logprobs=True, top_logprobs=3, temperature=1.7, top_k=1, min_p=0.5,
               presence_penalty=2, seed=9)  # fmt: skip
    (one,), (two,) = (made["choices"][0]["logprobs"]["content"] for made in (plain, wild))
    assert one["top_logprobs"] == two["top_logprobs"]


def test_an_answer_goes_on_until_its_least(client):
    short = ask(client)["usage"]["completion_tokens"]
    made = ask(client, min_tokens=short + 9, max_tokens=short + 20)["usage"]["completion_tokens"]
    assert short + 9 <= made <= short + 20


def test_a_seed_is_an_answer(client):
    wild = {"temperature": 4, "top_p": 1, "max_tokens": 12, "logit_bias": ENDS, "top_k": 0}
    texts = [text_of(ask(client, seed=seed, **wild)) for seed in (1, 1, 2, -1)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert text_of(ask(client, **wild)) != text_of(ask(client, **wild)), "no seed is one of chance"


@pytest.mark.parametrize("stop", ["4 in P", ["nowhere", "4 in P", "Python"]])
def test_a_stop_string_ends_all_answers_of_a_stream(client, stop):
    chunks = chunks_of(client, stop=stop, n=2)
    for k in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == k]
        assert "".join(c["delta"].get("content") or "" for c in mine) == "Twinpath is Gemma "
        assert mine[-1]["finish_reason"] == "stop" and mine[0]["delta"]["role"] == "assistant"


def test_what_only_looks_like_a_stop_string_is_not_held_back_for_ever(client):
    assert text_of(ask(client, stop=["engine.And"])) == ANSWER
    assert text_of(ask(client, stop=["<turn|>", "<end_of_turn>"])) == ANSWER


def test_regex_and_grammar(client):
    assert text_of(ask(client, regex="[0-9]{3}-[a-z]{2}", max_tokens=30))[3] == "-"
    for grammar in ('root ::= "yes" | "no"', 'start: "yes" | "no"'):
        assert text_of(ask(client, grammar=grammar)) in ("yes", "no")


# -- tools and thoughts ----------------------------------------------------------------------------


def test_no_tools_is_no_tools(client):
    """tool_choice none declares nothing: the prompt is the one without tools."""
    without = ask(client)
    none = ask(client, tools=TOOLS, tool_choice="none")
    assert none["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert text_of(none) == ANSWER and "tool_calls" not in none["choices"][0]["message"]
    assert ask(client, tools=TOOLS)["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}])
def test_a_choice_of_several_tools(client, choice):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    made = ask(client, tools=[*TOOLS, other], tool_choice=choice, parallel_tool_calls=False, temperature=2,
               seed=3, max_tokens=300)  # fmt: skip
    [call] = made["choices"][0]["message"]["tool_calls"]
    assert made["choices"][0]["finish_reason"] == "tool_calls"
    names = {"get_weather", "other"} if choice == "required" else {"other"}
    assert call["function"]["name"] in names and isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("budget", [1, 5, 12])
def test_a_thought_ends_at_its_budget(client, budget):
    """From its opening marker on; the markers count as thoughts too."""
    usage = ask(client, reasoning_effort="high", thinking_budget=budget, max_tokens=60)["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= budget + 1


@pytest.mark.parametrize("off", [{}, {"reasoning_effort": "none"},
                                 {"chat_template_kwargs": {"enable_thinking": False}}])  # fmt: skip
def test_thinking_is_off_unless_it_is_asked_for(client, off):
    made = ask(client, **off)
    assert "reasoning_content" not in made["choices"][0]["message"]
    body = {"messages": QUESTION, **off}
    assert "<|think|>" not in client.post("/apply-template", json=body).json()["prompt"]


def test_the_template_is_shown_with_tools_and_thinking(client):
    body = {"messages": QUESTION, "tools": TOOLS, "reasoning_effort": "low"}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith("<bos>") and prompt.count("<bos>") == 1
    assert "<|think|>" in prompt and "<|tool>declaration:get_weather" in prompt
    ids = client.post("/tokenize", json={"content": prompt, "parse_special": True}).json()["tokens"]
    assert len(ids) == ask(client, **body, max_tokens=1)["usage"]["prompt_tokens"]


# -- usage and timings -----------------------------------------------------------------------------


def test_usage_says_what_the_cache_had(client):
    said = [{"role": "user", "content": "A question that nobody has asked before: why?"}]
    first, second = (ask(client, messages=said, max_tokens=2)["usage"] for _ in range(2))
    n = first["prompt_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < n - 10
    assert second["prompt_tokens_details"]["cached_tokens"] == n - 1
    [*_, last] = chunks_of(client, messages=said, max_tokens=2, stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == n - 1 and last["choices"] == []
    assert all(not chunk.get("usage") for chunk in chunks_of(client, max_tokens=2))


def test_timings_add_up(client):
    made = ask(client, max_tokens=20, logit_bias=ENDS)["timings"]
    assert 0 <= made["queue_ms"] <= made["first_token_ms"] and made["prompt_ms"] > 0
    assert made["predicted_per_second"] == pytest.approx(19e3 / made["predicted_ms"])


# -- operations ------------------------------------------------------------------------------------


def test_slots_show_who_is_answered(demo):
    with serving(demo, n_seqs=1) as served, httpx.Client(base_url=served.url, timeout=30) as client:
        body = {"messages": QUESTION, "max_tokens": 3000, "min_tokens": 3000, "stream": True}
        with (
            client.stream("POST", CHAT, json=body) as first,
            client.stream("POST", CHAT, json=body) as second,
        ):
            lines = first.iter_lines()
            next(lines)
            slots = client.get("/slots").json()
            assert [slot["is_waiting"] for slot in slots] == [False, True], slots
            assert slots[0]["prompt_tokens"] == 12 and second.status_code == 200
            text = client.get("/metrics").text
            assert "twinpath_running 1.0" in text and "twinpath_waiting 1.0" in text
        assert served.settled() and client.get("/slots").json() == []


def test_a_server_that_ends_takes_nothing_more(demo):
    with serving(demo) as served, httpx.Client(base_url=served.url, timeout=30) as client:
        served.service.exchange.worker.close(0)
        for path, body in ((CHAT, {"messages": QUESTION}), (RAW, {"prompt": ["a", "b"]}),
                           (MESSAGES, {"messages": QUESTION, "max_tokens": 3})):  # fmt: skip
            refused = client.post(path, json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
        assert client.get("/health").status_code == 503
        assert client.get("/health").json() == {"status": "closing"}


def test_a_list_of_prompts_waits_as_one_does(demo):
    """All of them, or none."""
    with serving(demo, n_seqs=1, max_waiting=3) as served:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            body = {"messages": QUESTION, "max_tokens": 3000, "min_tokens": 3000, "stream": True}
            with client.stream("POST", CHAT, json=body) as first:
                lines = first.iter_lines()
                next(lines)
                refused = client.post(RAW, json={"prompt": ["a"] * 4})
                assert refused.status_code == 400 and "at most 3" in refused.json()["error"]["message"]
                with client.stream("POST", CHAT, json=body), client.stream("POST", CHAT, json=body):
                    refused = client.post(RAW, json={"prompt": ["a"] * 3})
                    assert refused.status_code == 429
                    time.sleep(0.1)  # those that had begun are given up within a step
                    assert served.engine.n_waiting == 2
            assert served.settled()


# -- the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_texts_only_when_it_is_told_to(demo, caplog, log_prompts):
    caplog.set_level(logging.INFO, logger="twinpath.server")
    with serving(demo, log_prompts=log_prompts) as served:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            ask(client)
            chunks_of(client)
            client.post(RAW, json={"prompt": ["Twinpath", "Hi"], "max_tokens": 2, "temperature": 0})
            client.post(CHAT, json={"messages": [{"role": "Twinpath", "content": "Twinpath"}]})
    entries = [json.loads(record.message) for record in caplog.records]
    ends = [entry for entry in entries if "status" in entry]
    assert [entry["status"] for entry in ends] == [200, 200, 200, 400]
    assert all(entry["path"].startswith("/v1/") and entry["ms"] > 0 for entry in ends)
    assert len({entry["id"] for entry in ends}) == 4 and all(entry["id"] for entry in entries)
    if not log_prompts:
        assert entries == ends and "Twinpath" not in caplog.text
        return
    for end in ends[:2]:
        texts = [entry for entry in entries if entry["id"] == end["id"] and entry is not end]
        prompt, answer = texts
        assert QUESTION[0]["content"] in prompt["prompt"] and answer["answer"]["content"] == ANSWER
    prompts = [entry["prompt"] for entry in entries if "prompt" in entry]
    assert prompts[2:] == ["<bos>Twinpath", "<bos>Hi"]


def test_numbers_of_the_engine_are_those_of_the_answer(client, demo):
    """Of a forced choice: probability one for who forces it, the model's own in the answer."""
    schema = {"type": "object", "properties": {"days": {"const": 7}}, "required": ["days"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    made = ask(client, response_format=form, logprobs=True, top_logprobs=1)
    assert json.loads(text_of(made)) == {"days": 7}
    found = made["choices"][0]["logprobs"]["content"]
    assert min(each["logprob"] for each in found) < -1, "the demo would not have said it of itself"
    assert all(each["top_logprobs"][0]["logprob"] >= each["logprob"] - np.spacing(1) for each in found)
