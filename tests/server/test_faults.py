"""Bad input, strangers, crowds, and clients that leave."""

import json
import threading
import time

import httpx
import pytest

from tests.server.conftest import ENDS
from tests.server.serving import serving
from tests.server.test_openai import ANSWER, QUESTION

CHAT, RAW, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
LONG = {"messages": QUESTION, "max_tokens": 4000, "min_tokens": 4000, "temperature": 0}
FAULTS = [  # path, body, the field that is named
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": QUESTION * 4097}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": QUESTION, "temperature": -1}, "temperature"),
    (CHAT, {"messages": QUESTION, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": QUESTION, "top_p": 0}, "top_p"),
    (CHAT, {"messages": QUESTION, "n": 0}, "n"),
    (CHAT, {"messages": QUESTION, "n": 1000}, "n"),
    (CHAT, {"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": QUESTION, "stop": ""}, "stop"),
    (CHAT, {"messages": QUESTION, "stop": ["a"] * 100}, "stop"),
    (CHAT, {"messages": QUESTION, "logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
    (CHAT, {"messages": QUESTION, "tools": [5]}, "tools[0]"),
    (CHAT, {"messages": QUESTION, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": QUESTION, "tool_choice": {"type": "function"}}, "tool_choice"),
    (CHAT, {"messages": QUESTION, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": QUESTION, "grammar": "root ::= ("}, "grammar"),
    (CHAT, {"messages": QUESTION, "regex": "("}, "regex"),
    (CHAT, {"messages": QUESTION, "regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    (CHAT, {"messages": QUESTION, "grammar": 'start: "a"', "tools": [{"name": "f"}]}, "grammar"),
    (CHAT, {"messages": QUESTION, "regex": "a", "grammar": 'start: "a"'}, "regex"),
    (CHAT, {"messages": QUESTION, "chat_template_kwargs": {"enable_thinking": "false"}},
     "chat_template_kwargs.enable_thinking"),
    (CHAT, {"messages": QUESTION, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": QUESTION, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": QUESTION, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": QUESTION, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": QUESTION, "image_tokens": 300}, "image_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:;base64,aGk=", "detail": "huge"}}]}]},
     "messages[0].content[0].image_url.detail"),
    (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
     "messages[0].content[0].image_url.url"),
    (RAW, {"prompt": [999999]}, "prompt"),
    (RAW, {"prompt": []}, "prompt"),
    (RAW, {"prompt": ["a", 5]}, "prompt.str"),
    (RAW, {"prompt": ["a"] * 65}, "prompt"),
    (RAW, {"prompt": ["a", []]}, "prompt[1]"),
    (RAW, {"prompt": [[5], [999999]]}, "prompt[1]"),
    (RAW, {"prompt": "a", "best_of": 2}, "best_of"),
    (RAW, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (RAW, {"prompt": "a", "suffix": "b"}, "suffix"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
     "messages[1].tool_calls[0]"),
    (CHAT, {"messages": [*QUESTION, 5], "continue_final_message": True}, "messages[1]"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": 5}], "continue_final_message": True},
     "messages[1].content"),
    (CHAT, {"messages": QUESTION, "logit_bias": {"-1": 1}}, "logit_bias"),
    (CHAT, {"messages": QUESTION, "repetition_penalty": -1}, "repetition_penalty"),
    (CHAT, {"messages": QUESTION, "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": QUESTION, "prompt_logprobs": 21}, "prompt_logprobs"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "smell"}]}, "input[0]"),
    (RESPONSES, {"input": [*QUESTION, {"role": "user", "content": 5}], "instructions": "S"},
     "input[1].content"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}],
                 "instructions": "S"}, "input[0].content[0].text"),
    (RESPONSES, {"input": [*QUESTION, {"role": "user", "content": [
        {"type": "input_image", "image_url": "data:;base64,?"}]}], "instructions": "S"},
     "input[1].content[0].image_url"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    (RESPONSES, {"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    (RESPONSES, {"input": "Hi", "instructions": 5}, "instructions"),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": 5}]},
     "tools[0].parameters"),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
     "text.format"),
    (RESPONSES, {"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    (MESSAGES, {"messages": QUESTION}, "max_tokens"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "thinking": {"type": "?"}}, "thinking.type"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "tool_choice": 5}, "tool_choice"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"messages": [*QUESTION, {"role": "user", "content": [{"type": "smell"}]}], "max_tokens": 5,
                "system": "S"}, "messages[1].content[0]"),
    (MESSAGES, {"messages": [*QUESTION, {"role": "assistant", "content": [
        {"type": "text", "text": "a"}, {"type": "tool_use", "id": "x", "name": "f", "input": 5}]}],
        "max_tokens": 5, "system": "S"}, "messages[1].content[1].input"),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": "y"}, {"type": "text", "text": "a"},
        {"type": "image", "source": {"type": "base64", "data": "?"}}]}], "max_tokens": 5, "system": "S"},
     "messages[0].content[2].source.data"),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}]}], "max_tokens": 5},
     "messages[0].content[0].source.url"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "tools": [{"name": "f", "input_schema": 5}]},
     "tools[0].input_schema"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "tools": [{"input_schema": {}}]}, "tools[0].name"),
    (MESSAGES, {"messages": QUESTION, "max_tokens": 5, "tools": [
        {"name": "f", "input_schema": {"properties": 5}}]}, "tools[0].input_schema.properties"),
    *((CHAT, {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"properties": {"a": {"type": "integer", "multipleOf": n}}}}}}, "response_format")
      for n in (2**31, 1000003)),  # which the library has a state of for each remainder
    (CHAT, {"messages": QUESTION, "top_k": 10**400}, "top_k"),
    (CHAT, {"messages": QUESTION, "logit_bias": {str(10**400): 1}}, "logit_bias"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "x", "tool_calls": True}]},
     "messages[1].tool_calls"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "x", "tool_calls": [5]}]},
     "messages[1].tool_calls[0]"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [
        {"id": 1, "function": {"name": "f", "arguments": "{}"}},
        {"id": [1], "function": {"name": "f", "arguments": "{}"}}]}]}, "messages[1].tool_calls[1].id"),
    (CHAT, {"messages": [*QUESTION, {"role": "tool", "content": "x", "tool_call_id": {"a": 1}}]},
     "messages[1].tool_call_id"),
    (CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": "x", "reasoning_content": [5]}],
            "continue_final_message": True}, "messages[1].reasoning_content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0]"),
    (MESSAGES, {"messages": [*QUESTION, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "is_error": True, "content": [5]}]}], "max_tokens": 5},
     "messages[1].content[0].content[0]"),
    (CHAT, {"messages": QUESTION, "tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"a": {}}, "required": [{}]}}}]}, None),
    (RESPONSES, {"input": "Hi", "text": {"format": "json"}}, "text.format"),
    (RESPONSES, {"input": "Hi", "reasoning": {"effort": {}}}, "reasoning.effort"),
    ("/api/chat", {"messages": QUESTION, "options": {"temperature": 10**400}}, "options.temperature"),
    ("/tokenize", {}, "content"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/api/chat", {"messages": QUESTION, "options": {"temperature": "hot"}}, "options.temperature"),
    ("/api/chat", {"messages": QUESTION, "format": "xml"}, "format"),
    ("/api/chat", {"messages": QUESTION, "options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"messages": QUESTION, "options": {"num_predict": 0}}, "options.num_predict"),
    ("/api/chat", {"messages": QUESTION, "options": {"stop": ""}}, "options.stop"),
    ("/api/chat", {"messages": QUESTION, "options": {"repeat_last_n": -7}}, "options.repeat_last_n"),
    ("/api/chat", {"messages": QUESTION, "format": {"type": 5}}, "format"),
    ("/api/chat", {"messages": [*QUESTION, {"role": "user", "content": 5}]}, "messages[1].content"),
    ("/api/chat", {"messages": [*QUESTION, {"role": "user", "content": "a", "images": ["aGk=", "?"]}]},
     "messages[1].images[1]"),
    ("/api/chat", {"messages": [*QUESTION, {"role": "user", "content": "a", "images": [5]}]},
     "messages[1].images[0]"),
    ("/api/generate", {"prompt": "Hi", "system": "S", "images": ["aGk=", "?"]}, "images[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), FAULTS)
def test_bad_input_is_a_400_that_names_the_field(client, path, body, field):
    for stream in (False, True):
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        said = answer.json()["error"]
        if path.startswith("/api/"):
            assert field is None or said.startswith(f"{field}:"), said
        elif path == MESSAGES:
            named = field.replace("[", ".").replace("]", "")  # as that API writes it: messages.1.content.0
            assert said["type"] == "invalid_request_error" and said["message"].startswith(f"{named}:"), said
        else:
            assert said["param"] == field or field is None, said
            assert said["type"] == "invalid_request_error" and "\n" not in said["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"messages": 1e999}',
                                  b'{"messages": "\\ud800"}', b"9" * 10_000])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_body_that_is_no_request_is_a_400(client, path, body):
    answer = client.post(path, content=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["top_k", "seed", "num_predict", "repeat_last_n", "temperature"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_numbers_that_are_none(client, name, number):
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "options": {{"{name}": {number}}}}}'
    answer = client.post("/api/chat", content=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"options.{name}:"), answer.text


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "null", "", "http://"])
def test_an_origin_that_is_none_is_refused(client, origin):
    answer = client.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"


def test_head_is_get_without_a_body(client):
    for path in ("/", "/health", "/api/version"):
        answer = client.head(path)
        assert answer.status_code == 200 and not answer.content
        assert answer.headers["content-type"] == client.get(path).headers["content-type"]
    assert client.head("/v1/messages").status_code == 405
    assert client.get("/v1/messages").headers["allow"] == "POST"


def test_a_form_that_is_complete_ends_the_answer_whatever_min_tokens_says(client):
    body = {"messages": QUESTION, "regex": "[a-z]{3}", "min_tokens": 20, "max_tokens": 30}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert len(choice["message"]["content"]) == 3 and choice["finish_reason"] == "stop"


def test_a_form_that_nothing_has_names_its_field(client):
    answer = client.post(CHAT, json={"messages": QUESTION, "regex": "[^\\x00-\\x{10ffff}]"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "regex"


def test_unknown_paths_and_methods_are_errors_of_their_api(client):
    assert client.get("/v1/unknown").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/messages").json()["type"] == "error"
    assert client.get("/v1/messages").status_code == 405
    assert isinstance(client.get("/api/unknown").json()["error"], str)


def test_a_prompt_that_is_too_long_is_told_its_numbers(client, demo):
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "ab " * 4000}]})
    said = answer.json()["error"]
    assert answer.status_code == 400 and said["code"] == "context_length_exceeded"
    assert said["n_ctx"] == demo.config.context_len and said["n_prompt_tokens"] > said["n_ctx"]
    assert str(said["n_prompt_tokens"]) in said["message"] and str(said["n_ctx"]) in said["message"]


def test_the_context_ends_an_answer(client, demo):
    prompt = [5] * (demo.config.context_len - 3)
    body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "logit_bias": ENDS}
    made = client.post(RAW, json=body).json()
    assert made["usage"]["completion_tokens"] == 3 and made["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_given_up(served, stream):
    before = served.engine.n_waiting + served.engine.n_running
    with httpx.Client(base_url=served.url) as client:
        if stream:
            with client.stream("POST", CHAT, json={**LONG, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert not served.engine.is_idle
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=LONG, timeout=0.1)
    assert before == 0 and served.settled(2.0), "the answer goes on although nobody reads it"
    served.engine.check_integrity()


def test_a_client_that_leaves_while_it_waits_never_begins(demo):
    with serving(demo, n_seqs=1) as served, httpx.Client(base_url=served.url, timeout=30) as client:
        with client.stream("POST", CHAT, json={**LONG, "stream": True}) as first:
            lines = first.iter_lines()  # closes the connection when nobody holds it
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=LONG, timeout=0.1)
            time.sleep(0.1)
            assert served.engine.n_waiting == 0 and served.engine.n_running == 1
        assert served.settled()


def test_a_full_queue_is_a_429_with_a_time(demo):
    with serving(demo, n_seqs=1, max_waiting=1) as served:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            with client.stream("POST", CHAT, json={**LONG, "stream": True}) as first:
                lines = first.iter_lines()
                next(lines)
                with client.stream("POST", CHAT, json={**LONG, "stream": True}):
                    for path in (CHAT, MESSAGES, "/api/chat"):
                        refused = client.post(path, json=LONG)
                        assert refused.status_code == 429, refused.text
                        assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert served.settled()
            assert client.post(CHAT, json={**LONG, "max_tokens": 3}).status_code == 200


def test_answers_that_have_begun_are_ended_when_the_server_is_told_to_stop(demo):
    got = []
    with serving(demo, n_seqs=1) as served:
        client = httpx.Client(base_url=served.url, timeout=30)
        body = {**LONG, "max_tokens": 200, "min_tokens": 200, "stream": True}

        def read():
            with client.stream("POST", CHAT, json=body) as answer:
                got.extend(answer.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        while not got:
            time.sleep(0.01)
        served.server.should_exit = True
        reader.join(20)
    assert got[-2] == "data: [DONE]"
    assert json.loads(got[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_key_is_asked_for(demo):
    with serving(demo, api_key="sésame") as served, httpx.Client(base_url=served.url) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "sesam"},
            {"authorization": "x"},
        ):
            refused = client.post(CHAT, json=LONG, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        key = "sésame".encode()
        for headers in ({b"authorization": b"Bearer " + key}, {b"x-api-key": key}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200


def test_pages_of_other_places_are_refused_unless_they_are_named(demo):
    origin = {"origin": "https://example.org"}
    with serving(demo) as served, httpx.Client(base_url=served.url) as client:
        assert client.get("/v1/models", headers=origin).status_code == 403
        assert client.get("/v1/models", headers={"origin": served.url}).status_code == 200
    with serving(demo, origins=("https://example.org",)) as served:
        with httpx.Client(base_url=served.url) as client:
            wanted = {"access-control-request-headers": "authorization,x-stainless-os"}  # OpenAI's own client
            asked = client.options(
                CHAT, headers={**origin, "access-control-request-method": "POST", **wanted}
            )
            assert asked.status_code == 204
            assert asked.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            allowed = client.get("/v1/models", headers=origin).headers
            assert allowed["access-control-allow-origin"] == "https://example.org"


def test_a_name_that_is_not_the_servers_is_refused_where_it_is_local(demo):
    with (
        serving(demo, hosts=("127.0.0.1", "localhost")) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        assert client.get("/health").status_code == 200
        for host in ("evil.example", "evil.example:5000", "[", "127.0.0.1.evil.example", ""):
            assert client.get("/v1/models", headers={"host": host}).status_code in (400, 403), host


def test_a_body_that_is_too_large_is_refused(demo):
    with serving(demo, max_body=1000) as served, httpx.Client(base_url=served.url) as client:
        body = json.dumps({"messages": [{"role": "user", "content": "a" * 2000}]}).encode()
        assert client.post(CHAT, content=body).status_code == 413
        assert client.post(CHAT, content=iter([body[:900], body[900:]])).status_code == 413  # no length told
        assert client.post(MESSAGES, content=body).json()["error"]["type"] == "request_too_large"


def test_operations(client):
    assert client.get("/health").json() == {"status": "ok"}
    ids = client.post("/tokenize", json={"content": "Hi <turn|>", "add_special": True}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids[1:]}).json() == {"content": "Hi <turn|>"}
    prompt = client.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
    assert prompt.endswith("<|turn>model\n") and "What is Twinpath?" in prompt
    assert client.get("/props").json()["n_ctx"] == 4096 and client.get("/slots").json() == []
    client.post(CHAT, json={"messages": QUESTION, "max_tokens": 3})
    text = client.get("/metrics").text
    for name in ("queue_seconds", "first_token_seconds", "between_tokens_seconds", "pages", "cached_tokens"):
        assert f"twinpath_{name}" in text


def test_no_answer_names_a_file_of_this_machine(client, demo):
    folder = str(demo.path.parent)
    for path in ("/props", "/v1/models", "/api/tags", "/api/ps", "/slots", "/metrics", "/openapi.json"):
        assert folder not in client.get(path).text, path
    assert folder not in client.post("/api/show", json={"model": "demo"}).text


def test_an_answer_is_right_after_all_this(client):
    made = client.post(CHAT, json={"messages": QUESTION, "temperature": 0}).json()
    assert made["choices"][0]["message"]["content"] == ANSWER
