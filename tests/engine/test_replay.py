"""Replay: a recorded program gives the bytes of calling the ops one by one, or is not used."""

import gc
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.backend import ops_for
from fastpath.cpu import threads
from fastpath.lanes import Lanes
from fastpath.load import load_model
from fastpath.replay import MOST_PROGRAMS, MOST_TOKENS
from fastpath.trace import Recorder
from refimpl.batch import Batch
from tests import tiny

KINDS = [
    ("e2b", "block256"),
    ("e4b", "block32"),
    ("12b", "odd"),
    ("26b", "block32"),
    ("26b", "block256"),
    ("31b", "block256"),
]
EXAMPLES = settings.default.max_examples // 2  # each is many calls of a whole model


def engine_of(model, **options):
    return Lanes(model, ops_for("cpu"), **options)


def is_recorded(engine, n_tokens=1):
    return engine.replay.program(n_tokens) is not None


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


@pytest.fixture(scope="module")
def eager(tiny_model):
    """eager(family, size) -> (model, ids, f32[T, V]): each position's logits, without replay."""
    known = {}

    def logits(family, size="block32"):
        if (family, size) not in known:
            model, ids = tiny_model(family, size), tiny.prompt(family) + tiny.prompt(family, seed=2)
            engine = engine_of(model, replay=False, chunk=len(ids))
            known[family, size] = model, ids, engine.extend([(0, ids)], "all")
        return known[family, size]

    return logits


# -- the same bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "size"), KINDS)
def test_token_by_token(eager, family, size):
    """Windows are 7 and 8, rings 32: positions before, at and far behind both."""
    model, ids, expected = eager(family, size)
    engine = engine_of(model, chunk=1)
    for i, token_id in enumerate(ids):
        assert engine.decode(token_id).tobytes() == expected[i].tobytes(), i
        assert is_recorded(engine)


@pytest.mark.parametrize(("family", "size"), KINDS)
def test_packed_weights_and_any_number_of_tokens(eager, family, size):
    """One row, few rows, and as many as have kernels of their own."""
    model, ids, expected = eager(family, size)
    engine, packed = engine_of(model), model.packed()
    engine.model = packed
    for n in (1, 2, 3, 4, 5, 6, 11, 16):
        for start in (0, 3):
            engine.reset()
            if start:
                engine.prefill(ids[:start])
            got = engine.extend([(0, ids[start : start + n])], "all")
            assert got.tobytes() == expected[start : start + n].tobytes(), (n, start)
            assert is_recorded(engine, n)


@pytest.mark.parametrize("kv_type", ["f32", "bf16", ("f16", "f32")])
def test_every_type_of_cache(tiny_model, kv_type):
    model, ids = tiny_model("e4b", "block32"), tiny.prompt("e4b")[:20]
    engines = [engine_of(model, kv_type=kv_type, replay=replay) for replay in (False, True)]
    for token_id in ids:
        want, got = (engine.decode(token_id) for engine in engines)
        assert got.tobytes() == want.tobytes()
    assert is_recorded(engines[1])


def test_float_activations(tiny_model):
    model, ids = tiny_model("e2b"), tiny.prompt("e2b")[:6]
    engines = [engine_of(model, activations="float", replay=replay) for replay in (False, True)]
    for token_id in ids:
        want, got = (engine.decode(token_id) for engine in engines)
        assert got.tobytes() == want.tobytes()
    assert is_recorded(engines[1])


@pytest.mark.parametrize("family", ["e2b", "26b"])
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_lanes_and_lengths_in_any_order(eager, family, data):
    """Programs are used again for other lanes, positions and cuts of as many tokens; some calls are traced or
    too long, and run beside the programs on the same cache."""
    model, ids, expected = eager(family)
    n_lanes = 3
    engine = engine_of(model, n_seqs=n_lanes, chunk=20)
    for _ in range(data.draw(st.integers(3, 12), label="calls")):
        pieces = []
        for lane in data.draw(st.lists(st.integers(0, n_lanes - 1), min_size=1, max_size=3, unique=True)):
            if engine.length(lane) > len(ids) - 20:
                engine.reset(lane)
            held = engine.length(lane)
            pieces.append((lane, ids[held : held + data.draw(st.integers(1, 7))]))
        want = [expected[engine.length(lane) :][: len(piece)] for lane, piece in pieces]
        trace = data.draw(st.sampled_from([None, None, None, Recorder()]))
        got = engine.extend(pieces, "all", trace=trace)
        assert got.tobytes() == np.concatenate(want).tobytes()
        n_tokens = sum(len(piece) for _, piece in pieces)
        assert trace is not None or is_recorded(engine, n_tokens) == (n_tokens <= MOST_TOKENS)


