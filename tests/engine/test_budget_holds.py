"""The kernels against the definitions, every intermediate: within the error budget, on every family."""

import pytest

import refimpl.ops
from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.load import DEMO, load_model
from fastpath.trace import TraceFile, compare, record
from tests import tiny

CASES = [(family, "odd", "float") for family in tiny.FAMILIES] + [
    (family, size, activations)
    for family, size in [("e2b", "block256"), ("e4b", "block32"), ("12b", "block32"), ("26b", "block256"),
                         ("31b", "block256")]
    for activations in ("int8", "float")
]  # fmt: skip


def over(model, ids, activations, other="cpu"):
    """Names over the budget: kernels against definitions, or int8 against float32 activations."""
    kinds = (activations, activations) if other == "cpu" else ("float", "int8")
    tables = (refimpl.ops, ops_for("cpu") if other == "cpu" else refimpl.ops)
    engines = [Engine(model, ops, activations=kind) for ops, kind in zip(tables, kinds, strict=True)]
    a, b = (TraceFile(record(engine, ids)) for engine in engines)
    differences = compare(a, b, activations)
    assert len(differences) == len(a.arrays)
    return [d for d in differences if d.is_over]


@pytest.mark.parametrize(("family", "size", "activations"), CASES)
def test_cpu_against_ref(tiny_model, family, size, activations):
    assert over(tiny_model(family, size), tiny.prompt(family), activations) == []


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_int8_against_float(tiny_model, family):
    assert over(tiny_model(family, "block256"), tiny.prompt(family), "different", other="ref") == []


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_demo(activations):
    model = load_model(DEMO)
    messages = [{"role": "user", "content": "What is 47+38?"}]
    ids = model.template.render_ids(model.tokenizer, messages, thinking=True)
    assert over(model, ids, activations) == []
