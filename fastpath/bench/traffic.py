"""What a forward call reads and multiplies, op by op: an op table that hands every call on and notes it.

    watched = Watched(ops, model)
    forward(watched, ...)
    watched.calls        -> [Call, ...], of all forward calls so far

Bytes are those that must come from memory at least once per call: weights (of the experts that were chosen,
of the rows that were looked up), and the keys and values that are visible. Activations stay in the caches,
and do not count.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from refimpl.kv_types import STEP

# op or field of the weights -> what the profile calls it; other ops have their own name
CLASSES = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "attention projections"),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), "dense ffn"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "experts"),
    **dict.fromkeys(("inp_gate", "proj", "per_layer_model_proj"), "per-layer projections"),
    **dict.fromkeys(("add", "scale"), "add, scale"),
    **dict.fromkeys(("rope", "rope_table"), "rope"),
    **dict.fromkeys(("geglu", "softcap"), "activations"),
    "ffn_gate_inp": "router",
    "output": "head",
}
PRODUCTS = ("linear", "expert_linear")


@dataclass(frozen=True)
class Call:
    """One call of an op."""

    op: str
    field: str  # of the weights that it read; "" for ops without
    kind: str  # of the layer: see `layer_kind`; "" outside the layers
    ns: int
    begin_ns: int = 0
    n_rows: int = 0  # tokens of the forward call that it was part of
    weight_bytes: int = 0
    kv_bytes: int = 0
    n_ops: int = 0  # multiplications and additions of integers
    n_float_ops: int = 0  # those of float32: attention, weights without integer parts

    @property
    def op_class(self) -> str:
        name = CLASSES.get(self.field) if self.op in PRODUCTS else None
        return name or CLASSES.get(self.op, self.op)

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def layer_kind(layer) -> str:
    kind = "global" if layer.window is None else "local"
    return kind if layer.owns_kv else f"{kind}, shared KV"


class Watched:
    """The op table `ops` for a model."""

    def __init__(self, ops, model):
        self._ops, self._config = ops, model.config
        self._fields = {id(weight): place for weight, place in weight_places(model.weights)}
        self._kind, self._n_rows = "", 0
        self.calls: list[Call] = []

    def __getattr__(self, op: str) -> Any:
        function = getattr(self._ops, op)
        if op.startswith("_") or not callable(function):
            return function

        def call(*args, **options):
            begin = time.perf_counter_ns()
            result = function(*args, **options)
            ns = time.perf_counter_ns() - begin
            self.calls.append(self._noted(op, begin, ns, args))
            return result

        setattr(self, op, call)
        return call

    def _noted(self, op: str, begin: int, ns: int, args: tuple) -> Call:
        """Layers are told apart by the weights that their ops read; ops without belong to the same layer."""
        field = ""
        if op == "embed":  # the first op of a forward call
            self._n_rows = len(args[1])
        for arg in args:
            if id(arg) in self._fields:
                layer, field = self._fields[id(arg)]
                self._kind = "" if layer is None else layer_kind(self._config.layers[layer])
                break
        count = COUNTS.get(op)
        return Call(op, field, self._kind, ns, begin, self._n_rows, **(count(*args) if count else {}))


def weight_places(weights) -> Iterator[tuple[Any, tuple[int | None, str]]]:
    """Each weight with its layer and its field. A tied table has the field of the head, "output"."""
    for each in fields(weights):
        value = getattr(weights, each.name)
        if each.name not in ("layers", "unused", "output") and value is not None:
            yield value, (None, each.name)
    yield weights.output, (None, "output")
    for i, layer in enumerate(weights.layers):
        for each in fields(layer):
            value = getattr(layer, each.name)
            if value is not None and not isinstance(value, float):
                yield value, (i, each.name)


# -- op -> what a call counts, from its arguments


def _embed(table, ids, *_) -> dict[str, int]:
    return {"weight_bytes": len(ids) * table.row_bytes}


def _linear(x, weight, activations, *_) -> dict[str, int]:
    M, C = weight.shape
    return {"weight_bytes": weight.nbytes, _unit(weight, activations): 2 * len(x) * M * C}


def _expert_linear(x, weight, expert_ids, activations, *_) -> dict[str, int]:
    E, M, C = weight.shape
    n_read = len(np.unique(expert_ids))
    n_bytes = weight.nbytes // E * n_read
    return {"weight_bytes": n_bytes, _unit(weight, activations): 2 * expert_ids.size * M * C}


def _unit(weight, activations: str) -> str:
    return "n_ops" if activations == "int8" and weight.format.integer_parts is not None else "n_float_ops"


def _attention(q, k_pages, v_pages, table, seq_ids, positions, window, *_) -> dict[str, int]:
    """Keys that several rows of one sequence see are read once. k_pages [N, K, P/32, H, 32]"""
    _, N, H = q.shape
    last = np.asarray(positions, np.int64)
    first = np.zeros_like(last) if window is None else np.maximum(0, last - window + 1)
    lanes = np.asarray(seq_ids)
    n_keys = sum(int(last[lanes == r].max() - first[lanes == r].min()) + 1 for r in np.unique(lanes))
    per_key = (k_pages[0].nbytes + v_pages[0].nbytes) // (STEP * k_pages.shape[2])
    return {"kv_bytes": n_keys * per_key, "n_float_ops": 4 * N * H * int((last - first + 1).sum())}


COUNTS: dict[str, Callable[..., dict[str, int]]] = {
    "embed": _embed,
    "linear": _linear,
    "expert_linear": _expert_linear,
    "attention": _attention,
}


def totals(calls: list[Call]) -> Call:
    """The sum of calls, as one."""
    sums = {name: sum(getattr(c, name) for c in calls) for name in _SUMMED}
    return Call("", "", "", **sums)


_SUMMED = ("ns", "weight_bytes", "kv_bytes", "n_ops", "n_float_ops")
