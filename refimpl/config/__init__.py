"""Config: every fact about a model and each of its layers, settled once, when a file is opened.

Model code asks no questions of its own ("is this a global layer?", "does it share keys?"): it reads the
answer here. That keeps five sizes of Gemma 4 in one composition of ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from quant import GGUFFile


@dataclass(frozen=True, eq=False)
class RopeConfig:
    """How the layers of one kind rotate queries and keys.

    Shapes:
        theta     float     base of the frequencies: 10,000 in sliding layers, 1,000,000 in global ones
        inv_freq  f64[H/2]  radians per position of pair (i, i + H/2): theta^(-2i/H), or 0 for a pair that
                            stands still

    Notes:
        Global layers rotate the first quarter of their pairs only ("proportional" RoPE).  Exponents still
        divide by the whole H, so those pairs turn as fast as if all did.  The slowest of them turns once in
        about 190 positions; the pairs that would turn slower carry content, not position.
    """

    theta: float
    inv_freq: np.ndarray = field(repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RopeConfig):
            return NotImplemented
        return self.theta == other.theta and np.array_equal(self.inv_freq, other.inv_freq)

    def __hash__(self) -> int:
        return hash((self.theta, self.inv_freq.tobytes()))


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a layer, which work beside its dense FFN, not in its place."""

    n_experts: int  # E
    n_active: int  # A, experts that a token uses
    ffn_dim: int  # Fe, the hidden width of one expert


@dataclass(frozen=True)
class LayerConfig:
    """One layer."""

    index: int
    window: int | None  # positions that a query sees, its own included; None: all (a global layer)
    n_heads: int  # N
    n_kv_heads: int  # K; query head n reads key head n // (N/K)
    head_dim: int  # H; global layers of the published models have 512, sliding ones 256
    rope: RopeConfig  # one object for all layers of a kind
    kv_from: int  # the layer whose keys and values this one reads: itself, or an earlier one of its kind
    k_is_v: bool  # the values are the key projection, taken before its norm and rotation; there is no attn_v
    ffn_dim: int  # F; twice as wide in the layers of E2B that share keys
    moe: MoEConfig | None
    per_layer_dim: int  # P; 0 without per-layer embeddings

    @property
    def owns_kv(self) -> bool:
        return self.kv_from == self.index


@dataclass(frozen=True)
class Config:
    """A model."""

    architecture: str
    name: str
    size_label: str
    model_dim: int  # D
    vocab_size: int  # V
    context_len: int  # positions that the model was trained for
    rms_eps: float
    softcap: float | None  # 30 in all published models
    per_layer_dim: int  # P
    layers: tuple[LayerConfig, ...]
    media_attention: Literal[
        "causal", "bidirectional"
    ]  # whether tokens of one image see each other both ways
    repairs: tuple[str, ...] = ()  # where the weights overruled the file's metadata, in words

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def embed_scale(self) -> float:
        """Factor on token embeddings."""
        return math.sqrt(self.model_dim)

    @property
    def per_layer_embed_scale(self) -> float:
        """Factor on rows of the per-layer table."""
        return math.sqrt(self.per_layer_dim)

    @staticmethod
    def from_gguf(file: GGUFFile) -> Config:
        """Read metadata and tensor shapes; no weights but `rope_freqs`.

        Raises:
            ValueError: one line that names the key or the tensor, what was found and what was expected
        """
        from refimpl.config.from_gguf import config_from_gguf  # it needs the classes above

        return config_from_gguf(file)


__all__ = ["Config", "LayerConfig", "MoEConfig", "RopeConfig"]
