"""Published files of Gemma 4 in GGUF, which of them belong together, and how much memory each takes.

Projectors and drafters are made for one size of the text model, and work with every quantisation of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from fastpath.bench.sizes import HEAD_DIM, HEAD_DIM_GLOBAL, SIZES
from fastpath.hub.name import HubName
from fastpath.kv.geometry import plan
from fastpath.lanes import default_chunk

WORK_BYTES = 500_000_000  # the interpreter, compiled kernels, and what a call of a prompt's chunk computes in


@dataclass(frozen=True)
class Piece:
    """One file; `gb` is its size in units of 1e9 bytes, as published."""

    repo: str
    file: str
    gb: float

    @property
    def name(self) -> HubName:
        return HubName(self.repo, self.file)


@dataclass(frozen=True)
class Entry:
    """A model, with the projectors and the drafters that go with it: the first of each is taken.

    id    what `twinpath models` calls it
    size  of bench/sizes.py
    """

    id: str
    size: str
    model: Piece
    projectors: tuple[Piece, ...]
    drafters: tuple[Piece, ...] = ()

    @property
    def base(self) -> str:
        """The repository that it was converted from."""
        return f"google/gemma-4-{self.size}-it"

    def bytes_needed(self, context: int) -> int:
        """Of memory, with images and sounds, for one sequence of so many tokens with f16 keys and values."""
        files = self.model.gb + self.projectors[0].gb
        return int(files * 1e9) + kv_bytes(self.size, context) + WORK_BYTES


def kv_bytes(size: str, context: int, kv_type: str = "f16") -> int:
    """Keys and values of one sequence: the formula that the cache allocates by, on the published geometry."""
    s = SIZES[size]
    layers = [
        SimpleNamespace(
            owns_kv=i < s.n_layers - s.n_shared,
            window=None if s.is_global(i) else s.window,
            n_kv_heads=s.K if s.is_global(i) else s.K_swa,
            head_dim=HEAD_DIM_GLOBAL if s.is_global(i) else HEAD_DIM,
        )
        for i in range(s.n_layers)
    ]
    config = SimpleNamespace(layers=layers)
    context = min(context, s.context)
    return plan(config, 1, context, min(default_chunk(config), context), kv_type).nbytes


def _ggml(size: str, quant: str, gb: float) -> Piece:
    return Piece(f"ggml-org/gemma-4-{size}-it-GGUF", f"gemma-4-{size}-it-{quant}.gguf", gb)


def _ggml_projector(size: str, quant: str, gb: float) -> Piece:
    return Piece(f"ggml-org/gemma-4-{size}-it-GGUF", f"mmproj-gemma-4-{size}-it-{quant}.gguf", gb)


def _qat(size: str, file: str, gb: float) -> Piece:
    return Piece(f"unsloth/gemma-4-{size}-it-qat-GGUF", file, gb)


def _atomic(size: str, gb: float) -> Piece:
    return Piece(f"AtomicChat/gemma-4-{size}-it-assistant-GGUF", f"gemma-4-{size}-it-assistant.Q8_0.gguf", gb)


_E4B_PROJECTORS = (
    _ggml_projector("E4B", "Q8_0", 0.560),
    Piece("unsloth/gemma-4-E4B-it-GGUF", "mmproj-F16.gguf", 0.990),
)
_E4B_DRAFTERS = (_atomic("E4B", 0.100),)
_26B_PROJECTORS = (_ggml_projector("26B-A4B", "Q8_0", 0.806), _ggml_projector("26B-A4B", "bf16", 1.195))
_26B_DRAFTERS = (_qat("26B-A4B", "mtp-gemma-4-26B-A4B-it.gguf", 0.252), _atomic("26B-A4B", 0.462))
_31B_PROJECTORS = (_ggml_projector("31B", "Q8_0", 0.810), _ggml_projector("31B", "bf16", 1.201))

CATALOGUE = (
    Entry("E4B-Q8_0", "E4B", _ggml("E4B", "Q8_0", 8.031), _E4B_PROJECTORS, _E4B_DRAFTERS),
    Entry("E4B-Q4_0", "E4B", _ggml("E4B", "Q4_0", 4.588), _E4B_PROJECTORS, _E4B_DRAFTERS),
    Entry(
        "12B-QAT",
        "12B",
        _qat("12B", "gemma-4-12B-it-qat-UD-Q4_K_XL.gguf", 6.716),
        (_qat("12B", "mmproj-BF16.gguf", 0.175),),
        (_qat("12B", "mtp-gemma-4-12B-it.gguf", 0.254),),
    ),
    Entry(
        "26B-A4B-QAT",
        "26B-A4B",
        _qat("26B-A4B", "gemma-4-26B-A4B-it-qat-UD-Q4_K_XL.gguf", 14.249),
        (_qat("26B-A4B", "mmproj-BF16.gguf", 1.195),),
        _26B_DRAFTERS,
    ),
    Entry("26B-A4B-Q4_K_M", "26B-A4B", _ggml("26B-A4B", "Q4_K_M", 16.796), _26B_PROJECTORS, _26B_DRAFTERS),
    Entry("26B-A4B-Q8_0", "26B-A4B", _ggml("26B-A4B", "Q8_0", 26.860), _26B_PROJECTORS, _26B_DRAFTERS),
    Entry("31B-Q4_K_M", "31B", _ggml("31B", "Q4_K_M", 18.687), _31B_PROJECTORS),
    Entry("31B-Q8_0", "31B", _ggml("31B", "Q8_0", 32.636), _31B_PROJECTORS),
)
KINDS = ("model", "projector", "drafter")


def find(given: str) -> Entry:
    """The entry with an id, however it is capitalised."""
    found = next((entry for entry in CATALOGUE if entry.id.lower() == given.lower()), None)
    if found is None:
        known = ", ".join(entry.id for entry in CATALOGUE)
        raise ValueError(
            f"{given}: no model of the list, expected one of {known}; others: --model hf:OWNER/REPO."
        )
    return found


def pieces(kind: str) -> Iterator[tuple[str, Piece]]:
    """(size, file) of everything of one of KINDS."""
    for entry in CATALOGUE:
        of_kind = {"model": (entry.model,), "projector": entry.projectors, "drafter": entry.drafters}[kind]
        yield from ((entry.size, piece) for piece in of_kind)


def file_of(repo: str, kind: str) -> str:
    """The file that a repository is known for, or ""."""
    return next((piece.file for _, piece in pieces(kind) if piece.repo == repo), "")


def size_of(name: HubName) -> str:
    """The size that a file was made for, or "" if it is not of the list."""
    where = name.repo, name.file
    every = (item for kind in KINDS for item in pieces(kind))
    return next((size for size, piece in every if (piece.repo, piece.file) == where), "")


def right_one(kind: str, model_dim: int) -> str:
    """A projector or drafter for models of a width, as its name on the Hub, or ""."""
    sizes = {name for name, size in SIZES.items() if size.D == model_dim}
    return next((str(piece.name) for size, piece in pieces(kind) if size in sizes), "")


def check_pair(name: HubName, kind: str, model_dim: int, model: object) -> None:
    """Refuse, before it is fetched, a file of the list that was made for models of another width."""
    size = size_of(name if name.file else HubName(name.repo, file_of(name.repo, kind)))
    if size and SIZES[size].D != model_dim:
        instead = right_one(kind, model_dim)
        what = f"Use {instead}" if instead else f"Use the {kind} of that model"
        raise ValueError(
            f"{name}: a {kind} for {size} (width {SIZES[size].D}), expected one for width {model_dim} of "
            f"{model}. {what}"
        )
