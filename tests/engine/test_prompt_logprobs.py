"""How likely each token of a prompt is: the definition's numbers, and the same bytes in any company."""

import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine, Finished, PromptRead, Request, Token
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from refimpl.batch import SoftTokens
from refimpl.frontend.sampling import prompt_logprobs
from tests import tiny, tolerances
from tests.engine.held_out import by_definition

LONG = 77  # tokens: several windows, and no multiple of anything


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny.make(tmp_path_factory.mktemp("read") / "m.gguf", "e2b", size="block32"))


@pytest.fixture(scope="module")
def alone(model):
    """ids -> the entries that a lane of its own gives, token by token."""

    def read(ids, n_top):
        lanes = Lanes(model, ops_for("cpu"), replay=False)
        return tuple(prompt_logprobs(np.stack([lanes.decode(i) for i in ids]), ids, n_top))

    return read


def events_of(engine, *requests):
    ids = [engine.add(request) for request in requests]
    found = {id: [] for id in ids}
    while not engine.is_idle:
        for event in engine.step():
            found[event.id].append(event)
    engine.check_integrity()
    return [found[id] for id in ids]


def prompt_of(n, seed=0):
    return [token for k in range(9) for token in tiny.prompt("e2b", seed=seed + k)][:n]


def test_they_are_those_of_the_definition():
    demo = load_model(DEMO)
    ids = demo.template.render_ids(demo.tokenizer, [{"role": "user", "content": "What is Twinpath? " * 4}])
    [[read, end]] = events_of(Engine(demo, ops_for("cpu")), Request(ids, max_tokens=0, n_prompt_logprobs=2))
    assert read.logprobs[0] is None and len(read.logprobs) == len(ids) and end.reason == "length"
    got = np.array([each.logprob for each in read.logprobs[1:]])
    want = by_definition(demo, [(ids, None)])
    rms = np.sqrt(np.mean((got - want) ** 2))
    assert rms <= tolerances.LOG_PROBABILITY_RMS["int8"], rms
    assert [each.token for each in read.logprobs[1:]] == ids[1:]


@pytest.mark.parametrize("rows", [7, 1000])
def test_chunks_and_company_change_no_byte(model, alone, rows):
    """Two that are read, of which one begins like a third that is in the prefix cache, and one not."""
    engine = Engine(model, ops_for("cpu"), n_seqs=3, chunk=50)
    engine._scheduler.rows = rows
    first, second = prompt_of(LONG), [*prompt_of(40), *prompt_of(9, seed=3)]
    events_of(engine, Request(first, max_tokens=3))
    asked = [
        Request(first, max_tokens=5, n_prompt_logprobs=3),
        Request(first, max_tokens=5),
        Request(second, max_tokens=5, n_prompt_logprobs=0),
    ]
    read, plain, other = events_of(engine, *asked)
    for events, ids, n_top in ((read, first, 3), (other, second, 0)):
        kinds = [type(event) for event in events]
        assert kinds == [PromptRead, *[Token] * 5, Finished]
        assert events[0].logprobs == alone(ids, n_top)
        assert events[-1].usage.cached == 0 and events[-1].usage.computed == len(ids)
    assert [e.token for e in read[1:-1]] == [e.token for e in plain[:-1]]
    assert plain[-1].usage.cached > 0, "the prompt was read and left nothing to others"


def test_rows_of_a_call_are_bounded(model, monkeypatch):
    """A vocabulary of 262,144 has a megabyte of logits for each token."""
    engine = Engine(model, ops_for("cpu"), n_seqs=3, chunk=64)
    engine._scheduler.rows = 10
    seen, forward = [], engine.lanes.forward
    monkeypatch.setattr(engine.lanes, "forward", lambda batch: seen.append(batch) or forward(batch))
    read = Request(prompt_of(LONG), max_tokens=0, n_prompt_logprobs=0)
    events_of(engine, read, read, Request(prompt_of(50, seed=4), max_tokens=2))
    assert max(len(batch.logit_rows) for batch in seen) <= 10 + 1
    assert max(batch.n_tokens for batch in seen) > 20, "who is not read waits for who is"


def test_pages_that_run_out_change_nothing(model, alone):
    """Whoever is sent away begins again, and what was told is not told twice."""
    options = {"n_seqs": 2, "chunk": 32, "page": 32}
    least = Engine(model, ops_for("cpu"), **options).lanes.cache.geometry
    pages = {name: kind.n_entries * 2 if kind.window else 15 for name, kind in least.kinds.items()}
    engine = Engine(model, ops_for("cpu"), **options, n_pages=pages)
    more = {"max_tokens": 200, "stop_ids": frozenset(), "n_prompt_logprobs": 1}
    asked = [Request(prompt_of(n, seed=n), **more) for n in (70, 66)]
    found = events_of(engine, *asked)
    assert sum(events[-1].usage.preemptions for events in found)
    for events, request in zip(found, asked, strict=True):
        assert [type(event) for event in events].count(PromptRead) == 1
        assert events[0].logprobs == alone(list(request.prompt_ids), 1)


def test_an_interrupt_in_the_middle_costs_time_only(model, alone):
    engine = Engine(model, ops_for("cpu"), chunk=32)
    id = engine.add(Request(prompt_of(LONG), max_tokens=1, n_prompt_logprobs=1))
    assert engine.step() == []
    engine._in_books = True  # as an interrupt there leaves it: all that is in the cache is forgotten
    engine._scheduler.chunk = 20
    events = [event for _ in range(9) for event in engine.step()]
    assert [type(event) for event in events] == [PromptRead, Token, Finished]
    assert events[0].logprobs == engine.result(id).prompt_logprobs == alone(prompt_of(LONG), 1)


def test_one_token_is_predicted_by_nothing(model):
    [[read, token, _]] = events_of(
        Engine(model, ops_for("cpu")), Request([5], max_tokens=1, n_prompt_logprobs=2)
    )
    assert read.logprobs == (None,) and token.logprob is None


def test_pictures_are_refused(model):
    soft = [SoftTokens(1, np.zeros((2, model.config.model_dim), np.float32), vision=True)]
    with pytest.raises(ValueError, match="log-probabilities of a prompt with images"):
        Engine(model, ops_for("cpu")).add(Request([5, 0, 0, 7], soft, n_prompt_logprobs=0))


def test_what_is_kept_of_read_prompts_is_bounded(model, monkeypatch):
    """They take a hundred times the room of an answer's tokens."""
    monkeypatch.setattr("fastpath.engine.engine.KEPT_TOKENS", 30)
    engine = Engine(model, ops_for("cpu"), n_seqs=1)
    ids = []
    for k in range(4):
        ids.append(engine.add(Request(prompt_of(10, seed=k), max_tokens=0, n_prompt_logprobs=0)))
        while not engine.is_idle:
            engine.step()
    assert [len(engine.result(id).prompt_logprobs) for id in ids[1:]] == [10, 10, 10]
    with pytest.raises(KeyError, match="request 0 is not known"):
        engine.result(ids[0])
