"""Every key with its default and its other spellings; what the weights overrule; one line per wrong value."""

import json

import numpy as np
import pytest

from quant import open_gguf
from refimpl.config import Config
from tests import tiny
from tests.refimpl.files import arrays_of, config_of, model_file

L = 7  # layers of the tiny e2b: LLLGLLG, the last three share keys


def only_keys(family="e2b", **keys):
    """A file with metadata and no tensors at all."""
    file = model_file(family, keys={"vocab_size": 361, **keys})
    file.tensors = {}
    return Config.from_gguf(file)


# --- real sizes -----------------------------------------------------------------------

REAL = json.loads(tiny.HYPERPARAMETERS.read_text())["models"]


@pytest.mark.parametrize("size", REAL)
def test_published_sizes(size, tmp_path):
    want = REAL[size]
    file = open_gguf(tiny.make_real_header(tmp_path / "m.gguf", size))
    config = Config.from_gguf(file)
    assert len(file.tensors) == want["tensors"]
    assert (config.model_dim, config.n_layers, config.vocab_size) == (
        want["hidden_size"],
        want["num_hidden_layers"],
        want["vocab_size"],
    )
    assert config.context_len == want["max_position_embeddings"]
    assert config.softcap == want["final_logit_softcapping"]
    assert config.per_layer_dim == want["hidden_size_per_layer_input"]
    assert config.media_attention == ("causal" if size in ("E2B", "E4B") else "bidirectional")
    assert config.repairs == ()
    first_shared = config.n_layers - want["num_kv_shared_layers"]
    for layer in config.layers:
        is_global = (layer.index + 1) % want["pattern_period"] == 0
        kind = "global" if is_global else "local"
        assert layer.window == (None if is_global else want["sliding_window"])
        assert layer.n_heads == want["num_attention_heads"]
        assert layer.n_kv_heads == want["num_global_key_value_heads" if is_global else "num_key_value_heads"]
        assert layer.head_dim == want["global_head_dim" if is_global else "head_dim"]
        assert layer.rope.theta == want[f"rope_theta_{kind}"]
        rotating = np.count_nonzero(layer.rope.inv_freq)
        assert rotating == (layer.head_dim // 8 if is_global else layer.head_dim // 2)
        assert layer.kv_from == (layer.index if layer.index < first_shared else want[f"kv_source_{kind}"])
        assert layer.k_is_v == (want["attention_k_eq_v"] and is_global)
        wide = want["use_double_wide_mlp"] and layer.index >= first_shared
        assert layer.ffn_dim == want["intermediate_size"] * (2 if wide else 1)
        moe = layer.moe and (layer.moe.n_experts, layer.moe.n_active, layer.moe.ffn_dim)
        assert moe == ((128, 8, 704) if size == "26B-A4B" else None)


# --- the file as a whole --------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("gemma3", "Only Gemma 4"),
        ("gemma4-assistant", "drafter"),
        ("clip", "text part"),
        (None, "got nothing"),
        (7, "got 7"),
    ],
)
def test_other_architectures_are_refused(architecture, says):
    with pytest.raises(ValueError, match=r"general.architecture.*expected 'gemma4'") as fault:
        config_of(keys={"general.architecture": architecture})
    assert says in str(fault.value)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.sliding_window_pattern"])
def test_required_keys(key):
    with pytest.raises(ValueError, match=rf"gemma4.{key}'.*the file does not have it"):
        config_of(keys={key: None})


