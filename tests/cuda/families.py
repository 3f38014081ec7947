"""Kernels that differ only in how numbers are stored: what does not hang on that is proven of one of them.

`make test` proves of every kernel that its numbers are right and that its machine code for sm_90 is as it
should be; what costs more (other architectures, mutants, memory) of one per family, and of all under `slow`.
"""

import pytest

from fastpath.cuda import layout, table

# beginning of the names -> who stands for all of them in make test
FAMILIES = {
    "linear": "linear_q4_k",
    "some": "some_q4_k",
    "float": "float_q4_k",
    "many": "many_q4_k",
    "embed": "embed_q4_k",
    "attention_part": "attention_part_q8_0_q8_0",
    "write_kv": "write_kv_q4_0_q4_0",
}
ALONE = {"attention_part_f16_f16"}  # named like a variant, but another kernel: attention_tensor.py
FORMATS = {name.lower() for name in layout.CODINGS}


def family_of(name):
    """Beginning of a variant's name; None where a kernel stands for itself."""
    for family in FAMILIES if name not in ALONE else ():
        rest = name.removeprefix(f"{family}_")
        if rest != name and (
            rest in FORMATS or set(rest.split("_")) <= {"f32", "f16", "bf16", "q8", "q4", "0"}
        ):
            return family
    return None


def is_heavy(name):
    """Does another kernel stand for this one in make test?"""
    return FAMILIES.get(family_of(name), name) != name


def kernels(*more):
    """Names of the table as parameters of a test; those that another stands for are slow, and `more` too."""
    return [_parameter(name, is_heavy(name) or name in more) for name in table.KERNELS]


def _parameter(name, is_slow):
    return pytest.param(name, marks=pytest.mark.slow) if is_slow else name
