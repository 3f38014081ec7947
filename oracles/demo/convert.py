"""Write a trained demo as a GGUF: `python -m oracles.demo.convert --state DIR/state.pt --out FILE.gguf`.

Names, types and metadata are those of the published E2B and E4B files: norms F32, the projection of the
per-layer embeddings BF16, everything else Q8_0. Uses the gguf package alone, so that the file does not
depend on the code it is meant to test.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from importlib.resources import files

from oracles.needs import need

need("torch", "transformers")

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from . import model, vocab

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.weight": "output_norm.weight",
}


def gguf_name(name: str) -> str | None:
    """The GGUF name of an HF tensor; None for the tied head."""
    if name == "lm_head.weight":
        return None
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    if rest == "layer_scalar":
        return f"blk.{index}.layer_output_scale.weight"
    return f"blk.{index}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def kind_of(name: str, array: np.ndarray) -> GGMLQuantizationType:
    """The storage type of a tensor, as the published Q8_0 files have it."""
    if array.ndim < 2:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.BF16 if name == "per_layer_model_proj.weight" else GGMLQuantizationType.Q8_0


def rope_freqs(config) -> np.ndarray:
    """Divisors that turn the full rotation into the proportional one: 1 for the pairs that rotate, 1e30 for
    those that do not.
    """
    pairs = config.per_layer_config["full_attention"].head_dim // 2
    rotated = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.concatenate([np.ones(rotated), np.full(pairs - rotated, 1e30)]).astype(np.float32)


def add_metadata(w: GGUFWriter, config, name: str):
    """The keys of a published small-family file."""
    local, glob = (config.per_layer_config[k] for k in ("sliding_attention", "full_attention"))
    first = config.num_hidden_layers - config.num_kv_shared_layers
    w.add_type("model"), w.add_name(name), w.add_size_label("2.7M"), w.add_license("mit")
    w.add_file_type(7), w.add_quantization_version(2)
    (
        w.add_block_count(config.num_hidden_layers),
        w.add_context_length(config.max_position_embeddings),
        w.add_embedding_length(config.hidden_size),
    )
    w.add_feed_forward_length(
        [config.intermediate_size * (2 if i >= first else 1) for i in range(config.num_hidden_layers)]
    )
    w.add_head_count(config.num_attention_heads), w.add_head_count_kv(local.num_key_value_heads)
    w.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    w.add_float32("gemma4.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_key_length(glob.head_dim), w.add_value_length(glob.head_dim)
    w.add_key_length_swa(local.head_dim), w.add_value_length_swa(local.head_dim)
    w.add_rope_dimension_count(glob.head_dim), w.add_rope_dimension_count_swa(local.head_dim)
    w.add_final_logit_softcapping(config.final_logit_softcapping), w.add_sliding_window(config.sliding_window)
    (
        w.add_shared_kv_layers(config.num_kv_shared_layers),
        w.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input),
    )
    w.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])


def add_vocabulary(w: GGUFWriter):
    """Tokens, types, merges, special ids and the chat template."""
    tokens, types, merges = vocab.build()
    w.add_tokenizer_model("gemma4")
    w.add_token_list(tokens), w.add_token_types(types)
    w.add_token_scores([-1000.0] * len(tokens))
    w.add_key_value(
        "tokenizer.ggml.merges",
        [f"{a} {b}" for a, b in merges],
        GGUFValueType.ARRAY,
        sub_type=GGUFValueType.STRING,
    )
    (
        w.add_bos_token_id(2),
        w.add_eos_token_id(1),
        w.add_unk_token_id(3),
        w.add_pad_token_id(0),
        w.add_mask_token_id(4),
    )
    w.add_add_space_prefix(False), w.add_add_bos_token(True)
    w.add_chat_template(files(__package__).joinpath("template.jinja").read_text(encoding="utf-8"))


def write(state: dict, path: str, name="Twinpath demo"):
    """Write the state dict of the HF model to `path`."""
    config = model.config()
    w = GGUFWriter(path + ".tmp", "gemma4")
    add_metadata(w, config, name)
    add_vocabulary(w)
    w.add_tensor("rope_freqs.weight", rope_freqs(config))
    for source, tensor in state.items():
        target = gguf_name(source)
        if target is None:
            continue
        array = tensor.detach().float().numpy()
        kind = kind_of(target, array)
        w.add_tensor(
            target,
            array if kind is GGMLQuantizationType.F32 else quants.quantize(array, kind),
            raw_dtype=kind,
        )
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    os.replace(path + ".tmp", path)


def read(path: str):
    """The HF model in float32 with the dequantised weights of the file: what engines are compared with."""
    from gguf import GGUFReader
    from transformers import Gemma4ForCausalLM

    net = Gemma4ForCausalLM(model.config())
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    state = net.state_dict()
    for source in state:
        target = gguf_name(source) or "token_embd.weight"
        t = tensors[target]
        array = quants.dequantize(t.data, t.tensor_type)
        state[source] = torch.from_numpy(np.array(array, np.float32).reshape(state[source].shape))
    net.load_state_dict(state)
    return net.eval()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--state", required=True)
    ap.add_argument("--out", required=True)
    args = ap.parse_args()
    state = torch.load(args.state)
    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    write(state["net"], args.out)
    blob = open(args.out, "rb").read()
    print(f"{args.out}: step {state['step']}, {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}")


if __name__ == "__main__":
    main()
