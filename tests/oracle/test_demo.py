"""The shipped checkpoint answers in the tokens of transformers and llama.cpp (oracles/golden/demo.json)."""

import hashlib
import json
from functools import cache

import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.generate import generate
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from tests.oracle.goldens import GOLDEN

RECORDED = json.loads((GOLDEN / "demo.json").read_text())
CASES = RECORDED["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


@cache
def demo():
    return load_model(DEMO)


@cache
def engine(activations):
    return Engine(demo(), ops_for("cpu"), activations=activations)


@cache
def definitions():
    return Lanes(demo(), ops_for("ref"), activations="float")


def test_the_file_is_the_one_that_was_asked():
    assert hashlib.sha256(DEMO.read_bytes()).hexdigest() == RECORDED["sha256"]
    assert DEMO.stat().st_size <= 8 << 20


def test_both_oracles_agree_and_nothing_is_near_a_tie():
    assert RECORDED["near_ties"] == []
    assert all(case["answer_ids"] == case["llama_cpp_ids"] for case in CASES)


@each_case
def test_the_prompt_is_written_alike(case):
    ids = demo().template.render_ids(
        demo().tokenizer, case["messages"], tools=case["tools"] or None, thinking=case["thinking"]
    )
    assert ids == case["ids"]


@each_case
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_greedy_tokens_of_the_fast_engine(case, activations):
    runner = engine(activations)
    wanted = case["answer_ids"]
    said = list(generate(runner, case["ids"], max_tokens=len(wanted), stop_ids=()))
    assert said == wanted, demo().tokenizer.decode(said)


@each_case
def test_greedy_tokens_of_the_definitions(case):
    """One call over prompt and answer: each row's best token is the next one, as in token by token."""
    runner = definitions()
    runner.reset()
    prompt, answer = case["ids"], case["answer_ids"]
    logits = runner.extend([(0, prompt + answer[:-1])], rows="all")
    assert np.argmax(logits[len(prompt) - 1 :], axis=-1).tolist() == answer


def test_it_thinks_and_adds():
    case = {"messages": [{"role": "user", "content": "What is 47+38?"}]}
    ids = demo().template.render_ids(demo().tokenizer, case["messages"], thinking=True)
    runner = engine("int8")
    said = demo().tokenizer.decode(list(generate(runner, ids, max_tokens=100)))
    assert said.startswith("<|channel>thought\n") and said.endswith("<channel|>The answer is 85.")
