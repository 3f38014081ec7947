"""The kernels compile for AArch64 (nothing here runs them there)."""

import json
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from tests.parity import aarch64

ROOT = Path(__file__).parents[2]
FEW = ("matvec_q4_0", "matvec_q6_k", "quantize_32", "_scores_f16", "threads.")  # parts of names


def _has_target():
    llvm.initialize_all_targets()
    try:
        return bool(llvm.Target.from_triple(aarch64.TRIPLE))
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not _has_target(), reason="this LLVM has no AArch64 code generator")


def _compiled(*words):
    command = [sys.executable, "-m", "tests.parity.aarch64", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def _check(code):
    for name, has in code.items():
        assert has["elf"] and not has["x86"], f"{name}: {has}"
        assert not has["outside"], f"{name} calls {has['outside']}: a function that is not there"
        if name.startswith(("linear.", "matvec.", "attention.")):
            assert has["fma"], f"{name}: no fused multiply-add"
        if any(part in name for part in ("q4_0", "q6_k")):
            assert has["dot"] or has["multiply"], f"{name}: integer products without vector instructions"


def test_kernels_compile_for_aarch64():
    code = _compiled("neoverse-n1", *FEW)
    for part in FEW:
        assert any(part in name for name in code), f"no kernel with {part} in its name"
    _check(code)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", aarch64.CPUS)
def test_every_kernel_compiles_for_aarch64(cpu):
    code = _compiled(cpu)
    assert len(code) > 20
    _check(code)
