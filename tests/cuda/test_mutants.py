"""Every barrier, wait and commit of every kernel is needed: without any one of them, executor one sees it."""

import pytest

from fastpath.cuda import table
from tests.cuda import cases, families
from tests.gpu_on_cpu import mutants

# (kernel, device function that is shared): the kernel that needs the wait there
NEEDED_BY = {("rms_norm", "sum_of_warps"): "layer_norm"}  # where a second sum follows in the same memory


@pytest.mark.parametrize("name", families.kernels())
def test_each_wait_is_needed(name):
    for function, statement in mutants.unnoticed(table.KERNELS[name], cases.call_of(name)):
        elsewhere = [part for kernel, part in NEEDED_BY if kernel == name and part in function]
        assert elsewhere, f"without {statement} of {function}, {name} gives the same bytes"


def test_what_is_needed_elsewhere_is():
    for (_, part), name in NEEDED_BY.items():
        assert any(part in function for function, _ in mutants.waits(table.KERNELS[name]))
        assert not mutants.unnoticed(table.KERNELS[name], cases.call_of(name))


def test_waits_are_found():
    """Also in device functions; a kernel for tensor cores has all kinds of them."""
    assert len(mutants.waits(table.KERNELS["layer_norm"])) == 2
    kinds = [statement for _, statement in mutants.waits(table.KERNELS["many_q4_k"])]
    for kind, n in (("barrier0", 3), ("wait_group", 1), ("commit_group", 1)):
        assert sum(kind in statement for statement in kinds) == n
