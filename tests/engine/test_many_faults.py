"""What goes wrong for one request, or is interrupted, costs nobody else a bit."""

import random
import sys
import threading
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpath
from fastpath.backend import ops_for
from fastpath.engine import Engine, Finished, Request, Token, call, scheduler
from fastpath.engine import engine as engine_module
from fastpath.lanes import Lanes, NotFiniteError
from fastpath.load import load_model
from refimpl.batch import PAD, SoftTokens
from refimpl.frontend.sampling import SamplingParams
from tests import tiny

OPS = ops_for("cpu")
DRAWN = SamplingParams(temperature=1.1, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny.make(tmp_path_factory.mktemp("faults") / "m.gguf", "e2b"))


@pytest.fixture(scope="module")
def answers(model):
    """answers(prompt, n) -> the tokens that it gets alone"""

    @cache
    def alone(prompt, n):
        engine = Engine(model, OPS, prefix_cache=False, chunk=200, page=96)
        return list(engine.stream(engine.add(request(prompt, n))))

    return alone


def words(n, seed=0):
    ids = [token for s in range(seed, seed + 6) for token in tiny.prompt("e2b", seed=s)]
    return tuple(ids[:n])


def request(prompt, n, **options):
    return Request(prompt, params=DRAWN, max_tokens=n, stop_ids=frozenset(), **options)


def run(engine):
    events = []
    for _ in range(2000):
        if engine.is_idle:
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    raise AssertionError("somebody starves")


def ends(events):
    return {event.id: event for event in events if isinstance(event, Finished)}


# -- refused at once ----------------------------------------------------------------------------------


def soft(start, n, width=48, vision=True):
    return SoftTokens(start, np.ones((n, width), np.float32), vision)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": []}, "the prompt has no tokens"),
        ({"prompt_ids": [2] * 101}, "the prompt has 101 tokens, the context holds 100"),
        ({"prompt_ids": [2] * 70}, "the prompt has 70 tokens, the memory for keys and values holds 64"),
        ({"prompt_ids": [2, 10**6]}, "token id 1000000 is out of range"),
        ({"prompt_ids": [2, -1]}, "token id -1 is out of range"),
        ({"max_tokens": -1}, "max_tokens -1, expected a whole number of at least 0"),
        ({"max_tokens": 2.5}, "max_tokens 2.5, expected a whole number of at least 0"),
        ({"max_tokens": None}, "max_tokens None, expected a whole number of at least 0"),
        ({"n_logprobs": -1}, "n_logprobs -1, expected None or a whole number of at least 0"),
        ({"n_prompt_logprobs": "x"}, "n_prompt_logprobs 'x', expected None or a whole number of at least 0"),
        (
            {"soft": [soft(1, 2, width=7)]},
            r"soft tokens of shape \(2, 7\) at position 1, expected rows of 48",
        ),
        ({"soft": [soft(8, 3)]}, "soft tokens 8 .. 10, expected them inside the prompt's 9 tokens"),
        ({"soft": [soft(1, 3), soft(3, 2)]}, "soft tokens 1 .. 3 and from 3 on, expected them in order"),
    ],
)
def test_what_can_never_be_computed(model, wrong, message):
    engine = Engine(model, OPS, context_len=100, chunk=20, page=32, n_pages={"global": 2, "sliding": 3})
    with pytest.raises(ValueError, match=message):
        engine.add(Request(**({"prompt_ids": [2] * 9} | wrong)))
    assert engine.is_idle and engine.step() == []


def test_an_image_larger_than_a_call(tmp_path):
    model = load_model(tiny.make(tmp_path / "m.gguf", "26b"))
    engine = Engine(model, OPS, chunk=16)
    with pytest.raises(ValueError, match="an image of 20 soft tokens, but these lanes take at most 16"):
        engine.add(Request([2] * 5 + [PAD] * 20, [soft(5, 20)]))


def test_memory_that_serves_nobody(model):
    with pytest.raises(ValueError, match="2 pages of sliding layers, expected at least 3"):
        Engine(model, OPS, chunk=50, page=32, n_pages={"global": 9, "sliding": 2})
    with pytest.raises(ValueError, match="bytes for keys and values, but 4 sequences need at least"):
        Engine(model, OPS, n_seqs=4, kv_bytes=10_000)
    with pytest.raises(ValueError, match="0 sequences at once, expected at least 1"):
        Engine(model, OPS, n_seqs=0)


