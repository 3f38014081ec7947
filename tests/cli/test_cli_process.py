"""The few things that need a process of their own: start-up, signals, closed pipes."""

import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

COMMAND = [sys.executable, "-m", "fastpath.cli"]


def run(*words, **options):
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=120, **options
    )


def test_help_loads_neither_numpy_nor_the_compiler():
    code = "import sys; from fastpath.cli.__main__ import main; main(['--help']); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert "'argparse'" in modules
    assert not any(f"'{name}'" in modules for name in ("numpy", "numba", "jinja2", "tokenizers"))


def test_a_fault_is_one_line_and_status_2(tmp_path):
    (tmp_path / "page.gguf").write_text("<html></html>")
    outcome = run("--model", tmp_path / "page.gguf", "--prompt", "hi")
    assert outcome.returncode == 2 and outcome.stdout == ""
    assert outcome.stderr.startswith("twinpath: ") and outcome.stderr.count("\n") == 1


def test_a_reader_that_goes_away(tiny_path):
    process = subprocess.Popen(
        [*COMMAND, "inspect", str(tiny_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    err = process.stderr.read().decode()
    process.wait(120)
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_ends_cleanly(tiny_path):
    words = [
        "--model",
        str(tiny_path),
        "--backend",
        "ref",
        "--raw",
        "--prompt",
        "the user",
        "--max-tokens",
        "480",
    ]
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert first and out.endswith(b"\n")
    assert (process.returncode, err) == (130, b"")


def test_the_entry_imports_nothing_before_it_can_be_interrupted():
    """Before `main` a Ctrl+C is Python's, with a traceback."""
    code = (
        "import sys; old = {*sys.modules}; import fastpath.cli.__main__; print(sorted({*sys.modules} - old))"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert modules == "['fastpath', 'fastpath.cli', 'fastpath.cli.__main__']\n"


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="a name of POSIX")
@pytest.mark.parametrize(("command", "begins"), [("logits", b"\x93NUMPY"), ("trace", b"PK")])
@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
def test_numbers_to_standard_output(tiny_path, command, begins, out):
    words = [command, "--model", tiny_path, "--backend", "ref", "--tokens", "2,3", "--out", out]
    outcome = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, timeout=120)
    assert outcome.returncode == 0 and outcome.stdout.startswith(begins)
    assert b"2" in outcome.stderr and outcome.stderr.count(b"\n") == 1
    if command == "trace":
        assert "l_out-0" in np.load(io.BytesIO(outcome.stdout)).files


def redirected(tiny_path, redirection, words='inspect "$1"'):
    command = f'"$0" -m fastpath.cli {words} {redirection}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, str(tiny_path)], stderr=subprocess.PIPE, text=True, timeout=120
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(
    ("redirection", "says"), [("> /dev/full", "No space left"), (">&-", "output is closed")]
)
def test_output_that_takes_nothing(tiny_path, redirection, says):
    outcome = redirected(tiny_path, redirection)
    assert outcome.returncode == 2 and says in outcome.stderr and outcome.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(
    ("words", "redirection"),
    [
        ("--help", ">/dev/full"),
        ("inspect --help", ">/dev/full"),
        ("--nothing", "2>/dev/full"),
        ('--model "$1" --backend ref --raw --prompt user --max-tokens 2 --stats', "2>/dev/full >&2"),
    ],
)
def test_a_stream_that_takes_nothing_is_a_fault(tiny_path, words, redirection):
    assert redirected(tiny_path, redirection, words).returncode == 2


def test_a_terminal_without_the_characters(tmp_path, tiny_path):
    """Odd paths, and an answer that the terminal cannot show."""
    folder = tmp_path / "Dépôt Модели"
    folder.mkdir()
    path = folder / "\u3000 'm\".gguf"
    path.write_bytes(tiny_path.read_bytes())
    outcome = run("inspect", path, env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert outcome.returncode == 0 and outcome.stderr == "" and "D?p?t" in outcome.stdout
