"""Machine code of kernels that start early: they wait before they touch anything, and are as lean as others.

PTX says the same in test_early.py; the assembler moves instructions about.
"""

import pytest

from fastpath.cuda import early, table
from tests.cuda import families
from tests.gpu_on_cpu import needs, sass

if needs.missing_assembler():
    pytest.skip(needs.missing_assembler(), allow_module_level=True)

SMALL = ("rms_norm", "round_32", "geglu", "attention_join", "route", "top_of_logits", "group_by_expert")
NAMES = [*families.FAMILIES.values(), *SMALL]
# beginnings of what must not come before the wait: reading or writing what others write, leaving, jumps to
# nobody knows where.  Parameters (LDC) and weights (LDG....CONSTANT) are read by whoever is there.
NOT_BEFORE = ("LD", "ST", "ATOM", "RED", "EXIT", "BRX", "JMP", "JMX", sass.LET_NEXT_START)


def too_early(made):
    found = [one.mnemonic for one in sass.before_the_wait(made)]
    return [
        name for name in found
        if name.startswith(NOT_BEFORE) and not name.startswith("LDC") and ".CONSTANT" not in name
    ]  # fmt: skip


@pytest.fixture(scope="module")
def codes():
    made = sass.codes([early.kernel_of(table.KERNELS[name]) for name in NAMES], (9, 0))
    return dict(zip(NAMES, made, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_waits_first(name, codes):
    made = codes[name]
    assert made.mnemonics[sass.WAIT] and made.mnemonics[sass.LET_NEXT_START]
    assert not too_early(made)


@pytest.mark.parametrize("name", NAMES)
def test_as_lean_as_others(name, codes):
    """Registers, spills, and the instructions that the kernel is for."""
    assert not sass.faults(early.kernel_of(table.KERNELS[name]), (9, 0), codes[name])


def test_a_kernel_that_does_not_wait_is_found():
    """All of it is before the wait, its stores included."""
    assert {"LDG.E", "STG.E", "EXIT"} <= set(too_early(sass.code(table.KERNELS["geglu"], (9, 0))))


def test_ways_around_the_wait_are_found():
    listing = (
        ("@P0", "BRA", " 0x30"), ("", "LDG.E.CONSTANT", " R2, [R2]"), ("", "ACQBULK", ""),
        ("@P1", "ACQBULK", ""), ("", "LDG.E", " R4, [R2]"), ("@P2", "BRA", " 0x20"),
        ("", "ACQBULK", ""), ("", "PREEXIT", ""), ("", "EXIT", ""),
    )  # fmt: skip
    assert too_early(_made(listing)) == ["LDG.E"]


def test_a_guard_that_is_asked_twice():
    """Whoever does not wait at the first jump has not come to load: P0 says the same at both."""
    twice = (
        ("@!P0", "BRA", " 0x20"), ("", "ACQBULK", ""), ("@!P0", "BRA", " 0x40"), ("", "LDG.E", " R2, [R2]"),
        ("", "ACQBULK", ""), ("", "EXIT", ""),
    )  # fmt: skip
    assert not too_early(_made(twice))
    asked_anew = (*twice[:2], ("", "ISETP.NE.AND", " P0, PT, R3, RZ, PT"), *twice[2:])
    jumps = {0: ("@!P0", "BRA", " 0x20"), 3: ("@!P0", "BRA", " 0x50")}
    assert too_early(_made([jumps.get(i, one) for i, one in enumerate(asked_anew)])) == ["LDG.E"]


def _made(listing):
    instructions = tuple(sass.Instruction(16 * i, *one) for i, one in enumerate(listing))
    return sass.Code(32, 0, 0, 0, instructions, 1.0, 1.0)
