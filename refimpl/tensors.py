"""The tensor table: what every weight is called here and in a GGUF file, its shape, and who needs it.

This is the only place that knows a tensor's names.  A field here is named like the tensor in the file; the
aliases are those of other converters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quant import GGUFFile, QTensor

if TYPE_CHECKING:
    from refimpl.config import Config, LayerConfig

ALWAYS, OPTIONAL = "always", "optional"
PER_LAYER, OWNS_KV, OWNS_V, EXPERTS = "per-layer embeddings", "own keys", "own values", "experts"

NEEDED: dict[str, Callable[[Any], bool]] = {
    ALWAYS: lambda layer: True,
    PER_LAYER: lambda layer: layer.per_layer_dim > 0,
    OWNS_KV: lambda layer: layer.owns_kv,
    OWNS_V: lambda layer: layer.owns_kv and not layer.k_is_v,
    EXPERTS: lambda layer: layer.moe is not None,
}


ENCODERS = ("v.", "a.", "mm.")  # tensors of media_tensors.py, which some files hold beside the text model


@dataclass(frozen=True)
class TensorSpec:
    """One row of the table."""

    field: str
    names: tuple[str, ...]  # in a file, the usual name first; {i} is the layer
    shape: str  # letters of docs/glossary.md, one word per axis
    needed: str = ALWAYS
    per_expert: tuple[str, ...] = ()  # names of the single matrices, where a file keeps each expert {e} apart


def _model(field: str, shape: str, needed: str = ALWAYS) -> TensorSpec:
    return TensorSpec(field, (f"{field}.weight",), shape, needed)


def _layer(field: str, shape: str, needed: str = ALWAYS, *, aliases: tuple[str, ...] = ()) -> TensorSpec:
    names = tuple(f"blk.{{i}}.{name}" for name in (f"{field}.weight", *aliases))
    return TensorSpec(field, names, shape, needed)


def _experts(field: str, single: str, shape: str) -> TensorSpec:
    per_expert = (f"blk.{{i}}.{field}.{{e}}.weight", f"blk.{{i}}.{single}.{{e}}.weight")
    return TensorSpec(field, (f"blk.{{i}}.{field}.weight",), shape, EXPERTS, per_expert)


MODEL_TENSORS = (
    _model("token_embd", "V D"),
    _model("output", "V D", OPTIONAL),  # tied to token_embd when missing, as in all published models
    _model("output_norm", "D"),
    _model("per_layer_token_embd", "V L*P", PER_LAYER),
    _model("per_layer_model_proj", "L*P D", PER_LAYER),
    _model("per_layer_proj_norm", "P", PER_LAYER),
    _model("rope_freqs", "H/2", OPTIONAL),  # read by refimpl.config
)

LAYER_TENSORS = (
    _layer("attn_norm", "D"),
    _layer("attn_q", "N*H D"),
    _layer("attn_k", "K*H D", OWNS_KV),
    _layer("attn_v", "K*H D", OWNS_V),
    _layer("attn_output", "D N*H"),
    _layer("attn_q_norm", "H"),
    _layer("attn_k_norm", "H", OWNS_KV),
    _layer("post_attention_norm", "D", aliases=("attn_post_norm.weight",)),
    _layer("ffn_norm", "D"),
    _layer("ffn_gate", "F D"),
    _layer("ffn_up", "F D"),
    _layer("ffn_down", "D F"),
    _layer("post_ffw_norm", "D", aliases=("ffn_post_norm.weight",)),
    _layer("ffn_gate_inp", "E D", EXPERTS),
    TensorSpec("ffn_gate_inp_scale", ("blk.{i}.ffn_gate_inp.scale",), "D", EXPERTS),
    _layer("pre_ffw_norm_2", "D", EXPERTS, aliases=("ffn_pre_norm_2.weight",)),
    _layer("post_ffw_norm_1", "D", EXPERTS, aliases=("ffn_post_norm_1.weight",)),
    _layer("post_ffw_norm_2", "D", EXPERTS, aliases=("ffn_post_norm_2.weight",)),
    _experts("ffn_gate_exps", "ffn_gate", "E Fe D"),
    _experts("ffn_up_exps", "ffn_up", "E Fe D"),
    _experts("ffn_down_exps", "ffn_down", "E D Fe"),
    TensorSpec(
        "ffn_down_exps_scale",
        ("blk.{i}.ffn_down_exps.scale", "blk.{i}.ffn_gate_inp.per_expert_scale"),
        "E",
        EXPERTS,
    ),
    _layer("inp_gate", "P D", PER_LAYER),
    _layer("proj", "D P", PER_LAYER),
    _layer("post_norm", "D", PER_LAYER),
    _layer("layer_output_scale", "1", OPTIONAL),  # 1 when missing
)

# Tensors that hold the rows of several others, one after the other.
FUSED_TENSORS = (
    (_layer("attn_qkv", "N*H+2*K*H D"), ("attn_q", "attn_k", "attn_v")),
    (_layer("ffn_gate_up", "2*F D"), ("ffn_gate", "ffn_up")),
    (_experts("ffn_gate_up_exps", "ffn_gate_up", "E 2*Fe D"), ("ffn_gate_exps", "ffn_up_exps")),
)

SPECS = {spec.field: spec for spec in (*MODEL_TENSORS, *LAYER_TENSORS, *(spec for spec, _ in FUSED_TENSORS))}


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: matrices as QTensors, vectors as f32 arrays; None where a layer has none."""

    attn_norm: np.ndarray
    attn_q: QTensor
    attn_k: QTensor | None
    attn_v: QTensor | None
    attn_output: QTensor
    attn_q_norm: np.ndarray
    attn_k_norm: np.ndarray | None
    post_attention_norm: np.ndarray
    ffn_norm: np.ndarray
    ffn_gate: QTensor
    ffn_up: QTensor
    ffn_down: QTensor
    post_ffw_norm: np.ndarray
    ffn_gate_inp: QTensor | None
    ffn_gate_inp_scale: np.ndarray | None
    pre_ffw_norm_2: np.ndarray | None
    post_ffw_norm_1: np.ndarray | None
    post_ffw_norm_2: np.ndarray | None
    ffn_gate_exps: QTensor | None
    ffn_up_exps: QTensor | None
    ffn_down_exps: QTensor | None
    ffn_down_exps_scale: np.ndarray | None
    inp_gate: QTensor | None
    proj: QTensor | None
    post_norm: np.ndarray | None
    layer_output_scale: float


