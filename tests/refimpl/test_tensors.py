"""One model in all its spellings, and every fault named by its tensor."""

import numpy as np
import pytest

from quant import QTensor
from refimpl.config import Config
from refimpl.tensors import LAYER_TENSORS, MODEL_TENSORS, LayerWeights, Weights, load_weights
from tests import tiny
from tests.refimpl.files import all_logits, arrays_of, model_file, opened

FAMILIES = tuple(tiny.FAMILIES)
OPTIONAL = ("rope_freqs.weight", "layer_output_scale.weight")


def logits(family, **changes):
    return all_logits(*opened(family, **changes), tiny.prompt(family)[:19])


def loading(family, **changes):
    file = model_file(family, **changes)
    return load_weights(file, Config.from_gguf(file))


def test_the_table_is_the_tree():
    assert {s.field for s in MODEL_TENSORS} - {"rope_freqs"} == set(Weights.__annotations__) - {
        "layers",
        "unused",
    }
    assert [s.field for s in LAYER_TENSORS] == list(LayerWeights.__annotations__)


@pytest.mark.parametrize("family", FAMILIES)
def test_spellings_of_one_model(family):
    want = logits(family)
    for spelling in (
        {"fused": ("qkv", "gate_up")},
        {"aliases": True},
        {"experts": "split"},
        {"experts": "numbered", "aliases": True, "fused": ("qkv",)},
    ):
        np.testing.assert_array_equal(logits(family, **spelling), want)


def test_numbered_experts_under_their_long_name():
    arrays = arrays_of("26b")
    stacks = [name for name in arrays if name.endswith("_exps.weight")]
    single = {
        f"{name.removesuffix('.weight')}.{e}.weight": matrix
        for name in stacks
        for e, matrix in enumerate(arrays[name])
    }
    np.testing.assert_array_equal(logits("26b", tensors=single, drop=stacks), logits("26b"))


@pytest.mark.parametrize(("family", "i", "parts"), [("12b", 2, "qk"), ("e2b", 5, "q"), ("e2b", 5, "qk")])
def test_fused_without_all_three(family, i, parts):
    """No values where they are keys; nothing but queries, or no values, in a layer that shares both."""
    arrays = arrays_of(family)
    names = [f"blk.{i}.attn_{part}.weight" for part in parts]
    fused = {f"blk.{i}.attn_qkv.weight": np.concatenate([arrays[name] for name in names])}
    drop = [f"blk.{i}.attn_{part}.weight" for part in "qkv"]
    np.testing.assert_array_equal(logits(family, tensors=fused, drop=drop), logits(family))


def test_output_is_the_embedding_table_when_missing():
    want = logits("12b")
    untied = logits("12b", tensors={"output.weight": arrays_of("12b")["token_embd.weight"]})
    np.testing.assert_array_equal(untied, want)
    assert not np.allclose(logits("12b", tied=False), want)
    weights = opened("12b")[1]
    assert weights.output is weights.token_embd


def test_keys_of_layers_that_share_are_not_read():
    names = [n for n in arrays_of("e2b") if n.startswith(("blk.4.", "blk.5.", "blk.6.")) and ".attn_" in n]
    unread = [n for n in names if n.split(".")[2] in ("attn_k", "attn_v", "attn_k_norm")]
    assert len(unread) == 9
    want = logits("e2b")
    np.testing.assert_array_equal(logits("e2b", drop=unread), want)
    np.testing.assert_array_equal(logits("e2b", tensors={n: arrays_of("e2b")[n] * 3 for n in unread}), want)
    assert opened("e2b")[1].unused == ()


def test_layer_scale_is_one_when_missing():
    name = "blk.2.layer_output_scale.weight"
    np.testing.assert_array_equal(logits("12b", drop=(name,)), logits("12b", tensors={name: np.ones(1)}))


