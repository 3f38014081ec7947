"""The tensors of the encoders: names, shapes, and how files of three makes become one set of names.

llama.cpp's converter writes an mmproj GGUF; those names are used here.  Ollama keeps the same tensors under
other names in the file of the model itself.  Hugging Face checkpoints have names of their own, pixels of a
patch in another order, and no metadata.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as with_default
from pathlib import Path
from typing import Any

import numpy as np

from quant import QTensor, open_gguf
from quant.safetensors import looks_like_safetensors, open_safetensors
from refimpl.config import Config
from refimpl.config.keys import Keys
from refimpl.config.media import AudioConfig, VisionConfig, audio_config, vision_config

GET_AGAIN = "Was it converted completely? Get it again"


@dataclass(frozen=True)
class ClippedLinear:
    """A matrix, and the bounds that its input and its output are clipped to."""

    weight: QTensor
    bounds: tuple[float, float, float, float] | None  # input low, high; output low, high

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


# Fields of a layer: name, shape in letters, and whether it is a clipped matrix.  Letters: those of the
# configurations; D width, N heads, H head size, F hidden width, K kernel.
VISION_LAYER = (
    ("ln1", "D", False),
    ("attn_q", "N*H D", True),
    ("attn_k", "N*H D", True),
    ("attn_v", "N*H D", True),
    ("attn_q_norm", "H", False),
    ("attn_k_norm", "H", False),
    ("attn_out", "D N*H", True),
    ("attn_post_norm", "D", False),
    ("ln2", "D", False),
    ("ffn_gate", "F D", True),
    ("ffn_up", "F D", True),
    ("ffn_down", "D F", True),
    ("ffn_post_norm", "D", False),
)
AUDIO_LAYER = (
    ("ffn_norm", "D", False),
    ("ffn_up", "F D", True),
    ("ffn_down", "D F", True),
    ("ffn_post_norm", "D", False),
    ("attn_pre_norm", "D", False),
    ("attn_q", "N*H D", True),
    ("attn_k", "N*H D", True),
    ("attn_v", "N*H D", True),
    ("attn_k_rel", "N*H D", False),
    ("per_dim_scale", "H", False),
    ("attn_out", "D N*H", True),
    ("attn_post_norm", "D", False),
    ("conv_norm", "D", False),  # before the convolution; transformers calls it pre_layer_norm
    ("conv_pw1", "2*D D", True),
    ("conv_dw", "D K", False),
    ("norm_conv", "D", False),  # after it; transformers calls this one conv_norm
    ("conv_pw2", "D D", True),
    ("ffn_norm_1", "D", False),
    ("ffn_up_1", "F D", True),
    ("ffn_down_1", "D F", True),
    ("ffn_post_norm_1", "D", False),
    ("ln2", "D", False),  # of the whole layer
)


@dataclass(frozen=True)
class VisionWeights:
    """gemma4v.  Layers are {field: f32[..] | ClippedLinear}."""

    patch_embd: QTensor  # [D, 3*p*p], channel first
    position_embd: QTensor  # [2, positions, D]: columns, then rows
    layers: tuple[dict[str, Any], ...]
    std_bias: np.ndarray | None
    std_scale: np.ndarray | None
    input_projection: QTensor


@dataclass(frozen=True)
class UnifiedVisionWeights:
    """gemma4uv."""

    norms: tuple[tuple[np.ndarray, np.ndarray], ...]  # three of (weight, bias)
    patch_embd: QTensor  # [D, 3*48*48], channel first
    patch_bias: np.ndarray
    position_embd: QTensor  # [2, positions, D]
    input_projection: QTensor


@dataclass(frozen=True)
class AudioWeights:
    """gemma4a."""

    convs: tuple[np.ndarray, ...]  # f32[channels, channels before, 3, 3]
    conv_norms: tuple[np.ndarray, ...]
    inp: QTensor
    layers: tuple[dict[str, Any], ...]
    out: QTensor
    out_bias: np.ndarray
    input_projection: QTensor


@dataclass(frozen=True)
class UnifiedAudioWeights:
    """gemma4ua."""

    input_projection: QTensor


@dataclass(frozen=True)
class Media:
    """What a projector file holds: the encoders, each a configuration and weights, or None."""

    path: Path
    vision: tuple[VisionConfig, Any] | None
    audio: tuple[AudioConfig, Any] | None
    notes: tuple[str, ...] = ()  # what the user should know
    tensors: Mapping[str, QTensor] = with_default(
        default_factory=dict, repr=False
    )  # all of the encoders, by name

    def check(self, config: Config, model_path: Any) -> None:
        """Refuse a text model that these encoders were not made for."""
        for what, encoder in (("images", self.vision), ("sounds", self.audio)):
            if encoder is not None and encoder[0].out_dim != config.model_dim:
                raise ValueError(
                    f"{self.path}: soft tokens of {what} are {encoder[0].out_dim} wide, expected "
                    f"{config.model_dim} as the embeddings of {model_path}. Use the projector of that model"
                )

    def need_vision(self) -> tuple[VisionConfig, Any]:
        if self.vision is None:
            raise ValueError(
                f"{self.path}: no encoder of images in it, expected one for an image or a video. "
                "Use the projector of a model that sees"
            )
        return self.vision

    def need_audio(self) -> tuple[AudioConfig, Any]:
        if self.audio is None:
            raise ValueError(
                f"{self.path}: no encoder of sounds in it, expected one. Only E2B, E4B and 12B hear"
            )
        return self.audio


def load_media(path: str | os.PathLike[str]) -> Media:
    """Open a projector: an mmproj GGUF, a file of Ollama's, or a safetensors shard with a vision tower.

    Raises:
        ValueError: one line that names the file and the tensor or key
    """
    source = _open(Path(path))
    seeing, hearing = vision_config(source.keys, source.tensors), audio_config(source.keys, source.tensors)
    if seeing is None and hearing is None:
        raise ValueError(
            f"{path}: no encoder in it, expected v.patch_embd.weight or mm.a.input_projection.weight. "
            f"{GET_AGAIN}"
        )
    _refuse_unknown(source)
    vision = None if seeing is None else (seeing, _vision(source, seeing))
    audio = None if hearing is None else (hearing, _audio(source, hearing))
    return Media(source.path, vision, audio, source.notes, source.tensors)


def is_projector(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it holds encoders and no text model; files that do not open are none."""
    head = _head(Path(path))
    if head[:4] != b"GGUF":
        return looks_like_safetensors(head)
    try:
        return open_gguf(path).metadata.get("general.architecture") == "clip"
    except (OSError, ValueError):
        return False


