"""Every kernel of the table against its definition: random sizes on both executors, for both architectures.

A kernel that has no line here fails.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.cuda import device, layout, ops, table
from fastpath.cuda.linear import MANY, MANY_OF_EXPERT, SOME
from quant import FORMATS
from refimpl.ops.attention import widen
from tests import strategies, tolerances
from tests.cuda import cases, families
from tests.cuda.executors import EXECUTORS

FORMAT_OF = {name.lower(): FORMATS[name] for name in layout.CODINGS}
# kernels that are a step of an op, or have another name: the kernel whose op launches them
STEPS = {
    "attention_join": "attention_part_f16_f16",
    "attention_relative": "relative_attention",
    "spread": "float_f16",
    "round_32": "linear_q4_0",
    "round_256": "linear_q4_k",
    "group_by_expert": "expert_linear",
}
IN_PLACE = {"write_kv": ("k_pages", "v_pages"), "set_rows": ("x",)}
EXAMPLES = {"ir": 20, "sm_80": 4, "sm_90": 6}
OF_VARIANTS = {"ir": 4, "sm_80": 2, "sm_90": 2}  # a kernel for each format


@st.composite
def product(draw, fmt, T, activations="int8"):
    """Rows, tokens and columns that fill no tile; integers from blocks that bytes can spell."""
    rng, M, C = draw(strategies.generators()), draw(strategies.sizes(1, 40)), draw(strategies.columns(fmt))
    any_bytes = activations == "int8" and draw(st.booleans())
    weight = (strategies.random_blocks if any_bytes else strategies.weights)(rng, fmt, M, C)
    return {"x": strategies.normal(rng, draw(T), C), "weight": weight, "activations": activations}


@st.composite
def entries(draw):
    """So many for each expert that they go to tensor cores; some experts have most of them."""
    fmt = FORMATS[draw(st.sampled_from(["Q4_0", "Q5_1", "Q4_K", "Q6_K"]))]
    rng, A, E = draw(strategies.generators()), draw(strategies.sizes(1, 3)), draw(strategies.sizes(1, 4))
    T, M, C = MANY_OF_EXPERT * E + draw(strategies.sizes(0, 70)), draw(strategies.sizes(1, 70)), 256
    x = strategies.normal(rng, T, C) if draw(st.booleans()) else strategies.normal(rng, T, A, C)
    ids = np.minimum(rng.geometric(0.6, (T, A)) - 1, E - 1).astype(np.int32)
    weight = strategies.weights(rng, fmt, E, M, C)
    return {"x": x, "weight": weight, "expert_ids": ids, "activations": "int8"}


@st.composite
def rows_of(draw, fmt):
    rng, V = draw(strategies.generators()), draw(strategies.sizes(1, 20))
    make = strategies.weights if fmt.block_size == 1 else strategies.random_blocks
    table = make(rng, fmt, V, draw(strategies.columns(fmt)))
    ids = rng.integers(0, V, draw(strategies.sizes(1, 5))).astype(np.int32)
    return {"table": table, "ids": ids, "scale": np.float32(draw(st.sampled_from([1.0, 39.25])))}


def proof_of(name):
    """(op, strategy of its arguments, examples) that launch a kernel."""
    name = STEPS.get(name, name)
    if name == "tiles_of_experts":
        return "expert_linear", entries(), {"ir": 6, "sm_80": 2, "sm_90": 3}
    kind, _, rest = name.partition("_")
    tokens = {"linear": st.integers(1, SOME - 1), "some": st.integers(SOME, MANY - 1),
              "many": st.integers(MANY, 70), "float": strategies.sizes(1, 9)}  # fmt: skip
    if kind in tokens and rest in FORMAT_OF:
        how = "float" if kind == "float" else "int8"
        return "linear", product(FORMAT_OF[rest], tokens[kind], how), OF_VARIANTS
    if kind == "embed":
        return "embed", rows_of(FORMAT_OF[rest]), OF_VARIANTS
    if kind in ("best", "top"):
        ks, Vs = (1,) if kind == "best" else (2, 17, 64, 256), (1, 5, 255, 4097, 9001)
        return "top_k", strategies.top_k(ks, Vs[3:] if rest == "of_pairs" else Vs), EXAMPLES
    for op, start in (("attention", "attention_part_"), ("write_kv", "write_kv_")):
        for types in strategies.KV_TYPES.elements:
            if name == f"{start}{types}_{types}":
                return op, getattr(strategies, op)(types=st.just(types)), OF_VARIANTS
    assert name in refimpl.ops.__all__, f"kernel {name}: tests/cuda/test_kernels.py does not know its op"
    return name, getattr(strategies, name)(), EXAMPLES


def _runs():
    """All kernels on executor one; on executor two one of each family, and all of them under `slow`."""
    found = []
    for name in table.KERNELS:
        for executor in EXECUTORS:
            is_slow = executor != "ir" and families.is_heavy(name)
            found.append(pytest.param(name, executor, marks=[pytest.mark.slow] if is_slow else []))
    return found


def test_every_kernel_has_its_proofs():
    """A definition, a case for mutants and memory; and families are what they say."""
    for name in table.KERNELS:
        op, _, _ = proof_of(name)
        assert op in refimpl.ops.__all__
        assert cases.call_of(name)
    for family, kernel in families.FAMILIES.items():
        assert families.family_of(kernel) == family and kernel in table.KERNELS


@pytest.mark.parametrize(("name", "executor"), _runs())
def test_kernel(name, executor):
    op, cases, examples = proof_of(name)
    launched = EXECUTORS[executor].launched
    before = launched.get(name, 0)

    @settings(max_examples=examples[executor])
    @given(data=st.data())
    def check(data):
        case = data.draw(cases, label=op)
        with device.use(EXECUTORS[executor]):
            got = _results(ops, op, case)
        if op == "embed" or tolerances.is_exact(op, case):  # NaN where the definition has it
            for ours, theirs in zip(got, _results(refimpl.ops, op, case), strict=True):
                np.testing.assert_array_equal(_as_numbers(ours), _as_numbers(theirs))
        else:
            tolerances.check(op, case, got, _results(refimpl.ops, op, _in_float64(case)))

    with np.errstate(all="ignore"):
        check()
    assert launched.get(name, 0) > before, f"{op} does not launch {name}"


def _results(functions, op, case):
    """The results of an op as a tuple; what it writes in place is copied before."""
    written = {name: case[name].copy() for name in IN_PLACE.get(op, ())}
    result = getattr(functions, op)(**{**case, **written})
    if written:
        return tuple(written.values())
    return result if isinstance(result, tuple) else (result,)


def _as_numbers(x):
    """Pages of 16-bit numbers as numbers, since one NaN is as good as another."""
    return widen(x, np.float32) if x.dtype in (np.uint16, np.float16) else x


def _in_float64(case):
    """Exactly the numbers, widened; the definition widens pages itself."""
    return {
        name: value.astype(np.float64)
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and not name.endswith("_pages")
        else value
        for name, value in case.items()
    }
