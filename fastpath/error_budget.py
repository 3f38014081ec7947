"""How far two traces of one model may lie apart, name by name: the one table behind `twinpath diff`.

The figure is the normalised error, RMS(a - b) / RMS(a), over all rows of a name. One wrong row of many hides
in it, so the worst row has a limit of its own: RMS(a_t - b_t) / RMS(a over all rows) may be the name's limit
times the factor in the column `row`. Four columns of limits:

float      both sides take activations as float32: they differ in the order of sums and in the last bits of
           exp and tanh
half       the same, but something is rounded to 16 bits: keys and values in a cache of f16 or bf16, the same
           on both sides, or f16 on one and float32 on the other; llama.cpp on float weights reads GELU from a
           table in float16, and rounds what it multiplies by BF16 weights to BF16
int8       both sides follow the integer contract
different  one side rounds activations to int8 and the other does not, or rounds them in another way; or one
           rounds keys and values to bf16 and the other does not

A limit holds at layer 0. Later layers inherit what came before, so it grows by sqrt(1 + layer).

Rounding makes small differences large. Two rows that differ by d, rounded in steps of s, agree but for a
share d/s of their values, and those differ by a whole s: the distance becomes sqrt(s d). With s = 1e-2 the
1e-7 of another order of sums turns into 3e-5, then 5e-4, then 2e-3: after a few layers it is the rounding
noise itself. Keys and values of f16 have s = 2^-11 of each, so that the same 1e-7 becomes sqrt(5e-4 * 1e-7)
= 7e-6 in one layer and 3e-4 after many; bf16, with s = 2^-8, 1e-3. That is why the int8 column is half as
wide as the last and not thousands of times narrower, and why a wrong op is best looked for with
--activations float.
"""

import math
from dataclasses import dataclass

COLUMNS = ("float", "half", "int8", "different")


@dataclass(frozen=True)
class Budget:
    limits: tuple[float, float, float, float]  # of the four columns; inf: not judged
    reason: str
    row: float = 2.0  # the worst row's limit, in units of the name's; measured: up to 1.4


_COPY = Budget((1e-6, 1e-6, 1e-6, 1e-6), "rows of a table times one factor: no sum, no rounding")
_INPUT = Budget((1e-5, 5e-3, 1e-2, 2e-2), "one projection of the scaled embedding, normed")
_STREAM = Budget((1e-5, 2e-3, 5e-2, 1e-1), "the residual stream: errors of all branches, partly cancelling")
_NORMED = Budget((1e-5, 2e-3, 5e-2, 1e-1), "the residual stream, rescaled")
_BRANCH = Budget((1e-5, 2e-3, 5e-2, 1e-1), "one projection: its own rounding on top of the stream's")
_DEEP = Budget((2e-5, 3e-3, 8e-2, 1.5e-1), "two projections, a softmax or a product deep into a branch")
_CHOICE = Budget(
    (0.0, math.inf, math.inf, math.inf), "numbers of experts: near a tie rounding picks another one"
)
_ROUTED = Budget(
    (2e-5, 5e-2, 2e-1, 5e-1),
    "one entry per chosen expert: another choice replaces a whole row",
    row=8.0,  # measured: 3.2
)
_EXPERTS = Budget(
    (2e-5, 1e-2, 1e-1, 2e-1),
    "the sum of the experts: a tie exchanges two of similar weight",
    row=4.0,  # measured: 1.5, in a row with a tie
)
_HEAD = Budget((2e-5, 2e-3, 5e-2, 1e-1), "norm and projection of the last layer's output, at its depth")
_SOUND = Budget((1e-5, 1e-4, 1e-4, 1e-4), "made in float64; published front ends agree to 1e-4")

