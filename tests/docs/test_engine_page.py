"""The Python and the commands of docs/engine.md run as they stand; MODEL.gguf is the demo checkpoint."""

import json
import re
import shlex
from pathlib import Path

from fastpath.cli.__main__ import main
from fastpath.load import DEMO

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)


def test_the_python_runs(capsys):
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    exec(compile(code.replace("MODEL.gguf", str(DEMO)), "engine.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.count("Twinpath demo") == 2 and "85" in said
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) cached\n$", said).groups())
    assert 0 < cached < prompt and cached > prompt / 2


def test_the_batches_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text('{"prompt": "Who are you?"}\n{"prompt": "Hi", "max_tokens": 0}\n')
    commands = [
        line
        for kind, block in BLOCKS
        for line in block.splitlines()
        if line.startswith("twinpath --model MODEL.gguf")
    ]
    shown = [json.loads(line) for kind, block in BLOCKS if kind == "json" for line in block.splitlines()]
    assert len(commands) == 2
    for command in commands:
        assert main([str(DEMO) if w == "MODEL.gguf" else w for w in shlex.split(command)[1:]]) == 1
        results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [r.keys() for r in results] == [r.keys() for r in shown]
        assert results[0]["usage"] == shown[0]["usage"] and results[1] == shown[1]
