"""Machine code of every kernel for sm_90, of a few for sm_80: what must be there, and what must not."""

import pytest

from fastpath.cuda import table
from tests.gpu_on_cpu import needs, sass

if needs.missing_assembler():
    pytest.skip(needs.missing_assembler(), allow_module_level=True)

FOR_SM_80 = ("rms_norm", "geglu", "round_256", "linear_q8_0", "linear_q6_k", "attention_part_bf16_bf16")
CASES = [(name, (9, 0)) for name in table.KERNELS] + [(name, (8, 0)) for name in FOR_SM_80]


@pytest.mark.parametrize("name, architecture", CASES)
def test_machine_code(name, architecture):
    faults = sass.faults(table.KERNELS[name], architecture)
    assert not faults, f"{name}: {'; '.join(faults)}"
