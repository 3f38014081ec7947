"""`bench --turn` and `--engine`: what was run and counted. No speed is looked at."""

import json

import pytest

from fastpath.backend import ops_for
from fastpath.bench.requests import ANSWER, Runner
from fastpath.cli.__main__ import main
from fastpath.engine import Engine
from fastpath.engine import engine as loop
from fastpath.engine.call import outcomes_of
from fastpath.load import load_model
from tests import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("requests") / "e2b.gguf", "e2b", size="block32")


@pytest.fixture
def bench(path, capsys):
    def run(*words):
        capsys.readouterr()
        status = main(["bench", "-m", str(path), *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_a_turn_computes_what_is_new(bench):
    """And the last token of the answer before it, which was told and never fed back."""
    status, out, err = bench("--turn", "7,20", "-d", "64,90", "-r", 2, "--json")
    rows = json.loads(out)
    assert status == 0, err
    assert [row["test"] for row in rows] == ["turn7 @ d64", "turn20 @ d64", "turn7 @ d90", "turn20 @ d90"]
    for row in rows:
        assert (row["cached"], row["computed"]) == (row["n_depth"] - 1, row["n_turn"] + 1)
        assert len(row["samples_ns"]) == len(row["cold_ns"]) == 2 and row["percent"] > 0


def test_the_parts_of_a_step(bench):
    status, out, err = bench("--engine", "--batch", "1,3", "-n", 6, "-d", "0,33", "--json")
    rows = json.loads(out)
    assert status == 0, err
    assert [r["test"] for r in rows] == [
        "engine tg6 x1", "engine tg6 x3", "engine tg6 x1 @ d33", "engine tg6 x3 @ d33",
    ]  # fmt: skip
    for r in rows:
        assert len(r["samples_ns"]) == len(r["bare_ns"]) == 6
        for parts in zip(r["samples_ns"], r["forward_ns"], r["choice_ns"], r["rest_ns"], strict=True):
            assert min(parts) > 0 and parts[0] == sum(parts[1:])
        assert r["percent"] == pytest.approx(100 * sum(r["rest_ns"]) / sum(r["samples_ns"]))


def test_tables_are_for_people(bench):
    status, out, _ = bench("--engine", "--turn", 5, "-d", 40, "-n", 3, "-r", 1)
    assert status == 0 and "is green" in out
    first = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert [name for name in first if name and name != "test" and name.strip("-")] == [
        "turn5 @ d40", "engine tg3 x1 @ d40",
    ]  # fmt: skip


def test_the_engine_is_left_as_it_was(path):
    model = load_model(path)
    engine = Engine(model, ops_for("cpu"), n_seqs=2, context_len=128)
    runner = Runner(engine)
    runner.steps(2, 10, 3)
    runner.turn(5, ANSWER + 20, 1)
    engine.check_integrity()
    assert engine.is_idle and "forward" not in vars(engine.lanes) and loop.outcomes_of is outcomes_of


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--turn", 5], "expected more than the 16 tokens of the answer"),
        (["--turn", 5, "-d", 600], "605 positions asked for, but the model was made for 512"),
        (["--engine", "-n", 0], "--engine without steps"),
        (["--turn", 0, "-d", 40], "'0' is not a whole number"),
    ],
)
def test_wrong_words_are_one_line(bench, words, says):
    status, out, err = bench(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err