def test_weights_are_views():
    file = model_file("26b")
    weights = load_weights(file, Config.from_gguf(file))
    fused = file.tensors["blk.0.ffn_gate_up_exps.weight"].data
    for part in (weights.layers[0].ffn_gate_exps, weights.layers[0].ffn_up_exps):
        assert np.shares_memory(part.data, fused)
    assert weights.layers[0].attn_q is file.tensors["blk.0.attn_q.weight"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_tensor_is_named(family):
    for name in arrays_of(family):
        field = name.split(".", 2)[-1]
        shared = tiny.shape_of(family).n_shared
        i = int(name.split(".")[1]) if name.startswith("blk.") else -1
        unread = i >= tiny.shape_of(family).n_layers - shared and field.startswith(("attn_k", "attn_v"))
        if name.endswith(OPTIONAL) or unread:
            loading(family, drop=(name,))
            continue
        key = {"token_embd.weight": {"vocab_size": 361}}.get(name, {})
        with pytest.raises(ValueError, match=r"missing") as fault:
            loading(family, drop=(name,), keys=key)
        named = name.replace("ffn_gate_up_exps", "ffn_gate_exps")  # either spelling would do
        assert f"tensor {named} is missing" in str(fault.value)
        assert "\n" not in str(fault.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_misshapen_tensor_is_named(family):
    shape = tiny.shape_of(family)
    for name, array in arrays_of(family).items():
        i = int(name.split(".")[1]) if name.startswith("blk.") else -1
        if i >= shape.n_layers - shape.n_shared and name.split(".")[2] in ("attn_k", "attn_v", "attn_k_norm"):
            continue
        longer = np.concatenate([array, array[..., -1:]], axis=-1)
        with pytest.raises(ValueError, match=r"expected") as fault:
            loading(
                family, tensors={name: longer}, keys={"expert_feed_forward_length": shape.F_expert or None}
            )
        assert name in str(fault.value)
        assert str(list(longer.shape)) in str(fault.value)


def test_rows_of_keys_that_fit_no_head():
    k = arrays_of("31b")["blk.2.attn_k.weight"]
    with pytest.raises(
        ValueError, match=r"blk.2.attn_k.weight: shape \[63, 80\], expected \[K\*H, D\] = \[64, 80\]"
    ):
        loading("31b", tensors={"blk.2.attn_k.weight": k[:-1]})


def test_fused_rows_are_counted():
    qkv = tiny.tensors_of(tiny.shape_of("e4b"), fused=("qkv",))["blk.0.attn_qkv.weight"]
    with pytest.raises(ValueError, match=r"blk.0.attn_qkv.weight: shape \[159, 80\].* = \[160, 80\]"):
        loading("e4b", fused=("qkv",), tensors={"blk.0.attn_qkv.weight": qkv[:-1]})


def test_stray_tensors_are_reported():
    stray = {
        "blk.0.attn_q.bias": np.ones(64),
        "blk.9.attn_q.weight": np.ones((64, 48)),
        "v.patch": np.ones(3),  # of an encoder: media_tensors.py reads it
    }
    assert loading("e2b", tensors=stray).unused == ("blk.0.attn_q.bias", "blk.9.attn_q.weight")


def test_separate_scales_are_refused():
    with pytest.raises(ValueError, match=r"blk.3.attn_q.scale: got a scale of blk.3.attn_q.weight"):
        loading("e2b", tensors={"blk.3.attn_q.scale": np.ones(1)})


def test_experts_kept_apart_have_one_form():
    odd = {
        "blk.0.ffn_up.3.weight": QTensor.from_array(
            np.ones((24, 48), np.float32), "F16", "blk.0.ffn_up.3.weight"
        )
    }
    with pytest.raises(ValueError, match=r"blk.0.ffn_up.3.weight: got F16"):
        loading("26b", experts="numbered", tensors=odd)


def test_a_missing_expert_is_noticed():
    with pytest.raises(
        ValueError, match=r"blk.0.ffn_up.0.weight: shape \[3, 24, 48\], expected .* = \[7, 24, 48\]"
    ):
        loading("26b", experts="numbered", drop=("blk.0.ffn_up.3.weight",))
