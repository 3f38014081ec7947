"""The published sizes of Gemma 4: geometry, and the tensors that a file of each size holds.

Source: the models' config.json on Hugging Face (google/gemma-4-E2B ... 31B), and the tensor lists of their
GGUF conversions by llama.cpp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

VOCAB = 262144
RMS_EPS = 1e-6
THETA_LOCAL, THETA_GLOBAL = 1e4, 1e6
ROTATED_SHARE = 0.25  # of the pairs of a global head
SOFTCAP = 30.0
HEAD_DIM, HEAD_DIM_GLOBAL = 256, 512


@dataclass(frozen=True)
class Size:
    """Letters as in docs/glossary.md; `_swa` is the sliding layers'."""

    name: str
    n_layers: int
    period: int  # every period-th layer is global
    D: int
    N: int
    K_swa: int
    K: int
    F: int
    window: int
    context: int
    n_shared: int = 0  # last layers, which read the keys of earlier ones
    double_wide: bool = False  # these have an FFN of 2F
    P: int = 0
    k_is_v: bool = False  # global layers have no attn_v
    E: int = 0
    A: int = 0
    F_expert: int = 0

    def is_global(self, i: int) -> bool:
        return (i + 1) % self.period == 0

    def ffn_dim(self, i: int) -> int:
        return self.F * (2 if self.double_wide and i >= self.n_layers - self.n_shared else 1)


SIZES = {
    size.name: size
    for size in (
        Size("E2B", 35, 5, D=1536, N=8, K_swa=1, K=1, F=6144, window=512, context=131072,
             n_shared=20, double_wide=True, P=256),
        Size("E4B", 42, 6, D=2560, N=8, K_swa=2, K=2, F=10240, window=512, context=131072,
             n_shared=18, P=256),
        Size("12B", 48, 6, D=3840, N=16, K_swa=8, K=1, F=15360, window=1024, context=262144, k_is_v=True),
        Size("26B-A4B", 30, 6, D=2816, N=16, K_swa=8, K=2, F=2112, window=1024, context=262144, k_is_v=True,
             E=128, A=8, F_expert=704),
        Size("31B", 60, 6, D=5376, N=32, K_swa=16, K=4, F=21504, window=1024, context=262144, k_is_v=True),
    )
}  # fmt: skip

Planned = tuple[str, tuple[int, ...], str]  # name, shape with the row length last, kind


