"""docs/conflicts.md, row by row: what transformers recorded follows the decision and not the alternative.

The second half of a layer (everything after attention) is written out below in plain NumPy float64, with a
switch for each alternative, and is applied to what transformers recorded before and after it.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import quant
from refimpl.config import Config
from tests import tiny
from tests.oracle import goldens
from tests.oracle.conftest import open_model
from tests.tolerances import ORACLE_F32_ABS, ORACLE_F64_ABS

ROOT = Path(__file__).parents[2]
FAR = 100 * ORACLE_F32_ABS


@pytest.fixture(scope="module")
def recorded():
    """recorded(family) -> (Shape, float64 weights, golden)."""

    def read(family):
        weights = {n: t.astype(np.float64) for n, t in tiny.tensors_of(tiny.FAMILIES[family]).items()}
        return tiny.FAMILIES[family], weights, goldens.read(f"{family}.transformers-f64")

    return read


def rms(x, weight=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(1e-6))) * weight


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def routing(s, w, x, *, described=False):
    """Ids and weights of the chosen experts, by descending weight."""
    if described:  # the description: a norm with the experts' weights first, the router's scale last
        logits = rms(rms(x, w["pre_ffw_norm_2.weight"])) @ w["ffn_gate_inp.weight"].T
    else:
        logits = rms(x) * s.D**-0.5 * w["ffn_gate_inp.scale"] @ w["ffn_gate_inp.weight"].T
    probs = softmax(logits)
    ids = np.argsort(-probs, axis=-1, kind="stable")[:, : s.A]
    chosen = np.take_along_axis(probs, ids, -1)
    return ids, chosen / chosen.sum(-1, keepdims=True) * w["ffn_down_exps.scale"][ids]


def experts(s, w, x, act):
    out = np.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(*routing(s, w, x))):
        z = rms(x[t], w["pre_ffw_norm_2.weight"])
        for e, weight in zip(ids, weights):
            gate, up = np.split(w["ffn_gate_up_exps.weight"][e] @ z, 2)
            out[t] += weight * (w["ffn_down_exps.weight"][e] @ (act(gate) * up))
    return out


def second_half(s, w, x, per_layer=None, *, expert_act=gelu, inject_early=False):
    """attn_out -> l_out of one layer: FFN and experts, per-layer embedding, layer scalar."""

    def injected(x):
        gate = gelu(x @ w["inp_gate.weight"].T) * per_layer
        return x + rms(gate @ w["proj.weight"].T, w["post_norm.weight"])

    if inject_early:
        x = injected(x)
    z = rms(x, w["ffn_norm.weight"])
    y = (gelu(z @ w["ffn_gate.weight"].T) * (z @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    if s.E:
        chosen = experts(s, w, x, expert_act)
        y = rms(y, w["post_ffw_norm_1.weight"]) + rms(chosen, w["post_ffw_norm_2.weight"])
    x = x + rms(y, w["post_ffw_norm.weight"])
    if per_layer is not None and not inject_early:
        x = injected(x)
    return x * w["layer_output_scale.weight"]


def of_layer(weights, i):
    prefix = f"blk.{i}."
    return {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}


def worst(recorded, **alternative):
    """Largest distance between the formula above and transformers, over all layers of a model."""
    s, weights, golden = recorded
    per_layer = golden.arrays.get("inp_per_layer")
    return max(
        goldens.max_abs_in_deviations(
            second_half(
                s,
                of_layer(weights, i),
                golden.arrays[f"attn_out-{i}"],
                None if per_layer is None else per_layer[:, i],
                **alternative,
            ),
            golden.arrays[f"l_out-{i}"],
        )
        for i in range(s.n_layers)
    )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_second_half_of_every_layer(family, recorded):
    assert worst(recorded(family)) < ORACLE_F64_ABS


def test_attention_scale_is_one(model, tmp_path):
    """Query norms divided by sqrt(H) are what a scale of 1/sqrt(H) would be: far from transformers."""
    golden = goldens.read("12b.transformers-f32")
    file = quant.open_gguf(model("12b").path)
    tensors = dict(file.tensors)
    for name, norm in file.tensors.items():
        if name.endswith("attn_q_norm.weight"):
            tensors[name] = quant.QTensor.from_array(norm.dequantize() / np.sqrt(norm.shape[0]), "F32", name)
    [path] = quant.write_gguf(tmp_path / "scaled.gguf", file.metadata, tensors)
    moved = open_model(path).trace(golden.tokens)["l_out-0"]
    assert np.abs(moved - golden.arrays["l_out-0"]).max() > FAR


def test_router_reads_the_bare_residual(recorded):
    s, weights, golden = recorded("26b")
    for i in range(s.n_layers):
        x, w = golden.arrays[f"attn_out-{i}"], of_layer(weights, i)
        ids, mixing = routing(s, w, x)
        assert np.array_equal(ids, golden.arrays[f"ffn_moe_topk-{i}"])
        recorded_mixing = golden.arrays[f"ffn_moe_weights_scaled-{i}"]
        assert np.abs(mixing - recorded_mixing).max() < ORACLE_F64_ABS
        described_ids, described = routing(s, w, x, described=True)
        assert (described_ids != ids).any() or np.abs(described - recorded_mixing).max() > FAR


def test_experts_use_gelu(recorded):
    assert worst(recorded("26b"), expert_act=silu) > FAR


@pytest.mark.parametrize("family", ["e2b", "e4b"])
def test_per_layer_embedding_enters_after_the_ffn(family, recorded):
    assert worst(recorded(family), inject_early=True) > FAR


@pytest.mark.parametrize("family", ["e2b", "e4b"])
def test_per_layer_embedding_norms_the_projection(family, recorded):
    """(norm(Wm x / sqrt(D)) + sqrt(P) table[id]) / sqrt(2); the description norms what was looked up."""
    s, weights, golden = recorded(family)
    x, ids = golden.arrays["inp_scaled"], np.array(golden.tokens)[golden.rows]
    shape = (len(x), s.n_layers, s.P)
    projected = (x @ weights["per_layer_model_proj.weight"].T * s.D**-0.5).reshape(shape)
    looked_up = (weights["per_layer_token_embd.weight"][ids] * np.sqrt(s.P)).reshape(shape)
    norm, want = weights["per_layer_proj_norm.weight"], golden.arrays["inp_per_layer"]
    assert np.abs((rms(projected, norm) + looked_up) * 2**-0.5 - want).max() < ORACLE_F64_ABS
    assert np.abs((projected + rms(looked_up, norm)) * 2**-0.5 - want).max() > FAR


def test_embedding_scale_is_not_rounded(recorded):
    s, weights, golden = recorded("e2b")
    rows = weights["token_embd.weight"][np.array(golden.tokens)[golden.rows]]
    assert np.abs(rows * np.sqrt(s.D) - golden.arrays["inp_scaled"]).max() < ORACLE_F64_ABS


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_global_rope_divides_by_the_whole_head(family, model):
    """A quarter of the pairs (i, i + H/2) turn, with exponents over H; not the first quarter of the dims."""
    config = model(family).config
    for layer in config.layers:
        H = layer.head_dim
        want = [1e4 ** (-2 * i / H) for i in range(H // 2)]
        if layer.window is None:
            want = [1e6 ** (-2 * i / H) if i < H // 8 else 0.0 for i in range(H // 2)]
        assert layer.rope.inv_freq.tolist() == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_media_attention_follows_the_per_layer_width(family, model):
    config: Config = model(family).config
    assert config.media_attention == ("causal" if family in ("e2b", "e4b") else "bidirectional")


def test_register_names_tests_that_exist():
    text = (ROOT / "docs" / "conflicts.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 15
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"docs/conflicts.md names {path}::{test}"
