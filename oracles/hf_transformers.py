"""Oracle: Hugging Face transformers' Gemma4ForCausalLM with the weights of a GGUF file.

The model code is transformers' own, unchanged.  This file reads the GGUF with the gguf package, derives the
configuration, copies the dequantised weights in, and listens at the modules.  In `--dtype float64` the code
still runs as it is, with the float32 casts that it contains (norms, softmax, rotary angles) read as float64.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from pathlib import Path

from oracles.needs import need

need("torch", "transformers", "gguf")

import gguf
import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.models.gemma4 import modeling_gemma4 as modeling

from oracles import protocol

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Metadata and float32 weights, row length last."""
    reader = gguf.GGUFReader(path)
    keys = {k: f.contents() for k, f in reader.fields.items() if not k.startswith(("tokenizer.", "GGUF."))}
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for name in [n for n in weights if n.endswith("ffn_gate_exps.weight")]:
        parts = weights.pop(name), weights.pop(name.replace("gate", "up"))
        weights[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    return keys, weights


def config_of(keys: dict[str, object], weights: dict[str, np.ndarray]) -> transformers.Gemma4TextConfig:
    """The configuration that these keys and shapes describe; what transformers cannot express is an error."""
    if keys["general.architecture"] != "gemma4":
        sys.exit(f"{keys['general.architecture']}: this oracle runs gemma4 only")
    get = {k.removeprefix("gemma4."): v for k, v in keys.items()}.get
    n_layers = get("block_count")
    sliding = get("attention.sliding_window_pattern")
    kv_heads = get("attention.head_count_kv")
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * n_layers
    ffn = get("feed_forward_length")
    ffn = ffn if isinstance(ffn, list) else [ffn] * n_layers
    n_shared = get("attention.shared_kv_layers", 0)
    own = n_layers - n_shared
    per_layer_dim = get("embedding_length_per_layer_input", 0)
    n_experts = get("expert_count", 0)
    if sliding[-1] or len(set(ffn[:own])) != 1 or any(f not in (ffn[0], 2 * ffn[0]) for f in ffn[own:]):
        sys.exit(
            "transformers wants a global last layer, and FFNs of one width or of twice that in shared layers"
        )
    global_layers = [i for i in range(n_layers) if not sliding[i]]
    k_eq_v = all(f"blk.{i}.attn_v.weight" not in weights for i in global_layers if i < own)
    return transformers.Gemma4TextConfig(
        vocab_size=len(weights["token_embd.weight"]),
        vocab_size_per_layer_input=len(weights["token_embd.weight"]),
        hidden_size=get("embedding_length"),
        intermediate_size=ffn[0],
        use_double_wide_mlp=n_shared > 0 and ffn[-1] == 2 * ffn[0],
        num_hidden_layers=n_layers,
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=next(k for k, s in zip(kv_heads, sliding, strict=True) if s),
        num_global_key_value_heads=kv_heads[global_layers[0]] if k_eq_v else None,
        head_dim=get("attention.key_length_swa"),
        global_head_dim=get("attention.key_length"),
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding],
        sliding_window=get("attention.sliding_window"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        final_logit_softcapping=get("final_logit_softcapping"),
        attention_k_eq_v=k_eq_v,
        num_kv_shared_layers=n_shared,
        hidden_size_per_layer_input=per_layer_dim,
        enable_moe_block=n_experts > 0,
        num_experts=n_experts or None,
        top_k_experts=get("expert_used_count"),
        moe_intermediate_size=get("expert_feed_forward_length"),
        max_position_embeddings=get("context_length"),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": rotated_share(weights.get("rope_freqs.weight")),
                "rope_theta": get("rope.freq_base"),
            },
        },
        attn_implementation="eager",
        experts_implementation="eager",
        tie_word_embeddings="output.weight" not in weights,
    )


def rotated_share(factors: np.ndarray | None) -> float:
    """rope_freqs holds 1 for the pairs that rotate and 1e30 for those that do not."""
    if factors is None:
        return 1.0
    n = int((factors == 1).sum())
    if not ((factors[:n] == 1).all() and (factors[n:] > 1e20).all()):
        sys.exit("rope_freqs: transformers has ones followed by 1e30s only")
    return n / len(factors)


