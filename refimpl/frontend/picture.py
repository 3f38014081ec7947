"""What the model sees, as a picture for people: the canvas with its soft tokens, or a sound's mel energies.

image_picture   every soft token framed and numbered, in the order of the prompt
audio_picture   frequency upwards, time to the right; a line and a number at soft tokens of 40 ms
video_picture   the frames side by side, with their times
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refimpl.frontend.audio import Sound, load_audio, log_mel
from refimpl.frontend.image import DEFAULT_BUDGET, TOKEN_PIXELS, fit, format_of, load_image
from refimpl.frontend.media_file import UNKNOWN, MediaFile, Source, begins_as, describe, read_media
from refimpl.frontend.media_input import DEFAULT_SAMPLING, Sampling
from refimpl.frontend.video import NO_VIDEO, Frame, load_video, stamp
from refimpl.frontend.wav import is_wave

SIDE = 24  # pixels of a picture of a sound that stand for a soft token; 4 mel frames
MEL_RANGE = (np.log(1e-3), 4.0)  # silence is black; speech rarely exceeds this
SEVERAL = 8  # soft tokens between two numbers under a sound
LINE = 10 * SEVERAL  # soft tokens in a line of the picture of a sound: 3.2 s, as wide as a screen
MAX_SIDE = 8192  # pixels of a row of frames; viewers do not open much more


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
        _numbered(colored[:, a : a + LINE * SIDE], a // SIDE) for a in range(0, colored.shape[1], LINE * SIDE)
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
    """The picture of a file, whatever it is: an image or a WAV file if it begins as one, else a video, else a
    sound.

    Raises:
        ValueError: one line, if it is none of them
    """
    file = read_media(source, "an image, a sound or a video", name)
    if format_of(file.data) is not None:  # a cut JPEG would be a video of one frame
        return image_picture(fit(load_image(file.data, name=file.name), budget))
    if is_wave(file.data):
        return audio_picture(load_audio(file.data, name=file.name))
    try:
        return video_picture(load_video(file.data, name=file.name, **vars(sampling)).frames)
    except ValueError as fault:
        of_video = fault
    try:
        return audio_picture(load_audio(file.data, name=file.name))
    except ValueError as of_sound:
        raise _told(file, of_video, of_sound) from None


def _told(file: MediaFile, of_video: ValueError, of_sound: ValueError) -> ValueError:
    """The fault that helps, of a file that is neither a video nor a sound."""
    seen, kind = describe(file.data), begins_as(file.data)
    if seen == UNKNOWN:
        if kind == "sound" or f"{file.name}: {NO_VIDEO}" in str(of_video):
            return of_sound
        if kind == "video" or f"{file.name}: not readable as" not in str(of_video):
            return of_video
    return file.fault(seen, "an image, a sound or a video", "Send another file")


def png_bytes(picture: np.ndarray) -> bytes:
    """u8[h, w, 3] as a PNG file."""
    import imageio.v3 as imageio

    return bytes(imageio.imwrite("<bytes>", picture, extension=".png", plugin="pillow"))


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
