"""A constraint in use: rollback, forks, rows of any length; faults, and grammars that are slow to compile."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.grammar import Grammars, json_schema, regex, tool_calls
from refimpl.frontend.sampling import SamplingParams, sample
from tests.frontend.constrained import ENDS, GRAMMARS, PERSON, TOOLS, allowed, follow, ids_of
from tests.frontend.vocab import small

TEXTS = ['{"name": "the", "age": 12}', '{ "name":"a",\n"age":-3,"ok":true}']


@given(st.sampled_from(TEXTS), st.data())
def test_rollback_leads_to_the_same_masks(text, data):
    """Drafts that were taken back leave no trace."""
    ids = ids_of(text)
    masks = []
    straight = GRAMMARS.constraint(json_schema(PERSON))
    for token in ids:
        masks.append(allowed(straight))
        straight.accept(token)
    at, constraint = 0, GRAMMARS.constraint(json_schema(PERSON))
    for _ in range(6):
        ahead = data.draw(st.integers(0, min(len(ids) - at, 9)))
        for token in ids[at : at + ahead]:
            constraint.accept(token)
        back = data.draw(st.integers(0, ahead))
        constraint.rollback(back)
        at += ahead - back
        assert allowed(constraint) == (masks[at] if at < len(ids) else ENDS)


def test_rollback_across_thoughts_calls_and_the_end():
    form = tool_calls(TOOLS, ToolChoice())
    ids = ids_of("a<|tool_call>call:none{}<tool_call|>b<|tool_call>call:none{}<tool_call|><|tool_response>")
    masks, constraint = [], GRAMMARS.constraint(form)
    for token in ids:
        masks.append(allowed(constraint))
        constraint.accept(token)
    for k in range(len(ids) - 1, -1, -1):
        constraint.rollback(1)
        assert allowed(constraint) == masks[k]
    with pytest.raises(ValueError, match="rollback: 1 tokens, at most 0"):
        constraint.rollback(1)


def test_forks_go_their_own_ways():
    one = follow(json_schema(PERSON), '{"name": "')
    other = one.fork()
    for token in ids_of('a"'):
        one.accept(token)
    assert [small().piece(i) for i in allowed(one) if small().piece(i) in ",}"] == [","]
    assert small().id_of("a") in allowed(other)


def test_a_token_that_is_not_allowed_is_an_error():
    constraint = GRAMMARS.constraint(json_schema(PERSON))
    with pytest.raises(ValueError, match=r"^response_format: token \d+ came, which it forbids"):
        constraint.accept(small().id_of("a"))


def test_rows_longer_and_shorter_than_the_vocabulary():
    for n in (small().n_vocab + 40, small().n_vocab - 3):
        row = np.ones(n, np.float64)
        follow(json_schema({"type": "string"}), '"').mask(row, [])
        assert np.isneginf(row[small().n_vocab :]).all()
        assert (row > 0).sum() > 30


def test_a_model_file_that_forbids_what_must_come():
    only_brace = [i for i in range(small().n_vocab) if small().token_bytes(i) == b"{"]
    with pytest.raises(ValueError, match=r"^constraint: all .* tokens of the vocabulary are forbidden"):
        sample(
            np.zeros(small().n_vocab, np.float32),
            SamplingParams(),
            suppress=only_brace,
            constraint=GRAMMARS.constraint(json_schema(PERSON)),
        )


def test_without_the_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="llguidance is not installed"):
        Grammars(small()).constraint(json_schema(PERSON))


def test_a_grammar_that_is_never_done_keeps_nobody_waiting(monkeypatch):
    """Each pattern that must hold at once doubles the library's time; others are compiled meanwhile."""
    monkeypatch.setattr("refimpl.frontend.grammar.COMPILE_S", 0.2)
    monkeypatch.setattr("refimpl.frontend.grammar.PATIENCE_S", 0.1)
    grammars = Grammars(small())
    grammars.prepare().result()
    slow = [{"allOf": [{"pattern": f"a{{{k}}}.*b{{{k}}}"} for k in range(1, n)]} for n in (20, 21)]
    with pytest.raises(ValueError, match=r"^response_format: not compiled after 0.2 s, expected fewer"):
        grammars.constraint(json_schema({"type": "string", **slow[0]}))
    assert grammars.constraint(regex("b+")) is not None
    with pytest.raises(ValueError, match="not compiled"):
        grammars.constraint(json_schema({"type": "string", **slow[1]}))
    with pytest.raises(ValueError, match=r"^regex: 2 grammars are being compiled. Try again later$"):
        grammars.constraint(regex("c+"))
    assert grammars.constraint(regex("b+")) is not None  # it is kept


@pytest.mark.parametrize(
    "divisors",
    [[10**400 + 1], [2**31], [1000003], [101, 103, 107], [k**2 + 1 for k in range(40)], [0.001, 100.003]],
)
def test_divisors_whose_remainders_are_too_many(divisors):
    schema = {"anyOf": [{"type": "integer", "multipleOf": n} for n in divisors]}
    with pytest.raises(ValueError, match=r"^response_format: multipleOf .*, expected (at most 32|a common)"):
        json_schema(schema)


@pytest.mark.parametrize("divisors", [[0.01], [3], [10**9], [0.05, 7, 2.5], [1e-7]])
def test_divisors_that_can_be_followed(divisors):
    GRAMMARS.constraint(json_schema({"anyOf": [{"type": "number", "multipleOf": n} for n in divisors]}))
