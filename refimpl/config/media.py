"""Facts about the encoders of images and sounds.

    clip.vision.projector_type             gemma4v: a tower; gemma4uv: one projection, no tower (12B)
    clip.audio.projector_type              gemma4a: a conformer; gemma4ua: one projection (12B)
    clip.*.embedding_length, block_count, feed_forward_length, attention.head_count
                                           else from the weights; the unified model writes 0
    clip.*.projection_dim                  else the rows of the projection: the width of the text model
    clip.vision.attention.layer_norm_epsilon, projector.scale_factor
                                           1e-6, and 48 pixels by the patch size

No key says what sort of GELU the tower has; converters forget it or write another one.  It is the tanh form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quant import QTensor
from refimpl.config.keys import Keys

TOKEN_PIXELS = 48  # side of the square that a soft token stands for
AUDIO_WINDOW = 12  # frames that a frame of the conformer sees, its own included
AUDIO_CAP = 50.0
# llama.cpp's converter once wrote another number here, and its reader has ignored the key since.
AUDIO_EPS = 1e-6
LAYER_NORM_EPS = 1e-5
VISION_THETA = 100.0

VISION_KINDS = ("gemma4v", "gemma4uv")
AUDIO_KINDS = ("gemma4a", "gemma4ua")
_MAX = 1 << 20


@dataclass(frozen=True)
class VisionConfig:
    """The encoder of images."""

    kind: Literal["gemma4v", "gemma4uv"]
    dim: int  # D, its own width
    out_dim: int  # width of the text model
    n_layers: int
    n_heads: int  # N
    head_dim: int  # H
    ffn_dim: int  # F
    patch: int  # pixels; 16, or 48 without a tower
    pool: int  # patches of a side that become one soft token; 3, or 1
    n_positions: int  # along one side
    eps: float
    standardize: bool  # whether pooled rows are shifted and scaled by learnt vectors


@dataclass(frozen=True)
class AudioConfig:
    """The encoder of sounds."""

    kind: Literal["gemma4a", "gemma4ua"]
    dim: int  # D; without a conformer the samples of a frame, 640
    out_dim: int  # width of the text model
    n_layers: int
    n_heads: int
    head_dim: int
    ffn_dim: int
    channels: tuple[int, int]  # of the two convolutions
    kernel: int  # of the causal convolution
    head_out: int  # width before the projection to the text model


def vision_config(keys: Keys, tensors: Mapping[str, QTensor]) -> VisionConfig | None:
    """None when the file has no vision encoder."""
    patch_embd = tensors.get("v.patch_embd.weight")
    if patch_embd is None:
        return None
    unified = _kind(keys, "vision", VISION_KINDS, "v.patch_norm.1.weight" in tensors) == "gemma4uv"
    count = _Counter(keys, tensors, "vision")
    dim = count("embedding_length", "v.patch_embd.weight", 0)
    out_dim = count("projection_dim", "mm.input_projection.weight", 0)
    positions = tensors.get("v.position_embd.weight")
    n_positions = positions.shape[1] if positions is not None and positions.ndim == 3 else 0
    eps = keys.real("vision.attention.layer_norm_epsilon", 1e-6)
    if unified:
        side = round((patch_embd.shape[-1] // 3) ** 0.5) if patch_embd.ndim == 2 else patch_embd.shape[-1]
        _check_token(keys, side)
        return VisionConfig("gemma4uv", dim, out_dim, 0, 0, 0, 0, side, 1, n_positions, eps, False)
    patch = patch_embd.shape[-1] if patch_embd.ndim == 4 else 16
    pool = keys.integer("vision.projector.scale_factor", TOKEN_PIXELS // patch, high=64)
    _check_token(keys, patch * pool)
    n_layers = count.layers("v.blk.{i}.ln1.weight")
    head_dim = count("attention.key_length", "v.blk.0.attn_q_norm.weight", 0)
    if head_dim % 4:
        raise keys.fault("vision.attention.head_count", f"heads of {head_dim}", "a multiple of 4")
    return VisionConfig(
        kind="gemma4v",
        dim=dim,
        out_dim=out_dim,
        n_layers=n_layers,
        n_heads=count("attention.head_count", "v.blk.0.attn_q.weight", 0, head_dim),
        head_dim=head_dim,
        ffn_dim=count("feed_forward_length", "v.blk.0.ffn_up.weight", 0),
        patch=patch,
        pool=pool,
        n_positions=n_positions,
        eps=eps,
        standardize="v.std_bias" in tensors,
    )


def audio_config(keys: Keys, tensors: Mapping[str, QTensor]) -> AudioConfig | None:
    """None when the file has no audio encoder."""
    if "mm.a.input_projection.weight" not in tensors:
        return None
    unified = _kind(keys, "audio", AUDIO_KINDS, "a.conv1d.0.weight" not in tensors) == "gemma4ua"
    count = _Counter(keys, tensors, "audio")
    out_dim = count("projection_dim", "mm.a.input_projection.weight", 0)
    if unified:
        # The key num_mel_bins says 128 there too; the frame is what the projection takes.
        frame = count("embedding_length", "mm.a.input_projection.weight", 1)
        return AudioConfig("gemma4ua", frame, out_dim, 0, 0, 0, 0, (0, 0), 0, frame)
    dim = count("embedding_length", "a.input_projection.weight", 0)
    head_dim = count("attention.key_length", "a.blk.0.per_dim_scale.weight", 0)
    channels = (count.rows("a.conv1d.0.weight", 0), count.rows("a.conv1d.1.weight", 0))
    return AudioConfig(
        kind="gemma4a",
        dim=dim,
        out_dim=out_dim,
        n_layers=count.layers("a.blk.{i}.ffn_norm.weight"),
        n_heads=count("attention.head_count", "a.blk.0.attn_q.weight", 0, head_dim),
        head_dim=head_dim,
        ffn_dim=count("feed_forward_length", "a.blk.0.ffn_up.weight", 0),
        channels=channels,
        kernel=count.rows("a.blk.0.conv_dw.weight", 1),
        head_out=count.rows("a.pre_encode.out.weight", 0),
    )


def _kind(keys: Keys, part: str, kinds: tuple[str, str], unified: bool) -> str:
    """The projector's type: as the file says, or by its tensors where it does not say."""
    name = f"{part}.projector_type" if keys.has(f"{part}.projector_type") else "projector_type"
    if not keys.has(name):
        return kinds[unified]
    kind = keys.text(f"{keys.architecture}.{name}")
    if kind not in kinds:
        raise keys.fault(
            name, repr(kind)[:40], f"{kinds[0]!r} or {kinds[1]!r}", "It is not of Gemma 4: get the right file"
        )
    if (kind == kinds[1]) != unified:
        raise keys.fault(name, repr(kind), f"{kinds[unified]!r}, by the tensors of the file")
    return kind


