"""A model file, opened: configuration, weights that stay in the file, tokenizer, chat template."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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
    arena: Any = field(
        default=None, repr=False
    )  # the memory of packed weights; None while they are in the file

    def packed(self, progress: Callable[[int, int], None] | None = None) -> "Model":
        """This model with its matrices in private memory, as the cpu kernels read them fastest (repack.py).

        progress(done, total): bytes of the file; an exception from it ends the packing
        """
        from fastpath import repack  # and with it the compiler, which not every command needs

        plan = repack.plan(self.weights)
        repack.check_room(plan)
        model = copy(self)  # with the tokenizer, if it has been made
        weights, arena = repack.pack(self.weights, plan, progress)
        vars(model).update(weights=weights, arena=arena)
        return model

    @property
    def private_bytes(self) -> int:
        """Memory for weights that are not read from the file as it lies."""
        return 0 if self.arena is None else self.arena.nbytes

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
