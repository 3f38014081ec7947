"""The oracles again, in this environment: pytest -m live (oracles/README.md)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.oracle import goldens
from tests.tolerances import ORACLE_AGAIN_ABS

ROOT = Path(__file__).parents[2]
NEEDS = {"hf_transformers": ["torch", "transformers"], "llama_cpp": ["llama_cpp"]}
CASES = [path.stem for path in sorted(goldens.GOLDEN.glob("*.npz"))]


@pytest.mark.live
@pytest.mark.parametrize("name", CASES)
def test_oracle_says_the_same_again(name, tmp_path):
    golden = goldens.read(name)
    oracle = golden.meta["oracle"]
    missing = [package for package in NEEDS[oracle] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: oracles/README.md")
    model = tiny.make_recipe(
        tmp_path / golden.meta["model"], name.partition(".")[0], seed=golden.meta["seed"]
    )
    out = tmp_path / "again.npz"
    arguments = ["--names", ",".join(golden.arrays), "--rows", golden.meta["rows"], "--out", out]
    if "dtype" in golden.meta:
        arguments += ["--dtype", golden.meta["dtype"]]
    tokens = ",".join(map(str, golden.tokens))
    command = [sys.executable, "-m", f"oracles.{oracle}", model, "--tokens", tokens, *arguments]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    again = goldens.read_file(out)
    assert again.meta["sha256"] == golden.meta["sha256"]
    assert set(again.arrays) == set(golden.arrays)
    for array_name, want in golden.arrays.items():
        limit = ORACLE_AGAIN_ABS[want.dtype.name]
        assert np.abs(again.arrays[array_name].astype(np.float64) - want).max() <= limit, array_name
