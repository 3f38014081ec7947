"""The kernels against the definitions, every intermediate: within the error budget, on every family."""

import pytest

import refimpl.ops
from fastpath.backend import ops_for
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from fastpath.trace import TraceFile, compare, record
from tests import tiny

CASES = [(family, "odd", "float") for family in tiny.FAMILIES] + [
    (family, size, activations)
    for family, size in [("e2b", "block256"), ("e4b", "block32"), ("12b", "block32"), ("26b", "block256"),
                         ("31b", "block256")]
    for activations in ("int8", "float")
]  # fmt: skip


def over(model, ids, column, *, kinds=None, kv_types=None, other="cpu"):
    """Names over the budget: kernels against definitions, or what `kinds` and `kv_types` of two sides say"""
    kinds = kinds or (column, column)
    kv_types = kv_types or (("f32", "f32") if column == "float" else ("f16", "f16"))
    tables = (refimpl.ops, ops_for(other))
    engines = [
        Lanes(model, ops, activations=kind, kv_type=kv_type)
        for ops, kind, kv_type in zip(tables, kinds, kv_types, strict=True)
    ]
    a, b = (TraceFile(record(engine, ids)) for engine in engines)
    differences = compare(a, b, column)
    assert len(differences) == len(a.arrays)
    return [d for d in differences if d.is_over]


@pytest.mark.parametrize(("family", "size", "activations"), CASES)
def test_cpu_against_ref(tiny_model, family, size, activations):
    assert over(tiny_model(family, size), tiny.prompt(family), activations) == []


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_int8_against_float(tiny_model, family):
    model, ids = tiny_model(family, "block256"), tiny.prompt(family)
    assert over(model, ids, "different", kinds=("float", "int8"), other="ref") == []


@pytest.mark.parametrize(
    "kv_types", [("f16", "f16"), ("bf16", "bf16"), (("bf16", "f16"),) * 2, ("f32", "f16")]
)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_caches_of_16_bits(tiny_model, family, kv_types):
    model, ids = tiny_model(family), tiny.prompt(family)
    assert over(model, ids, "half", kinds=("float", "float"), kv_types=kv_types) == []


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_bfloat16_against_float32(tiny_model, family):
    model, ids = tiny_model(family), tiny.prompt(family)
    kinds, kv_types = ("float", "float"), ("f32", "bf16")
    assert over(model, ids, "different", kinds=kinds, kv_types=kv_types, other="ref") == []


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_demo(activations):
    model = load_model(DEMO)
    messages = [{"role": "user", "content": "What is 47+38?"}]
    ids = model.template.render_ids(model.tokenizer, messages, thinking=True)
    assert over(model, ids, activations) == []