def _check_token(keys: Keys, side: int) -> None:
    if side != TOKEN_PIXELS:
        raise keys.fault(
            "vision.projector.scale_factor",
            f"soft tokens of {side} x {side} pixels",
            f"{TOKEN_PIXELS} x {TOKEN_PIXELS}",
        )


class _Counter:
    """Sizes by key, or by the shape of a tensor where the key is missing or 0."""

    def __init__(self, keys: Keys, tensors: Mapping[str, QTensor], part: str) -> None:
        self.keys, self.tensors, self.part = keys, tensors, part

    def __call__(self, key: str, tensor: str, axis: int, unit: int = 1) -> int:
        by_key: int = self.keys.integer(f"{self.part}.{key}", 0, low=0, high=_MAX)
        return by_key or self.rows(tensor, axis) // unit

    def rows(self, tensor: str, axis: int) -> int:
        found = self.tensors.get(tensor)
        if found is None or found.ndim <= axis:
            raise ValueError(
                f"{self.keys.path}: tensor {tensor} is missing or short of axes, expected in every encoder "
                "of this kind. Was the file converted completely? Get it again"
            )
        return found.shape[axis]

    def layers(self, name: str) -> int:
        n = 0
        while name.format(i=n) in self.tensors:
            n += 1
        n = self.keys.integer(f"{self.part}.block_count", 0, low=0, high=1 << 12) or n
        if not n:
            raise self.keys.fault(f"{self.part}.block_count", "0 and no layers in the file", "at least 1")
        return n


__all__ = ["AudioConfig", "VisionConfig", "audio_config", "vision_config"]
