"""`twinpath models`."""

import pytest

from fastpath import memory
from fastpath.cli.__main__ import main
from fastpath.hub.catalogue import CATALOGUE


def test_the_list_says_what_fits(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 7_000_000_000)
    assert main(["models", "--context", "4096"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[3 : 3 + len(CATALOGUE)]}
    assert rows["E4B-Q4_0"][1:4] == ["4.588", "0.560", "0.100"] and rows["E4B-Q4_0"][5] == "yes"
    assert rows["31B-Q8_0"][3] == "-" and rows["31B-Q8_0"][5] == "no"
    assert "7.0 GB are free" in out and "terms" in out
    assert "https://huggingface.co/google/gemma-4-31B-it" in out


def test_unknown_memory(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert main(["models"]) == 0
    assert "does not say" in capsys.readouterr().out


def test_an_unknown_id(capsys):
    assert main(["models", "--fetch", "E9B"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "E4B-Q8_0" in err


@pytest.mark.parametrize("options, n", [([], 3), (["--no-draft"], 2), (["--no-draft", "--no-mmproj"], 1)])
def test_fetching_one_with_what_belongs_to_it(hub, capsys, options, n):
    entry = CATALOGUE[0]
    for piece in (entry.model, *entry.projectors, *entry.drafters):
        hub.add(piece.repo, piece.file, piece.file.encode())
    assert main(["models", "--fetch", "e4b-q8_0", *options]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines] == ["--model", "--mmproj"][:n]
    assert ("the drafter is at" in said.err) == (n == 3), "options that do not exist are not advised"
    assert lines[0].endswith("/gemma-4-E4B-it-Q8_0.gguf") and "terms" in said.err
    assert main(["models"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(entry.id))
    assert row.split()[-1] == "yes"
