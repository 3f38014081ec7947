"""The fast engine finds held-out text of the demo as likely as the definition in float64 does."""

from functools import cache

import numpy as np
import pytest

import fastpath.cpu
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from tests import tolerances
from tests.engine import held_out

N = 24  # conversations, about 1,800 tokens


@cache
def definition():
    """(model, conversations, their log-probabilities in float64)."""
    model = load_model(DEMO)
    texts = held_out.conversations(model.tokenizer, N)
    return model, texts, held_out.by_definition(model, texts)


@pytest.mark.parametrize(
    "activations, kv_type, chunk",
    [
        ("int8", "f16", 200),
        ("int8", "f16", 17),  # the rest token by token
        ("int8", "f32", 17),
        ("float", "f32", 200),
        ("float", "f16", 200),
        ("float", "bf16", 200),
    ],
)
def test_held_out_text_is_as_likely(activations, kv_type, chunk):
    model, texts, want = definition()
    engine = Lanes(model, fastpath.cpu, activations=activations, kv_type=kv_type)
    got = held_out.by_engine(engine, texts, chunk)
    change = abs(got.mean() / want.mean() - 1)
    assert change <= tolerances.LOG_PROBABILITY_REL, f"{got.mean():.5f} against {want.mean():.5f}"
    rms = np.sqrt(np.mean((got - want) ** 2))
    print(f"mean {want.mean():.5f}, relative change {change:.1e}, RMS of a token's {rms:.1e}")
    assert rms <= tolerances.LOG_PROBABILITY_RMS["int8" if activations == "int8" else kv_type], rms


def test_answers_are_near_certain():
    """The demo was trained on answers: were the texts cut in the wrong place, this would be far off."""
    _, texts, want = definition()
    answers = np.concatenate([is_answer[1:] for _, is_answer in texts])
    assert 0.3 < answers.mean() < 0.7 and want[answers].mean() > -0.01 and want[~answers].mean() < -1
