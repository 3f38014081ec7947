"""What the model sees, as a picture for people: the canvas with its soft tokens, or a sound's mel energies.

image_picture   every soft token framed and numbered, in the order of the prompt
audio_picture   frequency upwards, time to the right; a line and a number at soft tokens of 40 ms
video_picture   the frames side by side, with their times
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refimpl.frontend.audio import Sound, log_mel
from refimpl.frontend.image import DEFAULT_BUDGET, TOKEN_PIXELS, fit, load_image
from refimpl.frontend.media_file import Source, describe, read_media
from refimpl.frontend.media_input import DEFAULT_SAMPLING, Sampling
from refimpl.frontend.video import Frame, load_video, stamp

SIDE = 24  # pixels of a picture of a sound that stand for a soft token; 4 mel frames
MEL_RANGE = (np.log(1e-3), 4.0)  # silence is black; speech rarely exceeds this
MAX_SIDE = 8192  # what a viewer opens; longer pictures of sounds and strips are broken into rows
SEVERAL = 8  # soft tokens between two numbers under a sound


def image_picture(canvas: np.ndarray) -> np.ndarray:
    """u8[h, w, 3] on its canvas -> the same with a grid and numbers."""
    rows, columns = canvas.shape[0] // TOKEN_PIXELS, canvas.shape[1] // TOKEN_PIXELS
    out = canvas.copy()
    out[::TOKEN_PIXELS] = out[::TOKEN_PIXELS] // 2
    out[:, ::TOKEN_PIXELS] = out[:, ::TOKEN_PIXELS] // 2
    picture, draw = _drawing(out)
    for i in range(rows * columns):
        _label(draw, i % columns * TOKEN_PIXELS + 3, i // columns * TOKEN_PIXELS + 2, str(i))
    return np.asarray(picture)


def audio_picture(sound: Sound) -> np.ndarray:
    """u8[h, w, 3]: brightness is the logarithm of the energy; silence black."""
    low, high = MEL_RANGE
    grey = ((log_mel(sound.samples) - low) / (high - low)).clip(0, 1)
    wide = np.repeat(grey.T[::-1], SIDE // 4, axis=1)
    tall = np.repeat((255 * wide).astype(np.uint8), 2, axis=0)
    n = -(-len(grey) // 4)
    canvas = np.zeros((tall.shape[0] + 16, max(1, n) * SIDE), np.uint8)
    canvas[: tall.shape[0], : tall.shape[1]] = tall
    colored = np.repeat(canvas[:, :, None], 3, axis=2)
    colored[:-16, ::SIDE] = colored[:-16, ::SIDE] // 2 + np.array([0, 60, 90], np.uint8)
    lines = [
        _numbered(colored[:, a : a + _per_line() * SIDE], a // SIDE)
        for a in range(0, colored.shape[1], _per_line() * SIDE)
    ]
    return _stack(lines)


def video_picture(frames: Sequence[Frame]) -> np.ndarray:
    """The frames from left to right and line by line, each with its grid and its time."""
    pictures = []
    for frame in frames:
        picture, draw = _drawing(image_picture(frame.pixels))
        _label(draw, 3, frame.pixels.shape[0] - 14, stamp(frame.seconds))
        pictures.append(np.asarray(picture))
    n = max(1, min(MAX_SIDE // max(p.shape[1] for p in pictures), 6))
    return _stack([np.concatenate(pictures[i : i + n], axis=1) for i in range(0, len(pictures), n)])


def picture_of(
    source: Source,
    *,
    budget: int = DEFAULT_BUDGET,
    sampling: Sampling = DEFAULT_SAMPLING,
    name: str | None = None,
) -> np.ndarray:
    """The picture of a file, whatever it is: an image if it can be read as one, else a sound, else a video.

    Raises:
        ValueError: one line, if it is none of them
    """
    from refimpl.frontend.audio import load_audio

    file = read_media(source, "an image, a sound or a video", name)
    attempts: list[Any] = [
        lambda: image_picture(fit(load_image(file.data, name=file.name), budget)),
        lambda: video_picture(load_video(file.data, name=file.name, **vars(sampling)).frames),
        lambda: audio_picture(load_audio(file.data, name=file.name)),
    ]
    faults = []
    for attempt in attempts:
        try:
            return attempt()
        except ValueError as fault:
            faults.append(fault)
    told = next(
        (f for f in faults if "expected an image (" not in str(f) and "no video in" not in str(f)), None
    )
    if describe(file.data) == "bytes of no known format" and told is not None:
        raise told
    raise file.fault(describe(file.data), "an image, a sound or a video", "Send another file")


def png_bytes(picture: np.ndarray) -> bytes:
    """u8[h, w, 3] as a PNG file."""
    import imageio.v3 as imageio

    return bytes(imageio.imwrite("<bytes>", picture, extension=".png", plugin="pillow"))


def _per_line() -> int:
    """Soft tokens in one line of the picture of a sound."""
    return MAX_SIDE // SIDE // SEVERAL * SEVERAL // 4


def _numbered(strip: np.ndarray, first: int) -> np.ndarray:
    picture, draw = _drawing(np.ascontiguousarray(strip))
    for i in range(0, strip.shape[1] // SIDE, SEVERAL):
        _label(draw, i * SIDE + 2, strip.shape[0] - 13, str(first + i))
    return np.asarray(picture)


def _drawing(pixels: np.ndarray) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    picture = Image.fromarray(pixels)
    return picture, ImageDraw.Draw(picture)


def _label(draw: Any, x: int, y: int, text: str) -> None:
    """White on black: readable on any picture."""
    draw.text((x, y), text, fill=(255, 255, 255), stroke_width=1, stroke_fill=(0, 0, 0))


def _stack(lines: Sequence[np.ndarray]) -> np.ndarray:
    """Lines of any width, one under the other."""
    width = max(line.shape[1] for line in lines)
    return np.concatenate([np.pad(line, ((0, 0), (0, width - line.shape[1]), (0, 0))) for line in lines])
