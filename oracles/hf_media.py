"""Oracle: the encoders of Hugging Face transformers with the weights of an mmproj GGUF.

    python -m oracles.hf_media MMPROJ.gguf picture.png other.png sound.wav --out trace.npz

Every input is encoded by itself; arrays are named `odd/v.l_out-0`, with the file's stem in front.  Pictures
are canvases: they are cut into patches as they are, with the function of transformers' own processor.
Classes and code are transformers', unchanged; see hf_transformers.py for `--dtype float64`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sys
from pathlib import Path

from oracles.needs import need

need("torch", "transformers", "gguf", "PIL")

import gguf
import numpy as np
import PIL.Image
import torch
import transformers
from transformers.models.gemma4 import feature_extraction_gemma4 as extraction
from transformers.models.gemma4 import image_processing_pil_gemma4 as images
from transformers.models.gemma4 import modeling_gemma4 as modeling
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from oracles import protocol
from oracles.hf_transformers import float32_means

VISION_LAYER = {
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AUDIO_LAYER = {
    "ffn_norm": "feed_forward1.pre_layer_norm",
    "ffn_up": "feed_forward1.ffw_layer_1",
    "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_post_norm": "feed_forward1.post_layer_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm",
    "ffn_up_1": "feed_forward2.ffw_layer_1",
    "ffn_down_1": "feed_forward2.ffw_layer_2",
    "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn",
    "attn_post_norm": "norm_post_attn",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post",
    "attn_k_rel": "self_attn.relative_k_proj",
    "per_dim_scale": "self_attn.per_dim_scale",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
    "conv_dw": "lconv1d.depthwise_conv1d",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ln2": "norm_out",
}
TOP = {
    "v.patch_embd.weight": "vision_tower.patch_embedder.input_proj.weight",
    "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
    "v.std_bias": "vision_tower.std_bias",
    "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection.weight": "embed_vision.embedding_projection.weight",
    "a.conv1d.0.weight": "audio_tower.subsample_conv_projection.layer0.conv.weight",
    "a.conv1d.1.weight": "audio_tower.subsample_conv_projection.layer1.conv.weight",
    "a.conv1d.0.norm.weight": "audio_tower.subsample_conv_projection.layer0.norm.weight",
    "a.conv1d.1.norm.weight": "audio_tower.subsample_conv_projection.layer1.norm.weight",
    "a.input_projection.weight": "audio_tower.subsample_conv_projection.input_proj_linear.weight",
    "a.pre_encode.out.weight": "audio_tower.output_proj.weight",
    "a.pre_encode.out.bias": "audio_tower.output_proj.bias",
    "mm.a.input_projection.weight": "embed_audio.embedding_projection.weight",
}
UNIFIED = {
    "v.patch_embd.weight": "vision_embedder.patch_dense.weight",
    "v.patch_embd.bias": "vision_embedder.patch_dense.bias",
    "v.patch_norm.1": "vision_embedder.patch_ln1",
    "v.patch_norm.2": "vision_embedder.patch_ln2",
    "v.patch_norm.3": "vision_embedder.pos_norm",
    "v.position_embd.weight": "vision_embedder.pos_embedding",
    "mm.input_projection.weight": "vision_embedder.multimodal_embedder.embedding_projection.weight",
    "mm.a.input_projection.weight": "embed_audio.embedding_projection.weight",
}


def read(path: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    keys = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return keys, {n: w.reshape(tuple(int(d) for d in _shape(reader, n))) for n, w in weights.items()}


def _shape(reader: gguf.GGUFReader, name: str) -> list[int]:
    return next(t.shape for t in reader.tensors if t.name == name)[::-1]


def is_unified(keys: dict[str, object]) -> bool:
    return keys.get("clip.vision.projector_type") == "gemma4uv"


def vision_config(keys: dict[str, object], w: dict[str, np.ndarray]):
    if is_unified(keys):
        dim = len(w["v.patch_embd.weight"])
        return unified.Gemma4UnifiedVisionConfig(
            mm_embed_dim=dim, mm_posemb_size=w["v.position_embd.weight"].shape[1], output_proj_dims=dim
        )
    v = {k.removeprefix("clip.vision."): value for k, value in keys.items()}
    return modeling.Gemma4VisionConfig(
        hidden_size=v["embedding_length"],
        intermediate_size=v["feed_forward_length"],
        num_hidden_layers=v["block_count"],
        num_attention_heads=v["attention.head_count"],
        num_key_value_heads=v["attention.head_count"],
        head_dim=len(w["v.blk.0.attn_q_norm.weight"]),
        position_embedding_size=w["v.position_embd.weight"].shape[1],
        use_clipped_linears="v.blk.0.attn_q.input_min" in w,
        standardize="v.std_bias" in w,
        rms_norm_eps=v["attention.layer_norm_epsilon"],
        attn_implementation="eager",
    )


def audio_config(keys: dict[str, object], w: dict[str, np.ndarray]):
    if "mm.a.input_projection.weight" not in w:
        return None
    if is_unified(keys):
        return unified.Gemma4UnifiedAudioConfig(audio_embed_dim=w["mm.a.input_projection.weight"].shape[1])
    a = {k.removeprefix("clip.audio."): value for k, value in keys.items()}
    return modeling.Gemma4AudioConfig(
        hidden_size=a["embedding_length"],
        num_hidden_layers=a["block_count"],
        num_attention_heads=a["attention.head_count"],
        subsampling_conv_channels=[len(w["a.conv1d.0.weight"]), len(w["a.conv1d.1.weight"])],
        conv_kernel_size=w["a.blk.0.conv_dw.weight"].shape[1],
        use_clipped_linears="a.blk.0.attn_q.input_min" in w,
        output_proj_dims=len(w["a.pre_encode.out.weight"]),
        attn_implementation="eager",
    )


def slot_of(name: str, is_unified: bool) -> str:
    """Where transformers keeps a tensor."""
    if is_unified:
        base, _, kind = name.rpartition(".")
        return UNIFIED.get(name) or f"{UNIFIED[base]}.{kind}"
    if name in TOP:
        return TOP[name]
    part, _, i, field, kind = name.split(".")
    inner = (VISION_LAYER if part == "v" else AUDIO_LAYER)[field]
    tower = "vision_tower.encoder.layers" if part == "v" else "audio_tower.layers"
    if field == "per_dim_scale":
        return f"{tower}.{i}.{inner}"
    return f"{tower}.{i}.{inner}.{kind}"


def value_of(name: str, values: np.ndarray, slot_shape: tuple[int, ...], is_unified: bool) -> torch.Tensor:
    """As transformers has it: pixels of a patch color by color, softplus not yet applied."""
    x = torch.from_numpy(values.astype(np.float64))
    if name in ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias") and is_unified:
        side = math.isqrt(x.shape[-1] // 3)
        x = x.reshape(*x.shape[:-1], 3, side, side).movedim(-3, -1).reshape(x.shape)
    elif name == "v.patch_embd.weight":
        x = x.permute(0, 2, 3, 1).reshape(len(x), -1)
    elif name == "v.position_embd.weight" and is_unified:
        x = x.permute(1, 0, 2)
    elif name.endswith("per_dim_scale.weight"):
        x = x + torch.log(-torch.expm1(-x))
    return x.reshape(slot_shape)


def fill(modules: torch.nn.ModuleDict, weights: dict[str, np.ndarray], is_unified: bool) -> None:
    slots = dict(modules.named_parameters()) | dict(modules.named_buffers())
    filled = set()
    with torch.no_grad():
        for name, values in weights.items():
            slot = slot_of(name, is_unified)
            if slot not in slots and slot.replace(".weight", ".linear.weight") in slots:
                slot = slot.replace(".weight", ".linear.weight")
            if slot not in slots:
                sys.exit(f"{name}: no place in the model (as {slot})")
            slots[slot].copy_(value_of(name, values, tuple(slots[slot].shape), is_unified))
            filled.add(slot)
    if empty := {name for name, _ in modules.named_parameters()} - filled:
        sys.exit(f"the file has nothing for {sorted(empty)}")


class TextWidth:
    """All that an embedder asks of a text configuration."""

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size


def build(keys: dict[str, object], weights: dict[str, np.ndarray], dtype: torch.dtype) -> torch.nn.ModuleDict:
    seeing, hearing = vision_config(keys, weights), audio_config(keys, weights)
    text = TextWidth(len(weights["mm.input_projection.weight"]))
    modules = torch.nn.ModuleDict()
    if is_unified(keys):
        modules["vision_embedder"] = unified.Gemma4UnifiedVisionEmbedder(seeing, text)
        modules["embed_audio"] = unified.Gemma4UnifiedMultimodalEmbedder(hearing, text)
    else:
        modules["vision_tower"] = modeling.Gemma4VisionModel(seeing)
        modules["embed_vision"] = modeling.Gemma4MultimodalEmbedder(seeing, text)
        if hearing is not None:
            modules["audio_tower"] = modeling.Gemma4AudioModel(hearing)
            modules["embed_audio"] = modeling.Gemma4MultimodalEmbedder(hearing, text)
    modules = modules.to(dtype).eval()
    fill(modules, weights, is_unified(keys))
    return modules


def cut(canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u8[h, w, 3] -> patches of 16 pixels and their columns and rows, as the processor makes them."""
    pixels = (canvas.transpose(2, 0, 1) / 255).astype(np.float64)
    patches = images.convert_image_to_patches(pixels, 16)
    x, y = np.meshgrid(np.arange(canvas.shape[1] // 16), np.arange(canvas.shape[0] // 16), indexing="xy")
    return patches, np.stack([x, y], axis=-1).reshape(-1, 2)


def merge_patches(patches: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The unified processor's function, without its module, which wants torchvision."""
    path = Path(unified.__file__).with_name("image_processing_gemma4_unified.py")
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "patches_merge"]
    scope = {"torch": torch, "math": math}
    exec(compile(tree, path.name, "exec"), scope)
    return scope["patches_merge"](patches, places, patches.shape[1] // 9)


def read_wav(path: Path) -> np.ndarray:
    data = path.read_bytes()
    return np.frombuffer(data[data.index(b"data") + 8 :], "<f4").astype(np.float64)


def mel_of(samples: np.ndarray) -> np.ndarray:
    """In float64; the processor itself has a window of float32, and goes on in it."""
    extractor = extraction.Gemma4AudioFeatureExtractor()
    extractor.window = extraction.window_function(extractor.frame_length)
    mel, mask = extractor._extract_spectrogram(samples, np.ones(len(samples), int))
    return mel[mask]


class Listener:
    """Records what flows in and out of the modules, with the name of the input in front."""

    def __init__(self, modules: torch.nn.ModuleDict, trace: protocol.Trace):
        self.trace, self.stem = trace, ""
        if "vision_embedder" in modules:
            embedder = modules["vision_embedder"]
            self.output(embedder.patch_dense, "v.patch_embd")
            self.output(embedder.patch_ln2, "v.patch_norm-2")
            self.input(embedder.pos_norm, "v.pos_embd")
            self.output(embedder.pos_norm, "v.patch_norm-3")
            self.output(embedder.multimodal_embedder, "v.projected")
        if "vision_tower" in modules:
            self.listen_to_tower(modules["vision_tower"])
            self.output(modules["embed_vision"], "v.projected")
        if "audio_tower" in modules:
            self.listen_to_conformer(modules["audio_tower"])
        if "embed_audio" in modules:
            self.output(modules["embed_audio"], "a.projected")

    def record(self, name, value, shape=None):
        array = value.detach().cpu().numpy()
        array = array[0] if array.shape[0] == 1 and array.ndim > 2 else array
        self.trace.add(f"{self.stem}/{name}", array.reshape(shape) if shape else array)

    def output(self, module, name, shape=None):
        def hook(m, args, out):
            value = out if isinstance(out, torch.Tensor) else out[0]
            self.record(name, value, shape)

        module.register_forward_hook(hook)

    def input(self, module, name, shape=None):
        module.register_forward_pre_hook(lambda m, args: self.record(name, args[0], shape))

    def listen_to_tower(self, tower):
        self.output(tower.patch_embedder.input_proj, "v.patch_embd")
        self.output(tower.patch_embedder, "v.pos_embd")
        for i, layer in enumerate(tower.encoder.layers):
            self.output(layer.input_layernorm, f"v.attn_norm-{i}")
            self.output(layer.self_attn.v_norm, f"v.Vcur_normed-{i}")
            self.input(layer.self_attn.o_proj, f"v.kqv_out-{i}")
            self.input(layer.pre_feedforward_layernorm, f"v.attn_out-{i}")
            self.output(layer.pre_feedforward_layernorm, f"v.ffn_norm-{i}")
            self.input(layer.mlp.down_proj, f"v.ffn_geglu-{i}")
            self.output(layer.mlp, f"v.ffn_out-{i}")
            self.output(layer, f"v.l_out-{i}")
        self.output(tower.pooler, "v.pooled")
        if tower.config.standardize:
            tower.register_forward_hook(lambda m, a, out: self.record("v.std_scaled", out.last_hidden_state))

    def listen_to_conformer(self, tower):
        for i, layer in enumerate(
            [tower.subsample_conv_projection.layer0, tower.subsample_conv_projection.layer1]
        ):
            layer.register_forward_hook(
                lambda m, a, out, i=i: self.record(f"a.conv-{i}", out[0].permute(0, 2, 3, 1))
            )
        self.output(tower.subsample_conv_projection.input_proj_linear, "a.inp")
        D = (-1, tower.config.hidden_size)
        for i, layer in enumerate(tower.layers):
            heads = (-1, layer.self_attn.num_heads, layer.self_attn.head_dim)
            self.output(layer.feed_forward1, f"a.ffn_out-{i}", D)
            for name in "qkv":
                self.output(getattr(layer.self_attn, f"{name}_proj"), f"a.{name.upper()}cur-{i}", heads)
            self.input(layer.self_attn.post, f"a.kqv_out-{i}", D)
            self.input(layer.lconv1d, f"a.attn_out-{i}", D)
            # inputs and outputs of in-place additions are the sums themselves
            self.output(layer.lconv1d, f"a.conv_out-{i}", D)
            self.output(layer.feed_forward2, f"a.ffn_out_1-{i}", D)
            self.output(layer, f"a.l_out-{i}", D)
        self.output(tower.output_proj, "a.out")


def encode(modules, is_unified: bool, path: Path, dtype: torch.dtype) -> None:
    if path.suffix == ".png":
        patches, places = cut(np.asarray(PIL.Image.open(path)))
        patches, places = torch.from_numpy(patches)[None].to(dtype), torch.from_numpy(places)[None]
        if is_unified:
            modules["vision_embedder"](*merge_patches(patches, places))
        else:
            out = modules["vision_tower"](pixel_values=patches, pixel_position_ids=places)
            modules["embed_vision"](out.last_hidden_state)
        return
    samples = read_wav(path)
    if is_unified:
        frames = np.pad(samples, (0, -len(samples) % 640)).reshape(-1, 640)
        modules["embed_audio"](torch.from_numpy(frames).to(dtype))
    else:
        mel = torch.from_numpy(mel_of(samples)).to(dtype)[None]
        out = modules["audio_tower"](mel, torch.ones(1, mel.shape[1], dtype=torch.bool))
        modules["embed_audio"](out.last_hidden_state)


def spread(n: int, k: int) -> np.ndarray:
    """k of the numbers 0 .. n-1, or all of them."""
    return np.unique(np.linspace(0, n - 1, min(n, k or n)).astype(int))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="an mmproj GGUF with llama.cpp's names")
    parser.add_argument(
        "inputs", type=Path, nargs="+", help="canvases (.png) and float32 16 kHz sounds (.wav)"
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--names", default="*", help="patterns of the names to keep, with commas between")
    parser.add_argument("--rows", type=int, default=0, help="rows to keep of each array, evenly spread (all)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    trace = protocol.Trace(args.names)
    with float32_means(dtype), torch.no_grad():
        keys, weights = read(args.model)
        modules = build(keys, weights, dtype)
        listener = Listener(modules, trace)
        for path in args.inputs:
            listener.stem = path.stem
            if path.suffix == ".png" or "embed_audio" in modules:
                encode(modules, is_unified(keys), path, dtype)
    arrays = {name: array[spread(len(array), args.rows)] for name, array in trace.arrays().items()}
    meta = {
        "oracle": "hf_media",
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "command": protocol.command_line(),
        "model": args.model.name,
        "sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "inputs": [path.stem for path in args.inputs],
        "dtype": args.dtype,
        "rows": args.rows,
        "numpy": np.__version__,
    }
    arrays[protocol.META] = np.array(json.dumps(meta))
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {len(arrays) - 1} arrays, {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