@dataclass(frozen=True)
class Weights:
    """The weights of a model."""

    token_embd: QTensor
    output: QTensor  # the same object as token_embd when tied
    output_norm: np.ndarray
    per_layer_token_embd: QTensor | None
    per_layer_model_proj: QTensor | None
    per_layer_proj_norm: np.ndarray | None
    layers: tuple[LayerWeights, ...]
    unused: tuple[str, ...] = ()  # tensors of the file that nobody reads


def find(tensors: Mapping[str, QTensor], field: str, i: int | None = None) -> QTensor | None:
    """The tensor of a field (of layer i) under any of its names; None when there is none of them.

    Notes:
        Experts that a file keeps apart are stacked.  They are the only weights that are ever copied.
    """
    names = _names_in(tensors, field, i)
    if len(names) < 2:
        return tensors[names[0]] if names else None
    parts = [tensors[name] for name in names]
    first = parts[0]
    for part in parts:
        if part.format is not first.format or part.shape != first.shape:
            raise ValueError(
                f"{part.name}: got {part.format.name} {list(part.shape)}, expected {first.format.name} "
                f"{list(first.shape)} as in {first.name}. Experts of a layer have one form: convert again"
            )
    return QTensor(
        first.format, (len(parts), *first.shape), np.stack([part.data for part in parts]), first.name
    )


def shape_of(tensors: Mapping[str, QTensor], field: str, i: int | None = None) -> tuple[int, ...] | None:
    """The shape of `find`'s answer, without stacking experts."""
    names = _names_in(tensors, field, i)
    if not names:
        return None
    shape = tensors[names[0]].shape
    return shape if len(names) == 1 and names[0] in _whole_names(field, i) else (len(names), *shape)


def _whole_names(field: str, i: int | None) -> list[str]:
    return [name.format(i=i) for name in SPECS[field].names]


def _names_in(tensors: Mapping[str, QTensor], field: str, i: int | None) -> list[str]:
    """The name under which a file has this field, or the names of its single experts, or nothing."""
    for name in _whole_names(field, i):
        if name in tensors:
            return [name]
    for single in SPECS[field].per_expert:
        names: list[str] = []
        while (name := single.format(i=i, e=len(names))) in tensors:
            names.append(name)
        if names:
            return names
    return []


def missing(path: Any, field: str, i: int | None, why: str) -> ValueError:
    """The error for a tensor that a model cannot do without."""
    first, *others = _whole_names(field, i)
    others += [_whole_names(fused.field, i)[0] for fused, parts in FUSED_TENSORS if field in parts]
    also = f" (and so is {', '.join(others)})" if others else ""
    return ValueError(
        f"{path}: tensor {first} is missing{also}, expected because {why}. "
        "Was this gemma4 model converted completely? Get it again"
    )


def load_weights(file: GGUFFile, config: Config) -> Weights:
    """Take the tensors of the table out of a file, as views, with their shapes checked.

    Raises:
        ValueError: one line that names the missing or misshapen tensor
    """
    loader = _Loader(file, config)
    model = loader.take_all(MODEL_TENSORS, None)
    layers = tuple(LayerWeights(**loader.take_all(LAYER_TENSORS, layer)) for layer in config.layers)
    del model["rope_freqs"]
    model["output"] = model["output"] or model["token_embd"]
    return Weights(**model, layers=layers, unused=loader.unused())


