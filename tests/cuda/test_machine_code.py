"""Machine code of every kernel: what must be there, and what must not.

In make test for sm_90, and for sm_80 of one kernel per family; all of them for both under `slow`.
"""

import functools

import pytest

from fastpath.cuda import probe, table
from tests.cuda import families
from tests.gpu_on_cpu import needs, offline, sass

if needs.missing_assembler():
    pytest.skip(needs.missing_assembler(), allow_module_level=True)

TOGETHER = 32  # kernels that the tools are given at once
KERNELS = table.KERNELS | {kernel.name: kernel for kernel in probe.KERNELS}
# those of a kind side by side, so that few of the others are compiled for the sake of one
IN_ORDER = sorted(KERNELS, key=families.is_heavy)


def _parameters():
    found = []
    for architecture in offline.ARCHITECTURES:
        for name in KERNELS:
            is_slow = architecture != (9, 0) and families.is_heavy(name)
            found.append(pytest.param(
                name, architecture, id=f"{name}-sm_{architecture[0]}{architecture[1]}",
                marks=[pytest.mark.slow] if is_slow else [],
            ))  # fmt: skip
    return found


@functools.cache
def _codes(is_heavy, number, architecture):
    names = [name for name in IN_ORDER if families.is_heavy(name) == is_heavy]
    names = names[number * TOGETHER : (number + 1) * TOGETHER]
    return dict(zip(names, sass.codes([KERNELS[name] for name in names], architecture), strict=True))


def _code(name, architecture):
    is_heavy = families.is_heavy(name)
    alike = [other for other in IN_ORDER if families.is_heavy(other) == is_heavy]
    return _codes(is_heavy, alike.index(name) // TOGETHER, architecture)[name]


@pytest.mark.parametrize(("name", "architecture"), _parameters())
def test_machine_code(name, architecture):
    made = _code(name, architecture)
    faults = sass.faults(KERNELS[name], architecture, made)
    assert not faults, f"{name}: {'; '.join(faults)}"
    assert made.registers and made.mnemonics, f"{name}: nothing was read"


def test_alone_as_together():
    """Kernels share a module only to be read sooner."""
    assert sass.code(KERNELS["layer_norm"], (9, 0)) == _code("layer_norm", (9, 0))
