"""The five published sizes, loaded from headers of their exact shape, against published figures."""

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


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    """(published figures, open file, Config, Weights) of one size; the weights are a hole in the file."""
    path = tiny.make_real_header(tmp_path_factory.mktemp("real") / "model.gguf", request.param)
    file = quant.open_gguf(path)
    config = Config.from_gguf(file)
    yield MODELS[request.param], file, config, load_weights(file, config)
    path.unlink()


def test_model(loaded):
    want, _, config, _ = loaded
    assert config.architecture == "gemma4"
    assert config.model_dim == want["hidden_size"]
    assert config.n_layers == want["num_hidden_layers"]
    assert config.vocab_size == want["vocab_size"]
    assert config.context_len == want["max_position_embeddings"]
    assert config.per_layer_dim == want["hidden_size_per_layer_input"]
    assert config.softcap == want["final_logit_softcapping"]
    assert config.rms_eps == pytest.approx(want["rms_norm_eps"])
    assert config.embed_scale == math.sqrt(want["hidden_size"])
    assert config.repairs == ()
    # only the sizes without per-layer embeddings look at images in both directions
    assert config.media_attention == ("causal" if want["hidden_size_per_layer_input"] else "bidirectional")


def test_layers(loaded):
    want, _, config, _ = loaded
    first_shared = want["num_hidden_layers"] - want["num_kv_shared_layers"]
    for i, layer in enumerate(config.layers):
        is_global = (i + 1) % want["pattern_period"] == 0
        assert layer.index == i
        assert layer.window == (None if is_global else want["sliding_window"])
        assert layer.n_heads == want["num_attention_heads"]
        assert layer.n_kv_heads == want["num_global_key_value_heads" if is_global else "num_key_value_heads"]
        assert layer.head_dim == want["global_head_dim" if is_global else "head_dim"]
        assert layer.k_is_v == (is_global and want["attention_k_eq_v"])
        wide = want["use_double_wide_mlp"] and i >= first_shared
        assert layer.ffn_dim == want["intermediate_size"] * (2 if wide else 1)
        if i < first_shared:
            assert layer.kv_from == i
        else:
            assert layer.kv_from == want["kv_source_global" if is_global else "kv_source_local"]
    assert config.layers[-1].window is None


def test_rotation(loaded):
    want, _, config, _ = loaded
    for layer in config.layers:
        H, kind = layer.head_dim, "local" if layer.window else "global"
        n_rotated = H // 2 if layer.window else int(want["partial_rotary_factor_global"] * H / 2)
        assert layer.rope.theta == want[f"rope_theta_{kind}"]
        assert (layer.rope.inv_freq[:n_rotated] > 0).all() and not layer.rope.inv_freq[n_rotated:].any()
        last = want[f"rope_theta_{kind}"] ** (-2 * (n_rotated - 1) / H)  # exponents over the whole head
        assert layer.rope.inv_freq[n_rotated - 1] == pytest.approx(last, rel=1e-12)


def test_experts(loaded):
    want, _, config, weights = loaded
    for layer, w in zip(config.layers, weights.layers):
        if not want["num_experts"]:
            assert layer.moe is None and w.ffn_gate_inp is None
            continue
        assert layer.moe.n_experts == want["num_experts"]
        assert layer.moe.n_active == want["top_k_experts"]
        assert layer.moe.ffn_dim == want["moe_intermediate_size"]
        assert w.ffn_gate_exps.shape == w.ffn_up_exps.shape == (128, 704, want["hidden_size"])


def test_counts(loaded):
    want, file, _, weights = loaded
    assert len(file.tensors) == want["tensors"]
    n_parameters = sum(math.prod(t.shape) for t in file.tensors.values())
    assert round(n_parameters / 1e9, 3) == want["billion_parameters"]
    assert weights.unused == ()
    assert weights.output is weights.token_embd


def test_opening_is_quick(loaded):
    """2.5 to 17 GB: nothing but the header is read."""
    _, file, _, _ = loaded
    assert os.path.getsize(file.path) > 2e9
    start = time.perf_counter()
    Config.from_gguf(quant.open_gguf(file.path))
    assert time.perf_counter() - start < 2
