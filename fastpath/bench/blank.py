"""Models of the published sizes without numbers: what their files say, and matrices of nothing but zeros.

    model = blank("E4B:Q8_0")    ->  .config, .weights

For everything that depends on shapes and types alone: plans of memory, predictions.  A matrix is one byte
that is seen everywhere, so that a model of 60 GB takes none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastpath.bench import sizes
from quant import FORMATS, QTensor
from refimpl.config import Config
from refimpl.tensors import load_weights


@dataclass(frozen=True)
class Blank:
    """What fastpath.load.Model has, as far as a forward call asks."""

    config: Any
    weights: Any
    name: str


def blank(spec: str) -> Blank:
    return assembled(*sizes.parse(spec), _zeros)


def assembled(
    size: sizes.Size, recipe: str, matrix: Callable[..., QTensor], vocabulary: int = sizes.VOCAB
) -> Blank:
    """A model of any size; matrix(format, shape, name) makes its matrices."""
    tensors = {}
    for planned in sizes.tensors(size):
        name, shape, kind = planned
        if kind == "table":
            shape = vocabulary, *shape[1:]
        fmt = FORMATS[sizes.type_of(size, recipe, planned)]
        is_vector = fmt.name == "F32" and len(shape) == 1
        tensors[name] = _vector(name, shape, kind) if is_vector else matrix(fmt, shape, name)
    metadata = sizes.metadata(size, recipe) | {"tokenizer.ggml.tokens": ()}
    spec = f"{size.name}:{recipe}"
    file: Any = SimpleNamespace(metadata=metadata, tensors=tensors, path=spec, paths=[spec])
    config = Config.from_gguf(file)
    return Blank(config, load_weights(file, config), spec)


def _vector(name, shape, kind):
    values = np.ones(shape, np.float32)
    if kind == "rope":
        values[int(sizes.ROTATED_SHARE * shape[0]) :] = 1e30
    return QTensor.from_array(values, "F32", name)


def _zeros(fmt, shape, name):
    data = np.broadcast_to(np.zeros(1, np.uint8), (*shape[:-1], fmt.row_bytes(shape[-1])))
    return QTensor(fmt, shape, data, name)
