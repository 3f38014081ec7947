"""Projector files with random weights: the encoders of E2B and E4B, in their published geometry.

    path = ensure("E2B:F16")          in the cache folder, written if it is not there

Source: the models' config.json on Hugging Face, and the names and types that llama.cpp's converter writes.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastpath.bench import sizes
from fastpath.bench.sizes import Planned
from fastpath.bench.synthetic import SEED, Draw, check_disk, folder, n_bytes
from quant import QTensor, write_gguf

RECIPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}  # general.file_type
BOUND = 8.0  # of clipped matrices: a few numbers reach it
# the tower of images: width, layers, heads, hidden width, positions along a side
V_DIM, V_LAYERS, V_HEADS, V_FFN, V_POSITIONS = 768, 16, 12, 3072, 10240
# the conformer: width, layers, heads, hidden width, channels of its convolutions, frames of the causal one
A_DIM, A_LAYERS, A_HEADS, A_FFN, A_CHANNELS, A_KERNEL, A_OUT = 1024, 12, 8, 4096, (128, 32), 5, 1536
SIZES = ("E2B", "E4B")


def tensors(width: int) -> Iterator[Planned]:
    """Every tensor for a text model of this width.  Kinds: norm, plain (float32 always), matrix, clipped."""
    head = V_DIM // V_HEADS
    yield "v.patch_embd.weight", (V_DIM, 3, 16, 16), "matrix"
    yield "v.position_embd.weight", (2, V_POSITIONS, V_DIM), "plain"
    for i in range(V_LAYERS):
        b = f"v.blk.{i}."
        yield from ((f"{b}{name}.weight", (V_DIM,), "norm") for name in
                    ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"))  # fmt: skip
        yield from ((f"{b}attn_{name}_norm.weight", (head,), "norm") for name in "qk")
        yield from ((f"{b}attn_{name}.weight", (V_DIM, V_DIM), "clipped") for name in ("q", "k", "v", "out"))
        yield from ((f"{b}ffn_{name}.weight", (V_FFN, V_DIM), "clipped") for name in ("gate", "up"))
        yield f"{b}ffn_down.weight", (V_DIM, V_FFN), "clipped"
    yield "mm.input_projection.weight", (width, V_DIM), "matrix"

    before = (1, A_CHANNELS[0])
    for i in range(2):
        yield f"a.conv1d.{i}.weight", (A_CHANNELS[i], before[i], 3, 3), "plain"
        yield f"a.conv1d.{i}.norm.weight", (A_CHANNELS[i],), "norm"
    yield "a.input_projection.weight", (A_DIM, 32 * A_CHANNELS[1]), "matrix"
    for i in range(A_LAYERS):
        b = f"a.blk.{i}."
        yield from ((f"{b}{name}.weight", (A_DIM,), "norm") for name in
                    ("ffn_norm", "ffn_post_norm", "ffn_norm_1", "ffn_post_norm_1", "attn_pre_norm",
                     "attn_post_norm", "conv_norm", "norm_conv", "ln2"))  # fmt: skip
        yield from ((f"{b}ffn_up{part}.weight", (A_FFN, A_DIM), "clipped") for part in ("", "_1"))
        yield from ((f"{b}ffn_down{part}.weight", (A_DIM, A_FFN), "clipped") for part in ("", "_1"))
        yield from ((f"{b}{name}.weight", (A_DIM, A_DIM), "clipped") for name in
                    ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"))  # fmt: skip
        yield f"{b}attn_k_rel.weight", (A_DIM, A_DIM), "matrix"
        yield f"{b}per_dim_scale.weight", (A_DIM // A_HEADS,), "norm"
        yield f"{b}conv_pw1.weight", (2 * A_DIM, A_DIM), "clipped"
        yield f"{b}conv_dw.weight", (A_DIM, A_KERNEL), "plain"
    yield "a.pre_encode.out.weight", (A_OUT, A_DIM), "matrix"
    yield "a.pre_encode.out.bias", (A_OUT,), "norm"
    yield "mm.a.input_projection.weight", (width, A_OUT), "matrix"


def type_of(recipe: str, planned: Planned) -> str:
    _, shape, kind = planned
    if kind in ("norm", "plain"):
        return "F32"
    return "F16" if recipe == "Q8_0" and shape[-1] % 32 else recipe


def metadata(width: int, name: str, recipe: str) -> dict[str, object]:
    keys: dict[str, object] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": f"synthetic encoders of gemma-4 {name} {recipe}",
        "general.file_type": RECIPES[recipe],
        "clip.has_vision_encoder": True,
        "clip.has_audio_encoder": True,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": 16,
        "clip.vision.image_mean": [0.0, 0.0, 0.0],
        "clip.vision.image_std": [1.0, 1.0, 1.0],
        "clip.audio.num_mel_bins": 128,
    }
    for part, kind, dims in (
        ("vision", "gemma4v", (V_DIM, V_FFN, V_LAYERS, V_HEADS)),
        ("audio", "gemma4a", (A_DIM, A_FFN, A_LAYERS, A_HEADS)),
    ):
        names = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
        keys |= {f"clip.{part}.{key}": value for key, value in zip(names, dims, strict=True)}
        keys[f"clip.{part}.projector_type"] = kind
        keys[f"clip.{part}.projection_dim"] = width
        keys[f"clip.{part}.attention.layer_norm_epsilon"] = sizes.RMS_EPS
    return keys


def parse(spec: str) -> tuple[str, str]:
    """ "E2B:F16" -> its size and recipe."""
    size, _, recipe = spec.partition(":")
    if size not in SIZES or recipe not in RECIPES:
        raise ValueError(
            f"synthetic projector {spec[:40]!r}: expected SIZE:RECIPE such as E2B:F16, SIZE one of "
            f"{', '.join(SIZES)}, RECIPE one of {', '.join(RECIPES)}"
        )
    return size, recipe


def ensure(spec: str, path: Path | None = None) -> Path:
    """The file of synthetic encoders, written if it is not there; the same arguments give the same bytes."""
    size, recipe = parse(spec)
    if path is None:
        path = folder() / f"mmproj-gemma-4-{size}-{recipe}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(size, recipe, path)
    return path


def write(size: str, recipe: str, path: Path) -> None:
    width = sizes.SIZES[size].D
    plan = [(planned, type_of(recipe, planned)) for planned in tensors(width)]
    check_disk(path, sum(n_bytes(planned[1], fmt) for planned, fmt in plan))
    draw, found = Draw(np.random.default_rng(SEED)), []
    for planned, fmt in plan:
        found.append(draw.tensor(planned, fmt))
        if planned[2] == "clipped":
            base = planned[0].removesuffix(".weight")
            for name in ("input", "output"):
                for end, bound in (("min", -BOUND), ("max", BOUND)):
                    found.append(
                        QTensor.from_array(np.array([bound], np.float32), "F32", f"{base}.{name}_{end}")
                    )
    write_gguf(path, metadata(width, size, recipe), found)
