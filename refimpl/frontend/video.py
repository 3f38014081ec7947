"""Video files: frames at chosen times, each one an image with a small budget.

The models see a video as stills with the time in front: `00:00 <image> 00:01 <image> ...`.  Two rules choose
them: by time (one frame a second, as long as that is not too many), or the published processor's, 32 frames
evenly from beginning to end.

PyAV is used directly: the frames' own times are needed, and plugins that read "frame number n" assume a
constant rate.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from refimpl.frontend.audio import import_av, unreadable
from refimpl.frontend.image import MAX_PIXELS, fit, format_of
from refimpl.frontend.media_file import MediaFile, Source, read_media

FRAME_BUDGET = 70  # soft tokens of a frame
MAX_FRAMES = 60
UNIFORM_FRAMES = 32
NO_VIDEO = "no video in it"
EXPECTED = "a video (MP4, WebM or MOV, whatever its name)"
SEEK_SECONDS = 5.0  # a gap from which on it is faster to jump to a key frame than to decode all between
MAX_DECODED = 50_000  # frames; bounds the time that a file may take

Rule = Literal["time", "uniform"]


@dataclass(frozen=True)
class Frame:
    """One still: u8[h, w, 3], already on its canvas, and its time in the video."""

    seconds: float
    pixels: np.ndarray


@dataclass(frozen=True)
class Video:
    frames: tuple[Frame, ...]
    seconds: float
    notes: tuple[str, ...] = ()


def stamp(seconds: float) -> str:
    """`mm:ss`, rounded down; minutes go on beyond 59."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def spread(n: int, k: int) -> list[int]:
    """k of the numbers 0 .. n-1, evenly from the first to the last; a single one from the middle."""
    if k >= n:
        return list(range(n))
    if k == 1:
        return [n // 2]
    return [(2 * i * (n - 1) + k - 1) // (2 * (k - 1)) for i in range(k)]  # rounded, halves up


def count_times(seconds: float, fps: float) -> int:
    """How many of 0, 1/fps, 2/fps, ... lie before the end."""
    return max(1, int(np.ceil(seconds * fps - 1e-6)))


def chosen_times(seconds: float, fps: float, max_frames: int) -> list[float]:
    """0, 1/fps, 2/fps, ... before the end; of too many, max_frames evenly."""
    return [i / fps for i in spread(count_times(seconds, fps), max_frames)]


def load_video(
    source: Source,
    *,
    fps: float = 1.0,
    max_frames: int = MAX_FRAMES,
    rule: Rule = "time",
    budget: int = FRAME_BUDGET,
    name: str | None = None,
) -> Video:
    """Decode the frames that the model will see, and resize them.

    Args:
        fps: frames a second, for the rule "time"
        max_frames: more are thinned out evenly
        rule: "time", or "uniform": the published processor's, frames number i * total // n, n being 32, or
            max_frames or the total, where these are less
    Raises:
        ValueError: one line that names the file
    """
    if not 0 < fps <= 100 or max_frames < 1 or rule not in ("time", "uniform"):
        raise ValueError(
            f"video: fps {fps}, {max_frames} frames, rule {rule!r}; expected fps in 0 .. 100, "
            "1 frame or more, rule 'time' or 'uniform'. Correct the options"
        )
    file = read_media(source, "a video", name)
    image = format_of(file.data)
    if image not in (None, "GIF"):  # FFmpeg takes it for a video of one frame; a GIF may be an animation
        raise file.fault(f"an image ({image})", EXPECTED, "Send it as an image")
    av = import_av(file)
    try:
        with av.open(io.BytesIO(file.data)) as container:
            return _load(file, container, fps, max_frames, rule, budget)
    except Exception as error:  # decoders raise anything on broken files
        raise unreadable(file, "video", EXPECTED, error) from error


def _load(file: MediaFile, container: Any, fps: float, max_frames: int, rule: Rule, budget: int) -> Video:
    streams = [s for s in container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not streams and not container.streams.audio:
        raise file.fault("neither pictures nor sound in it", EXPECTED, "It may be cut off: copy it again")
    if not streams:
        raise file.fault(NO_VIDEO, EXPECTED, "Send another file, or send it as a sound")
    stream = streams[0]
    if stream.codec_context is None:
        raise file.fault("a codec that is not known", EXPECTED, "Convert it, or save it again")
    stream.thread_type = "AUTO"
    pixels = stream.codec_context.width * stream.codec_context.height
    if pixels > MAX_PIXELS:
        raise file.fault(f"frames of {pixels} pixels", f"at most {MAX_PIXELS}", "Make the video smaller")
    times, start, seconds = _times_of(container, stream)
    if rule == "uniform":
        n = min(UNIFORM_FRAMES, max_frames, len(times))
        targets = [times[i * len(times) // n] for i in range(n)]
    else:
        targets = chosen_times(seconds, fps, max_frames)
    container.seek(0)
    frames = [Frame(t, fit(image, budget)) for t, image in _frames_at(container, stream, start, targets)]
    if not frames:
        raise file.fault("a video without frames", EXPECTED, "It may be cut off: copy it again")
    notes = []
    if rule == "time" and (n := count_times(seconds, fps)) > max_frames:
        notes.append(
            f"{file.name}: {seconds:.1f} s of video at {fps:g} frames a second would be {n}, more than "
            f"{max_frames} frames: so many are shown, evenly spread"
        )
    if len(frames) < len(targets):
        last = stamp(frames[-1].seconds)
        notes.append(
            f"{file.name}: {len(frames)} of {len(targets)} frames are shown, the last one of {last}: the "
            f"others are damaged, or behind more than {MAX_DECODED} frames that had to be decoded"
        )
    return Video(tuple(frames), seconds, tuple(notes))


def _times_of(container: Any, stream: Any) -> tuple[list[float], float, float]:
    """Times of all frames from the first one on, ascending, the first one's own, and the length in seconds.

    Reading the packets without decoding them is fast, and headers lie."""
    found: list[tuple[float, float]] = []
    for packet in container.demux(stream):
        time = packet.pts if packet.pts is not None else packet.dts
        if time is not None and packet.size:
            base = float(packet.time_base)
            found.append((time * base, (packet.duration or 0) * base))
    found.sort()
    if not found:
        return [], 0.0, 0.0
    start = found[0][0]
    return [t - start for t, _ in found], start, found[-1][0] + found[-1][1] - start


def _frames_at(
    container: Any, stream: Any, start: float, targets: list[float]
) -> Iterator[tuple[float, np.ndarray]]:
    """The frame that is on the screen at each of the times, and the time asked for.

    Notes:
        Where a decoder ends early its last frame stays on the screen; a time that was jumped to, with nothing
        to decode behind it, is left out.  So are all that come after MAX_DECODED frames.
    """
    base = float(stream.time_base)
    decoder, shown, coming, n_decoded = container.decode(stream), None, None, 0

    def time_of(frame: Any) -> float:
        return (frame.pts if frame.pts is not None else 0) * base - start

    for target in targets:
        now = 0.0 if shown is None else time_of(shown)
        if target - now > SEEK_SECONDS:
            container.seek(int((target + start) / base), stream=stream)
            decoder, shown, coming = container.decode(stream), None, None
        while coming is None or time_of(coming) <= target + 1e-6:
            shown = coming if coming is not None else shown
            coming = next(decoder, None)
            n_decoded += 1
            if coming is None or n_decoded > MAX_DECODED:
                break
        if n_decoded > MAX_DECODED:
            return
        if shown is None and coming is not None:  # a key frame a little late: the first one there is
            shown = coming
        if shown is not None:
            yield target, _upright(shown)


def _upright(frame: Any) -> np.ndarray:
    """u8[H, W, 3], turned as the file says."""
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, (getattr(frame, "rotation", 0) // 90) % 4))
