"""Quantisers of our own: error against ggml's own, recorded by oracles/record_quant.py, and small laws."""

import hashlib
import json

import numpy as np
import pytest

import quant
from oracles import record_quant
from tests import tolerances

GOLDEN = json.loads(record_quant.GOLDEN.read_text())
K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
OWN = (*K_FORMATS, "IQ4_NL", "IQ4_XS")


@pytest.fixture(scope="module")
def inputs():
    drawn = record_quant.distributions()
    for name, x in drawn.items():
        got = hashlib.sha256(x.astype("<f4").tobytes()).hexdigest()
        assert got == GOLDEN["inputs"][name], (
            f"{name}: NumPy draws other numbers than when the golden was recorded"
        )
    return drawn


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("distribution", GOLDEN["inputs"])
def test_error_is_no_worse_than_ggmls(name, distribution, inputs):
    x = inputs[distribution]
    ours = record_quant.relative_rmse(x, quant.dequantize(quant.quantize(x, name), name))
    assert ours <= tolerances.QUANT_RMSE_OVER_GGML * GOLDEN["rmse"][name][distribution]


@pytest.mark.parametrize("name", ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
def test_error_of_the_legacy_formats_is_ggmls(name, inputs):
    for distribution, x in inputs.items():
        ours = record_quant.relative_rmse(x, quant.dequantize(quant.quantize(x, name), name))
        assert ours == pytest.approx(GOLDEN["rmse"][name][distribution], rel=tolerances.QUANT_RMSE_SAME_REL)


@pytest.mark.parametrize("name", K_FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.02, -3e4])
def test_a_constant_block_keeps_its_value(name, value):
    x = np.full((1, 256), value, np.float32)
    back = quant.dequantize(quant.quantize(x, name), name)
    np.testing.assert_allclose(back, x, rtol=tolerances.QUANT_CONSTANT_REL)


@pytest.mark.parametrize("name", OWN)
def test_values_on_the_grid_come_back(name):
    """Requantising what was dequantised loses next to nothing: the levels are found again."""
    x = np.random.default_rng(3).standard_normal((20, 256)).astype(np.float32)
    once = quant.dequantize(quant.quantize(x, name), name)
    twice = quant.dequantize(quant.quantize(once, name), name)
    assert record_quant.relative_rmse(once, twice) <= 0.5 * record_quant.relative_rmse(x, once)


@pytest.mark.parametrize("name", OWN)
def test_blocks_are_independent(name):
    x = np.random.default_rng(4).standard_normal((6, 512)).astype(np.float32)
    whole = quant.quantize(x, name)
    for i in range(6):
        np.testing.assert_array_equal(quant.quantize(x[i, :256], name), whole[i, : whole.shape[1] // 2])
