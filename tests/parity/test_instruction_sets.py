"""The same bytes from every instruction set: kernels compiled for older CPUs, each in its own process."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastpath.cpu as cpu
from quant import FORMATS
from tests import strategies

ROOT = Path(__file__).parents[2]
TARGETS = {  # LLVM's name of a CPU, its features
    "x86-64": "",
    "nehalem": "+ssse3,+sse4.1,+sse4.2",
    "haswell": "+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+bmi2",
}


def results():
    """A hash of what the kernels make of fixed numbers."""
    rng, state = np.random.default_rng(11), hashlib.sha256()
    for name in ("Q4_0", "IQ4_NL", "Q4_K", "Q3_K", "F16"):
        x, weight = strategies.normal(rng, 5, 512), strategies.weights(rng, FORMATS[name], 21, 512)
        state.update(cpu.linear(x, weight, "int8").tobytes())
    x, kv = strategies.normal(rng, 2, 4, 40), strategies.normal(rng, 1, 50, 2, 40)
    state.update(cpu.attention(x, kv, kv, np.zeros(2, int), np.array([3, 49]), None).tobytes())
    for part in (
        cpu.geglu(x, x),
        cpu.softcap(x, 2.0),
        cpu.rms_norm(x, None, 1e-6),
        *cpu.route(x[0], 3, None),
    ):
        state.update(part.tobytes())
    return state.hexdigest()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 targets")
@pytest.mark.parametrize("target", TARGETS)
def test_older_cpus_give_the_same_bytes(target, tmp_path):
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": target,
        "NUMBA_CPU_FEATURES": TARGETS[target],
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [
        sys.executable,
        "-c",
        "from tests.parity.test_instruction_sets import results; print(results())",
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == results()
