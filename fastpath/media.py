"""The encoders of a projector file over an op table, and the soft tokens that they made lately.

    encoders = Encoders(load_projector(model, "mmproj.gguf"), ops_for("cpu"))
    photo = encoders.open("image", "photo.jpg")      # decoded: the number of its soft tokens is known
    encoded = encoders.encode(photo)                 # the work

The same content under the same budget is encoded once, whatever its name and in whatever list it comes.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastpath import locks
from fastpath.load import Model
from fastpath.model.audio import encode_audio
from fastpath.model.vision import encode_image
from refimpl.frontend.image import DEFAULT_BUDGET
from refimpl.frontend.media_file import Source
from refimpl.frontend.media_input import DEFAULT_SAMPLING, MediaInput, Sampling, open_input, read_input
from refimpl.frontend.media_prompt import Encoded, Kind
from refimpl.media_tensors import Media, load_media

CACHE_BYTES = 256 << 20  # 280 soft tokens of the widest model are 6 MB

Key = tuple[str, bytes, int | Sampling | None]  # kind, digest of the content, budget or choice of frames
Trace = Callable[[str, np.ndarray], None]
Progress = Callable[[int, int], None]


def load_projector(model: Model, path: str | None) -> Media:
    """The projector file of a model. Where none is named: the model itself, if its file holds encoders too,
    or the only one beside it, and a note says which.

    Raises:
        ValueError: one line; also when its soft tokens do not fit the model
    """
    notes: tuple[str, ...] = ()
    if path is None:
        path = _beside(model)
        if path != str(model.path):
            notes = (f"{path}: the encoders of images and sounds, as no --mmproj was given",)
    if not path:
        raise ValueError("the projector's name is empty. Name the model's mmproj file")
    media = load_media(path)
    media.check(model.config, model.path)
    return Media(media.path, media.vision, media.audio, notes + media.notes, media.tensors)


def _beside(model: Model) -> str:
    if any(name in model.file.tensors for name in ("v.patch_embd.weight", "mm.a.input_projection.weight")):
        return str(model.path)
    folder = model.path.parent
    found = sorted(path for path in folder.glob("*.gguf") if "mmproj" in path.name.lower())
    if len(found) == 1:
        return str(found[0])
    what = "none lies beside it" if not found else f"{len(found)} lie beside it"
    raise ValueError(
        f"{model.path}: images, sounds and videos need the model's encoders, and of files mmproj-...gguf "
        f"{what}. Name the right one: --mmproj FILE"
    )


@dataclass(frozen=True)
class Opened:
    """A media file whose soft tokens are counted.

    rows  the soft tokens, if they were known already
    """

    kind: Kind
    key: Key
    input: MediaInput
    rows: tuple[np.ndarray, ...] | None = field(default=None, repr=False)
    decode_s: float = 0.0


class Encoders:
    """What sees and hears.

    media        the projector, checked against the model
    activations  "int8" | "float", of quantised weights
    cache_bytes  most bytes of soft tokens that are kept; those used least lately go first
    """

    def __init__(self, media: Media, ops: Any, *, activations: str = "int8", cache_bytes: int = CACHE_BYTES):
        self.media, self.ops, self.activations = media, ops, activations
        self.kept = Kept(cache_bytes)

    def open(
        self,
        kind: Kind,
        source: Source,
        *,
        name: str | None = None,
        budget: int = DEFAULT_BUDGET,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> Opened:
        """Read a file, and decode it unless its soft tokens are known; arguments as in `open_input`."""
        begin = time.perf_counter()
        file = read_input(self.media, kind, source, name)
        options: dict[str, int | Sampling | None] = {"image": budget, "video": sampling, "audio": None}
        key: Key = kind, hashlib.sha256(file.data).digest(), options[kind]
        known = self.kept.get(key)
        if known is not None:
            earlier, rows = known
            notes = tuple(note.replace(earlier.name, file.name, 1) for note in earlier.notes)
            return Opened(kind, key, MediaInput(file.name, earlier.part, (), notes), rows)
        opened = open_input(self.media, kind, file, budget=budget, sampling=sampling)
        return Opened(kind, key, opened, None, time.perf_counter() - begin)

    def encode(
        self, opened: Opened, *, trace: Trace | None = None, progress: Progress | None = None
    ) -> Encoded:
        """The soft tokens of a file.

        trace     called with every intermediate; then nothing is taken from what is kept
        progress  (done, total) after each image, frame or sound
        """
        given, rows = opened.input, opened.rows
        if rows is None and trace is None and (known := self.kept.get(opened.key)):
            rows = known[1]  # made since the file was opened
        if rows is None:
            made = []
            for piece in given.pieces:
                made.append(self.run_checked(opened.kind, piece, given.name, trace))
                if progress is not None:
                    progress(len(made), len(given.pieces))
            rows = tuple(made)
            self.kept.put(opened.key, MediaInput(given.name, given.part, (), given.notes), rows)
        return Encoded(given.part, rows, given.notes)

    def run(self, kind: Kind, piece: np.ndarray, trace: Trace | None = None) -> np.ndarray:
        """f32[n, D of the text model] of a canvas or of samples."""
        options: dict[str, Any] = {"activations": self.activations, "trace": trace}
        if kind == "audio":
            return encode_audio(self.ops, *self.media.need_audio(), piece, **options)
        return encode_image(self.ops, *self.media.need_vision(), piece, **options)

    def run_checked(self, kind: Kind, piece: np.ndarray, name: str, trace: Trace | None = None) -> np.ndarray:
        """The same, of a file with this name; what is no number is said."""
        with np.errstate(all="ignore"):
            rows = self.run(kind, piece, trace)
        if not np.isfinite(rows).all():
            raise ValueError(
                f"{self.media.path}: NaN or infinity in the soft tokens of {name}. "
                "The weights of the encoder are damaged: download the file again."
            )
        rows.flags.writeable = False  # it may be handed out again
        return rows


class Kept:
    """Soft tokens by key, bounded in bytes; used from several threads."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self.hits = self.misses = 0
        self._entries: OrderedDict[Key, tuple[MediaInput, tuple[np.ndarray, ...]]] = OrderedDict()
        self._lock = locks.lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> tuple[MediaInput, tuple[np.ndarray, ...]] | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return found

    def put(self, key: Key, given: MediaInput, rows: tuple[np.ndarray, ...]) -> None:
        with self._lock:
            self._drop(key)
            self._entries[key] = given, rows
            self.nbytes += _nbytes(rows)
            while self.nbytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= _nbytes(entry[1])


def _nbytes(rows: tuple[np.ndarray, ...]) -> int:
    return sum(row.nbytes for row in rows)