@pytest.mark.parametrize("n_seqs", [1, 3])
def test_memory_is_what_was_allowed(model, answers, n_seqs):
    """From just enough on: never more, and hardly less (some pages of each kind)."""
    geometry = Lanes(model, OPS, n_seqs=n_seqs, chunk=64, page=32).cache.geometry
    with pytest.raises(ValueError, match=r"need at least \d+") as found:
        Engine(model, OPS, n_seqs=n_seqs, chunk=64, page=32, kv_bytes=1)
    least = int(str(found.value).split("at least ")[1].split(".")[0])
    for kv_bytes in (least, least + 50_000, 3 * least):
        engine = Engine(model, OPS, n_seqs=n_seqs, chunk=64, page=32, kv_bytes=kv_bytes)
        left = kv_bytes - engine.lanes.max_cache_bytes
        assert 0 <= left < sum(geometry.page_bytes.values())
    ids = [engine.add(request(words(40, i), 5)) for i in range(5)]
    run(engine)
    assert [engine.result(i).tokens for i in ids] == [tuple(answers(words(40, i), 5)) for i in range(5)]


# -- pages run out, requests are given up -------------------------------------------------------------


def test_one_that_cannot_grow_ends_as_if_it_were_long_enough(model, answers):
    """Two pages of 32 positions: 60 tokens of prompt, five of the answer, the last of which has no room."""
    engine = Engine(model, OPS, chunk=20, page=32, n_pages={"global": 2, "sliding": 3})
    id = engine.add(request(words(60), 30))
    events = run(engine)
    assert ends(events)[id].reason == "length"
    assert list(engine.result(id).tokens) == answers(words(60), 30)[:5]


@pytest.mark.parametrize("n", [40, 33, 63])
def test_a_prefix_that_is_adopted_and_evicted_at_once(model, answers, n):
    """The page in which the prefix ends is the lane's alone when the others are counted, and stays so: if the
    tree took it again, the lane would have to copy it, and there is no page left for that."""
    engine = Engine(model, OPS, chunk=32, page=32, n_pages={"global": 3, "sliding": 8})
    engine.add(request(words(n), 1))
    run(engine)
    longer = words(n) + words(96 - n, seed=3)
    id = engine.add(request(longer, 1))
    run(engine)
    assert engine.usage(id).cached == n
    assert list(engine.result(id).tokens) == answers(longer, 1)


def test_giving_up_in_the_middle_of_a_prompt(model, answers):
    """Nobody is in a step: its pages are back at once, and what was computed serves the next."""
    engine = Engine(model, OPS, chunk=32, page=32)
    id = engine.add(request(words(100), 5))
    engine.step()
    engine.step()
    assert engine.abort(id) and not engine.abort(id) and not engine.abort(77)
    assert engine.is_idle and engine.n_running == 0
    engine.check_integrity()
    assert engine.step() == [Finished(id, "abort", engine.usage(id))]
    again = engine.add(request(words(100), 5))
    run(engine)
    assert engine.result(again).tokens == tuple(answers(words(100), 5))
    assert engine.usage(again).cached == 64


def test_giving_up_one_that_waits(model):
    engine = Engine(model, OPS, chunk=32)
    ids = [engine.add(request(words(40), 5)) for _ in range(3)]
    engine.step()
    engine.abort(ids[1])
    assert engine.n_waiting == 1
    reasons = {id: event.reason for id, event in ends(run(engine)).items()}
    assert reasons == {ids[0]: "length", ids[1]: "abort", ids[2]: "length"}


# -- NaN ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(model, tmp_path_factory):
    """damaged(token) -> the model with NaN in what a layer looks up for the token"""

    @cache
    def make(token):
        path = tiny.make(tmp_path_factory.mktemp("damaged") / f"{token}.gguf", "e2b")
        table = load_model(path).file.tensors["per_layer_token_embd.weight"]
        data = bytearray(path.read_bytes())
        at = bytes(data).index(table.data[token].tobytes())
        data[at : at + 4] = np.float32(np.nan).tobytes()
        path.write_bytes(data)
        return load_model(path)

    return make


def test_nan_ends_one_request_and_says_where(damaged, answers):
    """The second has a damaged token in its prompt, the third begins like it and comes later."""
    bad = 50
    prompts = [tuple(30 if t == bad else t for t in words(n, n)) for n in (70, 80, 40)]
    broken = (*prompts[1][:60], bad, *prompts[1][60:])
    engine = Engine(damaged(bad), OPS, n_seqs=3, chunk=32, page=32)
    first, second = engine.add(request(prompts[0], 9)), engine.add(request(broken, 9))
    third, fourth = engine.add(request(prompts[2], 9)), engine.add(request(prompts[1], 9))
    events = run(engine)
    error = ends(events)[second].error
    assert isinstance(error, NotFiniteError)
    assert "inp_per_layer_selected: NaN or infinity at position 60" in str(error)
    assert engine.result(second).reason == "error" and engine.result(second).tokens == ()
    for id, prompt in ((first, prompts[0]), (third, prompts[2]), (fourth, prompts[1])):
        assert list(engine.result(id).tokens) == answers(prompt, 9)
    with pytest.raises(NotFiniteError, match="position 60"):
        list(engine.stream(engine.add(request(broken, 9))))
    with pytest.raises(NotFiniteError, match="position 60"):
        list(engine.stream(second))
    late = engine.add(request(prompts[1], 9))  # in pages that held NaN
    run(engine)
    assert list(engine.result(late).tokens) == answers(prompts[1], 9)


