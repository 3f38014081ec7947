"""Tiny random encoders, made from a seed: the same arguments give the same bytes.

    path = tiny_mmproj.make(folder / "mmproj.gguf", "e2b")
    path = tiny_mmproj.make(folder / "mmproj.gguf", "e2b", ollama=True)
    path = tiny_mmproj.make_checkpoint(folder / "model.safetensors", "26b")

Their widths are those of the tiny text models of the same names.  Every parameter is away from its neutral
value; bounds of clipped matrices cut off a tenth of all values.

Command line: python -m tests.media.tiny_mmproj NAME OUT.gguf
"""

import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

import quant
from tests.tiny import FAMILIES, _bell, _uniform


@dataclass(frozen=True)
class VisionShape:
    D: int
    N: int
    H: int
    F: int
    n_layers: int
    n_positions: int = 40
    clipped: bool = False
    standardize: bool = False


@dataclass(frozen=True)
class AudioShape:
    D: int
    N: int
    F: int
    n_layers: int
    P: int
    channels: tuple[int, int] = (128, 8)
    kernel: int = 5
    clipped: bool = True

    @property
    def H(self) -> int:
        return self.D // self.N


# family: (vision, audio); "unified" has no towers
ENCODERS = {
    "e2b": (VisionShape(D=36, N=3, H=16, F=52, n_layers=2, clipped=True), AudioShape(32, 2, 128, 2, 24)),
    "e4b": (VisionShape(D=48, N=4, H=12, F=40, n_layers=1, clipped=True), AudioShape(48, 3, 192, 1, 20)),
    "12b": ("unified", "unified"),
    "26b": (VisionShape(D=48, N=2, H=24, F=56, n_layers=3, standardize=True), None),
    "31b": (VisionShape(D=32, N=4, H=8, F=48, n_layers=1, standardize=True), None),
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_UNIFIED_POSITIONS = 24


def plan(family: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(llama.cpp's name, shape with the row length last, kind of values)."""
    vision, audio = ENCODERS[family]
    out = FAMILIES[family].D
    if vision == "unified":
        n = 3 * 48 * 48
        yield "v.patch_embd.weight", (out, n), "matrix"
        yield "v.patch_embd.bias", (out,), "bias"
        for i, width in ((1, n), (2, out), (3, out)):
            yield f"v.patch_norm.{i}.weight", (width,), "norm"
            yield f"v.patch_norm.{i}.bias", (width,), "bias"
        yield "v.position_embd.weight", (2, _UNIFIED_POSITIONS, out), "position"
        yield "mm.input_projection.weight", (out, out), "matrix"
    else:
        yield from _vision_plan(vision, out)
    if audio == "unified":
        yield "mm.a.input_projection.weight", (out, 640), "matrix"
    elif audio is not None:
        yield from _audio_plan(audio, out)


def _vision_plan(s: VisionShape, out: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield "v.patch_embd.weight", (s.D, 3, 16, 16), "kernel"
    yield "v.position_embd.weight", (2, s.n_positions, s.D), "position"
    linear = "clipped" if s.clipped else "matrix"
    for i in range(s.n_layers):
        b = f"v.blk.{i}."
        for name in ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"):
            yield f"{b}{name}.weight", (s.D,), "norm"
        for name in ("attn_q", "attn_k", "attn_v"):
            yield f"{b}{name}.weight", (s.N * s.H, s.D), linear
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{b}{name}.weight", (s.H,), "head_norm"
        yield f"{b}attn_out.weight", (s.D, s.N * s.H), linear
        for name in ("ffn_gate", "ffn_up"):
            yield f"{b}{name}.weight", (s.F, s.D), linear
        yield f"{b}ffn_down.weight", (s.D, s.F), linear
    if s.standardize:
        yield "v.std_bias", (s.D,), "std_bias"
        yield "v.std_scale", (s.D,), "norm"
    yield "mm.input_projection.weight", (out, s.D), "matrix"


def _audio_plan(s: AudioShape, out: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    before = (1, s.channels[0])
    for i in range(2):
        yield f"a.conv1d.{i}.weight", (s.channels[i], before[i], 3, 3), "kernel"
        yield f"a.conv1d.{i}.norm.weight", (s.channels[i],), "norm"
    yield "a.input_projection.weight", (s.D, 32 * s.channels[1]), "matrix"
    linear = "clipped" if s.clipped else "matrix"
    for i in range(s.n_layers):
        b = f"a.blk.{i}."
        for name in ("ffn_norm", "ffn_post_norm", "ffn_norm_1", "ffn_post_norm_1", "attn_pre_norm",
                     "attn_post_norm", "conv_norm", "norm_conv", "ln2"):  # fmt: skip
            yield f"{b}{name}.weight", (s.D,), "norm"
        for name in ("ffn_up", "ffn_up_1"):
            yield f"{b}{name}.weight", (s.F, s.D), linear
        for name in ("ffn_down", "ffn_down_1"):
            yield f"{b}{name}.weight", (s.D, s.F), linear
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"):
            yield f"{b}{name}.weight", (s.D, s.D), linear
        yield f"{b}attn_k_rel.weight", (s.D, s.D), "matrix"
        yield f"{b}per_dim_scale.weight", (s.H,), "per_dim"
        yield f"{b}conv_pw1.weight", (2 * s.D, s.D), linear
        yield f"{b}conv_dw.weight", (s.D, s.kernel), "kernel"
    yield "a.pre_encode.out.weight", (s.P, s.D), "matrix"
    yield "a.pre_encode.out.bias", (s.P,), "bias"
    yield "mm.a.input_projection.weight", (out, s.P), "matrix"


_RANGES = {
    "norm": (0.5, 1.5),
    "head_norm": (0.5, 1.3),
    "per_dim": (0.4, 1.4),
    "input_min": (-2.0, -1.2),
    "input_max": (1.2, 2.0),
    "output_min": (-2.2, -1.4),
    "output_max": (1.4, 2.2),
}


def _values(key: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind in _RANGES:
        return _uniform(key, int(np.prod(shape)), *_RANGES[kind]).reshape(shape).astype(np.float32)
    std = {"bias": 0.2, "position": 0.5, "std_bias": 3.0}.get(kind)
    if std is None:
        n_in = int(np.prod(shape[1:])) if kind == "kernel" else shape[-1]
        std = n_in**-0.5
    return _bell(key, shape, std).astype(np.float32)


def tensors_of(family: str, *, seed: int = 1) -> dict[str, np.ndarray]:
    """All tensors in float32, with the bounds of clipped matrices."""
    out = {}
    for name, shape, kind in plan(family):
        key = f"{seed}/mmproj/{family}/{name}"
        out[name] = _values(key, shape, "matrix" if kind == "clipped" else kind)
        if kind == "clipped":
            base = name.removesuffix(".weight")
            out |= {f"{base}.{b}": _values(f"{key}/{b}", (1,), b) for b in BOUNDS}
    return out


def metadata(family: str) -> dict[str, object]:
    """The keys of published files."""
    vision, audio = ENCODERS[family]
    out = FAMILIES[family].D
    unified = vision == "unified"
    keys: dict[str, object] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": f"random encoders {family}",
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4uv" if unified else "gemma4v",
        "clip.vision.projection_dim": out,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": 16,
        "clip.vision.embedding_length": out if unified else vision.D,
        "clip.vision.feed_forward_length": 0 if unified else vision.F,
        "clip.vision.block_count": 0 if unified else vision.n_layers,
        "clip.vision.attention.head_count": 0 if unified else vision.N,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.0, 0.0, 0.0],
        "clip.vision.image_std": [1.0, 1.0, 1.0],
    }
    if audio is not None:
        keys |= {
            "clip.has_audio_encoder": True,
            "clip.audio.projector_type": "gemma4ua" if unified else "gemma4a",
            "clip.audio.projection_dim": out,
            "clip.audio.embedding_length": 640 if unified else audio.D,
            "clip.audio.feed_forward_length": 0 if unified else audio.F,
            "clip.audio.block_count": 0 if unified else audio.n_layers,
            "clip.audio.attention.head_count": 0 if unified else audio.N,
            "clip.audio.num_mel_bins": 128,
            "clip.audio.attention.layer_norm_epsilon": 1e-5,  # wrong, as in published files
        }
    return keys


# How Ollama spells the same tensors (each name is looked up once).
_OLLAMA_LAYER = {
    "attn_pre_norm": "ln1", "attn_post_norm": "ln2", "ln2": "layer_pre_norm", "attn_k_rel": "linear_pos",
}  # fmt: skip
_OLLAMA = {"a.pre_encode.out": "mm.a.fc", "a.input_projection": "a.pre_encode.out"}


def ollama_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("a.blk."):
        head, _, field = base.rpartition(".")
        return f"{head}.{_OLLAMA_LAYER.get(field, field)}.{kind}"
    return f"{_OLLAMA.get(base, base)}.{kind}"


def make(
    path: Path | str,
    family: str,
    *,
    seed: int = 1,
    ollama: bool = False,
    formats: dict[str, str] | None = None,
    keys: dict[str, object] | None = None,
    drop: tuple[str, ...] = (),
    replace: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes the encoders of a family and returns the path.

    Args:
        ollama: under Ollama's names
        formats: {pattern of names: format} for matrices; others stay F32
        keys: metadata to add or replace; a value of None removes the key
        drop: patterns of tensors to leave out
        replace: tensors to put in the place of others, or to add
    """
    tensors = tensors_of(family, seed=seed) | (replace or {})
    tensors = {n: t for n, t in tensors.items() if not any(fnmatchcase(n, p) for p in drop)}
    table = {k: v for k, v in (metadata(family) | (keys or {})).items() if v is not None}
    weights = {}
    for name, values in tensors.items():
        fits = values.ndim == 2 and "conv" not in name
        fmt = next((f for p, f in (formats or {}).items() if fits and fnmatchcase(name, p)), "F32")
        stored = ollama_name(name) if ollama else name
        weights[stored] = quant.QTensor.from_array(values, fmt, stored)
    return quant.write_gguf(path, table, weights)[0]


# --- a shard of a Hugging Face checkpoint ---------------------------------------------------------------

CHECKPOINT_LAYER = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def checkpoint_tensors(family: str, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The vision tower under the names of transformers, pixels of a patch color by color."""
    out = {}
    for name, values in tensors_of(family).items():
        if name == "v.patch_embd.weight":
            name, values = "vision_tower.patch_embedder.input_proj.weight", values.transpose(0, 2, 3, 1)
            values = np.ascontiguousarray(values).reshape(len(values), -1)
        elif name == "v.position_embd.weight":
            name = "vision_tower.patch_embedder.position_embedding_table"
        elif name.startswith("v.std_"):
            name = f"vision_tower.{name[2:]}"
        elif name == "mm.input_projection.weight":
            name = "embed_vision.embedding_projection.weight"
        elif name.startswith("v.blk."):
            _, _, i, field, kind = name.split(".")
            inner = ".linear" if kind == "weight" and field.startswith(("attn_", "ffn_")) else ""
            inner = "" if field.endswith("norm") else inner
            name = f"vision_tower.encoder.layers.{i}.{CHECKPOINT_LAYER[field]}{inner}.{kind}"
            values = values[0] if kind in BOUNDS else values
        else:
            continue
        out[prefix + name] = values
    return out


def make_checkpoint(path: Path | str, tensors: dict[str, np.ndarray], *, kind: str = "F32") -> Path:
    """Writes a .safetensors file of F32 or BF16."""
    header, blobs, at = {}, [], 0
    for name, values in tensors.items():
        data = np.asarray(values, np.float32)
        if kind == "BF16":
            data = (data.view(np.uint32) >> 16).astype(np.uint16)
        blob = data.tobytes()
        header[name] = {"dtype": kind, "shape": list(np.shape(values)), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return Path(path)


# --- what the encoders are shown --------------------------------------------------------------------------

# name: rows and columns of soft tokens; odd ones, and one of each direction
CANVASES = {"square": (2, 2), "wide": (1, 5), "tall": (4, 1), "odd": (3, 5)}
# name: mel frames, hence tokens: less than a block of 12, one, one and a bit, three and a bit
CLIPS = {"one": 1, "short": 43, "block": 48, "ragged": 49, "long": 147}


def canvas(name: str) -> np.ndarray:
    """u8[48 rows, 48 columns, 3]"""
    rows, columns = CANVASES[name]
    n = rows * columns * 48 * 48 * 3
    noise = _uniform(f"canvas/{name}", n, 0, 256).reshape(48 * rows, 48 * columns, 3)
    y, x = np.mgrid[: 48 * rows, : 48 * columns]
    smooth = np.stack([4 * x % 256, 3 * y % 256, (x * y // 9) % 256], -1)
    return ((noise + 3 * smooth) // 4).astype(np.uint8)


def clip(name: str) -> np.ndarray:
    """f32[n]: as many samples as give that many mel frames, and some that do not make another one."""
    n = 161 + 160 * (CLIPS[name] - 1) + 37
    t = np.arange(n) / 16000
    phase = 150 * t + 900 * t * t
    wave = 0.4 * (1 - 4 * np.abs(phase % 1 - 0.5)) + 0.05 * _uniform(f"clip/{name}", n, -1, 1)
    return wave.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tiny random encoders, and what they are shown.")
    parser.add_argument("family", choices=ENCODERS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    from tests.media.files import png, wav

    make(args.out, args.family)
    for name in CANVASES:
        (args.out.parent / f"{name}.png").write_bytes(png(canvas(name)))
    for name in CLIPS:
        (args.out.parent / f"{name}.wav").write_bytes(wav(clip(name)))


if __name__ == "__main__":
    main()
