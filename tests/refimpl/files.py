"""Model files in memory, changed in one place, for tests of what the loader makes of them."""

from functools import cache
from pathlib import Path

import numpy as np

from quant import GGUFFile, QTensor
from refimpl.batch import make_batch
from refimpl.cache import KVCache
from refimpl.config import Config
from refimpl.model.text import forward
from refimpl.tensors import load_weights
from tests import tiny


@cache
def _published(family):
    shape = tiny.shape_of(family)
    tensors = tiny.tensors_of(shape)
    return tiny.metadata(shape, with_vocabulary=False), tensors


def model_file(family="e2b", *, keys=None, tensors=None, drop=(), **spelling):
    """A tiny model as an opened file.

    keys      metadata to set, "gemma4." is added to names of hyper-parameters; None removes a key
    tensors   name -> array, to set
    drop      names to leave out
    spelling  arguments of tiny.tensors_of: fused, experts, aliases, tied
    """
    metadata, arrays = _published(family)
    arrays = tiny.tensors_of(tiny.shape_of(family), **spelling) if spelling else dict(arrays)
    metadata = dict(metadata)
    for key, value in (keys or {}).items():
        metadata[key if key.startswith(("general.", "tokenizer.")) else f"gemma4.{key}"] = value
    arrays.update(tensors or {})
    weights = {
        name: array if isinstance(array, QTensor) else QTensor.from_array(np.float32(array), "F32", name)
        for name, array in arrays.items()
        if name not in drop
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return GGUFFile(Path("tiny.gguf"), 3, 32, 0, metadata, weights, ())


def arrays_of(family):
    """The tensors of the published form, as float32 arrays."""
    return dict(_published(family)[1])


def config_of(family="e2b", **changes):
    return Config.from_gguf(model_file(family, **changes))


def opened(family="e2b", **changes):
    """(config, weights)."""
    file = model_file(family, **changes)
    config = Config.from_gguf(file)
    return config, load_weights(file, config)


def run(config, weights, parts, *, cache=None, dtype=np.float64, **options):
    """Logits of some (lane, start, ids, wanted) parts; without a cache, in a fresh one that holds them."""
    if cache is None:
        length = max(start + len(ids) for _, start, ids, _ in parts)
        cache = KVCache(config, 1 + max(part[0] for part in parts), length, length, dtype)
    return forward(config, weights, cache, make_batch(parts), **options)


def all_logits(config, weights, ids, **options):
    """f[T, V] of one sequence in one call."""
    return run(config, weights, [(0, 0, ids, "all")], **options)
