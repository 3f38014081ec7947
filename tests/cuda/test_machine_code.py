"""Machine code of every kernel for both architectures: what must be there, and what must not."""

import functools

import pytest

from fastpath.cuda import table
from tests.gpu_on_cpu import needs, offline, sass

if needs.missing_assembler():
    pytest.skip(needs.missing_assembler(), allow_module_level=True)

TOGETHER = 16  # kernels that the tools are given at once
NAMES = list(table.KERNELS)


@functools.cache
def _codes(first, architecture):
    names = NAMES[first : first + TOGETHER]
    return dict(zip(names, sass.codes([table.KERNELS[name] for name in names], architecture), strict=True))


@pytest.mark.parametrize("architecture", offline.ARCHITECTURES, ids=lambda a: f"sm_{a[0]}{a[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_machine_code(name, architecture):
    made = _codes(NAMES.index(name) // TOGETHER * TOGETHER, architecture)[name]
    faults = sass.faults(table.KERNELS[name], architecture, made)
    assert not faults, f"{name}: {'; '.join(faults)}"
    assert made.registers and made.mnemonics, f"{name}: nothing was read"


def test_alone_as_together():
    """Kernels share a module only to be read sooner."""
    first = NAMES.index("layer_norm") // TOGETHER * TOGETHER
    assert sass.code(table.KERNELS["layer_norm"], (9, 0)) == _codes(first, (9, 0))["layer_norm"]
