"""The few things that need a process of their own: start-up, signals, closed pipes."""

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastpath.cpu import kernel_cache

ROOT = Path(__file__).parents[2]
HELLO = ["--prompt", "Hello", "--max-tokens", "2", "--stats"]
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


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache folder that has what the demo needs, as after its first run."""
    folder = tmp_path_factory.mktemp("kept")
    if kernel_cache.FOLDER is not None:
        shutil.copytree(kernel_cache.FOLDER, folder / kernel_cache.FOLDER.name)
    outcome = run(*HELLO, env=os.environ | {"NUMBA_CACHE_DIR": str(folder)})
    assert outcome.returncode == 0, outcome.stderr
    return folder


def test_a_start_with_kept_kernels_loads_no_compiler(kept):
    """What a start does not import it does not wait for."""
    code = f"import sys; from fastpath.cli.__main__ import main; main({HELLO}); print(sorted(sys.modules))"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "all from the kernel cache" in outcome.stderr
    modules = outcome.stdout.splitlines()[-1]
    assert "'numba'" in modules
    assert not any(f"'{name}'" in modules for name in ("scipy.linalg", "numba.np.arraymath", "tokenizers"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders of POSIX")
@pytest.mark.parametrize("home", ["missing", "a file"])
def test_without_a_home(kept, tmp_path, home):
    """Kernels are kept in the temporary folder instead."""
    temporary = tmp_path / "temporary" / f"twinpath-{os.getuid()}"
    shutil.copytree(kept, temporary)
    temporary.chmod(0o700)
    (tmp_path / "a file").write_bytes(b"")
    env = {
        name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    outcome = run(*HELLO, env=env | {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "temporary")})
    assert outcome.returncode == 0 and "all from the kernel cache" in outcome.stderr, outcome.stderr
    assert not (tmp_path / "missing").exists()


def test_nothing_is_written_into_the_install(kept, tmp_path):
    """It may be read-only, and shared by many users."""
    for package in ("quant", "refimpl", "fastpath"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "install" / package, ignore=ignore)
    installed = sorted((tmp_path / "install").rglob("*"))
    for path in installed:
        path.chmod(0o555 if path.is_dir() else 0o444)
    env = os.environ | {
        "NUMBA_CACHE_DIR": str(kept),
        "PYTHONPATH": str(tmp_path / "install"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    code = f"import fastpath; print(fastpath.__file__); from fastpath.cli.__main__ import main; main({HELLO})"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert outcome.stdout.startswith(str(tmp_path)), outcome.stderr
    assert "all from the kernel cache" in outcome.stderr  # they are those of the same sources elsewhere
    assert sorted((tmp_path / "install").rglob("*")) == installed


def test_two_first_starts_at_once(tmp_path):
    """Both write the same files; each finds a whole one or makes its own."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    code = (
        "import numpy, fastpath.cpu; from quant import open_gguf; from fastpath.load import load_model, DEMO;"
        "print(fastpath.cpu.softcap(numpy.ones((1, 1), 'f4'), 30.0)[0, 0]); "
        "print(load_model(DEMO).tokenizer.encode('Hello'))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert said[0] == said[1] and not said[0][1] and said[0][0]
    assert not list(tmp_path.rglob("*.part")) and len(list(tmp_path.rglob("*.o"))) > 0


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
