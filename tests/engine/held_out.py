"""Held-out conversations of the demo checkpoint, and how likely a model finds them.

A figure near perplexity: the mean natural logarithm of the probability of the token that comes next, over
every token of conversations that training never saw (oracles/demo/data.py makes them from a seed).
"""

from itertools import islice

import numpy as np

from oracles.demo import data
from refimpl.batch import make_batch
from refimpl.cache import KVCache
from refimpl.model.text import forward

SEED = 20_260_701


def conversations(tokenizer, n):
    """n lists of (ids, whether each token is part of an answer)."""
    result = []
    for example in islice(data.stream(SEED, held=True), n):
        ids, is_answer = [], []
        for text, weight in example.pieces:
            piece = tokenizer.encode(text, parse_special=True)
            ids += piece
            is_answer += [weight > 0] * len(piece)
        result.append((ids, np.array(is_answer)))
    return result


def log_probabilities(logits, ids):
    """f64[T - 1]: of token t + 1, by the logits f[T, V] of tokens 0 .. t."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
    return logits[np.arange(len(ids) - 1), ids[1:]] - total


def by_definition(model, texts, activations="float", dtype=np.float64):
    """Log-probabilities of all conversations in a row, by the reference, in one call."""
    longest = max(len(ids) for ids, _ in texts)
    cache = KVCache(model.config, len(texts), longest, longest, dtype)
    batch = make_batch([(lane, 0, ids, "all") for lane, (ids, _) in enumerate(texts)])
    logits = forward(model.config, model.weights, cache, batch, activations=activations)
    ends = np.cumsum([len(ids) for ids, _ in texts])
    parts = zip(np.split(logits, ends[:-1]), texts, strict=True)
    return np.concatenate([log_probabilities(rows, ids) for rows, (ids, _) in parts])


def by_engine(engine, texts, chunk):
    """The same by the fast engine: the first `chunk` tokens of each in one call, then one at a time."""
    parts = []
    for ids, _ in texts:
        engine.reset()
        first = engine.forward(make_batch([(0, 0, ids[:chunk], "all")]))
        rest = [engine.forward(make_batch([(0, t, ids[t : t + 1], "all")])) for t in range(chunk, len(ids))]
        parts.append(log_probabilities(np.concatenate([first, *rest]), ids))
    return np.concatenate(parts)
