"""Worker and exchange without a server: whole answers, answers given up, steps that fail."""

import asyncio
import gc
import json
import threading
import time
import weakref

import jsonschema
import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine, Finished, Request, Token
from fastpath.load import DEMO, load_model
from fastpath.talk.events import Call, Options, Text, Thought
from fastpath.talk.exchange import ContextOverflow, Exchange
from fastpath.talk.worker import Closing, InternalError, QueueFull, Worker
from refimpl.frontend.constraint import MinTokens
from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.sampling import SamplingParams, log_softmax

QUESTION = [{"role": "user", "content": "What is Twinpath?"}]
ANSWER = "Twinpath is Gemma 4 in Python: a readable NumPy reference and a fast Numba engine."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 40, "maxLength": 60}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ENDLESS = Options(min_tokens=3000, max_tokens=3000)


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO)


@pytest.fixture
def exchange(model):
    worker = Worker(Engine(model, ops_for("cpu"), n_seqs=4), max_waiting=4)
    yield Exchange(worker)
    worker.close(5)


def overheard(engine, patch):
    """What the steps of an engine say, as they go on saying it to others."""
    told, step = [], engine.step

    def listened():
        events = step()
        told.extend(events)
        return events

    patch.setattr(engine, "step", listened)
    return told


def whole(exchange, messages=QUESTION, **options):
    said = list(exchange.answer(exchange.prepare(messages, Options(**options))))
    return said, said[-1]


def test_events_are_the_answer_in_pieces(exchange):
    said, end = whole(exchange)
    assert "".join(each.text for each in said if isinstance(each, Text)) == ANSWER
    assert end.message == {"role": "assistant", "content": ANSWER}
    assert (end.reason, end.usage.prompt, end.usage.generated) == ("stop", 12, 56)


def test_the_conversation_so_far_is_in_the_cache_whatever_the_answer_was_made_of(exchange):
    """Sampled wildly, an answer is not made of the tokens that its text would be cut into."""
    markers = tuple((i, -np.inf) for i in exchange.tokenizer.special_ids)  # old thoughts are left out
    wild = SamplingParams(temperature=4.0, seed=3, bias=markers)
    messages, n = list(QUESTION), 0
    for k in range(4):
        _, end = whole(exchange, messages, params=wild, max_tokens=30)
        assert end.usage.cached >= n - 1, k
        n = end.usage.prompt + end.usage.generated
        messages += [end.message, {"role": "user", "content": "Why?"}]


def test_leaving_gives_an_answer_up(exchange):
    answer = exchange.answer(exchange.prepare(QUESTION, ENDLESS))
    next(answer)
    answer.close()
    deadline = time.monotonic() + 2
    while not exchange.worker.engine.is_idle and time.monotonic() < deadline:
        time.sleep(0.005)
    assert exchange.worker.engine.is_idle
    exchange.worker.engine.check_integrity()


def test_nothing_stays_of_requests_that_have_ended(exchange, monkeypatch):
    """Neither in the engine, nor in the frames that an error came through."""
    engine = exchange.worker.engine
    told = overheard(engine, monkeypatch)
    ones = [i for i in range(exchange.tokenizer.n_vocab) if b"1" in exchange.tokenizer.token_bytes(i)]
    never = SamplingParams(bias=tuple((i, -np.inf) for i in ones))  # what the form wants
    kinds = [
        {"max_tokens": 5, "n_logprobs": 2, "n": 3},
        {"max_tokens": 500, "min_tokens": 500, "n": 2},  # cancelled
        {"max_tokens": 50, "schema": {"const": 1}, "params": never},  # fails
        {"max_tokens": 50, "stops": ("in",)},
    ]
    prompts = []
    for options in kinds:
        prompt = exchange.prepare(QUESTION, Options(**options))
        prompts.append(weakref.ref(prompt))
        answer = exchange.answer(prompt)
        try:
            next(answer)
            while "min_tokens" not in options:
                next(answer)
        except StopIteration:
            pass
        except ValueError as error:
            assert "forbidden" in str(error)
        answer.close()
    deadline = time.monotonic() + 5
    while not engine.is_idle and time.monotonic() < deadline:
        time.sleep(0.005)
    exchange.worker.call(lambda: None).result(5)  # the last step has been told
    ended = [event for event in told if isinstance(event, Finished)]
    assert sorted(event.reason for event in ended) == ["abort"] * 3 + ["error"] + ["length"] * 3
    for event in ended:
        with pytest.raises(KeyError):
            engine.result(event.id)
    del prompt, answer, ended, event
    told.clear()
    gc.collect()
    assert [prompt() for prompt in prompts] == [None] * 4


def test_all_that_a_step_says_comes_to_the_loop_at_once(exchange, monkeypatch):
    n_steps, n_calls = 0, 0

    async def everybody():
        loop = asyncio.get_running_loop()
        step, call = exchange.worker.engine.step, loop.call_soon_threadsafe

        def stepped():
            nonlocal n_steps
            n_steps += 1
            return step()

        def called(*given, **more):
            nonlocal n_calls
            n_calls += 1
            return call(*given, **more)

        monkeypatch.setattr(exchange.worker.engine, "step", stepped)
        monkeypatch.setattr(loop, "call_soon_threadsafe", called)
        options = Options(max_tokens=30, min_tokens=30)
        talks = [exchange.begin(exchange.prepare(QUESTION, options)) for _ in range(4)]

        async def end(talk):
            *_, last = [said async for said in talk]
            return last

        return await asyncio.gather(*map(end, talks))

    ends = asyncio.run(everybody())
    assert [end.usage.generated for end in ends] == [30] * 4 and n_calls <= n_steps < 4 * 30


