"""The rules by which a GGUF file becomes a Config.

    general.architecture                      must be gemma4
    block_count, attention.head_count,
    attention.sliding_window_pattern          required; the pattern is one truth value per layer or a period
    embedding_length                          or the width of token_embd
    context_length                            131072
    attention.layer_norm_rms_epsilon          1e-6
    attention.sliding_window                  512
    attention.key_length, key_length_swa      512, 256; then the weights decide
    attention.head_count_kv                   one number or one per layer, else head_count; then the weights
    attention.global_head_count_kv            for the global layers, when head_count_kv is one number
    attention.shared_kv_layers                0
    feed_forward_length                       one number or one per layer; then the weights decide
    embedding_length_per_layer_input          or the length of per_layer_proj_norm, else 0: none
    expert_count, expert_used_count,
    expert_feed_forward_length                the first and the last from the weights if need be
    final_logit_softcapping                   no cap when missing or 0, as in transformers (llama.cpp: 30)
    rope.freq_base                            1e6
    rope.freq_base_swa | rope.local.freq_base 1e4
    rope_freqs.weight (a tensor)              divisors of the global layers' frequencies, 1e30 for none; else
    rope.partial_rotary_factor                the part of the pairs that rotates; else all of them do

"The weights decide": converters have written wrong or incomplete sizes, and the shapes of the weights cannot
be wrong. An array with a number for each layer is explicit, though: there a contradiction is an error.  Every
such correction is in Config.repairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quant import GGUFFile
from refimpl.config import Config, LayerConfig, MoEConfig, RopeConfig
from refimpl.config.keys import REQUIRED, Keys
from refimpl.tensors import EXPERTS, LAYER_TENSORS, find, missing, shape_of

ARCHITECTURE = "gemma4"

# Far above every published model; they keep a damaged header from asking for gigabytes.
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_DIM = 1 << 20
MAX_POSITIONS = (1 << 31) - 1

STANDS_STILL = 1e20  # frequency divisors from here on mean "does not rotate"; files have 1e30

OTHER_FILES = {
    "gemma4-assistant": "This is a drafter: it runs beside a gemma4 model. Name that model",
    "clip": "This is the image and audio part of a model: name the file of its text part",
}


def config_from_gguf(file: GGUFFile) -> Config:
    """See Config.from_gguf."""
    keys = _open_keys(file)
    return _Builder(file, keys).config()


def _open_keys(file: GGUFFile) -> Keys:
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        got = "nothing" if architecture is None else repr(architecture)[:60]
        advice = OTHER_FILES.get(str(architecture), "Only Gemma 4 models run here: get one as GGUF")
        raise ValueError(
            f"{file.path}: key 'general.architecture': got {got}, expected {ARCHITECTURE!r}. {advice}"
        )
    return Keys(file.metadata, ARCHITECTURE, file.path)


class _Builder:
    """The steps share the file, its keys and the list of repairs."""

    def __init__(self, file: GGUFFile, keys: Keys) -> None:
        self.file, self.keys = file, keys
        self.repairs: list[str] = []
        self.n_layers: int = keys.integer("block_count", high=MAX_LAYERS)
        self.sliding: list[bool] = keys.sliding("attention.sliding_window_pattern", self.n_layers)
        self.ropes: dict[tuple[bool, int], RopeConfig] = {}

    def config(self) -> Config:
        keys = self.keys
        model_dim = self._width("embedding_length", "token_embd", -1)
        per_layer_dim = self._width("embedding_length_per_layer_input", "per_layer_proj_norm", -1, 0, low=0)
        layers = self._layers(per_layer_dim)
        return Config(
            architecture=ARCHITECTURE,
            name=keys.text("general.name"),
            size_label=keys.text("general.size_label"),
            model_dim=model_dim,
            vocab_size=self._vocab_size(),
            context_len=keys.integer("context_length", 131072, high=MAX_POSITIONS),
            rms_eps=keys.real("attention.layer_norm_rms_epsilon", 1e-6),
            softcap=keys.real("final_logit_softcapping", 0.0) or None,
            per_layer_dim=per_layer_dim,
            layers=layers,
            # No key says it: the sizes with per-layer embeddings are those with causal media (transformers).
            media_attention="causal" if per_layer_dim else "bidirectional",
            repairs=tuple(self.repairs),
        )

    # Sizes of the whole model

    def _width(self, name: str, field: str, axis: int, default: Any = REQUIRED, *, low: int = 1) -> int:
        """A size from its key; from a tensor when the file has no key; else the default."""
        shape = shape_of(self.file.tensors, field)
        if not self.keys.has(name) and shape is not None:
            default = shape[axis]
        return self.keys.integer(name, default, low=low, high=MAX_DIM)

    def _vocab_size(self) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        tokens = tokens if isinstance(tokens, Sequence) else None  # the tokenizer will complain
        table = find(self.file.tensors, "token_embd")
        if table is None:
            n_tokens = REQUIRED if tokens is None else len(tokens)
            return self.keys.integer("vocab_size", n_tokens, high=MAX_POSITIONS)
        if tokens is not None and len(tokens) > table.shape[0]:
            raise ValueError(
                f"{self.file.path}: {table.name}: {table.shape[0]} rows, expected at least "
                f"{len(tokens)}, one per token of tokenizer.ggml.tokens. Convert the model again"
            )
        return int(table.shape[0])

    # Sizes of the layers

    def _layers(self, per_layer_dim: int) -> tuple[LayerConfig, ...]:
        L, keys = self.n_layers, self.keys
        window = keys.integer("attention.sliding_window", 512, high=MAX_POSITIONS)
        n_heads, _ = keys.per_layer("attention.head_count", L, high=MAX_HEADS)
        kv_from = self._kv_from()
        head_dims = [self._head_dim(i, n_heads[i]) for i in range(L)]
        n_kv_heads = self._n_kv_heads(n_heads, head_dims, kv_from)
        k_is_v = self._k_is_v(n_heads, n_kv_heads, head_dims, kv_from)
        ffn_dims = self._ffn_dims()
        moe = self._moe()
        return tuple(
            LayerConfig(
                index=i,
                window=window if self.sliding[i] else None,
                n_heads=n_heads[i],
                n_kv_heads=n_kv_heads[i],
                head_dim=head_dims[i],
                rope=self._rope(i, head_dims[i]),
                kv_from=kv_from[i],
                k_is_v=k_is_v[i],
                ffn_dim=ffn_dims[i],
                moe=moe[i],
                per_layer_dim=per_layer_dim,
            )
            for i in range(L)
        )

    def _kv_from(self) -> list[int]:
        """The last `shared_kv_layers` layers read the keys of the last layer of their kind before them."""
        name = "attention.shared_kv_layers"
        n_owners = self.n_layers - self.keys.integer(name, 0, low=0, high=self.n_layers)
        donors = {self.sliding[i]: i for i in range(n_owners)}
        for i in range(n_owners, self.n_layers):
            if self.sliding[i] not in donors:
                kind = self._kind(i)
                raise self.keys.fault(
                    name,
                    f"{self.n_layers - n_owners}, so that layer {i} ({kind}) shares keys",
                    f"a {kind} layer among the {n_owners} that own theirs",
                    "No layer has keys for it to read: lower the number, or is this a drafter?",
                )
        return list(range(n_owners)) + [donors[self.sliding[i]] for i in range(n_owners, self.n_layers)]

    def _head_dim(self, i: int, n_heads: int) -> int:
        """H of layer i, from attn_q_norm [H] and attn_q [N*H, D] if they agree, else from the metadata."""
        name = "attention.key_length_swa" if self.sliding[i] else "attention.key_length"
        stated = self.keys.integer(name, 256 if self.sliding[i] else 512, low=2, high=MAX_DIM)
        of_norm = self._size("attn_q_norm", i, 0)
        rows = self._size("attn_q", i, 0)
        of_rows = of_norm if rows is None else rows / n_heads  # a fused attn_qkv is checked when it is split
        if of_norm is not None and of_norm == of_rows and of_norm != stated:
            self._repaired(i, f"heads of {of_norm}, not of the {stated} of {name}")
            stated = of_norm
        if stated % 2:
            raise self.keys.fault(name, str(stated), "an even number: heads are rotated in pairs")
        return stated

    def _n_kv_heads(self, n_heads: list[int], head_dims: list[int], kv_from: list[int]) -> list[int]:
        L, name = self.n_layers, "attention.head_count_kv"
        counts, explicit = self.keys.per_layer(name, L, None, high=MAX_HEADS)
        counts = [n_heads[i] if count is None else count for i, count in enumerate(counts)]
        if not explicit:
            of_global = self.keys.integer("attention.global_head_count_kv", 0, low=0, high=MAX_HEADS)
            for i in range(L):
                if of_global and not self.sliding[i]:
                    counts[i] = of_global
                rows = self._size("attn_k", i, 0)
                if rows and rows % head_dims[i] == 0 and rows // head_dims[i] != counts[i]:
                    self._repaired(i, f"{rows // head_dims[i]} key heads, not the {counts[i]} of {name}")
                    counts[i] = rows // head_dims[i]
        for i, donor in enumerate(kv_from):
            counts[i] = counts[donor]
            if head_dims[i] != head_dims[donor]:
                raise ValueError(
                    f"{self.file.path}: layer {i} reads the keys of layer {donor}: got heads of "
                    f"{head_dims[i]}, expected {head_dims[donor]} as there. Check attention.shared_kv_layers"
                )
            if n_heads[i] % counts[i]:
                raise self.keys.fault(
                    name, f"{counts[i]} in layer {i}", f"a divisor of its {n_heads[i]} heads"
                )
        return counts

    def _k_is_v(
        self, n_heads: list[int], n_kv_heads: list[int], head_dims: list[int], kv_from: list[int]
    ) -> list[bool]:
        """Global layers without attn_v take the key projection as values: all of a model's or none."""
        any_k = any_v = False
        for i in range(self.n_layers):
            if not self.sliding[i]:
                fused = self._size("attn_qkv", i, 0)
                any_k |= fused is not None or self._size("attn_k", i, 0) is not None
                any_v |= self._size("attn_v", i, 0) is not None
                any_v |= fused is not None and fused > (n_heads[i] + n_kv_heads[i]) * head_dims[i]
        owns_global = [kv_from[i] == i and not self.sliding[i] for i in range(self.n_layers)]
        return [any_k and not any_v and owns for owns in owns_global]

    def _ffn_dims(self) -> list[int]:
        name = "feed_forward_length"
        dims, explicit = self.keys.per_layer(name, self.n_layers, None, high=MAX_DIM)
        for i, dim in enumerate(dims):
            rows = self._size("ffn_gate", i, 0)
            if rows is None and (fused := self._size("ffn_gate_up", i, 0)) is not None:
                rows = fused // 2
            if rows is None and dim is None:
                self.keys.per_layer(name, self.n_layers, high=MAX_DIM)  # required, then
            elif rows is not None and rows != dim and not explicit:
                if dim is not None:
                    self._repaired(i, f"an FFN of {rows}, not the {dim} of {name}")
                dims[i] = rows
        return dims

    def _moe(self) -> list[MoEConfig | None]:
        """A layer with any tensor of a router or experts has all of them; which ones are there is checked at
        load."""
        L, keys = self.n_layers, self.keys
        widths, _ = keys.per_layer("expert_feed_forward_length", L, None, high=MAX_DIM)
        n_experts = keys.integer("expert_count", 0, low=0, high=MAX_DIM)
        is_moe = [self._has_expert_tensors(i) for i in range(L)]
        if n_experts and not any(is_moe):
            if self.file.tensors:
                raise missing(
                    self.file.path, "ffn_gate_inp", 0, f"the model has {n_experts} experts (expert_count)"
                )
            is_moe = [True] * L
        if not any(is_moe):
            return [None] * L
        if n_experts == 0:
            n_experts = self._size("ffn_gate_inp", is_moe.index(True), 0) or keys.integer(
                "expert_count", high=MAX_DIM
            )
        n_active = keys.integer("expert_used_count", high=n_experts)
        moe: list[MoEConfig | None] = [None] * L
        for i in range(L):
            width = widths[i] or self._size("ffn_down_exps", i, -1)
            if is_moe[i] and width is None:
                keys.per_layer("expert_feed_forward_length", L, high=MAX_DIM)  # required, then
            if is_moe[i] and width is not None:
                moe[i] = MoEConfig(n_experts, n_active, width)
        return moe

    def _has_expert_tensors(self, i: int) -> bool:
        fields = [spec.field for spec in LAYER_TENSORS if spec.needed == EXPERTS] + ["ffn_gate_up_exps"]
        return any(self._size(field, i, 0) is not None for field in fields)

    # Rotation

    def _rope(self, i: int, head_dim: int) -> RopeConfig:
        kind = (self.sliding[i], head_dim)
        if kind not in self.ropes:
            self._check_rotation(i, head_dim)
            keys = self.keys
            if self.sliding[i]:
                theta = keys.real(("rope.freq_base_swa", "rope.local.freq_base"), 1e4, low=1.0)
                divisors = np.ones(head_dim // 2)
            else:
                theta = keys.real("rope.freq_base", 1e6, low=1.0)
                divisors = self._divisors(head_dim)
            inv_freq = theta ** (-2 * np.arange(head_dim // 2) / head_dim) / divisors
            self.ropes[kind] = RopeConfig(theta, np.where(divisors < STANDS_STILL, inv_freq, 0.0))
        return self.ropes[kind]

    def _divisors(self, head_dim: int) -> np.ndarray:
        """f64[H/2] divisors of the frequencies of global layers, from whatever the file has."""
        tensor = find(self.file.tensors, "rope_freqs")
        if tensor is None:
            part = self.keys.real("rope.partial_rotary_factor", 1.0)
            if part > 1:
                raise self.keys.fault("rope.partial_rotary_factor", str(part), "a part, 0 .. 1")
            rotating = int(part * head_dim / 2)
            return np.where(np.arange(head_dim // 2) < rotating, 1.0, 1e30)
        if tensor.shape != (head_dim // 2,):
            raise ValueError(
                f"{self.file.path}: {tensor.name}: shape {list(tensor.shape)}, expected [H/2] = "
                f"[{head_dim // 2}] of the global layers. Convert the model again"
            )
        divisors = tensor.dequantize(np.float64)
        if not (divisors > 0).all():  # NaN is not, either
            raise ValueError(
                f"{self.file.path}: {tensor.name}: got the divisor {divisors.min()}, expected positive "
                "numbers. Convert the model again"
            )
        return divisors

    def _check_rotation(self, i: int, head_dim: int) -> None:
        """Refuse ways to rotate that no Gemma 4 has, rather than rotate wrongly."""
        suffix = "_swa" if self.sliding[i] else ""
        name = f"rope.dimension_count{suffix}"
        n_rotated = self.keys.integer(name, head_dim, low=0, high=MAX_DIM)
        stated = self.keys.integer(f"attention.key_length{suffix}", head_dim, low=2, high=MAX_DIM)
        if n_rotated < head_dim and n_rotated != stated:  # both wrong alike: the whole of a wrong head size
            raise self.keys.fault(
                name,
                f"{n_rotated}",
                f"the head size of layer {i}, {head_dim}",
                "Gemma 4 spells partial rotation as rope_freqs.weight: convert the model again",
            )
        if (factor := self.keys.real("rope.scaling.factor", 1.0)) != 1.0:
            raise self.keys.fault("rope.scaling.factor", str(factor), "1: Gemma 4 does not scale positions")

    # Helpers

    def _size(self, field: str, i: int, axis: int) -> int | None:
        shape = shape_of(self.file.tensors, field, i)
        return None if shape is None else shape[axis]

    def _kind(self, i: int) -> str:
        return "sliding" if self.sliding[i] else "global"

    def _repaired(self, i: int, what: str) -> None:
        self.repairs.append(f"layer {i} ({self._kind(i)}): {what}")
