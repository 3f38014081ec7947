"""The text model of Gemma 4: token ids in, logits out."""

import numpy as np

from refimpl import ops
from refimpl.batch import check_soft
from refimpl.model.block import Call, block


def forward(config, weights, cache, batch, *, activations="float", trace=None):
    """Run T tokens of some sequences through the model; their keys and values stay in the cache.

        x = embed(ids) * sqrt(D);   x = block_l(x) for every layer;   logits = softcap(E norm(x))

    Shapes:
        config       Config
        weights      Weights
        cache        KVCache  its dtype is the precision of the whole call: float64 for the truth
        batch        Batch    T tokens, M of which want logits
        activations  "float" | "int8"  see ops.linear
        trace        function of (name, array) | None  called with every intermediate value; names are those
                     of docs/glossary.md, e.g. `l_out-3`
    Returns:
        f[M, V]

    Notes:
        There is one kind of call.  A prompt, a chunk of it, one decoded token or several sequences of each
        differ only in the batch; a token's logits do not depend on the others' being there.
        Soft tokens of images and sounds differ from words in two things only: where their embedding comes
        from, and, in the large models, that those of one image see each other both ways (Call.ends).
        Only the M wanted rows go through the head: with 262,144 rows the output matrix is the largest of all.
    """
    cache.check(batch)
    _check_ids(config, batch)
    both_ways = config.media_attention == "bidirectional"
    check_soft(batch, config.model_dim, whole=both_ways)
    ends = batch.ends if both_ways else None
    call = Call(batch, ends, config.rms_eps, activations, trace or (lambda name, array: None))
    # A NumPy scalar of the cache's precision: in this way `embed` starts a float64 pass.
    x = ops.embed(weights.token_embd, batch.token_ids, cache.dtype.type(config.embed_scale))
    if batch.soft is not None:
        x[batch.soft_rows] = batch.soft  # as they are: the factor above is for words
    call.trace("inp_scaled", x)
    per_layer = per_layer_inputs(call, config, weights, x)

    ropes = {}  # two tables, one for each kind of layer
    for layer, w in zip(config.layers, weights.layers):
        if layer.rope not in ropes:
            ropes[layer.rope] = ops.rope_table(batch.positions, layer.rope.inv_freq)
        mine = None if per_layer is None else per_layer[:, layer.index]
        x = block(call, layer, w, cache.layer(layer.kv_from), ropes[layer.rope], mine, x)

    if len(batch.logit_rows) == 0:
        return np.empty((0, config.vocab_size), cache.dtype)
    x = call.norm(x[batch.logit_rows], weights.output_norm)
    call.trace("result_norm", x)
    logits = call.linear(x, weights.output)
    if config.softcap is not None:
        logits = ops.softcap(logits, config.softcap)
    call.trace("result_output", logits)
    return logits


def per_layer_inputs(call, config, weights, x):
    """A second embedding of every token: P numbers for each layer (E2B and E4B only).

        looked_up = table[id] * sqrt(P)                                  a row of the per-layer table: L
        slices of P projected = norm_P(Wm x / sqrt(D))                               the same from the token's
        embedding out = (looked_up + projected) / sqrt(2)

    Shapes:
        x  f[T, D]  the scaled embeddings, before any layer
    Returns:
        f[T, L, P], or None when the model has no such embeddings

    Notes:
        In E2B this table has more weights than all layers together, and a token reads one row of it: five
        billion weights that cost as much as two ("effective 2B").
    """
    if config.per_layer_dim == 0:
        return None
    T, L, P = len(x), config.n_layers, config.per_layer_dim
    scale = x.dtype.type(config.per_layer_embed_scale)
    looked_up = ops.embed(weights.per_layer_token_embd, call.batch.token_ids, scale).reshape(T, L, P)
    call.trace("inp_per_layer_selected", looked_up)
    projected = ops.scale(call.linear(x, weights.per_layer_model_proj), config.model_dim**-0.5)
    projected = call.norm(projected.reshape(T, L, P), weights.per_layer_proj_norm)
    call.trace("per_layer_proj", projected)
    out = ops.scale(ops.add(projected, looked_up), 2**-0.5)
    call.trace("inp_per_layer", out)
    return out


def _check_ids(config, batch):
    ids = batch.token_ids
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ValueError(
            f"batch: token id {bad}, expected 0 .. {config.vocab_size - 1}. Ids of another model's tokenizer?"
        )
