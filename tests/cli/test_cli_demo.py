"""The embedded checkpoint is the default: the compiled engine and the definitions give one answer."""

import pytest


@pytest.mark.parametrize("words", [["--prompt", "Who are you?"], ["--think", "--prompt", "What is 47+38?"]])
def test_the_same_answer_from_both_op_tables(twinpath, words):
    compiled, defined = (twinpath(*words, "--backend", backend) for backend in ("cpu", "ref"))
    assert compiled.status == 0 and compiled.out == defined.out
    assert ("[thought]" in compiled.out) == ("--think" in words)
    assert "--think" not in words or compiled.out.endswith("85.\n")


def test_statistics_go_to_stderr(twinpath):
    outcome = twinpath("--prompt", "Hello", "--stats", "--max-tokens", 4, "--threads", 1)
    assert "tokens/s" in outcome.err and "tokens/s" not in outcome.out


def test_inspect_needs_no_name(twinpath):
    assert "Twinpath" in twinpath("inspect").out