def test_nan_in_the_middle_of_an_answer(damaged, answers):
    prompt = words(40)
    answer = answers(prompt, 9)
    bad = next(t for t in answer[2:] if t not in prompt)
    n = answer.index(bad)
    other = tuple(t for t in words(60, 3) if t != bad)
    assert bad not in answers(other, 9), "choose another seed"
    engine = Engine(damaged(bad), OPS, n_seqs=2, chunk=64)
    first, second = engine.add(request(prompt, 9)), engine.add(request(other, 9))
    events = run(engine)
    assert list(engine.result(first).tokens) == answer[: n + 1]  # it was drawn, and then looked up
    assert f"position {40 + n}" in str(ends(events)[first].error)
    assert list(engine.result(second).tokens) == answers(other, 9)
    assert engine.result(first).usage.generated == n + 1


def test_nan_in_an_image(model, answers):
    rows = np.zeros((5, 48), np.float32)
    rows[3, 7] = np.inf
    image = SoftTokens(4, rows, True)
    engine = Engine(model, OPS, n_seqs=2, chunk=64)
    ids = [engine.add(request(words(40), 4)), engine.add(request(words(40), 4, soft=[image]))]
    error = ends(run(engine))[ids[1]].error
    assert "inp_scaled: NaN or infinity at position 7" in str(error)
    assert list(engine.result(ids[0]).tokens) == answers(words(40), 4)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_no_token_may_come(model, answers, kind):
    """What sampling refuses, or fails at, ends that request."""
    engine = Engine(model, OPS, n_seqs=2)
    good, bad = engine.add(request(words(9), 4)), engine.add(request(words(12), 4))
    real = call.sample

    def refuses(logits, params, history, *rest):
        if len(history) == 14:
            raise kind("all tokens are suppressed")
        return real(logits, params, history, *rest)

    with patch.object(call, "sample", refuses):
        events = run(engine)
    assert str(ends(events)[bad].error) == "all tokens are suppressed"
    assert list(engine.result(bad).tokens) == answers(words(12), 4)[:2]
    assert list(engine.result(good).tokens) == answers(words(9), 4)


# -- interrupts ---------------------------------------------------------------------------------------

SOURCES = tuple(
    str(Path(fastpath.__file__).parent / name) for name in ("engine/", "kv/", "lanes.py", "replay.py")
)


class InterruptAt:
    """KeyboardInterrupt at the n-th line that is run in the sources; None: counts them.

    Lines that take or give a lock are passed over: Python itself looks for signals elsewhere.
    """

    def __init__(self, n=None):
        self.n, self.count = n, 0

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _called(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame, event, argument):
        if event == "line" and not _is_lock(frame.f_code.co_filename, frame.f_lineno):
            self.count += 1
            if self.count == self.n:
                raise KeyboardInterrupt
        return self._line


@cache
def _lines(path):
    return Path(path).read_text().splitlines()


def _is_lock(path, number):
    line = _lines(path)[number - 1].strip()
    return line.startswith(("with ", "finally:", "try:")) or "release()" in line or "acquire(" in line


PROMPTS = (words(70), words(33, 2), (*words(64), 33, 34, 35), words(9, 4))


