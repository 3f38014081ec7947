"""Media files of a prompt, opened: what an encoder will read of each, and its part of the prompt.

The number of soft tokens is known before anything is encoded: prompts can be laid out, and refused, first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from refimpl.frontend.audio import SHORTEST, count_audio_tokens, count_waveform_tokens, load_audio
from refimpl.frontend.image import DEFAULT_BUDGET, TOKEN_PIXELS, check_budget, fit, load_image
from refimpl.frontend.media_file import MediaFile, Source, read_media
from refimpl.frontend.media_prompt import Kind, MediaPart
from refimpl.frontend.video import MAX_FRAMES, Rule, load_video

DEFAULT_FPS = 1.0  # frames of a video that are shown of each second


@dataclass(frozen=True)
class Sampling:
    """Which frames of a video are shown: arguments as in `load_video`."""

    fps: float = DEFAULT_FPS
    max_frames: int = MAX_FRAMES
    rule: Rule = "time"


DEFAULT_SAMPLING = Sampling()
_EXPECTED = {"image": "an image", "audio": "a sound", "video": "a video"}


@dataclass(frozen=True)
class MediaInput:
    """One file.

    Shapes:
        name    of the file, for messages
        part    its soft tokens in the prompt
        pieces  what the encoder reads one by one: u8[h, w, 3] of an image or of each frame, f32[n] of a sound
        notes   what the user should know
    """

    name: str
    part: MediaPart
    pieces: tuple[np.ndarray, ...]
    notes: tuple[str, ...] = ()


def read_input(media: Any, kind: str, source: Source, name: str | None = None) -> MediaFile:
    """The bytes of a file of some kind, if the projector (media_tensors.Media) has an encoder for that."""
    if kind not in get_args(Kind):
        raise ValueError(f"media: kind {kind!r}, expected 'image', 'audio' or 'video'. Choose one")
    media.need_audio() if kind == "audio" else media.need_vision()
    return read_media(source, _EXPECTED[kind], name)


def open_input(
    media: Any,
    kind: Kind,
    file: MediaFile,
    *,
    budget: int = DEFAULT_BUDGET,
    sampling: Sampling = DEFAULT_SAMPLING,
) -> MediaInput:
    """Decode a file as the encoders want it.

    Args:
        budget: soft tokens of an image
        sampling: of the frames of a video
    Raises:
        ValueError: one line that names the file
    """
    if kind == "audio":
        sound = load_audio(file.data, name=file.name)
        is_raw = media.need_audio()[0].kind == "gemma4ua"
        n = (count_waveform_tokens if is_raw else count_audio_tokens)(len(sound.samples))
        if n == 0:
            raise file.fault(
                f"{len(sound.samples)} samples at 16 kHz",
                f"a sound of {SHORTEST} or more",
                "Send a longer one",
            )
        return MediaInput(file.name, MediaPart("audio", (n,)), (sound.samples,), sound.notes)
    if kind == "image":
        check_budget(budget)
        canvas = fit(load_image(file.data, name=file.name), budget)
        _check_positions(media, file, canvas)
        return MediaInput(file.name, MediaPart("image", (_tokens(canvas),)), (canvas,))
    video = load_video(file.data, name=file.name, **vars(sampling))
    frames = tuple(frame.pixels for frame in video.frames)
    for canvas in frames:
        _check_positions(media, file, canvas)
    part = MediaPart("video", tuple(map(_tokens, frames)), tuple(frame.seconds for frame in video.frames))
    return MediaInput(file.name, part, frames, video.notes)


def _check_positions(media: Any, file: MediaFile, canvas: np.ndarray) -> None:
    """An encoder has a learnt vector for each of so many columns and rows of patches."""
    config = media.need_vision()[0]
    rows, columns = canvas.shape[0] // config.patch, canvas.shape[1] // config.patch
    if max(rows, columns) > config.n_positions:
        raise file.fault(
            f"{columns} x {rows} patches on its canvas",
            f"at most {config.n_positions} along a side, as many as the encoder has positions",
            "Choose a smaller number of image tokens, or send a less narrow one",
        )


def _tokens(canvas: np.ndarray) -> int:
    return canvas.shape[0] * canvas.shape[1] // TOKEN_PIXELS**2
