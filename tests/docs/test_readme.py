"""The README's commands and its Python, run as they stand; MODEL.gguf is the demo checkpoint, MMPROJ.gguf
random encoders of its width."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from fastpath.cli.__main__ import main
from fastpath.load import DEMO, load_model
from tests.media import files, tiny_mmproj

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
LINES = [
    line.split(" #")[0].strip()
    for kind, block in BLOCKS
    if not kind
    for line in block.splitlines()
    if line.strip()
]
COMMANDS = [part.strip() for line in LINES for part in line.split(" ; ")]
MAKE = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
TWINPATH = [
    re.sub(r"^(\.venv/bin/python|python) -m fastpath.cli", "twinpath", command)
    for command in COMMANDS
    if command.startswith("twinpath") or "fastpath.cli" in command
]


def test_the_first_screen_has_both_commands():
    first_screen = README.splitlines()[:30]
    assert {"demo", "test"} <= set(MAKE)
    assert any("make demo" in line for line in first_screen) and any(
        "make test" in line for line in first_screen
    )


@pytest.mark.parametrize("target", MAKE)
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def random_encoders(path):
    """For the demo checkpoint, which has seen no picture: what it says is noise."""
    D = load_model(DEMO).config.model_dim
    tensors = tiny_mmproj.tensors_of("e2b")
    replace = {
        "mm.input_projection.weight": np.resize(tensors["mm.input_projection.weight"], (D, 36)),
        "mm.a.input_projection.weight": np.resize(tensors["mm.a.input_projection.weight"], (D, 24)),
        "v.position_embd.weight": np.resize(tensors["v.position_embd.weight"], (2, 80, 36)),
    }
    keys = {"clip.vision.projection_dim": D, "clip.audio.projection_dim": D}
    return tiny_mmproj.make(path, "e2b", replace=replace, keys=keys)


def test_twinpath_commands_run(tmp_path, monkeypatch, capsys):
    """In their order: later ones read what earlier ones wrote."""
    monkeypatch.chdir(tmp_path)
    Path("question.txt").write_text("What is 21+14?")
    Path("chat.json").write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    Path("requests.jsonl").write_text('{"prompt": "Hi"}\n{"id": 1, "prompt": "What is 21+14?"}\n')
    Path("photo.jpg").write_bytes(files.encoded(files.picture("photo-small"), ".jpg"))
    Path("talk.wav").write_bytes(files.wav(files.sound("chirp")))
    stand_ins = {"MMPROJ.gguf": str(random_encoders(tmp_path / "MMPROJ.gguf"))}
    assert len(TWINPATH) >= 12
    for command in TWINPATH:
        words = [
            stand_ins.get(word, str(DEMO)) if word.endswith(".gguf") else word
            for word in shlex.split(command)[1:]
        ]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n")))  # for `chat`
        if words[0] == "serve":  # up to where it listens; then it would not end
            words += ["--port", "0"]
            monkeypatch.setattr("fastpath.server.run.run", lambda service, listener: service.close(0))
        status = main(words)
        said = capsys.readouterr()
        assert status == 0, f"{command}: exit status {status}: {said.err}"
        assert (said.out + said.err).strip(), f"{command}: said nothing"


def test_the_python_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["readme"])
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    exec(compile(code.replace("MODEL.gguf", str(DEMO)), "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.strip() and "\u2581" not in said


def test_oracle_programs_exist():
    programs = re.findall(r"python -m (oracles\.\w+)", README)
    assert programs
    for program in programs:
        assert (ROOT / (program.replace(".", "/") + ".py")).exists()
