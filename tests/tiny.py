"""Tiny random Gemma 4 models, one per family, made from a seed: the same arguments give the same bytes.

Every feature of the family is present and every parameter is away from its neutral value (norm weights are
not 1, layer scalars are not 1, the soft cap bends), sizes are odd where the format allows it, and the window
is short, so that a dropped term, a wrong donor layer or a wrong window shows in the logits.

    path = tiny.make(folder / "m.gguf", "e2b")
    path = tiny.make(folder / "m.gguf", "26b", size="block256", formats={"*_exps.*": "Q4_K", "*": "Q8_0"})
    path = tiny.make_real_header(folder / "m.gguf", "26B-A4B")  # published shapes, no weights: a hole

Command line: python -m tests.tiny NAME OUT.gguf, where NAME is a family or a recipe
"""

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

import quant

HYPERPARAMETERS = Path(__file__).parent / "data" / "hyperparameters.json"
ROTATED_SHARE = 0.25  # of the head of a global layer, in every published size


@dataclass(frozen=True)
class Shape:
    """The sizes of one model, tiny or real.  Letters as in the glossary; `_swa` is the sliding layers'."""

    name: str
    pattern: str  # one letter a layer: L sliding, G global
    D: int
    N: int
    K_swa: int
    K: int
    H_swa: int
    H: int
    F: int
    V: int
    window: int
    softcap: float
    context: int = 512
    n_shared: int = 0
    double_wide: bool = False
    P: int = 0
    k_is_v: bool = False
    E: int = 0
    A: int = 0
    F_expert: int = 0
    kv_in_shared: bool = True

    @property
    def n_layers(self) -> int:
        return len(self.pattern)

    def is_shared(self, i: int) -> bool:
        return i >= self.n_layers - self.n_shared

    def head_dim(self, i: int) -> int:
        return self.H if self.pattern[i] == "G" else self.H_swa

    def n_kv(self, i: int) -> int:
        return self.K if self.pattern[i] == "G" else self.K_swa

    def ffn_dim(self, i: int) -> int:
        return self.F * 2 if self.double_wide and self.is_shared(i) else self.F


# --- a vocabulary of the kind the real files have, small ---------------------------------------------------

CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
_SPECIAL = [
    *((t, CONTROL) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>")),
    *((t, USER_DEFINED) for t in ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>")),
    ('<|"|>', USER_DEFINED),
    ("<|think|>", CONTROL),
    *((t, USER_DEFINED) for t in ("<|channel>", "<channel|>")),
    *((t, CONTROL) for t in ("<|turn>", "<turn|>", "<|image>", "<|audio>", "<|image|>", "<|audio|>")),
    *((t, CONTROL) for t in ("<image|>", "<audio|>", "<|video|>")),
]
_WORDS = ["▁the", "▁and", "▁model", "▁user", "▁turn", "system", "thought", "\n\n\n", "▁▁▁▁", "ing"]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Token texts, types and merges: special tokens, 256 bytes, some letters, and words built by merges."""
    pieces = list(_SPECIAL) + [(f"<0x{b:02X}>", BYTE) for b in range(256)]
    letters = "\n▁abcdefghijklmnopqrstuvwxyz0123456789.,;?!:'"
    pieces += [(c, NORMAL) for c in letters]
    known, merges = set(letters), []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in known:
                known.add(word[:end])
                pieces.append((word[:end], NORMAL))
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return [text for text, _ in pieces], [kind for _, kind in pieces], merges


_V = len(vocabulary()[0])

# Where layers share K/V, the last two that own any are L, G: there llama.cpp looks for the donors.
FAMILIES = {
    "e2b": Shape("e2b", "LLLGLLG", D=48, N=4, K_swa=1, K=1, H_swa=16, H=32, F=72, V=_V, window=8, softcap=5.0,
                 n_shared=3, double_wide=True, P=20),
    "e4b": Shape("e4b", "LGLLGLG", D=80, N=6, K_swa=2, K=2, H_swa=16, H=32, F=104, V=_V, window=8,
                 softcap=4.0, n_shared=2, P=12, kv_in_shared=False),
    "12b": Shape("12b", "LLGLLG", D=80, N=6, K_swa=3, K=1, H_swa=16, H=32, F=88, V=_V, window=8, softcap=6.0,
                 k_is_v=True),
    "26b": Shape("26b", "LLGLG", D=48, N=6, K_swa=3, K=2, H_swa=16, H=32, F=40, V=_V, window=8, softcap=5.0,
                 k_is_v=True, E=7, A=3, F_expert=24),
    "31b": Shape("31b", "LLLGLG", D=80, N=8, K_swa=4, K=2, H_swa=16, H=32, F=120, V=_V, window=7, softcap=4.5,
                 k_is_v=True),
}  # fmt: skip

# Row lengths for the block formats: "block32" fits the 32-value formats, "block256" the K-quants as well.
_WIDE = {
    "odd": {},
    "block32": dict(D=96, N=8, H_swa=16, H=32, F=160, P=32, F_expert=64),
    "block256": dict(D=256, N=8, H_swa=32, H=64, F=512, P=256, F_expert=256),
}


# Quantised models that the oracles run too: a mix of types as in published files, one of 32-value formats.
RECIPES: dict[str, dict] = {
    "e2b-k": dict(
        family="e2b",
        size="block256",
        formats={
            "token_embd.weight": "Q6_K",
            "per_layer_token_embd.weight": "Q5_K",
            "per_layer_model_proj.weight": "BF16",
            "*attn_v*": "Q6_K",
            "*ffn_down*": "Q6_K",
            "*attn_output*": "Q3_K",
            "*inp_gate*": "Q2_K",
            "*": "Q4_K",
        },
    ),
    "26b-legacy": dict(
        family="26b",
        size="block32",
        experts="split",
        formats={
            "token_embd.weight": "Q8_0",
            "*ffn_gate_exps*": "Q4_1",
            "*ffn_up_exps*": "Q5_1",
            "*ffn_down_exps*": "Q8_0",
            "*ffn_down*": "Q5_0",
            "*attn_q.*": "F16",
            "*": "Q4_0",
        },
    ),
}


def shape_of(family: str, size: str = "odd") -> Shape:
    """The sizes of a tiny model.  In the wide sizes N is 8, and K is rounded down to a divisor of it."""
    base = FAMILIES[family]
    wide = dict(_WIDE[size])
    if wide:
        wide["K_swa"], wide["K"] = (1 << k.bit_length() - 1 for k in (base.K_swa, base.K))
        wide |= {letter: 0 for letter in ("P", "F_expert") if not getattr(base, letter)}
    return replace(base, **wide)


# --- which tensors a file has -------------------------------------------------------------------------------


def tensor_plan(s: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields (GGUF name, shape with the row length last, kind of values), in the order of published files."""
    yield "rope_freqs.weight", (s.H // 2,), "rope"
    yield "token_embd.weight", (s.V, s.D), "embedding"
    if s.P:
        yield "per_layer_token_embd.weight", (s.V, s.n_layers * s.P), "per_layer_table"
        yield "per_layer_model_proj.weight", (s.n_layers * s.P, s.D), "matrix"
        yield "per_layer_proj_norm.weight", (s.P,), "norm"
    yield "output_norm.weight", (s.D,), "output_norm"
    for i in range(s.n_layers):
        yield from ((f"blk.{i}.{name}", shape, kind) for name, shape, kind in _layer_plan(s, i))


def _layer_plan(s: Shape, i: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    D, H, K, F = s.D, s.head_dim(i), s.n_kv(i), s.ffn_dim(i)
    has_kv = s.kv_in_shared or not s.is_shared(i)
    yield "attn_norm.weight", (D,), "norm"
    yield "attn_q.weight", (s.N * H, D), "matrix"
    if has_kv:
        yield "attn_k.weight", (K * H, D), "matrix"
        if not (s.k_is_v and s.pattern[i] == "G"):
            yield "attn_v.weight", (K * H, D), "matrix"
    yield "attn_output.weight", (D, s.N * H), "matrix"
    yield "attn_q_norm.weight", (H,), "head_norm"
    if has_kv:
        yield "attn_k_norm.weight", (H,), "head_norm"
    yield "post_attention_norm.weight", (D,), "norm"
    yield "ffn_norm.weight", (D,), "norm"
    yield "ffn_gate.weight", (F, D), "matrix"
    yield "ffn_up.weight", (F, D), "matrix"
    yield "ffn_down.weight", (D, F), "matrix"
    yield "post_ffw_norm.weight", (D,), "norm"
    if s.E:
        yield "ffn_gate_inp.weight", (s.E, D), "router"
        yield "ffn_gate_inp.scale", (D,), "norm"
        yield "pre_ffw_norm_2.weight", (D,), "norm"
        yield "post_ffw_norm_1.weight", (D,), "norm"
        yield "post_ffw_norm_2.weight", (D,), "norm"
        yield "ffn_gate_up_exps.weight", (s.E, 2 * s.F_expert, D), "matrix"
        yield "ffn_down_exps.weight", (s.E, D, s.F_expert), "matrix"
        yield "ffn_down_exps.scale", (s.E,), "norm"
    if s.P:
        yield "inp_gate.weight", (s.P, D), "matrix"
        yield "proj.weight", (D, s.P), "matrix"
        yield "post_norm.weight", (D,), "norm"
    yield "layer_output_scale.weight", (1,), "layer_scale"


def metadata(s: Shape, *, with_vocabulary: bool = True) -> dict[str, object]:
    """The keys of the published files, with the types they have there (int: u32, list of int: i32)."""
    a = "gemma4.attention."
    keys: dict[str, object] = {
        "general.architecture": "gemma4",
        "general.type": "model",
        "general.name": f"random {s.name}",
        "gemma4.block_count": s.n_layers,
        "gemma4.context_length": s.context,
        "gemma4.embedding_length": s.D,
        "gemma4.feed_forward_length": [s.ffn_dim(i) for i in range(s.n_layers)] if s.double_wide else s.F,
        a + "head_count": s.N,
        a + "head_count_kv": s.K if s.K == s.K_swa else [s.n_kv(i) for i in range(s.n_layers)],
        a + "layer_norm_rms_epsilon": 1e-6,
        "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4,
        a + "key_length": s.H,
        a + "value_length": s.H,
        a + "key_length_swa": s.H_swa,
        a + "value_length_swa": s.H_swa,
        "gemma4.rope.dimension_count": s.H,
        "gemma4.rope.dimension_count_swa": s.H_swa,
        "gemma4.final_logit_softcapping": s.softcap,
        a + "sliding_window": s.window,
        a + "shared_kv_layers": s.n_shared,
        a + "sliding_window_pattern": [kind == "L" for kind in s.pattern],
        "gemma4.embedding_length_per_layer_input": s.P,
    }
    if s.E:
        keys["gemma4.expert_count"] = s.E
        keys["gemma4.expert_used_count"] = s.A
        keys["gemma4.expert_feed_forward_length"] = s.F_expert
    return keys | (_tokenizer_metadata() if with_vocabulary else {})


def _tokenizer_metadata() -> dict[str, object]:
    texts, kinds, merges = vocabulary()
    t = "tokenizer.ggml."
    return {
        t + "model": "gemma4",
        t + "tokens": texts,
        t + "scores": [-1000.0] * len(texts),
        t + "token_type": kinds,
        t + "merges": merges,
        t + "bos_token_id": 2,
        t + "eos_token_id": 1,
        t + "unknown_token_id": 3,
        t + "padding_token_id": 0,
        t + "mask_token_id": 4,
        t + "add_space_prefix": False,
        t + "add_bos_token": True,
    }


# --- random values, the same on every machine ---------------------------------------------------------------


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")


def _uniform(key: str, n: int, low: float, high: float) -> np.ndarray:
    """f64[n] from raw Philox words, which NumPy keeps stable; what Generator makes of them may change."""
    words = np.random.Philox(key=_seed(key)).random_raw(n)
    return low + (high - low) * ((words >> np.uint64(11)) * 2.0**-53)


def _bell(key: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Sums of four uniforms: near enough to normal, and exact in every libm."""
    n = math.prod(shape)
    return (_uniform(key, 4 * n, -0.5, 0.5).reshape(4, n).sum(axis=0) * (math.sqrt(3.0) * std)).reshape(shape)


def _values(key: str, shape: tuple[int, ...], kind: str, s: Shape) -> np.ndarray:
    n_in = shape[-1]
    if kind == "rope":
        n_rotated = int(ROTATED_SHARE * s.H / 2)
        values = np.where(np.arange(n_in) < n_rotated, 1.0, 1e30)
    elif kind in _RANGES:
        values = _uniform(key, n_in, *_RANGES[kind])
    else:
        # router rows meet an input of length about 1, all others one of length about sqrt(n_in)
        std = 2.0 if kind == "router" else (s.P if kind == "per_layer_table" else n_in) ** -0.5
        values = _bell(key, shape, std)
    return values.astype(np.float32)


_RANGES = {
    "norm": (0.5, 1.5),
    "head_norm": (0.3, 0.9),  # scores have no 1/sqrt(H): with larger ones every softmax is a single key
    "output_norm": (1.0, 2.6),  # logits of deviation 1.8 before the cap
    "layer_scale": (0.6, 1.3),
}


# --- variants of one model: same numbers, other spelling ----------------------------------------------------

ALIASES = {
    "post_attention_norm.weight": "attn_post_norm.weight",
    "post_ffw_norm.weight": "ffn_post_norm.weight",
    "pre_ffw_norm_2.weight": "ffn_pre_norm_2.weight",
    "post_ffw_norm_1.weight": "ffn_post_norm_1.weight",
    "post_ffw_norm_2.weight": "ffn_post_norm_2.weight",
    "ffn_down_exps.scale": "ffn_gate_inp.per_expert_scale",
}


def _fuse(tensors: dict[str, np.ndarray], parts: list[str], whole: str, n_layers: int) -> None:
    """Puts the parts of each layer that has all of them into one tensor, rows one after another."""
    for i in range(n_layers):
        names = [f"blk.{i}.{part}.weight" for part in parts]
        if all(name in tensors for name in names):
            tensors[f"blk.{i}.{whole}.weight"] = np.concatenate([tensors.pop(name) for name in names])


def _respell_experts(tensors: dict[str, np.ndarray], experts: str, s: Shape) -> None:
    """experts: "fused" as published, "split" into gate and up, or "numbered": one 2-D tensor per expert."""
    for i in range(s.n_layers if s.E and experts != "fused" else 0):
        b = f"blk.{i}."
        gate_up = tensors.pop(b + "ffn_gate_up_exps.weight")
        tensors[b + "ffn_gate_exps.weight"] = gate_up[:, : s.F_expert].copy()
        tensors[b + "ffn_up_exps.weight"] = gate_up[:, s.F_expert :].copy()
        if experts == "numbered":
            for part in ("gate", "up", "down"):
                stack = tensors.pop(f"{b}ffn_{part}_exps.weight")
                tensors |= {f"{b}ffn_{part}.{e}.weight": stack[e].copy() for e in range(s.E)}


def _rename(tensors: dict[str, np.ndarray]) -> None:
    for name in [n for n in tensors if n.startswith("blk.")]:
        _, block, rest = name.split(".", 2)
        if rest in ALIASES:
            tensors[f"blk.{block}.{ALIASES[rest]}"] = tensors.pop(name)


def tensors_of(
    s: Shape,
    *,
    seed: int = 1,
    fused: tuple[str, ...] = (),
    experts: str = "fused",
    aliases: bool = False,
    tied: bool = True,
) -> dict[str, np.ndarray]:
    """All tensors in float32; values depend on the seed, the family and the published name only."""
    out = {name: _values(f"{seed}/{s.name}/{name}", shape, kind, s) for name, shape, kind in tensor_plan(s)}
    if not tied:
        out["output.weight"] = _values(f"{seed}/{s.name}/output.weight", (s.V, s.D), "matrix", s)
    if "qkv" in fused:
        _fuse(out, ["attn_q", "attn_k", "attn_v"], "attn_qkv", s.n_layers)
    if "gate_up" in fused:
        _fuse(out, ["ffn_gate", "ffn_up"], "ffn_gate_up", s.n_layers)
    _respell_experts(out, experts, s)
    if aliases:
        _rename(out)
    return out


def make(
    path: Path | str,
    family: str,
    *,
    seed: int = 1,
    size: str = "odd",
    formats: dict[str, str] | None = None,
    fused: tuple[str, ...] = (),
    experts: str = "fused",
    aliases: bool = False,
    tied: bool = True,
    kv_in_shared: bool | None = None,
    keys: dict[str, object] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Writes one tiny model and returns its path.

    Args:
        family: a key of FAMILIES: "e2b" "e4b" "12b" "26b" "31b".
        size: "odd", or "block32" / "block256" where every matrix row is a multiple of that many values.
        formats: {pattern of tensor names: format} for matrices, first match wins; others stay F32.
        fused: any of "qkv", "gate_up": store these parts as one tensor.
        experts: spelling of the expert matrices: "fused", "split" or "numbered".
        aliases: use the second names of the norms (table ALIASES).
        tied: without it the file has an output.weight of its own.
        kv_in_shared: whether layers that share K/V carry (unused) K/V tensors; None: as the family does.
        keys: metadata to add or replace; a value of None removes the key.
        drop: patterns of tensors to leave out.
    """
    s = shape_of(family, size)
    if kv_in_shared is not None:
        s = replace(s, kv_in_shared=kv_in_shared)
    tensors = tensors_of(s, seed=seed, fused=fused, experts=experts, aliases=aliases, tied=tied)
    tensors = {n: t for n, t in tensors.items() if not any(fnmatchcase(n, pattern) for pattern in drop)}
    table = {key: value for key, value in (metadata(s) | (keys or {})).items() if value is not None}
    chosen = {n: _format_of(n, t, formats or {}) for n, t in tensors.items()}
    weights = {n: _quantised(f"{seed}/{family}/{n}", t, chosen[n], n) for n, t in tensors.items()}
    return quant.write_gguf(path, table, weights)[0]


def make_recipe(path: Path | str, name: str, *, seed: int = 1) -> Path:
    """Writes the model of a family or of a recipe by its name: those that oracles/golden/ knows."""
    if name in FAMILIES:
        return make(path, name, seed=seed)
    return make(path, **RECIPES[name], seed=seed)


def _quantised(key: str, values: np.ndarray, fmt: str, name: str) -> quant.QTensor:
    """The values in a format; for one that nobody can quantise to, random blocks of the same deviation."""
    form = quant.FORMATS[fmt]
    if form.quantize_blocks is not None:
        return quant.QTensor.from_array(values, form, name)
    n = values.size // form.block_size
    blocks = np.random.Philox(key=_seed(key)).random_raw(n * form.block_bytes // 8 + 1).view(np.uint8)
    blocks = blocks[: n * form.block_bytes].reshape(n, form.block_bytes)
    _set_scale(blocks, fmt, np.ones(n))
    plain = quant.dequantize(blocks, form).astype(np.float64).reshape(-1)
    # fsum is exact: a float sum may depend on the width of the machine's vectors
    ratio = math.sqrt(math.fsum(values.astype(np.float64).reshape(-1) ** 2) / math.fsum(plain**2))
    _set_scale(blocks, fmt, ratio * _uniform(f"{key}/scale", n, 0.7, 1.3))
    return quant.QTensor(form, values.shape, blocks.reshape(*values.shape[:-1], -1), name)


def _set_scale(blocks: np.ndarray, fmt: str, scale: np.ndarray) -> None:
    """Puts the float16 scale of each block where the IQ formats keep it, in place."""
    words = scale.astype(np.float16).view(np.uint16)
    if fmt == "IQ1_M":  # four nibbles, on top of the last four words
        tail = blocks[:, -8:].view(np.uint16)
        for i in range(4):
            tail[:, i] = (tail[:, i] & 0x0FFF) | ((words >> 4 * i & 0xF) << 12)
    elif fmt.startswith("IQ"):
        blocks[:, :2] = words[:, None].view(np.uint8)
    else:
        raise ValueError(
            f"tests.tiny: no random blocks of {fmt}; expected a format with a quantiser or an IQ one"
        )


def _format_of(name: str, values: np.ndarray, formats: dict[str, str]) -> str:
    if values.ndim < 2 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    return next((fmt for pattern, fmt in formats.items() if fnmatchcase(name, pattern)), "F32")


def make_real_header(path: Path | str, size: str, fmt: str = "Q4_0") -> Path:
    """Writes a file with the header of a published size and a hole where its weights would be.

    Norms and other vectors are F32, matrices are `fmt`.  The hole takes no disk and reads as zeros, but for
    rope_freqs.  The
    header comes from the gguf package, so that our reader meets bytes that another program wrote.
    """
    import gguf

    s = real_shape(size)
    kind = gguf.GGMLQuantizationType[fmt]
    writer = gguf.GGUFWriter(path, "gemma4")
    for key, value in metadata(s, with_vocabulary=False).items():
        if key != "general.architecture":
            add = writer.add_array if isinstance(value, list) else _ADDERS[type(value)](writer)
            add(key, value)
    total = 0
    for name, shape, _ in tensor_plan(s):
        plain = len(shape) == 1 or name.endswith("ffn_gate_inp.weight")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.F32 if plain else kind]
        nbytes = math.prod(shape) // block * block_bytes
        if plain:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes)
        else:
            stored = (*shape[:-1], shape[-1] // block * block_bytes)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=kind)
        total += nbytes + -nbytes % 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    data = writer.fout[0]
    writer.write_padding(data, data.tell())
    data.truncate(data.tell() + total)
    data.write(_values("", (s.H // 2,), "rope", s).tobytes())  # the first tensor; zeros are no divisors
    writer.close()
    return Path(path)


_ADDERS = {
    str: lambda w: w.add_string,
    bool: lambda w: w.add_bool,
    int: lambda w: w.add_uint32,
    float: lambda w: w.add_float32,
}


def real_shape(size: str) -> Shape:
    """The sizes of a published model, from tests/data/hyperparameters.json."""
    c = json.loads(HYPERPARAMETERS.read_text())["models"][size]
    n_layers, period = c["num_hidden_layers"], c["pattern_period"]
    return Shape(
        name=f"gemma-4 {size}",
        pattern="".join("L" if (i + 1) % period else "G" for i in range(n_layers)),
        D=c["hidden_size"],
        N=c["num_attention_heads"],
        K_swa=c["num_key_value_heads"],
        K=c["num_global_key_value_heads"],
        H_swa=c["head_dim"],
        H=c["global_head_dim"],
        F=c["intermediate_size"],
        V=c["vocab_size"],
        window=c["sliding_window"],
        softcap=c["final_logit_softcapping"],
        context=c["max_position_embeddings"],
        n_shared=c["num_kv_shared_layers"],
        double_wide=c["use_double_wide_mlp"],
        P=c["hidden_size_per_layer_input"],
        k_is_v=c["attention_k_eq_v"],
        E=c["num_experts"],
        A=c["top_k_experts"],
        F_expert=c["moe_intermediate_size"],
    )


def prompt(name: str, *, seed: int = 1) -> list[int]:
    """Token ids that wrap the family's window at least three times: BOS, then bytes and pieces."""
    family = name if name in FAMILIES else RECIPES[name]["family"]
    s = FAMILIES[family]
    length = {"e2b": 33, "e4b": 37, "12b": 29, "26b": 31, "31b": 35}[family]
    return [2, *(int(x) for x in _uniform(f"{seed}/{family}/prompt", length - 1, len(_SPECIAL), s.V))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one tiny random model.")
    parser.add_argument("name", choices=[*FAMILIES, *RECIPES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_recipe(args.out, args.name, seed=args.seed)
    digest = hashlib.sha256(args.out.read_bytes()).hexdigest()
    tokens = prompt(args.name, seed=args.seed)
    print(json.dumps({"model": args.out.name, "sha256": digest, "tokens": tokens}))


if __name__ == "__main__":
    main()