def test_defaults():
    drop = {
        "context_length": None,
        "attention.layer_norm_rms_epsilon": None,
        "attention.sliding_window": None,
        "attention.shared_kv_layers": None,
        "attention.key_length": None,
        "attention.key_length_swa": None,
        "rope.dimension_count": None,
        "rope.dimension_count_swa": None,
        "rope.freq_base": None,
        "rope.freq_base_swa": None,
        "attention.head_count_kv": None,
        "final_logit_softcapping": None,
        "embedding_length_per_layer_input": None,
        "general.name": None,
    }
    config = only_keys(**drop)
    assert config.context_len == 131072
    assert config.rms_eps == 1e-6
    assert config.softcap is None
    assert config.per_layer_dim == 0
    assert config.name == ""
    sliding, global_ = config.layers[0], config.layers[3]
    assert (sliding.window, sliding.head_dim, sliding.rope.theta) == (512, 256, 1e4)
    assert (global_.window, global_.head_dim, global_.rope.theta) == (None, 512, 1e6)
    assert all(layer.n_kv_heads == layer.n_heads and layer.owns_kv for layer in config.layers)


@pytest.mark.parametrize("cap", [None, 0.0])
def test_no_soft_cap(cap):
    assert config_of(keys={"final_logit_softcapping": cap}).softcap is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", -1),
        ("block_count", 1 << 31),
        ("block_count", "7"),
        ("block_count", 7.0),
        ("block_count", True),
        ("context_length", 0),
        ("attention.head_count", 1 << 40),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1e-6),
        ("final_logit_softcapping", float("inf")),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", "1e6"),
        ("attention.sliding_window", 0),
        ("attention.shared_kv_layers", 8),
        ("embedding_length_per_layer_input", -20),
        ("rope.scaling.factor", 8.0),
    ],
)
def test_a_wrong_value_names_its_key(key, value):
    with pytest.raises(ValueError, match=rf"tiny.gguf: key 'gemma4.{key}': got .*, expected ") as fault:
        config_of(keys={key: value})
    assert "\n" not in str(fault.value)


def test_vocabulary_larger_than_the_table():
    with pytest.raises(ValueError, match=r"token_embd.weight: 361 rows, expected at least 362"):
        config_of(keys={"tokenizer.ggml.tokens": ["a"] * 362})
    assert config_of(keys={"tokenizer.ggml.tokens": ["a"] * 300}).vocab_size == 361


# --- which layers slide ---------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        [True, True, True, False, True, True, False],
        [1, 1, 1, 0, 1, 1, 0],
        np.array([1, 1, 1, 0, 1, 1, 0], np.uint8),
        np.array([1, 1, 1, 0, 1, 1, 0], np.int32),
        np.array([1, 1, 1, 0, 1, 1, 0], np.bool_),
    ],
)
def test_pattern_as_array(pattern):
    windows = [layer.window for layer in config_of(keys={"attention.sliding_window_pattern": pattern}).layers]
    assert windows == [8, 8, 8, None, 8, 8, None]


def test_pattern_as_period():
    windows = [layer.window for layer in only_keys(**{"attention.sliding_window_pattern": 3}).layers]
    assert windows == [8, 8, None, 8, 8, None, 8]


@pytest.mark.parametrize(
    "pattern", [[True] * 6, [True] * 8, [2] * 7, ["x"] * 7, [0.5] * 7, True, 0, "x", 1.5]
)
def test_wrong_pattern(pattern):
    with pytest.raises(ValueError, match=r"gemma4.attention.sliding_window_pattern"):
        config_of(keys={"attention.sliding_window_pattern": pattern})


# --- whose keys a layer reads ---------------------------------------------------------


def test_donor_is_the_last_owner_of_the_same_kind():
    assert [layer.kv_from for layer in config_of("e2b").layers] == [0, 1, 2, 3, 2, 2, 3]
    pattern = [True, False, True, True, True, False, True]
    config = only_keys(**{"attention.sliding_window_pattern": pattern, "attention.shared_kv_layers": 3})
    assert [layer.kv_from for layer in config.layers] == [0, 1, 2, 3, 3, 1, 3]


@pytest.mark.parametrize(("shared", "layer"), [(7, 0), (4, 3)])
def test_no_donor(shared, layer):
    """All layers share (a drafter); or the first global layer does, with only sliding ones before it."""
    with pytest.raises(ValueError, match=rf"shared_kv_layers'.*layer {layer} \(") as fault:
        config_of(keys={"attention.shared_kv_layers": shared})
    assert ("sliding" if shared == 7 else "global") in str(fault.value)


