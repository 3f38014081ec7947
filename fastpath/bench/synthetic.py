"""Models with random weights: the tensors, shapes, types and metadata of a published file of that size.

    path = ensure("E2B:Q4_0")            in the cache folder, written if it is not there
    write("E2B:Q4_0", path)

Speed, memory and start-up depend on sizes and types, not on what the weights say. So the values come cheap:
blocks of normal numbers are quantised once per type, a pool is drawn from them, and each row of a tensor is a
window of the pool. Rows overlap where a tensor is larger than its pool.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fastpath import user_cache
from fastpath.bench import sizes
from fastpath.bench.vocabulary import tokenizer_metadata
from quant import FORMATS, QTensor, open_gguf, quantize, write_gguf

Progress = Callable[[int, int], None]

POOL_BYTES = 1 << 26
SAMPLED_VALUES = 1 << 16  # quantised for real, per type and row length
SPARE_BYTES = 1 << 29  # of the disk, left free
SEED = 4


def folder() -> Path:
    """Where files are kept: beside the kernel cache."""
    base = user_cache.folder()
    if base is None:
        raise ValueError("there is no cache folder for a synthetic model. Name a file with --model FILE.")
    return base / "synthetic"


def ensure(
    spec: str, path: Path | None = None, *, vocab: Path | None = None, progress: Progress | None = None
) -> Path:
    """The file of a synthetic model, written if it is not there; ValueError if another one is."""
    size, recipe = sizes.parse(spec)
    if path is None:
        path = folder() / f"gemma-4-{size.name}-{recipe}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        check(spec, path, vocab=vocab)
    else:
        write(spec, path, vocab=vocab, progress=progress)
    return path


def check(spec: str, path: Path, *, vocab: Path | None = None) -> None:
    """The file is what `write` makes of the same arguments, but for the weights' values, or ValueError."""
    size, recipe = sizes.parse(spec)
    file, advice = open_gguf(path), "Name another file with --model, or remove this one to have it written"
    want = sizes.metadata(size, recipe)
    for key, value in want.items():
        got = file.metadata.get(key)
        kept = float(np.float32(value)) if isinstance(value, float) else value  # as files hold it
        if not np.array_equal(got, kept):  # type: ignore[arg-type]
            raise ValueError(f"{path}: {key} is {_short(got)}, expected {_short(value)} of {spec}. {advice}")
    plan = {name: (shape, sizes.type_of(size, recipe, (name, shape, kind)))
            for name, shape, kind in sizes.tensors(size)}  # fmt: skip
    found = {name: (tensor.shape, tensor.format.name) for name, tensor in file.tensors.items()}
    for name in plan | found:
        if plan.get(name) != found.get(name):
            got, expected = (_short(of.get(name)) for of in (found, plan))
            raise ValueError(f"{path}: tensor {name} is {got}, expected {expected} of {spec}. {advice}")
    if vocab is not None:
        for key, value in _tokenizer_of(vocab).items():
            if not np.array_equal(file.metadata.get(key), value):  # type: ignore[arg-type]
                raise ValueError(f"{path}: {key} is not that of {vocab}. {advice}")


def _short(value: object) -> str:
    """For a message: its beginning, or that it is not there."""
    if value is None:
        return "missing"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def write(
    spec: str, path: Path, *, vocab: Path | None = None, progress: Progress | None = None, seed: int = SEED
) -> None:
    """Writes the model; the same arguments give the same bytes.

    vocab     a GGUF file whose tokenizer.* metadata to take; None: words made up here
    progress  (bytes, of how many), after each tensor
    """
    size, recipe = sizes.parse(spec)
    plan = [(planned, sizes.type_of(size, recipe, planned)) for planned in sizes.tensors(size)]
    check_disk(path, sum(n_bytes(shape, fmt) for (_, shape, _), fmt in plan))
    draw = Draw(np.random.default_rng(seed))
    tokenizer = tokenizer_metadata() if vocab is None else _tokenizer_of(vocab)
    tensors = [draw.tensor(planned, fmt) for planned, fmt in plan]
    write_gguf(path, sizes.metadata(size, recipe) | tokenizer, tensors, progress=progress)


def n_bytes(shape: tuple[int, ...], fmt: str) -> int:
    return math.prod(shape[:-1]) * FORMATS[fmt].row_bytes(shape[-1])


def check_disk(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size + SPARE_BYTES:
        raise ValueError(
            f"{path}: got {free / 1e9:.1f} GB free, expected {(size + SPARE_BYTES) / 1e9:.1f} GB for this "
            "synthetic model. Make room, or name a file on another disk with --model FILE."
        )


def _tokenizer_of(vocab: Path) -> dict[str, object]:
    metadata = open_gguf(vocab).metadata
    found: dict[str, object] = {k: metadata.typed(k) for k in metadata if k.startswith("tokenizer.")}
    n = len(metadata.get("tokenizer.ggml.tokens", ()))
    if n != sizes.VOCAB:
        raise ValueError(
            f"{vocab}: got a vocabulary of {n} tokens, expected {sizes.VOCAB}. Take a Gemma 4 file"
        )
    return found


class Draw:
    """Draws tensors. Pools are shared by all tensors of one type and row length."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.pools: dict[tuple[str, int], np.ndarray] = {}

    def tensor(self, planned: sizes.Planned, fmt: str) -> QTensor:
        name, shape, kind = planned
        if kind in ("rope", "norm", "scale"):
            return QTensor.from_array(self._vector(shape[0], kind), fmt, name)
        n_rows, row_bytes = math.prod(shape[:-1]), FORMATS[fmt].row_bytes(shape[-1])
        pool = self._pool(fmt, shape[-1], n_rows)
        block = FORMATS[fmt].block_bytes
        step = min(row_bytes, (len(pool) - row_bytes) // n_rows // block * block)
        spare = (len(pool) - row_bytes - step * (n_rows - 1)) // block
        first = block * int(self.rng.integers(0, spare + 1))
        strides = [step * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
        data = np.lib.stride_tricks.as_strided(pool[first:], (*shape[:-1], row_bytes), (*strides, 1))
        return QTensor(FORMATS[fmt], shape, data, name)

    def _vector(self, n: int, kind: str) -> np.ndarray:
        if kind == "rope":
            rotating = int(sizes.ROTATED_SHARE * n)
            return np.where(np.arange(n) < rotating, 1.0, 1e30).astype(np.float32)
        if kind == "scale":
            return self.rng.uniform(0.6, 0.9, n).astype(np.float32)
        return (1 + 0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def _pool(self, fmt: str, row_len: int, n_rows: int) -> np.ndarray:
        """u8[...]: at least one block for each row and a row more; weights of deviation 1/sqrt(row_len)."""
        block = FORMATS[fmt].block_bytes
        size = max(POOL_BYTES, (n_rows + 1) * block + FORMATS[fmt].row_bytes(row_len))
        kept = self.pools.get((fmt, row_len))
        if kept is None or len(kept) < size:
            values = self.rng.standard_normal(SAMPLED_VALUES, np.float32) * np.float32(row_len**-0.5)
            blocks = quantize(values[None], fmt).reshape(-1, block)
            kept = blocks[self.rng.integers(0, len(blocks), -(-size // block))].reshape(-1)
            self.pools[fmt, row_len] = kept
        return kept
