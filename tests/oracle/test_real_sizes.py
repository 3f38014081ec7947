"""Headers of the five published sizes without weights: every tensor is known and fits; opening is quick.

What each layer is made of is compared with published figures in tests/refimpl/test_config.py.
"""

import json
import math
import os
import time

import pytest

import quant
from refimpl.config import Config
from refimpl.tensors import load_weights
from tests import tiny

MODELS = json.loads(tiny.HYPERPARAMETERS.read_text())["models"]


@pytest.mark.parametrize("size", MODELS)
def test_published_header(size, tmp_path):
    want = MODELS[size]
    path = tiny.make_real_header(tmp_path / "model.gguf", size)
    assert os.path.getsize(path) > 2e9  # 2.6 to 17 GB, of which the disk holds the header

    start = time.process_time()
    file = quant.open_gguf(path)
    config = Config.from_gguf(file)
    assert time.process_time() - start < 1

    n_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    assert len(file.tensors) == want["tensors"]
    assert round(n_parameters / 1e9, 3) == want["billion_parameters"]
    weights = load_weights(file, config)  # checks the shape of every tensor
    assert weights.unused == ()
    assert weights.output is weights.token_embd
    for layer in config.layers:
        n_rotated = layer.head_dim // 2 if layer.window else layer.head_dim // 8
        theta = want["rope_theta_local" if layer.window else "rope_theta_global"]
        slowest = theta ** (-2 * (n_rotated - 1) / layer.head_dim)  # the exponents span the whole head
        assert layer.rope.inv_freq[n_rotated - 1] == pytest.approx(slowest, rel=1e-12)
