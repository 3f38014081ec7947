"""The loop: the same tokens as recomputing everything each time, and its ends."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from refimpl.frontend.sampling import SamplingParams
from refimpl.generate import generate, load
from tests import tiny
from tests.refimpl.files import all_logits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("models") / "e2b.gguf", "e2b")


@pytest.fixture(scope="module")
def model(path):
    return load(path)


class NeverEnds:
    """The tokenizer's part of the loop, without tokens that end an answer."""

    eog_ids = frozenset()
    suppress_ids = ()


def test_greedy_tokens_are_those_of_full_recomputation(model):
    """Known fault A7's question for the whole loop: caches, rings and chunks against none of them."""
    endless = replace(model, tokenizer=NeverEnds)
    prompt = tiny.prompt("e2b")
    ids = list(prompt)
    for _ in range(12):
        logits = all_logits(model.config, model.weights, ids)[-1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-6
        ids.append(int(logits.argmax()))
    for chunk in (4, 512):
        got = list(generate(endless, prompt, max_tokens=12, chunk=chunk, dtype=np.float64))
        assert got == ids[len(prompt) :]


def test_draws_do_not_depend_on_chunks(model):
    params = SamplingParams(temperature=1.0, top_k=50, seed=3)
    endless = replace(model, tokenizer=NeverEnds)
    runs = [list(generate(endless, tiny.prompt("e2b"), params, 20, chunk=chunk)) for chunk in (7, 512)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 5


def test_an_end_token_ends(model):
    endless = replace(model, tokenizer=NeverEnds)
    prompt = tiny.prompt("e2b")
    answer = list(generate(endless, prompt, max_tokens=6))

    class Ends(NeverEnds):
        eog_ids = frozenset([answer[3]])

    n = answer.index(answer[3])
    assert list(generate(replace(model, tokenizer=Ends), prompt, max_tokens=6)) == answer[:n]


def test_a_full_context_ends(model):
    """Known fault A6: a defined end when the context is full; the last token needs no room in the cache."""
    small = replace(model, config=replace(model.config, context_len=40), tokenizer=NeverEnds)
    assert len(list(generate(small, tiny.prompt("e2b")[:30], max_tokens=60))) == 11
    with pytest.raises(ValueError, match=r"The context is full"):
        list(generate(small, [2] * 41, max_tokens=1))


def test_nothing_to_continue(model):
    with pytest.raises(ValueError, match=r"prompt"):
        list(generate(model, []))


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "refimpl", *words], capture_output=True, text=True, timeout=120
    )


def test_command_line(path, model):
    done = command(str(path), "the model", "--raw", "--max-tokens", "5")
    assert (done.returncode, done.stderr) == (0, "")
    ids = model.tokenizer.encode("the model", add_bos=True)
    stream = model.tokenizer.stream()
    want = "".join(stream.push(i) for i in generate(model, ids, max_tokens=5)) + stream.flush()
    assert done.stdout == want + "\n"
    assert command(str(path), "the model", "--think", "--max-tokens", "2").returncode == 0


def test_command_line_says_what_is_wrong(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        done = command(str(path), "x")
        assert done.returncode == 2
        assert done.stderr.startswith("refimpl: ") and done.stderr.count("\n") == 1
