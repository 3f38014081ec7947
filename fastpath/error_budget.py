"""How far two traces of one model may lie apart, name by name: the one table behind `twinpath diff`.

The figure is the normalised error, RMS(a - b) / RMS(a), over all rows of a name. Three columns:

float      both sides take activations as float32: they differ in the order of sums and the last bit of exp
           and tanh
int8       both sides follow the integer contract: as above, and now and then a value near the middle of two
           int8 steps falls to the other side, which moves one activation by amax / 127
different  one side rounds activations to int8 (or keeps tables in float16, as llama.cpp does for GELU), the
           other does not

A limit holds at layer 0; later layers inherit what came before, so it grows by sqrt(1 + layer).
"""

import math
from dataclasses import dataclass

COLUMNS = ("float", "int8", "different")


@dataclass(frozen=True)
class Budget:
    float: float
    int8: float
    different: float
    reason: str


_COPY = Budget(1e-6, 1e-6, 1e-6, "rows of a table times one factor: nothing to sum")
_INPUT = Budget(1e-5, 2e-3, 4e-2, "one projection of the scaled embedding, normed")
_STREAM = Budget(1e-5, 5e-3, 5e-2, "the residual stream: errors of all branches before, partly cancelling")
_NORMED = Budget(1e-5, 5e-3, 5e-2, "the residual stream, rescaled")
_BRANCH = Budget(2e-5, 1e-2, 8e-2, "one projection of a normed row: its own rounding on top of the stream's")
_DEEP = Budget(3e-5, 2e-2, 1.2e-1, "two projections or a softmax deep into a branch")
_HEAD = Budget(3e-5, 1e-2, 8e-2, "the final norm and the vocabulary's projection")
_CHOICE = Budget(
    1e-5, math.inf, math.inf, "expert numbers: with rounded activations a near-tie may pick another expert"
)
_ROUTED = Budget(3e-5, 5e-2, 5e-1, "behind the choice of experts: one other expert changes its whole row")

# In the order of computation, which is also the order of the report.
TABLE: dict[str, Budget] = {
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
    "ffn_moe_out": _ROUTED,
    "ffn_moe": _ROUTED,
    "ffn_moe_combined": _ROUTED,
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
_HEAD_NAMES = {"h_nextn", "result_norm", "result_output"}


def split_name(name: str) -> tuple[str, int | None]:
    """("Qcur_pos", 3) of "Qcur_pos-3"; the layer is None for names that belong to no layer."""
    base, dash, layer = name.rpartition("-")
    return (base, int(layer)) if dash and layer.isdecimal() else (name, None)


def limit_of(name: str, column: str, n_layers: int) -> float | None:
    """The budget of a name, e.g. "l_out-7"; None for a name that is not in the table.

    The head reads the last layer's output: it counts as layer n_layers - 1.
    """
    base, layer = split_name(name)
    if base not in TABLE:
        return None
    if layer is None:
        layer = n_layers - 1 if base in _HEAD_NAMES else 0
    limit: float = getattr(TABLE[base], column)
    return limit * math.sqrt(1 + layer)


def order_of(name: str) -> tuple[int, int, int, str]:
    """Sort key: the order in which a forward call computes the names; unknown ones last in their layer."""
    base, layer = split_name(name)
    stage = 1 if layer is not None else 2 if base in _HEAD_NAMES else 0
    return stage, layer or 0, _RANK.get(base, len(_RANK)), name


def markdown() -> str:
    """The table as it stands in docs/numerics.md."""
    lines = ["| name | float | int8 | different | reason |", "|---|---|---|---|---|"]
    for name, budget in TABLE.items():
        limits = " | ".join(
            "not judged" if math.isinf(x) else f"{x:.0e}"
            for x in (budget.float, budget.int8, budget.different)
        )
        lines.append(f"| `{name}` | {limits} | {budget.reason} |")
    return "\n".join(lines)
