"""Generation: when it ends, with what reason, and what it says when the numbers go wrong."""

import numpy as np
import pytest

import refimpl.ops
from fastpath.engine import Engine, Request
from fastpath.generate import generate
from fastpath.lanes import Lanes, NotFiniteError, default_chunk
from fastpath.load import load_model
from refimpl.frontend.sampling import SamplingParams
from tests import tiny


def lanes_of(model, **options):
    return Lanes(model, refimpl.ops, **({"activations": "float"} | options))


def engine_of(model, **options):
    return Engine(model, refimpl.ops, **({"activations": "float"} | options))


def reference_greedy(model, ids, n):
    """n tokens, each from a fresh call on all tokens before it."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(lanes_of(model).prefill(ids).argmax()))
    return ids[-n:]


def test_greedy_tokens_are_those_of_fresh_calls(tiny_model):
    model, ids = tiny_model("e2b"), tiny.prompt("e2b")[:12]
    generation = generate(engine_of(model, chunk=5), ids, SamplingParams(), 6, stop_ids=())
    assert list(generation) == reference_greedy(model, ids, 6)
    assert generation.reason == "length" and generation.n_decoded == 5


def test_a_stop_id_ends_it_and_is_not_part_of_it(tiny_model):
    model, ids = tiny_model("e2b"), tiny.prompt("e2b")[:12]
    tokens = reference_greedy(model, ids, 4)
    stop = tokens[2]
    generation = generate(engine_of(model), ids, SamplingParams(), 50, stop_ids=[stop])
    assert list(generation) == tokens[: tokens.index(stop)]
    assert generation.reason == "stop"


def test_a_full_context_is_a_defined_end(tiny_model):
    """A6: context 32, 20 tokens of prompt: positions 20 to 31, and one token more that is never fed back."""
    model, ids = tiny_model("12b"), tiny.prompt("12b")[:20]
    generation = generate(engine_of(model, context_len=32), ids, SamplingParams(), 60, stop_ids=())
    assert len(list(generation)) == 32 - 20 + 1
    assert generation.reason == "length"


def test_a_second_turn_goes_on_from_the_first(tiny_model):
    model, ids = tiny_model("31b"), tiny.prompt("31b")
    engine = engine_of(model)
    first = list(generate(engine, ids[:10], SamplingParams(), 3, stop_ids=()))
    second = list(generate(engine, ids[:10] + first + ids[10:15], SamplingParams(), 2, stop_ids=()))
    assert second == reference_greedy(model, ids[:10] + first + ids[10:15], 2)


def test_a_prompt_longer_than_the_context_is_refused(tiny_model):
    with pytest.raises(ValueError, match="17 tokens, the context holds 16"):
        list(generate(engine_of(tiny_model("12b"), context_len=16), list(range(17))))
    engine = lanes_of(tiny_model("12b"), context_len=16)
    with pytest.raises(ValueError, match="17 tokens, the context holds 16"):
        engine.prefill(list(range(17)))
    engine.prefill(list(range(10)))
    with pytest.raises(ValueError, match="of which 10 are taken"):
        engine.prefill(list(range(7)))


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_unknown_token_id_is_refused(tiny_model, bad):
    with pytest.raises(ValueError, match="token id"):
        lanes_of(tiny_model("12b")).prefill([2, bad])
    with pytest.raises(ValueError, match="token id"):
        engine_of(tiny_model("12b")).add(Request([2, bad]))


def test_a_context_beyond_the_model_is_refused(tiny_model):
    with pytest.raises(ValueError, match="made for 512"):
        engine_of(tiny_model("12b"), context_len=513)


def test_progress_counts_chunks_and_may_end_the_prefill(tiny_model):
    ids, seen = tiny.prompt("12b")[:20], []

    def give_up(done, total):
        raise KeyboardInterrupt

    lanes, engine = lanes_of(tiny_model("12b"), chunk=8), engine_of(tiny_model("12b"), chunk=8)
    lanes.prefill(ids, progress=lambda *counts: seen.append(counts))
    list(generate(engine, ids, max_tokens=3, stop_ids=(), progress=lambda *counts: seen.append(counts)))
    assert seen == [(8, 20), (16, 20), (20, 20)] * 2

    lanes.reset()
    with pytest.raises(KeyboardInterrupt):
        lanes.prefill(ids, progress=give_up)
    assert lanes.length() == 8
    generation = generate(engine, ids, max_tokens=3, progress=give_up)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.n_prefilled == 8 and generation.reason == "abort" and engine.is_idle
    engine.check_integrity()


def test_the_chunk_follows_the_window():
    def config(*windows):
        return type("C", (), {"layers": [type("L", (), {"window": w}) for w in windows]})

    assert default_chunk(config(512, None)) == 1024
    assert default_chunk(config(700, None)) == 1400
    assert default_chunk(config(1024, None)) == 2048
    assert default_chunk(config(4096)) == 2048
    assert default_chunk(config(None)) == 1024


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("blk.1.attn_norm.weight", "layer 1, attn_norm"),
        ("blk.2.ffn_norm.weight", "layer 2, ffn_norm"),
        ("output_norm.weight", "result_norm"),
    ],
)
def test_not_a_number_names_the_first_place(tiny_model, tmp_path, tensor, place):
    """A18: never token 0 repeated."""
    path = tmp_path / "broken.gguf"
    tiny.make(path, "12b")
    data = bytearray(path.read_bytes())
    healthy = load_model(path).file.tensors[tensor].data
    at = bytes(data).index(healthy.tobytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    engine = engine_of(load_model(path), chunk=8)
    with pytest.raises(NotFiniteError, match=f"{place}: NaN or infinity at position 0"):
        list(generate(engine, tiny.prompt("12b")[:20], SamplingParams(), 5, stop_ids=()))
