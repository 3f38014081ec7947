"""The package imports anywhere, and says in one line why there is no GPU."""

import subprocess
import sys

import pytest

from fastpath import backend
from fastpath.cli.__main__ import main
from fastpath.cuda import device

HIDE = """
import sys
from fastpath.cuda import device
device.DRIVER = None  # the program itself, which is there
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


@pytest.fixture
def no_driver(monkeypatch):
    """The sentence that everybody says where there is no driver.

    The driver's library is looked for first: importing numba-cuda takes a second, and there it says
    "Error at driver init".
    """
    monkeypatch.setattr(device, "DRIVER", "libof-nobody.so.1")
    device.why_not.cache_clear()
    yield "no NVIDIA driver: libof-nobody.so.1 is not here"
    device.why_not.cache_clear()


@pytest.mark.parametrize("words", [["--backend", "cuda", "--prompt", "hello"], ["device-check"]])
def test_commands_say_why_there_is_no_gpu(words, no_driver, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and f": {no_driver}. " in said


def test_inspect_says_why_there_is_no_gpu(no_driver, capsys):
    assert main(["inspect", "--device"]) == 0
    assert capsys.readouterr().out.startswith(f"device   no GPU: {no_driver}\n")


def test_stats_say_why_there_is_no_gpu(no_driver, capsys):
    words = ["--raw", "--prompt", "hello", "--max-tokens", "1", "--no-repack", "--stats"]
    assert main(words) == 0
    assert f"cpu: {no_driver}" in capsys.readouterr().err


# -- which backend `auto` is


class Something:
    """In the place of a GPU."""

    name = "a card"


def test_auto_takes_a_device_that_the_model_fits():
    with device.use(Something()):
        assert backend.choose("auto", lambda: None) == ("cuda", "a card")
        assert backend.choose("auto", lambda: "too small") == ("cpu", "too small")
        assert backend.choose("cpu", lambda: None).name == "cpu"
        assert backend.choose("ref", lambda: None).name == "ref"


def test_auto_without_a_driver_fits_nothing(no_driver):
    assert backend.choose("auto", lambda: pytest.fail("there is no device to fit")) == ("cpu", no_driver)


def test_cuda_by_name_refuses_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(backend, "ops_for", lambda name: None)
    with pytest.raises(ValueError, match=r"^backend cuda: 3 GB too much\. Ask for less"):
        backend.choose("cuda", lambda: "3 GB too much")


def test_auto_is_the_default_and_silent(capsys):
    if _has_device():
        pytest.skip("this machine has a CUDA device")
    words = ["--raw", "--prompt", "hello", "--max-tokens", "1", "--no-repack"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "GPU" not in said and "CUDA" not in said and "NVIDIA" not in said
    assert main(["inspect", "--device"]) == 0
    assert "bytes) for weights, as they lie there" in capsys.readouterr().out
