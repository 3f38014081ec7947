"""The whole algorithm: a prompt goes in by chunks, then one token at a time comes out and goes in again."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quant import open_gguf
from refimpl.batch import make_batch, plan_chunks
from refimpl.cache import KVCache
from refimpl.config import Config
from refimpl.frontend.chat_template import ChatTemplate
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.frontend.tokenizer import Tokenizer
from refimpl.model.text import forward
from refimpl.tensors import Weights, load_weights


@dataclass(frozen=True)
class Model:
    """What a model file holds."""

    config: Config
    weights: Weights
    tokenizer: Any
    template: Any


def load(path):
    """Open a GGUF file.  The weights stay in it until they are used."""
    file = open_gguf(path)
    config = Config.from_gguf(file)
    tokenizer = Tokenizer.from_gguf(file)
    template = ChatTemplate(
        file.metadata.get("tokenizer.chat_template"),
        small_family=config.per_layer_dim > 0,
        bos=tokenizer.piece(tokenizer.bos_id),
    )
    return Model(config, load_weights(file, config), tokenizer, template)


def generate(
    model,
    prompt_ids,
    params=None,
    max_tokens=100,
    *,
    soft=(),
    chunk=512,
    dtype=np.float32,
    activations="float",
    constraint=None,
):
    """Continue a prompt, token by token.

    Args:
        model: a Model
        prompt_ids: token ids, BOS included
        params: SamplingParams; None is greedy
        max_tokens: of the continuation; the model's context may end it earlier
        soft: SoftTokens of images and sounds in the prompt, in order
        chunk: most tokens of the prompt in one call; it changes memory and time, not the answer
        dtype: precision of activations and cache
        activations: see ops.linear
        constraint: what else must not come, a Constraint at the beginning of the answer
    Yields:
        token ids, without the one that ends the answer
    """
    params = params or SamplingParams()
    ids = list(prompt_ids)
    if not ids:
        raise ValueError("prompt: got no tokens, expected at least one. Begin with BOS")
    capacity = min(len(ids) + max_tokens, model.config.context_len)
    whole = model.config.media_attention == "bidirectional"
    chunks = plan_chunks(0, len(ids), chunk, soft, whole=whole)
    cache = KVCache(model.config, 1, capacity, max(stop - start for start, stop in chunks), dtype)

    def run(start, tokens, wanted):
        batch = make_batch([(0, start, tokens, wanted)], {0: soft})
        return forward(model.config, model.weights, cache, batch, activations=activations)

    for start, stop in chunks:
        logits = run(start, ids[start:stop], "last" if stop == len(ids) else "none")

    for _ in range(max_tokens):
        suppress = model.tokenizer.suppress_ids
        next_id = sample(logits[0], params, np.array(ids, np.int32), len(ids), suppress, constraint)
        if constraint is not None:
            constraint.accept(next_id)
        if next_id in model.tokenizer.eog_ids:
            return
        yield next_id
        ids.append(next_id)
        if len(ids) > capacity:
            return
        logits = run(len(ids) - 1, [next_id], "last")
