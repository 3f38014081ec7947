"""The engine's one property: whoever comes, goes or waits, a request gets the bytes that it gets alone."""

from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpath.backend import ops_for
from fastpath.cpu import threads
from fastpath.engine import Engine, Finished, Request, Token, scheduler
from fastpath.lanes import Lanes
from fastpath.load import load_model
from refimpl.batch import PAD, SoftTokens
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.kv_types import KV_TYPES
from tests import tiny
from tests.engine.conftest import FORMATS

# Windows of 7 and 8 positions lie inside a page; one of 45 spans two or three.
KINDS = [
    ("e2b", "block256", None),
    ("e4b", "block32", 45),
    ("12b", "odd", 45),
    ("26b", "block32", None),
    ("31b", "block256", 45),
]
EXAMPLES = max(6, settings.default.max_examples // 4)  # each is dozens of calls of a whole model
LENGTHS = (1, 2, 9, 31, 32, 33, 44, 45, 46, 63, 64, 65, 90, 128, 131)
MOST_TOKENS = 9
PARAMS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=1.3, top_k=40, seed=5),
    "penalised": SamplingParams(
        temperature=0.8, top_p=0.95, repeat_penalty=1.3, presence_penalty=0.4, seed=11
    ),
}
KV = [*sorted(set(KV_TYPES) - {"f64"}), ("f16", "f32")]


@dataclass(frozen=True)
class Ask:
    """A request of the universe: `n` tokens of a document, perhaps an ending of its own, and how to go on."""

    document: str
    n: int
    ending: int
    params: str


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """world(family, size, window) -> World"""
    folder = tmp_path_factory.mktemp("many")

    @cache
    def make(family, size, window):
        keys = {"gemma4.attention.sliding_window": window} if window else {}
        path = tiny.make(folder / f"{family}.gguf", family, size=size, formats=FORMATS[size], keys=keys)
        return World(load_model(path).packed(), family)

    return make


class World:
    """A model, documents that begin alike, and what each request gets alone."""

    def __init__(self, model, family):
        self.model, self.ops = model, ops_for("cpu")
        words = [token for seed in range(5) for token in tiny.prompt(family, seed=seed)]
        D = model.config.model_dim

        def image(start, n, key, vision=True):
            return SoftTokens(start, tiny._bell(key, (n, D), 1.0).astype(np.float32), vision)

        seen = words.copy()
        for start, n in ((12, 15), (40, 5), (70, 18)):
            seen[start : start + n] = [PAD] * n
        pictures = [image(12, 15, "a"), image(40, 5, "sound", False), image(70, 18, "b")]
        self.documents = {
            "words": (words, []),
            "seen": (seen, pictures),
            "other picture": (seen, [image(12, 15, "c"), *pictures[1:]]),  # equal ids
        }
        self.alone = cache(self._alone)

    def prompt(self, ask):
        ids, soft = self.documents[ask.document]
        n = ask.n
        for item in soft:
            if item.start < n < item.stop:
                n = item.stop
        ids = ids[:n] + [30 + ask.ending + i for i in range(ask.ending)]
        return ids, [item for item in soft if item.start < n]

    def _alone(self, ask, kv_type):
        """(tokens, rows): MOST_TOKENS of them, on lanes of its own: the prompt at once, then one by one."""
        ids, soft = self.prompt(ask)
        lanes = Lanes(self.model, self.ops, chunk=200, kv_type=kv_type, replay=False)
        rows, tokens = [lanes.prefill(ids, soft=soft)], []
        while True:
            history = ids + tokens
            suppress = self.model.tokenizer.suppress_ids
            tokens.append(sample(rows[-1], PARAMS[ask.params], history, len(history), suppress))
            if len(tokens) == MOST_TOKENS:
                return tokens, rows
            rows.append(lanes.decode(tokens[-1]))


asks = st.builds(
    Ask,
    st.sampled_from(["words", "seen", "other picture"]),
    st.sampled_from(LENGTHS),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from(sorted(PARAMS)),
)
additions = st.tuples(st.just("add"), asks, st.integers(1, MOST_TOKENS))
steps = st.tuples(st.just("step"), st.integers(1, 6))
aborts = st.tuples(st.just("abort"), st.integers(0, 7))
traces = st.lists(additions | additions | steps | aborts, min_size=3, max_size=14)


