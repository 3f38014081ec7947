"""Requests made of the OpenAPI document, valid ones and such that break it: none is answered with a fault."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.serving import serving
from tests.server.test_openai import QUESTION

WHY = "schemathesis is not installed: pip install 'twinpath[test-server]'"
schemathesis = pytest.importorskip("schemathesis", reason=WHY)
MOST = 200  # requests of each kind to each path; in `make test` half as many as a property has examples
CONTEXT = 200  # tokens: requests ask for any number of them


@pytest.fixture(scope="module")
def operations(demo):
    """What the document of a server offers, each with the address to send it to."""
    with serving(demo, engine={"context_len": CONTEXT}) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        yield [found.ok() for found in schema.get_all_operations()]
        served.engine.check_integrity()
        assert served.settled(), "an answer goes on that nobody waits for"


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_no_request_is_a_fault_of_the_server(operations, mode):
    paths = [operation.path for operation in operations]
    assert {"/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"} <= set(paths)
    n = min(MOST, settings.default.max_examples // 2)
    for operation in operations:
        if mode.is_negative and not operation.body:
            continue  # nothing in it could be wrong

        @given(operation.as_strategy(generation_mode=mode), st.booleans())
        @settings(max_examples=n, suppress_health_check=list(HealthCheck))
        def ask(case, is_question):
            if is_question and isinstance(case.body, dict):  # the document lets anything be a message
                case.body |= {key: QUESTION for key in ("messages", "input") if key in case.body}
            answer = case.call(timeout=60)
            check(case.formatted_path, answer.status_code, answer.headers["content-type"][0], answer.text)

        ask()


def check(path, status, kind, text):
    """An answer, or an error as this path's API writes it."""
    assert status < 500 and '"type":"api_error"' not in text, (path, status, text[-500:])
    if status < 400:
        return
    assert kind == "application/json", (path, status, kind)
    said = json.loads(text)
    if path.startswith("/api/"):
        message = said["error"]
    elif path.startswith("/v1/messages"):
        assert said["type"] == "error" and set(said["error"]) >= {"type", "message"}, said
        message = said["error"]["message"]
    else:
        assert set(said["error"]) >= {"message", "type", "param", "code"}, said
        message = said["error"]["message"]
    assert message and len(message.splitlines()) == 1, (path, status, said)
