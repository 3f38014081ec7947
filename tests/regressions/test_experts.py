"""Known faults of mixtures of experts that no other test has in their smallest form."""

import numpy as np
import pytest

import fastpath.cpu
from quant import FORMATS, QTensor
from tests import strategies


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "F32", "IQ3_S"])
def test_d6_experts_that_are_not_chosen_are_not_computed(name):
    """Their bits are all ones, NaN wherever a block has a float: none of it comes near the outputs."""
    rng = np.random.default_rng(6)
    healthy = strategies.weights(rng, FORMATS[name], 16, 20, 256)
    data = np.full_like(healthy.data, 0xFF)
    data[[3, 11]] = healthy.data[[3, 11]]
    ids = np.array([[3, 11], [11, 3], [3, 3]], np.int32)
    x = strategies.normal(rng, 3, 256)
    got = fastpath.cpu.expert_linear(x, QTensor(healthy.format, healthy.shape, data), ids, "int8")
    assert got.tobytes() == fastpath.cpu.expert_linear(x, healthy, ids, "int8").tobytes()
    assert np.isfinite(got).all()
