"""A model file, opened: configuration, weights that stay in the file, tokenizer, chat template."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fastpath import user_cache
from quant import open_gguf
from refimpl.config import Config
from refimpl.tensors import Weights, load_weights

DEMO = Path(__file__).parent / "demo" / "twinpath-demo.gguf"


@dataclass(frozen=True)
class Model:
    """What a file says. Tokenizer and template are made when first asked for: numbers alone need neither."""

    path: Path
    file: Any
    config: Config
    weights: Weights = field(repr=False)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Every id has a row in the embedding table, or ValueError."""
        V = self.config.vocab_size
        bad = next((i for i in ids if not 0 <= i < V), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is out of range: this model has tokens 0 to {V - 1}.")

    @cached_property
    def tokenizer(self):
        from refimpl.frontend.tokenizer import Tokenizer

        with _naming(self.path):
            return Tokenizer.from_gguf(self.file, keep_in=user_cache.folder())

    @cached_property
    def template(self):
        from refimpl.frontend.chat_template import ChatTemplate

        source = self.file.metadata.get("tokenizer.chat_template")
        bos = self.tokenizer.piece(self.tokenizer.bos_id)
        with _naming(self.path):
            return ChatTemplate(
                source, small_family=self.config.per_layer_dim > 0, bos=bos, name=str(self.path)
            )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Faults in a file's metadata name the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_model(path: str | Path) -> Model:
    """Opens a GGUF file. Its tensors are views of the mapped file: this reads little more than the header."""
    path = Path(path)
    file = open_gguf(path)
    config = Config.from_gguf(file)
    return Model(path, file, config, load_weights(file, config))
