"""The command line in this process: argument list in, (status, stdout, stderr) out."""

import io
import sys
import tempfile
from typing import NamedTuple

import pytest

from fastpath.cli.__main__ import main
from tests import tiny


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def twinpath(capsys, monkeypatch):
    """twinpath("tokenize", "hello", stdin=b"...") -> Outcome."""

    def run(*words, stdin: bytes | None = None) -> Outcome:
        if stdin is not None:
            file = tempfile.TemporaryFile()  # with a number, as the real one has
            file.write(stdin)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        capsys.readouterr()
        status = main([str(word) for word in words])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def fault(twinpath):
    """fault(...) -> the one line on stderr; fails unless the status is 2, the line one, and stdout empty."""

    def run(*words, stdin: bytes | None = None) -> str:
        outcome = twinpath(*words, stdin=stdin)
        assert outcome.status == 2 and outcome.out == "", outcome
        assert outcome.err.count("\n") == 1 and outcome.err.startswith("twinpath: "), outcome.err
        assert "Traceback" not in outcome.err
        return outcome.err

    return run


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A tiny E2B-like model in float32, quick under the reference's op table; it never ends an answer."""
    ends = {"tokenizer.ggml.suppress_tokens": [1, 9, 16]}  # <eos> <|tool_response> <turn|>
    return tiny.make(tmp_path_factory.mktemp("cli") / "tiny.gguf", "e2b", keys=ends)