@contextlib.contextmanager
def float32_means(dtype: torch.dtype):
    """Lets the casts `.float()` and `dtype=torch.float32` inside the model code mean `dtype`."""
    if dtype is torch.float32:
        yield
        return
    saved = torch.float, torch.float32, torch.Tensor.float, torch.get_default_dtype()
    torch.float = torch.float32 = dtype
    torch.Tensor.float = lambda self: self.to(dtype)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = saved[:3]
        torch.set_default_dtype(saved[3])


def load_model(path: Path, dtype: torch.dtype) -> modeling.Gemma4ForCausalLM:
    """Builds the model and copies every weight; a weight left over or left out is an error."""
    keys, weights = read_gguf(path)
    config = config_of(keys, weights)
    model = modeling.Gemma4ForCausalLM(config).to(dtype).eval()
    slots = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    if config.tie_word_embeddings:
        slots.pop("lm_head.weight")
    filled = set()
    with torch.no_grad():
        for name, values in weights.items():
            slot = slot_of(name)
            if slot is None or unused_kv(slot, config):
                continue
            if slot not in slots or tuple(slots[slot].shape) != values.shape:
                sys.exit(f"{name}: {values.shape} has no place in the model (as {slot})")
            slots[slot].copy_(torch.from_numpy(values.copy()))
            filled.add(slot)
    empty = {name for name, _ in model.named_parameters()} | {n for n in slots if n.endswith("layer_scalar")}
    if empty - filled:
        sys.exit(f"the file has nothing for {sorted(empty - filled)}")
    return model


def slot_of(name: str) -> str | None:
    """Where transformers keeps the tensor of this GGUF name; None for rope_freqs, which is in the config."""
    if name == "rope_freqs.weight":
        return None
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}"
    return TOP_NAMES[name]