class _Loader:
    """Takes tensors, and knows in the end which ones nobody took."""

    def __init__(self, file: GGUFFile, config: Config) -> None:
        self.file, self.config = file, config
        self.seen: set[str] = set()
        self.fused: dict[str, QTensor | None] = {}  # so that experts kept apart are stacked once

    def take_all(self, specs: tuple[TensorSpec, ...], layer: LayerConfig | None) -> dict[str, Any]:
        """The leaves of one level of the tree, by field."""
        leaves: dict[str, Any] = {}
        for spec in specs:
            tensor = self._take(spec, layer)
            leaves[spec.field] = tensor
            if tensor is not None and tensor.ndim == 1:
                leaves[spec.field] = tensor.dequantize(np.float32)
        if layer is not None:
            scale = leaves["layer_output_scale"]
            leaves["layer_output_scale"] = 1.0 if scale is None else float(scale[0])
        return leaves

    def _take(self, spec: TensorSpec, layer: LayerConfig | None) -> QTensor | None:
        i = None if layer is None else layer.index
        names = _names_in(self.file.tensors, spec.field, i)
        if spec.needed != OPTIONAL and not NEEDED[spec.needed](layer or self.config):
            if spec.needed in (OWNS_KV, OWNS_V) and layer and not layer.owns_kv:
                self.seen.update(names)  # published files have keys in layers that share them: harmless
            return None
        tensor = find(self.file.tensors, spec.field, i) if names else self._part_of_fused(spec, layer)
        if tensor is None:
            if spec.needed == OPTIONAL:
                return None
            raise missing(self.file.path, spec.field, i, self._why(spec, layer))
        self.seen.update(names)
        if spec.field != "rope_freqs":  # checked where it is read
            self._check_shape(tensor, spec.shape, self._shape(spec, layer))
        return tensor

    def _part_of_fused(self, spec: TensorSpec, layer: LayerConfig | None) -> QTensor | None:
        """The rows of one field in a tensor that holds several."""
        for fused, parts in FUSED_TENSORS:
            if spec.field not in parts or layer is None:
                continue
            names = _names_in(self.file.tensors, fused.field, layer.index)
            if not names:
                continue
            self.seen.update(names)
            if names[0] not in self.fused:
                self.fused[names[0]] = find(self.file.tensors, fused.field, layer.index)
            tensor = self.fused[names[0]]
            assert tensor is not None
            shapes = [self._shape(SPECS[part], layer) for part in parts]
            if fused.field == "attn_qkv" and tensor.shape[0] == shapes[0][0] + shapes[1][0]:
                shapes = shapes[:2]  # values are keys, or a layer that shares both
            expected = (*shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1])
            if fused.field != "attn_qkv" or layer.owns_kv or tensor.shape != shapes[0]:
                self._check_shape(tensor, fused.shape, expected)
            start = sum(shape[-2] for shape in shapes[: parts.index(spec.field)])
            return tensor.take_rows(start, start + self._shape(spec, layer)[-2])
        return None

    def _shape(self, spec: TensorSpec, layer: LayerConfig | None) -> tuple[int, ...]:
        """The shape of the table in numbers."""
        config = self.config
        letters = {
            "V": config.vocab_size,
            "D": config.model_dim,
            "L": config.n_layers,
            "P": config.per_layer_dim,
        }
        if layer is not None:
            letters |= {"N": layer.n_heads, "K": layer.n_kv_heads, "H": layer.head_dim, "F": layer.ffn_dim}
            if layer.moe is not None:
                letters |= {"E": layer.moe.n_experts, "Fe": layer.moe.ffn_dim}
        return tuple(
            math.prod(letters[factor] if factor in letters else int(factor) for factor in axis.split("*"))
            for axis in spec.shape.split()
        )

    def _check_shape(self, tensor: QTensor, letters: str, expected: tuple[int, ...]) -> None:
        if tensor.shape != expected:
            raise ValueError(
                f"{self.file.path}: {tensor.name}: shape {list(tensor.shape)}, expected "
                f"[{', '.join(letters.split())}] = {list(expected)}. "
                "Weights and metadata of different models? Convert the model again"
            )

    def _why(self, spec: TensorSpec, layer: LayerConfig | None) -> str:
        where = "" if layer is None else f"layer {layer.index}"
        return {
            ALWAYS: "every model has it",
            PER_LAYER: f"the model has per-layer embeddings of width {self.config.per_layer_dim}",
            OWNS_KV: f"{where} has keys of its own",
            OWNS_V: f"{where} has values of its own",
            EXPERTS: f"{where} has experts",
        }[spec.needed]

    def unused(self) -> tuple[str, ...]:
        """The tensors that nothing reads, after refusing those without which others would be misread."""
        rest = sorted(set(self.file.tensors) - self.seen)
        for name in rest:
            base, _, kind = name.rpartition(".")
            if kind in ("scale", "input_scale") and f"{base}.weight" in self.seen:
                raise ValueError(
                    f"{self.file.path}: tensor {name}: got a scale of {base}.weight, expected none, as "
                    "nothing would apply it. Convert the model to a type whose blocks hold their scales"
                )
        return tuple(name for name in rest if not name.startswith(ENCODERS))
