"""The text model over an op table: token ids in, logits of the wanted rows out."""

from dataclasses import replace
from typing import Any

import numpy as np

from fastpath import arrays
from fastpath.largest import Largest
from fastpath.model.block import Pass, Trace, block, ignore
from refimpl.batch import check_soft


def forward(
    ops,
    config,
    weights,
    cache,
    batch,
    *,
    activations: str = "int8",
    trace: Trace | None = None,
    k: int | None = None,
):
    """One call for a prompt, a chunk, a decoded token, or several sequences of any of these.

    Shapes:
        batch    T tokens, each with its position and its cache lane; M rows whose logits are wanted
        trace    called with every intermediate, all rows, in the order of computation; arrays are the op
                 table's (arrays.on_host)
        k        how many of a row's largest logits are wanted; None: all of them, in their order
    Returns:
        f[M, V] logits, soft-capped, on the host; with a k, Largest of as many

    Notes:
        The last layers of the small models write no keys, so nobody reads their output but the head: without
        a trace they run on the wanted rows only. No row's bytes depend on another row: no logit changes.
        Soft tokens replace embeddings after these were scaled. Elsewhere they are tokens like others, but for
        `ends`: in the large models those of one image see each other both ways.
    """
    both_ways = config.media_attention == "bidirectional"
    cache.check(batch)
    check_soft(batch, config.model_dim, whole=both_ways)
    cache.reserve(batch)
    place = arrays.of(ops)
    run = Pass(ops, config.rms_eps, activations, trace or ignore, **_tokens(place, batch, both_ways))
    ids, pages = place.put(batch.token_ids), _Pages(place, cache)
    positions, rows = batch.positions, batch.logit_rows
    number = cache.dtype.type  # the precision of the whole call: an embedding takes that of its factor
    x = ops.embed(weights.token_embd, ids, number(config.embed_scale))
    if batch.soft is not None:
        ops.set_rows(x, batch.soft_rows, batch.soft)
    run.trace("inp_scaled", x)
    per_layer = _per_layer_inputs(run, config, weights, ids, x)
    of_layers = _by_layer(ops, per_layer)
    last_owner = max(layer.index for layer in config.layers if layer.owns_kv)
    ropes: dict[int, tuple] = {}

    for layer, w in zip(config.layers, weights.layers, strict=True):
        if trace is None and layer.index == last_owner + 1 and len(rows) < len(x):
            run = replace(run, **_tokens(place, batch, both_ways, rows))
            positions, ropes = positions[rows], {}
            x, of_layers = ops.get_rows(x, rows), _by_layer(ops, per_layer, rows)
            rows = np.arange(len(x))
        if len(x) == 0:
            break
        if id(layer.rope) not in ropes:
            ropes[id(layer.rope)] = ops.rope_table(positions, layer.rope.inv_freq)
        mine = None if of_layers is None else of_layers[layer.index]
        x = block(run, layer, w, pages.of(layer.kv_from), ropes[id(layer.rope)], mine, x)
    if len(rows) == 0:
        none = np.empty((0, config.vocab_size), cache.dtype)
        return none if k is None else Largest(none[:, :k], np.empty((0, k), np.int32))
    is_whole = np.array_equal(rows, np.arange(len(x)))
    return _head(run, place, config, weights, x if is_whole else ops.get_rows(x, rows), k)


def _tokens(place, batch, both_ways: bool, rows=slice(None)) -> dict[str, Any]:
    """What layers know of the tokens, or of some of them; for a Pass."""
    ends = batch.ends if both_ways else None  # None as well where there are no images
    return {
        "positions": place.put(batch.positions[rows]),
        "seq_ids": place.put(batch.seq_ids[rows]),
        "ends": None if ends is None else place.put(ends[rows]),
    }


class _Pages:
    """A cache, with its tables where ops read them: each is brought there once a call."""

    def __init__(self, place, cache):
        self._place, self._cache, self._tables = place, cache, {}

    def of(self, layer: int) -> tuple:
        """Keys, values, table."""
        k, v, table = self._cache.layer(layer)
        if id(table) not in self._tables:
            self._tables[id(table)] = self._place.put(table)
        return k, v, self._tables[id(table)]


def _per_layer_inputs(run: Pass, config, weights, token_ids, x):
    """f[T, L, P]: for every layer, its row of the per-layer table plus a projection of the embedding."""
    P, L, T = config.per_layer_dim, config.n_layers, len(token_ids)
    if P == 0:
        return None
    ops = run.ops
    factor = x.dtype.type(config.per_layer_embed_scale)
    looked_up = ops.embed(weights.per_layer_token_embd, token_ids, factor).reshape(T, L, P)
    run.trace("inp_per_layer_selected", looked_up)
    projected = ops.scale(run.linear(x, weights.per_layer_model_proj), config.model_dim**-0.5).reshape(
        T, L, P
    )
    projected = run.norm(projected, weights.per_layer_proj_norm)
    run.trace("per_layer_proj", projected)
    both = ops.scale(ops.add(projected, looked_up), 2**-0.5)
    run.trace("inp_per_layer", both)
    return both


def _by_layer(ops, per_layer, rows=None):
    """f[T, L, P] -> f[L, T, P], or of some of the tokens; None stays None."""
    if per_layer is None:
        return None
    return ops.swap_axes(per_layer if rows is None else ops.get_rows(per_layer, rows))


def _head(run: Pass, place, config, weights, x, k: int | None):
    """f[M, D] -> what `forward` returns: only these rows meet the vocabulary."""
    x = run.norm(x, weights.output_norm)
    run.trace("result_norm", x)
    logits = run.linear(x, weights.output)
    if k is not None:
        values, ids = run.ops.top_k(logits, k, config.softcap)
        run.trace("result_output", values)
        return Largest(place.get(values), place.get(ids))
    if config.softcap is not None:
        logits = run.ops.softcap(logits, config.softcap)
    run.trace("result_output", logits)
    return place.get(logits)
