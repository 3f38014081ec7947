"""Tiny models, written and opened once per run, and the reference's forward pass over one of them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import quant
from refimpl.batch import make_batch
from refimpl.cache import KVCache
from refimpl.config import Config
from refimpl.model.text import forward
from refimpl.tensors import Weights, load_weights
from tests import tiny


@dataclass(frozen=True)
class TinyModel:
    """A tiny model as the reference sees it."""

    path: Path
    config: Config
    weights: Weights

    def trace(self, tokens, dtype=np.float32, *, chunk=None, activations="float") -> dict[str, np.ndarray]:
        """Every named intermediate for a prompt, rows in token order; `chunk` tokens a call."""
        step = chunk or len(tokens)
        kv = KVCache(self.config, 1, len(tokens), step, dtype)
        pieces: dict[str, list[np.ndarray]] = {}

        def listen(name, array):
            pieces.setdefault(name, []).append(np.array(array))

        for start in range(0, len(tokens), step):
            batch = make_batch([(0, start, tokens[start : start + step], "all")])
            forward(self.config, self.weights, kv, batch, activations=activations, trace=listen)
        return {name: np.concatenate(parts) for name, parts in pieces.items()}

    def logits(self, tokens, dtype=np.float32) -> np.ndarray:
        return self.trace(tokens, dtype)["result_output"]


def open_model(path: Path) -> TinyModel:
    file = quant.open_gguf(path)
    config = Config.from_gguf(file)
    return TinyModel(path, config, load_weights(file, config))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """model(name) -> TinyModel of a family or recipe of tests.tiny."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def make(name: str) -> TinyModel:
        return open_model(tiny.make_recipe(folder / f"tiny-{name}.gguf", name))

    return make


@pytest.fixture
def variant(tmp_path):
    """variant(family, **arguments of tiny.make) -> TinyModel."""

    def make(family: str, **arguments) -> TinyModel:
        return open_model(tiny.make(tmp_path / "variant.gguf", family, **arguments))

    return make
