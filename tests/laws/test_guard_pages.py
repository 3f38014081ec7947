"""Kernels touch their buffers, not a byte beside them, and no byte of scratch that they have not written."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws import guarded

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect as Linux has it")


def _run(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("side", ["before", "after"])
def test_every_buffer_ends_at_a_guard_page(side):
    run = _run("-m", "tests.laws.guarded", side)
    assert run.returncode == 0, f"status {run.returncode} in: " + " | ".join(run.stderr.splitlines()[-2:])
    assert run.stdout.endswith("cases\n")


@pytest.mark.parametrize("side, at", [("before", -1), ("after", 5)])
def test_the_guard_bites(side, at):
    code = f"""
import ctypes
from tests.laws import guarded
array = guarded.memory(5, {side!r})
print(array[0], array[4], flush=True)
ctypes.string_at(array.ctypes.data + {at}, 1)"""
    run = _run("-c", code)
    assert run.stdout == "255 255\n" and run.returncode < 0


def test_scratch_is_guarded():
    guard = guarded.Guard("after")
    first = guard.workspace(100, "a")
    assert first % 64 == 0 and guard.workspace(128, "a") == first and guard.workspace(128, "b") != first