def unused_kv(slot: str, config: transformers.Gemma4TextConfig) -> bool:
    """K/V weights of layers that share: published files carry them, no engine reads them."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight", slot)
    return bool(match) and int(match[1]) >= config.num_hidden_layers - config.num_kv_shared_layers


class Listener:
    """Records what flows in and out of the modules of a model under llama.cpp's names."""

    def __init__(self, model: modeling.Gemma4ForCausalLM, trace: protocol.Trace):
        self.trace = trace
        self.layer = 0  # the layer that runs now
        self.rotated = 0  # how many tensors its attention has rotated so far
        text = model.model
        self._output(text.embed_tokens, "inp_scaled")
        self._output(text.norm, "result_norm")
        model.register_forward_hook(lambda m, a, out: self._record("result_output", out.logits))
        if text.hidden_size_per_layer_input:
            shape = (-1, len(text.layers), text.hidden_size_per_layer_input)
            self._output(text.embed_tokens_per_layer, "inp_per_layer_selected", shape)
            self._output(text.per_layer_projection_norm, "per_layer_proj")
            text.project_per_layer_inputs = self._wrapped(text.project_per_layer_inputs, "inp_per_layer")
        for i, layer in enumerate(text.layers):
            self._listen_to_layer(i, layer)

    def _record(self, name: str, value: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Drops the batch axis: [1, T, ...] or [T, ...] -> [T, ...]."""
        array = value.detach().cpu().numpy()
        self.trace.add(name, array.reshape(shape) if shape else array[0])

    def _output(self, module, name, shape=None):
        module.register_forward_hook(lambda m, args, out: self._record(name, out, shape))

    def _input(self, module, name):
        module.register_forward_pre_hook(lambda m, args: self._record(name, args[0]))

    def _wrapped(self, function, name):
        @functools.wraps(function)
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            self._record(name, out)
            return out

        return call

    def _listen_to_layer(self, i: int, layer) -> None:
        def enter(*_):
            self.layer, self.rotated = i, 0

        layer.register_forward_pre_hook(enter)
        attention = layer.self_attn
        heads = (-1, layer.config.num_attention_heads, attention.head_dim)
        kv_heads = (
            -1,
            layer.config.num_attention_heads // attention.num_key_value_groups,
            attention.head_dim,
        )
        self._output(layer.input_layernorm, f"attn_norm-{i}")
        self._output(attention.q_proj, f"Qcur-{i}", heads)
        self._output(attention.q_norm, f"Qcur_normed-{i}")
        if not attention.is_kv_shared_layer:
            self._output(attention.k_proj, f"Kcur-{i}", kv_heads)
            self._output(attention.v_proj or attention.k_proj, f"Vcur-{i}", kv_heads)
            self._output(attention.k_norm, f"Kcur_normed-{i}")
            self._output(attention.v_norm, f"Vcur_normed-{i}")
        self._input(attention.o_proj, f"kqv_out-{i}")
        self._output(layer.post_attention_layernorm, f"attn_post_norm-{i}")
        self._input(layer.pre_feedforward_layernorm, f"attn_out-{i}")
        self._listen_to_ffn(i, layer)
        self._output(layer.post_feedforward_layernorm, f"ffn_post_norm-{i}")
        if layer.hidden_size_per_layer_input:
            self._input(layer.per_layer_input_gate, f"pe_in-{i}")
            self._output(layer.post_per_layer_input_norm, f"per_layer_embd_out-{i}")
        self._output(layer, f"out_scaled-{i}")
        self._output(layer, f"l_out-{i}")

    def _listen_to_ffn(self, i: int, layer) -> None:
        self._output(layer.mlp.gate_proj, f"ffn_gate-{i}")
        self._output(layer.mlp.up_proj, f"ffn_up-{i}")
        self._input(layer.mlp.down_proj, f"ffn_geglu-{i}")
        if not layer.enable_moe_block:
            self._output(layer.pre_feedforward_layernorm, f"ffn_norm-{i}")
            self._output(layer.mlp, f"ffn_out-{i}")
            return
        D = (-1, layer.hidden_size)
        self._output(layer.pre_feedforward_layernorm, f"ffn_norm_1-{i}")
        self._output(layer.post_feedforward_layernorm_1, f"ffn_mlp-{i}")
        self._output(layer.pre_feedforward_layernorm_2, f"ffn_norm_2-{i}", D)
        self._output(layer.router.proj, f"ffn_moe_logits-{i}", (-1, layer.config.num_experts))
        layer.router.register_forward_hook(lambda m, args, out: self._routing(i, *out))
        self._output(layer.experts, f"ffn_moe_out-{i}", D)
        self._output(layer.post_feedforward_layernorm_2, f"ffn_moe-{i}")
        self._input(layer.post_feedforward_layernorm, f"ffn_moe_combined-{i}")

    def _routing(self, i: int, probs: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """The weights also as llama.cpp has them: chosen, then renormalised, without the experts' scales."""
        chosen = torch.gather(probs, -1, ids)
        self.trace.add(f"ffn_moe_probs-{i}", probs.numpy())
        self.trace.add(f"ffn_moe_topk-{i}", ids.to(torch.int32).numpy())
        self.trace.add(f"ffn_moe_weights-{i}", chosen.numpy())
        self.trace.add(f"ffn_moe_weights_norm-{i}", (chosen / chosen.sum(-1, keepdim=True)).numpy())
        self.trace.add(f"ffn_moe_weights_scaled-{i}", weights.numpy())

    @contextlib.contextmanager
    def listening_to_rope(self):
        """Rotation is a plain function: the first call of a layer rotates q, the second k."""
        rope = modeling.apply_rotary_pos_emb

        def call(*args, **kwargs):
            out = rope(*args, **kwargs)
            self._record(f"{'QK'[self.rotated]}cur_pos-{self.layer}", out)
            self.rotated += 1
            return out

        modeling.apply_rotary_pos_emb = call
        try:
            yield
        finally:
            modeling.apply_rotary_pos_emb = rope


def run(path: Path, tokens: list[int], trace: protocol.Trace, dtype: torch.dtype, chunk: int = 0) -> None:
    """Runs the tokens, in chunks through transformers' own cache if `chunk` is given."""
    with float32_means(dtype), torch.no_grad():
        model = load_model(path, dtype)
        listener = Listener(model, trace)
        cache = DynamicCache(config=model.config) if chunk else None
        with listener.listening_to_rope():
            for start in range(0, len(tokens), chunk or len(tokens)):
                ids = torch.tensor([tokens[start : start + (chunk or len(tokens))]])
                model(input_ids=ids, cache=cache, use_cache=bool(chunk))


def main() -> None:
    parser = protocol.parser(__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trace = protocol.Trace(args.names)
    run(args.model, args.tokens, trace, getattr(torch, args.dtype), args.chunk)
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    kinds = {"dtype": args.dtype, "activations": "float"}
    protocol.save(args, trace, oracle="hf_transformers", version=version, **kinds)


if __name__ == "__main__":
    main()