# In the order of computation, which is also the order of the report.
TABLE: dict[str, Budget] = {
    "v.patch_norm": _NORMED,
    "v.patch_embd": _INPUT,
    "v.pos_embd": _STREAM,
    "v.attn_norm": _NORMED,
    "v.Qcur_pos": _BRANCH,
    "v.Kcur_pos": _BRANCH,
    "v.Vcur_normed": _BRANCH,
    "v.kqv_out": _DEEP,
    "v.attn_out": _STREAM,
    "v.ffn_norm": _NORMED,
    "v.ffn_geglu": _DEEP,
    "v.ffn_out": _DEEP,
    "v.l_out": _STREAM,
    "v.pooled": _STREAM,
    "v.std_scaled": _STREAM,
    "v.projected": _HEAD,
    "a.mel": _SOUND,
    "a.frames": _SOUND,
    "a.conv": _BRANCH,
    "a.inp": _BRANCH,
    "a.ffn_out": _STREAM,
    "a.Qcur": _BRANCH,
    "a.Kcur": _BRANCH,
    "a.Vcur": _BRANCH,
    "a.kqv_out": _DEEP,
    "a.attn_out": _STREAM,
    "a.glu": _BRANCH,
    "a.conv_dw": _DEEP,
    "a.conv_out": _STREAM,
    "a.ffn_out_1": _STREAM,
    "a.l_out": _STREAM,
    "a.out": _HEAD,
    "a.projected": _HEAD,
    "inp_scaled": _COPY,
    "inp_per_layer_selected": _COPY,
    "per_layer_proj": _INPUT,
    "inp_per_layer": _INPUT,
    "attn_norm": _NORMED,
    "Qcur": _BRANCH,
    "Qcur_normed": _BRANCH,
    "Qcur_pos": _BRANCH,
    "Kcur": _BRANCH,
    "Vcur": _BRANCH,
    "Kcur_normed": _BRANCH,
    "Vcur_normed": _BRANCH,
    "Kcur_pos": _BRANCH,
    "kqv_out": _DEEP,
    "attn_post_norm": _DEEP,
    "attn_out": _STREAM,
    "ffn_norm": _NORMED,
    "ffn_norm_1": _NORMED,
    "ffn_up": _BRANCH,
    "ffn_gate": _BRANCH,
    "ffn_geglu": _DEEP,
    "ffn_out": _DEEP,
    "ffn_mlp": _DEEP,
    "ffn_norm_2": _NORMED,
    "ffn_moe_logits": _BRANCH,
    "ffn_moe_topk": _CHOICE,
    "ffn_moe_weights_scaled": _ROUTED,
    "ffn_moe_up": _ROUTED,
    "ffn_moe_gate": _ROUTED,
    "ffn_moe_geglu": _ROUTED,
    "ffn_moe_out": _EXPERTS,
    "ffn_moe": _EXPERTS,
    "ffn_moe_combined": _EXPERTS,
    "ffn_post_norm": _DEEP,
    "pe_in": _STREAM,
    "per_layer_embd_out": _DEEP,
    "out_scaled": _STREAM,
    "l_out": _STREAM,
    "h_nextn": _HEAD,
    "result_norm": _HEAD,
    "result_output": _HEAD,
}

_RANK = {name: i for i, name in enumerate(TABLE)}
# After the layers: of the text model, and of the encoders.
_HEAD_NAMES = {"h_nextn", "result_norm", "result_output"}
_HEAD_NAMES |= {"v.pooled", "v.std_scaled", "v.projected", "a.out", "a.projected"}
# Before the layers, though they are numbered.
_BEFORE = (
    *("v.patch_norm-1", "v.patch_embd", "v.patch_norm-2", "v.pos_embd", "v.patch_norm-3"),
    *("a.mel", "a.frames", "a.conv-0", "a.conv-1", "a.inp"),
)
_PLACE = {name: i for i, name in enumerate(_BEFORE)}
_PARTS = ("v.", "a.")  # encoders, before the text model


def split_name(name: str) -> tuple[str, int | None]:
    """("Qcur_pos", 3) of "Qcur_pos-3"; the layer is None for names that belong to no layer."""
    base, dash, layer = name.rpartition("-")
    return (base, int(layer)) if dash and layer.isdecimal() else (name, None)


def part_of(name: str) -> int:
    """0: the vision encoder, 1: the audio encoder, 2: the text model; each has layers of its own."""
    return next((i for i, prefix in enumerate(_PARTS) if name.startswith(prefix)), len(_PARTS))


def growth(name: str, n_layers: int) -> float:
    """sqrt(1 + layer): how much wider than at layer 0 a limit is. The head counts as layer n_layers - 1.

    n_layers  of the part that the name belongs to
    """
    base, layer = split_name(name)
    if layer is None:
        layer = n_layers - 1 if base in _HEAD_NAMES else 0
    return math.sqrt(1 + layer)


def limit_of(name: str, column: str, n_layers: int) -> float | None:
    """The budget of a name, e.g. "l_out-7"; None for a name that is not in the table."""
    budget = TABLE.get(split_name(name)[0])
    return None if budget is None else budget.limits[COLUMNS.index(column)] * growth(name, n_layers)


def row_limit_of(name: str, column: str, n_layers: int) -> float | None:
    """The same for the worst row."""
    limit = limit_of(name, column, n_layers)
    return None if limit is None else limit * TABLE[split_name(name)[0]].row


def order_of(name: str) -> tuple[int, int, int, int, str]:
    """Sort key: the order in which a forward call computes the names; unknown ones last in their layer."""
    base, layer = split_name(name)
    if name in _PLACE:
        return part_of(name), 0, 0, _PLACE[name], name
    stage = 1 if layer is not None else 2 if base in _HEAD_NAMES else 0
    return part_of(name), stage, layer or 0, _RANK.get(base, len(_RANK)), name


def markdown() -> str:
    """The table as it stands in docs/numerics.md; `twinpath diff --budget` prints it."""
    lines = [f"| name | {' | '.join(COLUMNS)} | row | reason |", "|---|---|---|---|---|---|---|"]
    for name, budget in TABLE.items():
        limits = ("not judged" if math.isinf(limit) else f"{limit:g}" for limit in budget.limits)
        lines.append(f"| `{name}` | {' | '.join(limits)} | {budget.row:g}x | {budget.reason} |")
    return "\n".join(lines)
