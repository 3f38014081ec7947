"""The fast engine, chunked, against transformers and llama.cpp on tiny models of every family."""

import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.lanes import Lanes
from fastpath.load import load_model
from fastpath.trace import record
from tests import tiny
from tests.oracle import goldens
from tests.tolerances import LLAMA_CPP_INT8_NMSE, LLAMA_CPP_NMSE, ORACLE_F32_ABS


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """traced(name, activations, kv_type) -> (name of an intermediate -> array), chunks of five tokens."""
    folder = tmp_path_factory.mktemp("tiny")

    def trace(name: str, activations: str, kv_type: str = "f16") -> dict[str, np.ndarray]:
        path = folder / f"tiny-{name}.gguf"
        if not path.exists():
            tiny.make_recipe(path, name)
        options = {"chunk": 5, "activations": activations, "kv_type": kv_type}
        engine = Lanes(load_model(path), ops_for("cpu"), **options)
        return record(engine, tiny.prompt(name))

    return trace


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *tiny.RECIPES])
def test_float_activations_equal_transformers(name, traced):
    golden = goldens.read(f"{name}.transformers-f32")
    goldens.check(traced(name, "float", "f32"), golden, goldens.max_abs_in_deviations, ORACLE_F32_ABS)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_llama_cpp_agrees(name, traced):
    goldens.check(traced(name, "float"), goldens.read(f"{name}.llama_cpp"), goldens.nmse, LLAMA_CPP_NMSE)


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_integer_activations_are_like_llama_cpps(name, traced):
    golden = goldens.read(f"{name}.llama_cpp")
    goldens.check(traced(name, "int8"), golden, goldens.nmse, LLAMA_CPP_INT8_NMSE)