@st.composite
def engines(draw):
    """Options; `more` pages than the least: few make requests wait, leave, and evict prefixes."""
    return {
        "n_seqs": draw(st.integers(1, 4)),
        "chunk": draw(st.sampled_from([1, 7, 20, 33, 64, 150])),
        "page": draw(st.sampled_from([32, 64, 96])),
        "kv_type": draw(st.sampled_from(KV)),
        "prefix_cache": draw(st.sampled_from([True, True, False])),
        "replay": draw(st.sampled_from([True, True, False])),
        "small": draw(st.sampled_from([3, 20, 256])),
        "headroom": draw(st.sampled_from([0, scheduler.HEADROOM])),
        "more": draw(st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4))),
    }


def engine_of(world, *, more=None, page=64, small=scheduler.SMALL_CHUNK, **options):
    """small: prompt tokens of a call in which others decode"""
    if more is not None:
        full = Lanes(
            world.model, world.ops, page=page, chunk=options["chunk"], largest_image=18
        ).cache.geometry
        ring = full.kinds["sliding"].n_entries
        options["n_pages"] = {"sliding": ring + more[0], "global": -(-120 // page) + more[1]}
    engine = Engine(world.model, world.ops, page=page, largest_image=18, context_len=170, **options)
    engine._scheduler.small = min(small, engine.lanes.chunk)
    return engine


@pytest.mark.parametrize(("family", "size", "window"), KINDS)
@given(options=engines(), trace=traces, n_threads=st.sampled_from([1, 2]))
@settings(max_examples=EXAMPLES)
def test_everybody_gets_what_they_get_alone(world, family, size, window, options, trace, n_threads):
    world = world(family, size, window)
    before = threads.num_threads()
    threads.set_num_threads(n_threads)
    try:
        with patch.object(scheduler, "HEADROOM", options.pop("headroom")):
            run(world, engine_of(world, **options), trace)
    finally:
        threads.set_num_threads(before)


def run(world, engine, trace):
    asked, events = {}, {}

    def step():
        for event in engine.step():
            events.setdefault(event.id, []).append(event)

    for action, *what in trace:
        if action == "add":
            ask, n = what
            ids, soft = world.prompt(ask)
            request = Request(ids, soft, PARAMS[ask.params], n, frozenset(), want_logits=True)
            if len(ids) > memory(engine):
                with pytest.raises(ValueError, match="memory for keys and values"):
                    engine.add(request)
            else:
                asked[engine.add(request)] = ask, n
        elif action == "abort" and asked:
            engine.abort(list(asked)[what[0] % len(asked)])
        elif action == "step":
            for _ in range(what[0]):
                step()
            engine.check_integrity()
    for _ in range(3000):
        if engine.is_idle:
            break
        step()
        engine.check_integrity()
    assert engine.is_idle, "somebody starves"
    step()
    for id, (ask, n) in asked.items():
        check(world, engine, ask, n, events[id])
    return [events[id][-1].usage for id in asked]


def memory(engine):
    pool = engine.lanes.cache.pools["global"]
    return min(engine.lanes.context_len, pool.n * engine.lanes.cache.page)


def check(world, engine, ask, n, events):
    tokens, rows = world.alone(ask, engine.lanes.kv_type)
    *made, last = events
    assert isinstance(last, Finished) and all(isinstance(event, Token) for event in made)
    assert [event.index for event in made] == list(range(len(made)))
    for event in made:
        assert event.token == tokens[event.index], event.index
        assert event.logits.tobytes() == rows[event.index].tobytes(), event.index
    n_prompt = len(world.prompt(ask)[0])
    if last.reason == "length":
        is_full = n_prompt + len(made) == memory(engine) + 1
        assert len(made) == n or (is_full and len(made) < n)
    else:
        assert last.reason == "abort" and len(made) <= n, last
    usage, result = last.usage, engine.result(last.id)
    assert result.tokens == tuple(event.token for event in made) and result.reason == last.reason
    assert usage.prompt == n_prompt and usage.generated == len(made)
    assert usage.cached + usage.computed == (n_prompt if made or usage.computed else 0)
    assert (usage.preemptions > 0) or usage.recomputed == 0


# -- cases by hand ------------------------------------------------------------------------------------


def generate(engine, ids, n, **options):
    return list(engine.stream(engine.add(Request(ids, max_tokens=n, stop_ids=frozenset(), **options))))


@pytest.mark.parametrize(("family", "size", "window"), KINDS)
def test_alone_and_among_seven_others(world, family, size, window):
    """F16: the same request, alone and in the middle of a crowd that came before and comes after."""
    world = world(family, size, window)
    asks = [Ask(d, n, 1, "drawn") for d in ("words", "seen") for n in (9, 33, 46, 90)]
    engine = engine_of(world, n_seqs=8, chunk=50)
    trace = []
    for ask in asks:
        trace += [("add", ask, MOST_TOKENS), ("step", 2)]
    run(world, engine, trace)


@pytest.mark.parametrize("family", ["e2b", "31b"])
def test_sequences_that_join_later_leave_earlier_keys_alone(world, family):
    """F3: a past bug wiped the keys of the first sequence when the second one's pages were allocated."""
    world = world(family, "block256", None)
    first = Ask("words", 64, 0, "greedy")
    trace = [("add", first, MOST_TOKENS), ("step", 3)]
    for n in (9, 65, 131):
        trace += [("add", Ask("words", n, 3, "drawn"), MOST_TOKENS), ("step", 2)]
    run(world, engine_of(world, n_seqs=4, chunk=150, page=32), trace)


def test_out_of_pages(world):
    """Five grow in pages for two: prefixes are evicted, the youngest leave and come back, all is as alone."""
    world = world("26b", "block32", None)
    crowd = [("add", Ask("words", n, i, "drawn"), MOST_TOKENS) for i, n in enumerate((63, 31, 60, 32, 90))]
    with patch.object(scheduler, "HEADROOM", 0):
        engine = engine_of(world, n_seqs=5, chunk=33, page=32, more=(2, 1))
        usages = run(world, engine, [("add", Ask("seen", 90, 3, "greedy"), 2), ("step", 9), *crowd])
    assert sum(usage.preemptions for usage in usages) >= 1
    assert sum(usage.recomputed for usage in usages) >= 1
    assert engine.prefix_counters.evicted >= 1
    assert any(usage.cached for usage in usages)


def test_the_next_turn_of_a_chat_computes_what_is_new(world):
    """Prompt, answer, 20 more tokens: keys of prompt and answer are there, but for the last token's."""
    world = world("e4b", "block32", 45)
    engine = engine_of(world, chunk=150)
    ids, soft = world.prompt(Ask("seen", 90, 0, "greedy"))
    first = engine.add(Request(ids, soft, max_tokens=30, stop_ids=frozenset()))
    answer = list(engine.stream(first))
    more = ids + answer + list(range(40, 60))
    second = engine.add(Request(more, soft, max_tokens=5, stop_ids=frozenset(), want_logits=True))
    events = [event for _ in range(9) for event in engine.step()]
    assert events[-1].usage.cached == len(ids) + 29 and events[-1].usage.computed == 21
    lanes = Lanes(world.model, world.ops)
    assert events[0].logits.tobytes() == lanes.prefill(more, soft=soft).tobytes()
    assert engine.result(second).reason == "length"


def test_a_stop_id_ends_an_answer_and_is_no_part_of_it(world):
    world = world("e2b", "block256", None)
    ask = Ask("words", 33, 0, "drawn")
    tokens, _ = world.alone(ask, "f16")
    stop = tokens[4]
    engine = engine_of(world, chunk=150)
    id = engine.add(Request(world.prompt(ask)[0], (), PARAMS["drawn"], 50, frozenset([stop])))
    assert list(engine.stream(id)) == tokens[: tokens.index(stop)]
    result = engine.result(id)
    assert result.reason == "stop" and result.usage.generated == tokens.index(stop)
    turn = [*world.prompt(ask)[0], *result.tokens, stop, 41, 42]  # and the next turn has it
    id = engine.add(Request(turn, max_tokens=1))
    list(engine.stream(id))
    assert engine.usage(id).cached == len(turn) - 3


def test_no_tokens_wanted_computes_the_prompt(world):
    world = world("e2b", "block256", None)
    engine, (ids, _) = engine_of(world, chunk=150), world.prompt(Ask("words", 65, 0, "greedy"))
    assert generate(engine, ids, 0) == []
    assert generate(engine, ids, 1) == world.alone(Ask("words", 65, 0, "greedy"), "f16")[0][:1]
    assert engine.usage(1).cached == 64