@pytest.mark.parametrize(("family", "size"), [("e2b", "block256"), ("26b", "block32")])
def test_threads(eager, n_threads, family, size):
    model, ids, expected = eager(family, size)
    engine = engine_of(model)
    for i, token_id in enumerate(ids):
        n_threads(1 + i // 4 % 3)
        assert engine.decode(token_id).tobytes() == expected[i].tobytes()
        assert engine.replay.program(1).n_threads == threads.num_threads()


def test_a_deeper_sequence(tiny_model, monkeypatch):
    """330 tokens: programs have room for 256 positions, then for 512."""
    monkeypatch.setattr("fastpath.kv.cache.FIRST_DEPTH", 256)
    model = tiny_model("e2b", "block32")
    ids = [token_id for seed in range(10) for token_id in tiny.prompt("e2b", seed=seed)]
    expected = engine_of(model, replay=False, chunk=330).extend([(0, ids)], "all")
    engine = engine_of(model, chunk=64)
    first = engine.decode(ids[0])
    assert first.tobytes() == expected[0].tobytes()
    before = engine.replay.program(1)
    engine.prefill(ids[1:250])
    for i in range(250, 262):
        assert engine.decode(ids[i]).tobytes() == expected[i].tobytes()
        assert (engine.replay.program(1) is before) == (i < 256)
    assert engine.cache.depth == 512


# -- what is not replayed ----------------------------------------------------------------------------


def test_a_trace_sees_every_intermediate(eager):
    model, ids, expected = eager("26b")
    arrays = []
    for replay in (False, True):
        engine = engine_of(model, replay=replay)
        engine.decode(ids[0])
        recorder = Recorder()
        engine.extend([(0, ids[1:2])], trace=recorder)
        assert engine.decode(ids[2]).tobytes() == expected[2].tobytes()
        arrays.append(recorder.arrays())
    assert list(arrays[0]) == list(arrays[1])
    assert all(array.tobytes() == arrays[1][name].tobytes() for name, array in arrays[0].items())


def test_no_replay_without_a_table_that_records(tiny_model):
    model = tiny_model("12b")
    assert Lanes(model, refimpl.ops, activations="float").replay is None
    assert engine_of(model, replay=False).replay is None


def test_a_format_without_a_kernel_runs_op_by_op(tmp_path):
    path = tiny.make(tmp_path / "m.gguf", "31b", size="block256", formats={"*ffn_up*": "TQ2_0", "*": "Q4_K"})
    model, ids = load_model(path), tiny.prompt("31b")[:4]
    expected = engine_of(model, replay=False).extend([(0, ids)], "all")
    engine = engine_of(model)
    for i, token_id in enumerate(ids):
        assert engine.decode(token_id).tobytes() == expected[i].tobytes()
    assert not is_recorded(engine)


def test_what_is_refused_is_refused_in_the_same_words(tiny_model):
    model, ids = tiny_model("12b"), tiny.prompt("12b") * 3
    said = []
    for replay in (False, True):
        engine = engine_of(model, replay=replay, context_len=40, n_seqs=2)
        engine.prefill(ids[:38])
        engine.decode(ids[0])
        engine.decode(ids[0])
        words = []
        for lane, start, token_id in ((0, 40, 5), (0, -3, 5), (2, 0, 5), (-1, 0, 5), (0, 0, 1 << 20)):
            batch = one_token(lane, start, token_id)
            with pytest.raises((ValueError, IndexError)) as error:
                engine.forward(batch)
            words.append(str(error.value))
        with pytest.raises(ValueError, match="context holds 40"):
            engine.decode(5)
        said.append(words)
    assert said[0] == said[1]


def one_token(lane, position, token_id):
    one = [np.array([number], np.int32) for number in (token_id, position, lane, 0)]
    return Batch(*one)


# -- programs come and go ----------------------------------------------------------------------------


def test_programs_are_bounded(eager):
    model, ids, expected = eager("12b", "odd")
    engine = engine_of(model)
    for n in (*range(1, MOST_TOKENS + 1), 1):
        engine.reset()
        assert engine.extend([(0, ids[:n])], "all").tobytes() == expected[:n].tobytes()
    assert sum(is_recorded(engine, n) for n in range(1, MOST_TOKENS + 1)) == MOST_PROGRAMS


def test_other_weights_other_programs(tiny_model, tmp_path):
    ids = tiny.prompt("12b")[:3]
    engine = engine_of(tiny_model("12b"))
    engine.prefill(ids)
    other = load_model(tiny.make(tmp_path / "m.gguf", "12b", seed=5))
    expected = engine_of(other, replay=False).prefill(ids[:1])
    engine.reset()
    engine.model = other
    assert engine.decode(ids[0]).tobytes() == expected.tobytes()


def test_results_are_the_callers(eager):
    model, ids, expected = eager("e4b")
    engine = engine_of(model)
    rows = [engine.decode(token_id) for token_id in ids[:5]]
    assert np.stack(rows).tobytes() == expected[:5].tobytes()


def test_memory_is_used_again_within_a_program_and_freed_with_it(tiny_model):
    """Results of all layers lie in a few blocks; a dropped engine leaves nothing behind."""
    model, ids = tiny_model("31b", "block256"), tiny.prompt("31b")
    engine = engine_of(model)
    engine.decode(ids[0])
    program = engine.replay.program(1)
    results = [words[2] for kernel, words, *_ in program._steps if kernel.name.endswith("rms_norm_kernel")]
    assert len(results) == 6 * 7 + 1 and len(set(results)) < 15
    gone = weakref.ref(program)
    del engine, program
    gc.collect()
    assert gone() is None


# -- interruptions and company -----------------------------------------------------------------------


def test_an_interrupted_call_leaves_nothing_behind(eager):
    model, ids, expected = eager("26b")
    engine = engine_of(model)
    assert engine.decode(ids[0]).tobytes() == expected[0].tobytes()
    program = engine.replay.program(1)

    def interrupt():
        raise KeyboardInterrupt

    program.host_steps.insert(1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.decode(ids[1])
    program.host_steps.remove(interrupt)
    assert engine.length() == 1
    for i in range(1, 6):
        assert engine.decode(ids[i]).tobytes() == expected[i].tobytes()
    assert engine.replay.program(1) is program


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of the system")
def test_interrupts_at_any_moment(eager):
    """A timer raises in the middle of recordings and replays; the lane goes on as if nothing had been."""
    model, ids, expected = eager("e2b")
    engine, n_interrupts = engine_of(model), 0

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in np.geomspace(2e-5, 2e-2, 40):
            held = engine.length()
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                for i in range(held, held + 3):
                    engine.replay._known.clear() if i % 2 else None
                    engine.decode(ids[i])
            except KeyboardInterrupt:
                n_interrupts += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            held = engine.length()
            assert engine.decode(ids[held]).tobytes() == expected[held].tobytes()
            if held > 40:
                engine.reset()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert n_interrupts > 5


def test_two_engines_side_by_side(eager):
    (one, ids, expected), (two, ids_2, expected_2) = eager("e2b"), eager("26b")
    first, second = engine_of(one), engine_of(two)
    for i in range(12):
        assert first.decode(ids[i]).tobytes() == expected[i].tobytes()
        assert second.decode(ids_2[i]).tobytes() == expected_2[i].tobytes()


def test_engines_in_threads_of_python(eager):
    """Some find the workers busy; two share one engine, on lanes of their own."""
    model, ids, expected = eager("e2b")
    shared = engine_of(model, n_seqs=2)

    def decode(engine, lane):
        return np.stack([engine.decode(token_id, lane=lane) for token_id in ids[:25]]).tobytes()

    with ThreadPoolExecutor(5) as pool:
        work = [pool.submit(decode, shared, 0), pool.submit(decode, shared, 1)]
        work += [pool.submit(decode, engine_of(model), 0) for _ in range(3)]
        assert [job.result() == expected[:25].tobytes() for job in work] == [True] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_goes_on(eager):
    model, ids, expected = eager("e4b")
    engine = engine_of(model)
    for i in range(3):
        engine.decode(ids[i])
    child = os.fork()
    if child == 0:
        same = all(engine.decode(ids[i]).tobytes() == expected[i].tobytes() for i in range(3, 9))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    for i in range(3, 9):
        assert engine.decode(ids[i]).tobytes() == expected[i].tobytes()


# -- profiles ----------------------------------------------------------------------------------------


def test_every_step_has_a_time_and_a_name(eager):
    model, ids, expected = eager("26b")
    engine = engine_of(model)
    for token_id in ids[:3]:
        engine.decode(token_id)
    program = engine.replay.program(1)
    timings = program.timed()  # the last call once more
    assert len(timings) == len(program) + 1 and timings[0].kernel == "host"
    assert all(0 <= timing.seconds < 1 for timing in timings)
    assert sum(timing.seconds for timing in timings) > 0
    labels = {timing.label for timing in timings}
    assert {"blk.0.attn_q.weight", "blk.4.ffn_down_exps.weight", "token_embd.weight"} <= labels
    marks = [timing.mark for timing in timings[1:]]
    assert "" not in marks and marks[-1] == "result_output" and {"attn_norm-0", "ffn_moe_out-4"} <= set(marks)
    assert engine.decode(ids[3]).tobytes() == expected[3].tobytes()