def tensors(s: Size) -> Iterator[Planned]:
    """Every tensor of a file, in its order.

    Kinds: rope, norm, scale, router (float32 always), table (embeddings), bf16 (never quantised), and the
    matrices: v, down (which recipes give more bits), matrix.
    """
    yield "rope_freqs.weight", (HEAD_DIM_GLOBAL // 2,), "rope"
    yield "token_embd.weight", (VOCAB, s.D), "table"
    if s.P:
        yield "per_layer_token_embd.weight", (VOCAB, s.P * s.n_layers), "table"
        yield "per_layer_model_proj.weight", (s.P * s.n_layers, s.D), "bf16"
        yield "per_layer_proj_norm.weight", (s.P,), "norm"
    yield "output_norm.weight", (s.D,), "norm"
    for i in range(s.n_layers):
        for name, shape, kind in _layer(s, i):
            yield f"blk.{i}.{name}", shape, kind


def _layer(s: Size, i: int) -> Iterator[Planned]:
    D, F = s.D, s.ffn_dim(i)
    H, K = (HEAD_DIM_GLOBAL, s.K) if s.is_global(i) else (HEAD_DIM, s.K_swa)
    yield "attn_norm.weight", (D,), "norm"
    yield "attn_q.weight", (s.N * H, D), "matrix"
    yield "attn_k.weight", (K * H, D), "matrix"  # also where K/V are shared: nobody reads them there
    if not (s.k_is_v and s.is_global(i)):
        yield "attn_v.weight", (K * H, D), "v"
    yield "attn_output.weight", (D, s.N * H), "matrix"
    yield "attn_q_norm.weight", (H,), "norm"
    yield "attn_k_norm.weight", (H,), "norm"
    yield "post_attention_norm.weight", (D,), "norm"
    yield "ffn_norm.weight", (D,), "norm"
    yield "ffn_gate.weight", (F, D), "matrix"
    yield "ffn_up.weight", (F, D), "matrix"
    yield "ffn_down.weight", (D, F), "down"
    yield "post_ffw_norm.weight", (D,), "norm"
    if s.E:
        yield "ffn_gate_inp.weight", (s.E, D), "router"
        yield "ffn_gate_inp.scale", (D,), "norm"
        yield "pre_ffw_norm_2.weight", (D,), "norm"
        yield "post_ffw_norm_1.weight", (D,), "norm"
        yield "post_ffw_norm_2.weight", (D,), "norm"
        yield "ffn_gate_up_exps.weight", (s.E, 2 * s.F_expert, D), "matrix"
        yield "ffn_down_exps.weight", (s.E, D, s.F_expert), "down"
        yield "ffn_down_exps.scale", (s.E,), "norm"
    if s.P:
        yield "inp_gate.weight", (s.P, D), "matrix"
        yield "proj.weight", (D, s.P), "matrix"
        yield "post_norm.weight", (D,), "norm"
    yield "layer_output_scale.weight", (1,), "scale"


# -- recipes: which type a tensor gets, as in the published files (llama.cpp's llama-quant.cpp)

RECIPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "BF16": 32}  # general.file_type
BASE = {"Q4_0": "Q4_0", "Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "BF16": "BF16"}
SHORT_ROWS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256
FLOAT_KINDS = ("norm", "rope", "scale", "router")
PURE = "-pure"


def type_of(s: Size, recipe: str, planned: Planned) -> str:
    """The format of one tensor. "RECIPE-pure" has no bumps to Q6_K."""
    name, shape, kind = planned
    recipe, is_pure = recipe.removesuffix(PURE), recipe.endswith(PURE)
    if kind in FLOAT_KINDS:
        return "F32"
    if recipe == "BF16" or kind == "bf16":
        return "BF16"
    fmt = "Q6_K" if not is_pure and _is_bumped(s, recipe, name, kind) else BASE[recipe]
    return SHORT_ROWS.get(fmt, fmt) if shape[-1] % 256 else fmt


def _is_bumped(s: Size, recipe: str, name: str, kind: str) -> bool:
    if kind == "table":  # the tied head; the published Q4_0 files keep their per-layer table in Q4_0
        return recipe == "Q4_K_M" or (recipe == "Q4_0" and name == "token_embd.weight")
    if recipe != "Q4_K_M" or kind not in ("v", "down"):
        return False
    layers = [i for i in range(s.n_layers) if kind == "down" or not (s.k_is_v and s.is_global(i))]
    return _more_bits(layers.index(int(name.split(".")[1])), len(layers))


def _more_bits(i: int, n: int) -> bool:
    """The first and the last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def parse(spec: str) -> tuple[Size, str]:
    """ "E2B:Q4_0" -> its size and recipe."""
    size, _, recipe = spec.partition(":")
    if size not in SIZES or recipe.removesuffix(PURE) not in RECIPES:
        sizes, recipes = ", ".join(SIZES), ", ".join(RECIPES)
        raise ValueError(
            f"synthetic model {spec[:40]!r}: expected SIZE:RECIPE such as E2B:Q4_0, SIZE one of {sizes}, "
            f"RECIPE one of {recipes} (each also with {PURE} behind it)"
        )
    return SIZES[size], recipe


def metadata(s: Size, recipe: str) -> dict[str, object]:
    """The keys of the published files but the tokenizer's, with their types (int: u32, list of int: i32)."""
    a, layers = "gemma4.attention.", range(s.n_layers)
    keys: dict[str, object] = {
        "general.architecture": "gemma4",
        "general.type": "model",
        "general.name": f"synthetic gemma-4 {s.name} {recipe}",
        "general.file_type": RECIPES[recipe.removesuffix(PURE)],
        "general.quantization_version": 2,
        "gemma4.block_count": s.n_layers,
        "gemma4.context_length": s.context,
        "gemma4.embedding_length": s.D,
        "gemma4.feed_forward_length": [s.ffn_dim(i) for i in layers] if s.double_wide else s.F,
        a + "head_count": s.N,
        a + "head_count_kv": s.K if s.K == s.K_swa else [s.K if s.is_global(i) else s.K_swa for i in layers],
        a + "layer_norm_rms_epsilon": RMS_EPS,
        "gemma4.rope.freq_base": THETA_GLOBAL,
        "gemma4.rope.freq_base_swa": THETA_LOCAL,
        a + "key_length": HEAD_DIM_GLOBAL,
        a + "value_length": HEAD_DIM_GLOBAL,
        a + "key_length_swa": HEAD_DIM,
        a + "value_length_swa": HEAD_DIM,
        "gemma4.rope.dimension_count": HEAD_DIM_GLOBAL,
        "gemma4.rope.dimension_count_swa": HEAD_DIM,
        "gemma4.final_logit_softcapping": SOFTCAP,
        a + "sliding_window": s.window,
        a + "shared_kv_layers": s.n_shared,
        a + "sliding_window_pattern": [not s.is_global(i) for i in layers],
        "gemma4.embedding_length_per_layer_input": s.P,
    }
    if s.E:
        keys["gemma4.expert_count"] = s.E
        keys["gemma4.expert_used_count"] = s.A
        keys["gemma4.expert_feed_forward_length"] = s.F_expert
    return keys
