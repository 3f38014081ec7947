"""The same bytes from every kernel set: each in its own process, compiled for CPUs that have no more."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastpath.cpu import machine
from tests.parity import cases

ROOT = Path(__file__).parents[2]
AMONG = ("avxvnni", "avx2", "generic", "amx-emulated")
# A CPU between two sets: 16-byte table look-ups, no AVX.
NEHALEM = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+ssse3,+sse4.1,+sse4.2"}


def _run(environment, *words):
    """The output of a Python process of this project, with a kernel set of its own."""
    clean = {k: v for k, v in os.environ.items() if k != machine.SETTING and not k.startswith("NUMBA_CPU")}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )


def _digests(environment, formats):
    run = _run(environment, "-m", "tests.parity.cases", *formats)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def _compare(environments, formats):
    """All of them, as many at a time as there are CPUs for: most of it is compiling."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        own, *others = pool.map(lambda e: _digests(e, formats), [{}, *environments])
    for environment, other in zip(environments, others, strict=True):
        differ = [name for name in own if other[name] != own[name]]
        assert own.keys() == other.keys() and not differ, (
            f"{environment}: other bytes than {machine.KERNELS} in {len(differ)} of {len(own)} cases: "
            f"{', '.join(differ[:5])}"
        )


def _sets():
    """The sets that run here, as environments."""
    if not machine.IS_X86:
        return [{machine.SETTING: name} for name in ("generic", "amx-emulated")]
    order = ("amx", "avx512vnni", *AMONG)
    here = [n for n in order if n == "amx-emulated" or not machine._lacks(n, machine._host)]
    return [{machine.SETTING: name} for name in here if name != machine.KERNELS]


def test_kernel_sets_give_the_same_bytes():
    chosen = [e for e in _sets() if e[machine.SETTING] in ("avx2", "generic", "amx-emulated")]
    _compare(chosen, cases.SOME_FORMATS)


@pytest.mark.slow
def test_every_set_and_format_gives_the_same_bytes():
    _compare([*_sets(), *([NEHALEM] if machine.IS_X86 else [])], cases.EVERY_FORMAT)


def test_a_set_that_is_not_here_is_one_line():
    run = _run({machine.SETTING: "avx1024"}, "-m", "fastpath.cli", "--prompt", "Hi")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("twinpath: TWINPATH_KERNELS: got 'avx1024'; expected one of ")
    assert run.stderr.count("\n") == 1 and "generic, amx-emulated" in run.stderr


def test_a_set_cannot_change_under_compiled_code():
    code = "import numba; numba.njit('f8(f8)')(lambda x: x); import fastpath.cpu"
    run = _run({machine.SETTING: "generic"}, "-c", code)
    if machine.KERNELS in ("generic", "neon"):
        pytest.skip("the same instructions")
    assert "TWINPATH_KERNELS=generic: Numba has compiled before" in run.stderr


def test_the_set_is_named_and_keyed():
    code = "from fastpath.cpu import kernel_cache, machine; print(machine.describe(), kernel_cache.FOLDER)"
    said = [_run({machine.SETTING: name}, "-c", code).stdout for name in ("generic", "amx-emulated")]
    assert said[0].startswith("generic on ") and said[1].startswith("amx-emulated on ")
    assert said[0].split()[-1] != said[1].split()[-1]