def test_too_many_are_refused(exchange):
    def read():
        list(exchange.answer(exchange.prepare(QUESTION, ENDLESS)))

    readers = [threading.Thread(target=read) for _ in range(8)]
    for k, reader in enumerate(readers):
        reader.start()
        engine = exchange.worker.engine
        while engine.n_running + engine.n_waiting < k + 1 or engine.n_running < min(4, k + 1):
            time.sleep(0.001)
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        exchange.prepare(QUESTION, Options())
    exchange.worker.close(0.0)  # ends them all
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    with pytest.raises(Closing):
        exchange.prepare(QUESTION, Options())


def test_a_step_that_fails_ends_its_requests_and_no_later_ones(exchange, monkeypatch):
    answer = exchange.answer(exchange.prepare(QUESTION, ENDLESS))
    next(answer)
    engine = exchange.worker.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: 1 / 0)
        with pytest.raises(InternalError) as caught:
            list(answer)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert whole(exchange)[1].message["content"] == ANSWER


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting(exchange, monkeypatch):
    """By a fault of its own: no step's, which it would survive."""
    answer = exchange.answer(exchange.prepare(QUESTION, ENDLESS))
    next(answer)
    monkeypatch.setattr(exchange.worker, "_tell", lambda event: 1 / 0)
    with pytest.raises(InternalError, match="thread has ended"):
        list(answer)
    with pytest.raises(Closing):
        exchange.prepare(QUESTION, Options())


def test_the_context_has_numbers(exchange):
    with pytest.raises(ContextOverflow, match=r"^messages: the prompt has \d+ tokens.* 4096"):
        exchange.prepare([{"role": "user", "content": "ab " * 4000}], Options())


def test_media_need_encoders(exchange):
    part = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content\[0\]\.image_url\.url: .*--mmproj"):
        exchange.prepare([{"role": "user", "content": [part]}], Options())


def test_thoughts_calls_and_forms(exchange):
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    params = SamplingParams(temperature=1.0, seed=1)
    choice = ToolChoice("required", parallel=False)
    said, end = whole(exchange, tools=tools, choice=choice, params=params, max_tokens=500)
    [call] = [each for each in said if isinstance(each, Call)]
    jsonschema.validate(call.values, SCHEMA)
    assert json.loads(call.arguments) == call.values and end.reason == "tool_calls"
    said, end = whole(exchange, thinking=True, budget=20, schema=SCHEMA, params=params, max_tokens=500)
    jsonschema.validate(json.loads(end.message["content"]), SCHEMA)
    assert isinstance(said[0], Thought) and end.usage.thought <= 22


def test_constraints_are_kept_when_pages_run_out(model, monkeypatch):
    """Requests that wait, and are computed again, end as they do alone: no token is told twice."""
    params = [SamplingParams(temperature=1.5, seed=k) for k in range(6)]
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 250, "maxLength": 300}}}
    long |= {"required": ["a"], "additionalProperties": False}

    def run(engine, seeds):
        worker = Worker(engine)
        exchange = Exchange(worker)
        prompts = [
            exchange.prepare(QUESTION, Options(params=params[k], schema=long, max_tokens=600)) for k in seeds
        ]
        ends = {}

        def read(k, prompt):
            *_, ends[k] = exchange.answer(prompt)

        readers = [threading.Thread(target=read, args=each) for each in zip(seeds, prompts)]
        all_are_there = threading.Event()
        worker.call(lambda: all_are_there.wait(20))
        for reader in readers:
            reader.start()
        while engine.n_waiting < len(readers):
            time.sleep(0.001)
        all_are_there.set()
        for reader in readers:
            reader.join(60)
        worker.close()
        return {k: end.message["content"] for k, end in ends.items()}

    pages = {"global": 20, "sliding": 60}
    scarce = Engine(model, ops_for("cpu"), n_seqs=6, n_pages=pages, page=32, chunk=32)
    with monkeypatch.context() as patch:
        told = overheard(scarce, patch)
        crowd = run(scarce, range(6))
    assert sum(event.usage.preemptions for event in told if isinstance(event, Finished)) > 0
    for k in range(6):
        assert run(Engine(model, ops_for("cpu")), [k]) == {k: crowd[k]}


def test_log_probabilities_are_of_the_row_before_constraints_and_samplers(model):
    engine = Engine(model, ops_for("cpu"))
    ids = model.template.render_ids(model.tokenizer, QUESTION)
    ends = model.tokenizer.eog_ids
    bias = tuple((i, 50.0) for i in ends)  # the likeliest by far, but for MinTokens
    request = Request(
        ids,
        params=SamplingParams(temperature=1.0, top_k=2, seed=1, bias=bias),
        max_tokens=5,
        constraint=MinTokens(3, ends),
        n_logprobs=3,
        want_logits=True,
    )
    engine.add(request)
    events = []
    while not engine.is_idle:
        events += engine.step()
    tokens = [event for event in events if isinstance(event, Token)]
    assert len(tokens) == 3 and isinstance(events[-1], Finished) and events[-1].reason == "stop"
    for event in tokens:
        want = log_softmax(event.logits)
        assert event.logprob.token == event.token
        assert event.logprob.logprob == pytest.approx(want[event.token], abs=1e-9)
        assert [i for i, _ in event.logprob.top] == list(np.argsort(-want, kind="stable")[:3])