# -- three makes of files ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    path: Path
    keys: Keys
    tensors: dict[str, QTensor]  # llama.cpp's names
    notes: tuple[str, ...] = ()


def _head(path: Path) -> bytes:
    """The first nine bytes of a file, or none: the reader says what is wrong. A pipe may have no writer."""
    try:
        if path.is_file():
            with open(path, "rb") as stream:
                return stream.read(9)
    except OSError:
        pass
    return b""


def _open(path: Path) -> _Source:
    head = _head(path)
    if path.suffix == ".safetensors" or (head[:4] != b"GGUF" and looks_like_safetensors(head)):
        return _from_checkpoint(path)
    file = open_gguf(path)
    encoders = {n: t for n, t in file.tensors.items() if n.startswith(("v.", "a.", "mm."))}
    architecture = file.metadata.get("general.architecture")
    if architecture == "clip" or (architecture == "gemma4" and encoders):
        return _Source(path, Keys(file.metadata, architecture, path), _respell(encoders))
    if str(architecture).startswith("gemma4"):
        raise ValueError(
            f"{path}: a {architecture} model of text, expected its encoders (general.architecture 'clip', "
            "mostly in a file named mmproj-...gguf). Are the two files swapped?"
        )
    raise ValueError(
        f"{path}: key 'general.architecture': got {architecture!r}, expected 'clip'. "
        "Name the mmproj file of the model"
    )


# Ollama's names, where they differ.  One look-up each: `ln2` is the result of one and the key of another.
_OLLAMA_LAYER = {
    "ln1": "attn_pre_norm",
    "ln2": "attn_post_norm",
    "layer_pre_norm": "ln2",
    "linear_pos": "attn_k_rel",
}
_OLLAMA = {"mm.a.fc": "a.pre_encode.out", "a.pre_encode.out": "a.input_projection"}


def _respell(tensors: dict[str, QTensor]) -> dict[str, QTensor]:
    if not any(name.startswith("mm.a.fc.") for name in tensors):
        return tensors
    out = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"(a\.blk\.\d+\.)(\w+)", base)
        base = layer[1] + _OLLAMA_LAYER.get(layer[2], layer[2]) if layer else _OLLAMA.get(base, base)
        out[f"{base}.{kind}"] = tensor
    return out


