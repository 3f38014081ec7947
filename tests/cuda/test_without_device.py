"""The package imports anywhere, and says in one line why there is no GPU."""

import subprocess
import sys

import pytest

from fastpath.cli.__main__ import main

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "numba.cuda" or name.startswith(("numba_cuda", "cuda.")):
            raise ImportError(f"no {name} here")
sys.meta_path.insert(0, Hidden())
"""
ASK = """
import fastpath.cuda
from fastpath.cuda import device
reason = fastpath.cuda.why_not()
assert reason and "\\n" not in reason, reason
try:
    device.current()
except RuntimeError as error:
    assert reason in str(error)
print(reason)
"""


@pytest.mark.parametrize("prelude, expected", [(HIDE, "numba-cuda does not import"), ("", "")])
def test_reason(prelude, expected):
    if not prelude and _has_device():
        pytest.skip("this machine has a CUDA device")
    done = subprocess.run([sys.executable, "-c", prelude + ASK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout and len(done.stdout.splitlines()) == 1


def _has_device():
    from fastpath.cuda import why_not

    return why_not() is None


@pytest.mark.parametrize("words", [["--backend", "cuda", "--prompt", "hello"], ["device-check"]])
def test_commands_say_why_there_is_no_gpu(words, capsys):
    if _has_device():
        pytest.skip("this machine has a CUDA device")
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and ("no CUDA device" in said or "numba-cuda does not import" in said)


def test_inspect_says_why_there_is_no_gpu(capsys):
    if _has_device():
        pytest.skip("this machine has a CUDA device")
    assert main(["inspect", "--device"]) == 0
    assert capsys.readouterr().out.startswith("device   no GPU: ")
