"""docs/chat.md: its commands and its requests run, its tables are complete."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

from fastpath.cli.__main__ import main
from fastpath.cli.chat.commands import COMMANDS
from fastpath.cli.chat.script import KEYS

TEXT = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
LINES = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
REQUESTS = next(block for kind, block in BLOCKS if kind == "json")


def test_tables_are_complete():
    cells = " ".join(line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"/[a-z]+", cells)) == set(COMMANDS)
    assert set(KEYS) - {"role", "name", "tool_call_id"} <= set(re.findall(r"`(\w+)`", cells))


def test_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(REQUESTS)
    Path("turns.jsonl").write_text('"Who are you?"\n"What is 21+14?"\n')
    assert len(LINES) == 7
    for line in LINES:
        given, _, command = line.rpartition("| ")
        typed = re.search(r"printf '(.*)'", given)
        text = typed[1].replace("\\n", "\n") if typed else "Hi\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(shlex.split(command)[1:]) == 0, (line, capsys.readouterr().err)
        out = capsys.readouterr().out
        assert out.strip() or "--output" in line
        if typed:
            assert out.splitlines() == ["35", "7"] or out.startswith("35\n")
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer.get("id") for answer in answers] == [None, "a", "b", "c"]
    assert isinstance(json.loads(answers[3]["content"])["n"], int)
