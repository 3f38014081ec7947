"""The reference against transformers and llama.cpp, on tiny models of every family, layer by layer."""

import hashlib

import numpy as np
import pytest

from tests import tiny
from tests.oracle import goldens
from tests.tolerances import (
    LLAMA_CPP_INT8_NMSE,
    LLAMA_CPP_NMSE,
    ORACLE_F32_ABS,
    ORACLE_F64_ABS,
)

FAMILIES = list(tiny.FAMILIES)
ALL_GOLDENS = sorted(path.stem for path in goldens.GOLDEN.glob("*.npz"))
CHUNKS = [None, 5, 1]  # all at once; chunks that cut windows anywhere; token by token


@pytest.mark.parametrize("name", [*FAMILIES, *tiny.RECIPES])
def test_model_is_the_one_the_oracles_saw(name, model):
    digest = hashlib.sha256(model(name).path.read_bytes()).hexdigest()
    recorded = [golden for golden in ALL_GOLDENS if golden.partition(".")[0] == name]
    assert len(recorded) >= 2
    for golden in map(goldens.read, recorded):
        assert golden.meta["sha256"] == digest, f"{golden.name}: recorded for other bytes; record again"
        assert golden.tokens == tiny.prompt(name)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_transformers(family, chunk, model):
    golden = goldens.read(f"{family}.transformers-f64")
    trace = model(family).trace(golden.tokens, np.float64, chunk=chunk)
    goldens.check(trace, golden, goldens.max_abs_in_deviations, ORACLE_F64_ABS)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_transformers(family, chunk, model):
    golden = goldens.read(f"{family}.transformers-f32")
    trace = model(family).trace(golden.tokens, np.float32, chunk=chunk)
    goldens.check(trace, golden, goldens.max_abs_in_deviations, ORACLE_F32_ABS)
    logits = golden.arrays["result_output"]
    assert np.abs(trace["result_output"] - logits).max() < ORACLE_F32_ABS
    assert 1 <= logits.std() <= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_agrees(family, model):
    golden = goldens.read(f"{family}.llama_cpp")
    trace = model(family).trace(golden.tokens, np.float64)
    goldens.check(trace, golden, goldens.nmse, LLAMA_CPP_NMSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_oracles_agree(family):
    """No engine of ours is part of this: transformers confirmed by llama.cpp, donors of shared layers too."""
    hf, llama = goldens.read(f"{family}.transformers-f32"), goldens.read(f"{family}.llama_cpp")
    assert set(hf.arrays) == set(llama.arrays)
    goldens.check(llama.arrays, hf, goldens.nmse, LLAMA_CPP_NMSE)


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_quantised_weights_equal_transformers(name, model):
    """The same blocks, dequantised by the gguf package on the other side."""
    golden = goldens.read(f"{name}.transformers-f32")
    trace = model(name).trace(golden.tokens)
    goldens.check(trace, golden, goldens.max_abs_in_deviations, ORACLE_F32_ABS)


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_integer_activations_are_like_llama_cpps(name, model):
    """llama.cpp rounds activations to int8 too: in the first layer, doing so must bring the two nearer."""
    golden = goldens.read(f"{name}.llama_cpp")
    integer = model(name).trace(golden.tokens, activations="int8")
    goldens.check(integer, golden, goldens.nmse, LLAMA_CPP_INT8_NMSE)
    exact = model(name).trace(golden.tokens)
    first = {
        kind: goldens.nmse(trace["l_out-0"][golden.rows], golden.arrays["l_out-0"])
        for kind, trace in {"int8": integer, "float": exact}.items()
    }
    assert first["int8"] < first["float"] / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_wrap_the_window_twice_and_more(family):
    assert len(tiny.prompt(family)) > 3 * tiny.FAMILIES[family].window


@pytest.mark.parametrize("name", ALL_GOLDENS)
def test_golden_says_where_it_is_from(name):
    assert (goldens.GOLDEN / f"{name}.npz").stat().st_size <= 200_000
    meta = goldens.read(name).meta
    for key in ("oracle", "version", "command", "seed", "sha256"):
        assert meta[key], f"{name}: no {key}"
    assert "/" not in meta["command"]