_CHECKPOINT_LAYER = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CHECKPOINT = {
    "vision_tower.patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _from_checkpoint(path: Path) -> _Source:
    """A shard with names like `model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight`."""
    file = open_safetensors(path)
    tensors: dict[str, QTensor] = {}
    for name, tensor in file.tensors.items():
        short = re.sub(r"^.*?(?=(vision_tower|embed_vision)\.)", "", name)
        layer = re.fullmatch(r"vision_tower\.encoder\.layers\.(\d+)\.(.+)\.(\w+)", short)
        if short in _CHECKPOINT:
            tensors[_CHECKPOINT[short]] = tensor
        elif layer and (field := _CHECKPOINT_LAYER.get(layer[2].removesuffix(".linear"))):
            tensors[f"v.blk.{layer[1]}.{field}.{layer[3]}"] = tensor
    if "v.patch_embd.weight" not in tensors:
        raise ValueError(
            f"{path}: no vision_tower.patch_embedder in it, expected a shard that holds the vision tower. "
            "Name another shard of the checkpoint, or an mmproj GGUF"
        )
    tensors["v.patch_embd.weight"] = _channel_first(tensors["v.patch_embd.weight"])
    metadata, notes = _checkpoint_config(path, tensors["v.patch_embd.weight"].shape[0])
    return _Source(path, Keys(metadata, "clip", path), tensors, notes)


def _channel_first(patch_embd: QTensor) -> QTensor:
    """[D, p*p*3], colors side by side -> [D, 3, p, p], as GGUF files have it."""
    D, n = patch_embd.shape if patch_embd.ndim == 2 else (0, 0)
    p = math.isqrt(n // 3)
    if not n or 3 * p * p != n:
        raise ValueError(
            f"{patch_embd.name}: shape {list(patch_embd.shape)}, expected [D, 3 p p]. {GET_AGAIN}"
        )
    width = patch_embd.format.block_bytes
    data = np.ascontiguousarray(patch_embd.data).reshape(D, p, p, 3, width).transpose(0, 3, 1, 2, 4)
    return QTensor(patch_embd.format, (D, 3, p, p), data.reshape(D, 3, p, p * width), patch_embd.name)


def _checkpoint_config(path: Path, dim: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Pooling and epsilon from the config.json beside a shard, if it speaks of this tower."""
    try:
        vision = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))["vision_config"]
        if vision["hidden_size"] != dim:
            raise ValueError(f"it is for a tower of width {vision['hidden_size']}, this one has {dim}")
        return {
            "clip.vision.projector.scale_factor": vision.get("pooling_kernel_size", 3),
            "clip.vision.attention.layer_norm_epsilon": vision.get("rms_norm_eps", 1e-6),
        }, ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())[:120]
        return {}, (
            f"{path}: config.json beside it was not used ({why}); pooling 3 and epsilon 1e-6 are assumed, as "
            "in every published Gemma 4",
        )


# Tensors that some engines read and that would change the result.
_UNKNOWN = re.compile(
    r"(v|a)\.blk\.\d+\.(out_scale|per_dim_k_scale|attn_qkv|attn_sinks|ls\d|\w+\.bias).*|mm\.(a\.)?soft_emb_norm.*"
    r"|v\.(class_embd|post_ln|pre_ln).*|mm\.(a\.)?input_projection\.bias|a\.conv1d\.\d\.bias"
    r"|a\.input_projection\.bias"
)


def _refuse_unknown(source: _Source) -> None:
    for name in source.tensors:
        if _UNKNOWN.fullmatch(name):
            raise ValueError(
                f"{source.path}: tensor {name}: got one that no Gemma 4 has, expected none, as nothing "
                "would apply it. Is it the projector of another model?"
            )


# -- taking tensors ---------------------------------------------------------------------------------------


class _Taker:
    """Takes tensors by name, with their shapes checked."""

    def __init__(self, source: _Source, letters: Mapping[str, int]) -> None:
        self.source, self.letters = source, letters

    def take(self, name: str, shape: str) -> QTensor:
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise ValueError(
                f"{self.source.path}: tensor {name} is missing, expected in every encoder of this kind. "
                f"{GET_AGAIN}"
            )
        expected = tuple(
            math.prod(self.letters[f] if f in self.letters else int(f) for f in axis.split("*"))
            for axis in shape.split()
        )
        if tensor.shape != expected:
            raise ValueError(
                f"{self.source.path}: {name}: shape {list(tensor.shape)}, expected "
                f"[{', '.join(shape.split())}] = {list(expected)}. Weights and metadata of different models? "
                "Convert the projector again"
            )
        return tensor

    def vector(self, name: str, shape: str) -> np.ndarray:
        return self.take(name, shape).dequantize(np.float32)

    def flat(self, name: str, shape: str) -> QTensor:
        """A convolution kernel as a matrix: all axes but the first become one."""
        if self.source.tensors.get(name) is not None and self.source.tensors[name].ndim == 2:
            first, *others = shape.split()
            return self.take(name, f"{first} {'*'.join(others)}")
        tensor = self.take(name, shape)
        if tensor.format.block_size != 1:
            raise ValueError(
                f"{self.source.path}: {name}: format {tensor.format.name}, expected F32, F16 or BF16. "
                "Convert the projector again"
            )
        rows = tensor.shape[0]
        data = np.ascontiguousarray(tensor.data).reshape(rows, -1)
        return QTensor(tensor.format, (rows, math.prod(tensor.shape[1:])), data, tensor.name)

    def layer(self, prefix: str, fields: tuple[tuple[str, str, bool], ...]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for field, shape, clipped in fields:
            name = f"{prefix}.{field}"
            if clipped:
                out[field] = ClippedLinear(self.take(f"{name}.weight", shape), self.bounds(name))
            elif len(shape.split()) == 1 or field == "conv_dw":
                out[field] = self.vector(f"{name}.weight", shape)
            else:
                out[field] = self.take(f"{name}.weight", shape)
        return out

    def bounds(self, name: str) -> tuple[float, float, float, float] | None:
        """Four numbers, or none of them."""
        there = [bound for bound in _BOUNDS if f"{name}.{bound}" in self.source.tensors]
        if not there:
            return None
        if len(there) < len(_BOUNDS):
            lost = next(bound for bound in _BOUNDS if bound not in there)
            raise ValueError(
                f"{self.source.path}: tensor {name}.{lost} is missing, expected beside {name}.{there[0]}. "
                f"{GET_AGAIN}"
            )
        low, high, out_low, out_high = (float(self.vector(f"{name}.{bound}", "1")[0]) for bound in _BOUNDS)
        if not (low <= high and out_low <= out_high):  # NaN is refused too
            raise ValueError(
                f"{self.source.path}: {name}: clipped to {low:g} .. {high:g} and {out_low:g} .. {out_high:g}"
                f", expected lower bounds first. {GET_AGAIN}"
            )
        return low, high, out_low, out_high


def _vision(source: _Source, config: VisionConfig) -> VisionWeights | UnifiedVisionWeights:
    letters = {
        "D": config.dim, "N": config.n_heads, "H": config.head_dim, "F": config.ffn_dim, "p": config.patch,
        "S": config.n_positions, "O": config.out_dim,
    }  # fmt: skip
    taker = _Taker(source, letters)
    patch_embd = taker.flat("v.patch_embd.weight", "D 3 p p")
    position_embd = taker.take("v.position_embd.weight", "2 S D")
    projection = taker.take("mm.input_projection.weight", "O D")
    if config.kind == "gemma4uv":
        widths = ("3*p*p", "D", "D")
        norms = tuple(
            (taker.vector(f"v.patch_norm.{i}.weight", w), taker.vector(f"v.patch_norm.{i}.bias", w))
            for i, w in enumerate(widths, start=1)
        )
        bias = taker.vector("v.patch_embd.bias", "D")
        return UnifiedVisionWeights(norms, patch_embd, bias, position_embd, projection)
    layers = tuple(taker.layer(f"v.blk.{i}", VISION_LAYER) for i in range(config.n_layers))
    std = [taker.vector(f"v.std_{part}", "D") if config.standardize else None for part in ("bias", "scale")]
    return VisionWeights(patch_embd, position_embd, layers, std[0], std[1], projection)


def _audio(source: _Source, config: AudioConfig) -> AudioWeights | UnifiedAudioWeights:
    letters = {
        "D": config.dim, "N": config.n_heads, "H": config.head_dim, "F": config.ffn_dim, "K": config.kernel,
        "c": config.channels[0], "d": config.channels[1], "P": config.head_out, "O": config.out_dim,
    }  # fmt: skip
    taker = _Taker(source, letters)
    projection = taker.take("mm.a.input_projection.weight", "O P")
    if config.kind == "gemma4ua":
        return UnifiedAudioWeights(projection)
    return AudioWeights(
        convs=(
            taker.vector("a.conv1d.0.weight", "c 1 3 3"),
            taker.vector("a.conv1d.1.weight", "d c 3 3"),
        ),
        conv_norms=(taker.vector("a.conv1d.0.norm.weight", "c"), taker.vector("a.conv1d.1.norm.weight", "d")),
        inp=taker.take("a.input_projection.weight", "D 32*d"),
        layers=tuple(taker.layer(f"a.blk.{i}", AUDIO_LAYER) for i in range(config.n_layers)),
        out=taker.take("a.pre_encode.out.weight", "P D"),
        out_bias=taker.vector("a.pre_encode.out.bias", "P"),
        input_projection=projection,
    )
