"""From files to soft tokens: decode, resize, encode, and where they stand in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refimpl.batch import SoftTokens
from refimpl.frontend.audio import load_audio
from refimpl.frontend.image import DEFAULT_BUDGET, fit, load_image
from refimpl.frontend.media_file import Source
from refimpl.frontend.media_prompt import MediaPart, locate
from refimpl.frontend.video import load_video
from refimpl.model.audio import encode_audio
from refimpl.model.vision import encode_image

DEFAULT_QUESTIONS = {
    "image": "Describe this image.",
    "audio": "Transcribe this recording.",
    "video": "Describe this video.",
}


@dataclass(frozen=True)
class Encoded:
    """A file, seen or heard: its part of the prompt, and the rows of each image, sound or frame."""

    part: MediaPart
    rows: tuple[np.ndarray, ...]
    notes: tuple[str, ...] = ()


def encode(
    media: Any,
    kind: str,
    source: Source,
    *,
    name: str | None = None,
    budget: int = DEFAULT_BUDGET,
    fps: float = 1.0,
    dtype: Any = np.float32,
    activations: str = "float",
) -> Encoded:
    """Run the encoder of a projector (media_tensors.Media) on a file.

    Args:
        kind: "image", "audio" or "video"
        budget: soft tokens of an image
        fps: frames a second of a video
    """
    options = {"activations": activations}
    if kind == "audio":
        config, weights = media.need_audio()
        sound = load_audio(source, name=name)
        rows = encode_audio(config, weights, sound.samples, dtype, **options)
        return Encoded(MediaPart("audio", (len(rows),)), (rows,), sound.notes)
    config, weights = media.need_vision()
    if kind == "image":
        rows = encode_image(config, weights, fit(load_image(source, name=name), budget), dtype, **options)
        return Encoded(MediaPart("image", (len(rows),)), (rows,))
    if kind != "video":
        raise ValueError(f"media: kind {kind!r}, expected 'image', 'audio' or 'video'. Choose one")
    video = load_video(source, fps=fps, name=name)
    frames = tuple(encode_image(config, weights, frame.pixels, dtype, **options) for frame in video.frames)
    part = MediaPart("video", tuple(map(len, frames)), tuple(frame.seconds for frame in video.frames))
    return Encoded(part, frames, video.notes)


def place(
    ids: Sequence[int], tokenizer: Any, encoded: Sequence[Encoded]
) -> tuple[list[int], list[SoftTokens]]:
    """Token ids of a prompt with its placeholders written out -> ids with PAD there, and what stands there.

    Of a video every frame is an item of its own.
    """
    ids, starts = locate(ids, tokenizer, [item.part for item in encoded])
    rows = [(r, item.part.kind != "audio") for item in encoded for r in item.rows]
    return ids, [SoftTokens(start, r, vision) for start, (r, vision) in zip(starts, rows, strict=True)]


def prompt(
    model: Any, text: str, encoded: Sequence[Encoded], *, thinking: bool = False
) -> tuple[list[int], list[SoftTokens]]:
    """A user's message, its media in front of the text (a question by default), as ids and soft tokens."""
    if not text and encoded:
        text = DEFAULT_QUESTIONS[encoded[0].part.kind]
    content = [{"type": item.part.kind} for item in encoded] + [{"type": "text", "text": text}]
    ids = model.template.render_ids(
        model.tokenizer,
        [{"role": "user", "content": content}],
        thinking=thinking,
        media=[item.part for item in encoded],
    )
    return place(ids, model.tokenizer, encoded)