def crowded(model):
    """Little memory: admissions wait, prefixes are evicted, requests leave and come back."""
    engine = Engine(model, OPS, n_seqs=3, chunk=33, page=32, n_pages={"global": 5, "sliding": 6})
    return engine, [engine.add(request(prompt, 6)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def n_lines(model):
    engine, _ = crowded(model)
    with InterruptAt() as watch:
        while not engine.is_idle:
            engine.step()
    return watch.count


@given(data=st.data())
@settings(max_examples=max(40, settings.default.max_examples))
def test_an_interrupt_at_any_line(model, answers, n_lines, data):
    engine, ids = crowded(model)
    at = random.Random(data.draw(st.integers(0, 10**9))).randrange(1, n_lines)
    events = []
    with InterruptAt(at), pytest.raises(KeyboardInterrupt):
        while not engine.is_idle:
            events += engine.step()
    engine.check_integrity()
    events += run(engine)
    for id, prompt in zip(ids, PROMPTS, strict=True):
        assert list(engine.result(id).tokens) == answers(prompt, 6)
        told = [(event.index, event.token) for event in events if event.id == id and isinstance(event, Token)]
        assert told == sorted(set(told)), "told twice, or out of order"
        assert all(answers(prompt, 6)[index] == token for index, token in told)


def test_a_call_that_fails_is_made_again(model, answers):
    engine, ids = crowded(model)
    engine.step()
    with patch.object(engine.lanes, "forward", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.step()
    engine.check_integrity()
    run(engine)
    assert [list(engine.result(id).tokens) for id in ids] == [answers(prompt, 6) for prompt in PROMPTS]


# -- threads ------------------------------------------------------------------------------------------


def test_threads_add_read_and_give_up(model, answers):
    engine = Engine(model, OPS, n_seqs=3, chunk=33, page=32, n_pages={"global": 9, "sliding": 9})
    found, problems = {}, []

    def user(k):
        try:
            for i in range(6):
                prompt = words(20 + 7 * ((k + i) % 5), i)
                id = engine.add(request(prompt, 6))
                tokens = []
                for token in engine.stream(id):
                    tokens.append(token)
                    if (k + i) % 4 == 3 and len(tokens) == 2:
                        engine.abort(id)
                found[k, i] = prompt, tokens, engine.result(id).reason
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=user, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not problems and len(found) == 24 and engine.is_idle
    for (k, i), (prompt, tokens, reason) in found.items():
        assert tokens == answers(prompt, 6)[: len(tokens)]
        assert (reason == "length") == (len(tokens) == 6) or (k + i) % 4 == 3
    engine.check_integrity()
    assert engine.step() == []


def test_giving_up_while_another_thread_is_in_a_step(model):
    """The pages are back when that step is over, without another one."""
    engine = Engine(model, OPS, chunk=32)
    id = engine.add(request(words(100), 5))
    inside, go_on = threading.Event(), threading.Event()
    forward = engine.lanes.forward

    def slow(batch):
        inside.set()
        assert go_on.wait(60)
        return forward(batch)

    with patch.object(engine.lanes, "forward", slow):
        thread = threading.Thread(target=engine.step)
        thread.start()
        assert inside.wait(60)
        other = engine.add(request(words(9), 2))
        assert engine.abort(id) and engine.result(id).reason is None
        go_on.set()
        thread.join()
    assert engine.result(id).reason == "abort" and engine.n_running == 0
    engine.check_integrity()
    assert len(list(engine.stream(other))) == 2


# -- memory is flat -----------------------------------------------------------------------------------


def test_only_the_latest_results_are_kept(model):
    engine = Engine(model, OPS, n_seqs=4)
    with patch.object(engine_module, "KEPT_RESULTS", 5):
        ids = [engine.add(request(words(3, i), 1 + i % 2)) for i in range(12)]
        while not engine.is_idle:
            engine._step()  # nobody asks for the events
    assert len(engine._finished) == 5 and not engine._live
    assert set(engine._events) <= set(engine._finished)
    assert engine._n_kept_tokens == sum(len(result.tokens) for result in engine._finished.values())
    with pytest.raises(KeyError, match="request 0 is not known: of 12 so far, the latest 5"):
        engine.result(ids[0])
    assert len(engine.result(ids[-1]).tokens) == 2
    with pytest.raises(KeyError):
        next(engine.stream(0))


def test_params_of_another_type_are_refused(model):
    engine = Engine(model, OPS)
    with pytest.raises(ValueError, match="params None, expected SamplingParams"):
        engine.add(Request(words(5), params=None))


@pytest.mark.filterwarnings("error")
def test_extreme_sampling_is_silent(model):
    engine = Engine(model, OPS)
    for params in (
        SamplingParams(temperature=1e-320),
        SamplingParams(temperature=1, repeat_penalty=1e308),
        SamplingParams(temperature=1, repeat_penalty=1e-308),
    ):
        id = engine.add(Request(words(9), params=params, max_tokens=3, stop_ids=frozenset()))
        assert len(list(engine.stream(id))) == 3


def test_usage_counts_what_was_cached_at_first(model):
    """Three equal prompts at once, nothing is cached; one has to leave, and finds its own work when it comes
    back: that is none of its cached tokens.
    """
    prompt = words(40)
    with patch.object(scheduler, "HEADROOM", 0):
        engine = Engine(model, OPS, n_seqs=3, chunk=64, page=32, n_pages={"global": 7, "sliding": 30})
        ids = [engine.add(request(prompt, 60)) for _ in range(3)]
        run(engine)
    usages = [engine.usage(id) for id in ids]
    assert sum(usage.preemptions for usage in usages) >= 1
    assert [(usage.cached, usage.computed) for usage in usages if usage.preemptions] == [(0, 40)] * sum(
        usage.preemptions > 0 for usage in usages
    )