# --- sizes that the weights decide ----------------------------------------------------


@pytest.mark.parametrize(
    "lie", [{"attention.key_length": 24, "rope.dimension_count": 24}, {"attention.key_length_swa": 32}]
)
def test_head_size_comes_from_the_weights(lie):
    honest, repaired = config_of(), config_of(keys=lie)
    assert repaired.layers == honest.layers
    assert len(repaired.repairs) in (2, 5)
    assert "heads of" in repaired.repairs[0]


def test_one_number_of_key_heads_yields_to_the_weights():
    config = config_of("26b", keys={"attention.head_count_kv": 3})
    assert [layer.n_kv_heads for layer in config.layers] == [3, 3, 2, 3, 2]
    assert len(config.repairs) == 2


def test_global_key_heads_by_their_own_key():
    config = only_keys("26b", **{"attention.head_count_kv": 3, "attention.global_head_count_kv": 2})
    assert [layer.n_kv_heads for layer in config.layers] == [3, 3, 2, 3, 2]


def test_key_heads_one_by_one_are_not_overruled():
    config = config_of("26b", keys={"attention.head_count_kv": [3, 3, 3, 3, 3]})
    assert [layer.n_kv_heads for layer in config.layers] == [3] * 5  # and attn_k does not fit, at load


def test_head_sizes_and_counts_differ_by_layer():
    """Known fault A12: [2, 2, 1] key heads of 4, 4 and 8 are keys of width 8 everywhere."""
    config = only_keys(
        **{
            "block_count": 3,
            "attention.head_count": 2,
            "attention.head_count_kv": [2, 2, 1],
            "attention.key_length": 8,
            "attention.key_length_swa": 4,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 4,
            "attention.sliding_window_pattern": [True, True, False],
            "attention.shared_kv_layers": 0,
            "feed_forward_length": 5,
        }
    )
    assert [layer.n_kv_heads * layer.head_dim for layer in config.layers] == [8, 8, 8]


@pytest.mark.parametrize("key", ["attention.head_count_kv", "attention.head_count", "feed_forward_length"])
def test_array_of_wrong_length(key):
    with pytest.raises(ValueError, match=rf"gemma4.{key}'.*array of 6.*expected 7 items"):
        config_of(keys={key: [4] * 6})


def test_heads_must_share_evenly():
    with pytest.raises(ValueError, match=r"head_count_kv'.*3 in layer 0, expected a divisor of its 4 heads"):
        only_keys(**{"attention.head_count_kv": 3})


def test_odd_heads_cannot_rotate():
    with pytest.raises(ValueError, match=r"key_length'.*got 33.*even"):
        only_keys(**{"attention.key_length": 33, "rope.dimension_count": 33})


def test_ffn_widths():
    assert [layer.ffn_dim for layer in config_of().layers] == [72] * 4 + [144] * 3
    one_number = config_of(keys={"feed_forward_length": 72})
    assert [layer.ffn_dim for layer in one_number.layers] == [72] * 4 + [144] * 3
    assert len(one_number.repairs) == 3
    assert config_of(keys={"feed_forward_length": None}).layers == config_of().layers
    with pytest.raises(ValueError, match=r"feed_forward_length'.*does not have it"):
        only_keys(feed_forward_length=None)


def test_widths_without_their_keys():
    config = config_of(keys={"embedding_length": None, "embedding_length_per_layer_input": None})
    assert (config.model_dim, config.per_layer_dim) == (48, 20)


# --- values that are keys -------------------------------------------------------------


def test_k_is_v_is_for_all_global_layers_or_none():
    assert [layer.k_is_v for layer in config_of("12b").layers] == [False, False, True] * 2
    v = np.ones((32, 80))
    assert not any(layer.k_is_v for layer in config_of("12b", tensors={"blk.2.attn_v.weight": v}).layers)


