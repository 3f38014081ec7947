"""An oracle without its packages: one line that says what to install."""

import subprocess
import sys

import pytest

from oracles.needs import need


def test_what_is_missing_is_named():
    need("json")
    with pytest.raises(SystemExit, match=r"not installed, but needed here: no_such_package\. .*\[oracles\]"):
        need("json", "no_such_package")


@pytest.mark.parametrize("program", ["hf_transformers", "demo.train", "demo.evaluate"])
def test_programs_ask_before_they_import(program):
    code = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        f"runpy.run_module('oracles.{program}', run_name='__main__')"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert outcome.returncode != 0 and outcome.stderr.count("\n") == 1 and "torch" in outcome.stderr