def test_a_sliding_layer_always_has_values():
    assert not any(layer.k_is_v for layer in config_of(drop=("blk.0.attn_v.weight",)).layers)


# --- experts --------------------------------------------------------------------------


def test_experts_from_the_weights():
    honest = config_of("26b")
    assert [(m.n_experts, m.n_active, m.ffn_dim) for m in (layer.moe for layer in honest.layers)] == [
        (7, 3, 24)
    ] * 5
    assert config_of("26b", keys={"expert_count": None, "expert_feed_forward_length": None}) == honest
    widths = config_of("26b", keys={"expert_feed_forward_length": [24] * 5})
    assert widths == honest


def test_a_layer_without_expert_tensors_is_dense():
    words = ("ffn_gate_inp", "_exps", "norm_1", "norm_2")
    drop = [name for name in arrays_of("26b") if name.startswith("blk.1.") and any(w in name for w in words)]
    moe = [layer.moe for layer in config_of("26b", drop=drop).layers]
    assert [m is None for m in moe] == [False, True, False, False, False]


def test_experts_that_the_file_lacks():
    with pytest.raises(ValueError, match=r"blk.0.ffn_gate_inp.weight is missing.*7 experts"):
        config_of("e2b", keys={"expert_count": 7, "expert_used_count": 3})


@pytest.mark.parametrize("active", [None, 0, 8])
def test_number_of_active_experts(active):
    with pytest.raises(ValueError, match=r"gemma4.expert_used_count"):
        config_of("26b", keys={"expert_used_count": active})


# --- rotation -------------------------------------------------------------------------

QUARTER = [1e6 ** (-2 * i / 32) for i in range(4)] + [
    0.0
] * 12  # H = 32: a quarter of 16 pairs, exponents over 32
ALL = [1e6 ** (-2 * i / 32) for i in range(16)]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, QUARTER),
        ({"drop": ("rope_freqs.weight",)}, ALL),
        ({"drop": ("rope_freqs.weight",), "keys": {"rope.partial_rotary_factor": 0.25}}, QUARTER),
        ({"keys": {"rope.partial_rotary_factor": 0.5}}, QUARTER),
        ({"tensors": {"rope_freqs.weight": np.full(16, 2.0)}}, [f / 2 for f in ALL]),
    ],
)
def test_frequencies_of_global_layers(change, want):
    config = config_of(**change)
    np.testing.assert_allclose(config.layers[3].rope.inv_freq, want, rtol=1e-15)
    sliding = [1e4 ** (-2 * i / 16) for i in range(8)]  # rope_freqs is not for them
    np.testing.assert_allclose(config.layers[0].rope.inv_freq, sliding, rtol=1e-15)


def test_layers_of_a_kind_share_their_rotation():
    layers = config_of().layers
    assert layers[0].rope is layers[5].rope and layers[3].rope is layers[6].rope


def test_base_of_sliding_layers_has_two_names():
    for key in ("rope.freq_base_swa", "rope.local.freq_base"):
        config = config_of(keys={"rope.freq_base_swa": None, key: 500.0})
        assert config.layers[0].rope.theta == 500.0
    assert config_of(keys={"rope.local.freq_base": 500.0}).layers[0].rope.theta == 1e4  # the usual name wins


@pytest.mark.parametrize("divisors", [np.ones(15), np.zeros(16), np.full(16, np.nan), -np.ones(16)])
def test_wrong_rope_freqs(divisors):
    with pytest.raises(ValueError, match=r"rope_freqs.weight: "):
        config_of(tensors={"rope_freqs.weight": divisors})


@pytest.mark.parametrize("key", ["rope.dimension_count", "rope.dimension_count_swa"])
def test_partial_rotation_by_width_is_refused(key):
    with pytest.raises(ValueError, match=rf"gemma4.{key}'.*rope_freqs"):
        config_of(keys={key: 8})
    config_of(keys={key: 64})  # more than the head: clamped
