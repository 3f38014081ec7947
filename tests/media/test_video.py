"""Videos: which frames are shown, at which times, and damaged files."""

import io
from fractions import Fraction

import numpy as np
import pytest

from refimpl.frontend import video
from refimpl.frontend.image import canvas_size
from tests.media import files
from tests.media.test_audio import compressed, tone

av = pytest.importorskip("av")


def movie(n=100, fps=10, container="mp4", codec="libx264", size=(64, 48), pts=None) -> bytes:
    """n frames; frame i shows its number as eight bars, the bits of i from left to right."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        try:
            stream = out.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = *size, "yuv420p", 12
            stream.open()
        except Exception as error:
            pytest.skip(f"this build of PyAV does not encode {codec}: {error}")
        for i in range(n):
            bars = np.repeat([255 * (i >> bit & 1) for bit in range(8)], size[0] // 8)
            pixels = np.broadcast_to(bars.astype(np.uint8)[None, :, None], (size[1], size[0], 3))
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = pts[i] if pts else i, Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def shown(clip: video.Video) -> list[int]:
    """The numbers on the frames."""
    numbers = []
    for frame in clip.frames:
        h, w, _ = frame.pixels.shape
        middles = frame.pixels[h // 2, w // 16 :: w // 8].mean(axis=-1) > 127
        numbers.append(int((middles << np.arange(8)).sum()))
    return numbers


@pytest.mark.parametrize(
    "container, codec", [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mov", "libx264"), ("mp4", "mpeg4")]
)
def test_one_frame_a_second(container, codec):
    clip = video.load_video(movie(75, container=container, codec=codec), name="wrong.txt")
    assert [frame.seconds for frame in clip.frames] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert shown(clip) == list(range(0, 80, 10))
    assert clip.seconds == pytest.approx(7.5, abs=0.11) and clip.notes == ()
    assert all(frame.pixels.shape[:2] == canvas_size(48, 64, 70) for frame in clip.frames)


def test_other_rates_and_bounds():
    data = movie(100)
    assert shown(video.load_video(data, fps=2))[:4] == [0, 5, 10, 15]
    assert shown(video.load_video(data, fps=0.1)) == [0]
    few = video.load_video(data, max_frames=4, name="clip.mp4")
    assert [frame.seconds for frame in few.frames] == [0, 3, 6, 9]
    assert shown(few) == [0, 30, 60, 90] and "more than 4 frames" in few.notes[0]


def test_jumping_finds_the_same_frames():
    """Gaps of more than five seconds are jumped over."""
    data = movie(121, container="webm", codec="libvpx-vp9")
    assert shown(video.load_video(data, fps=1 / 6)) == [0, 60, 120]


def test_uniform_rule_is_that_of_transformers():
    """np.arange(32) * total // 32, as default_sample_indices_fn has it; fewer frames are all shown."""
    clip = video.load_video(movie(100), rule="uniform")
    assert shown(clip) == [i * 100 // 32 for i in range(32)]
    assert [round(10 * frame.seconds) for frame in clip.frames] == shown(clip)
    assert shown(video.load_video(movie(5), rule="uniform")) == [0, 1, 2, 3, 4]


def test_times_not_numbers():
    """Frames at irregular times: shown is what was on the screen at 0, 1, 2 ... seconds."""
    pts = [0, 1, 2, 3, 4, 5, 31, 32, 33, 34, 60]
    clip = video.load_video(movie(len(pts), pts=pts))
    assert shown(clip)[:7] == [0, 5, 5, 5, 9, 9, 10]


@pytest.mark.parametrize("seconds, text", [(0, "00:00"), (3.9, "00:03"), (62, "01:02"), (3605.2, "60:05")])
def test_stamp(seconds, text):
    assert video.stamp(seconds) == text


@pytest.mark.parametrize(
    "n, k, want", [(8, 4, [0, 2, 5, 7]), (9, 1, [4]), (3, 9, [0, 1, 2]), (100, 2, [0, 99]), (1, 1, [0])]
)
def test_spread(n, k, want):
    assert video.spread(n, k) == want


def test_a_cut_stream_shows_what_is_there():
    data = movie(100, container="webm", codec="libvpx-vp9")
    clip = video.load_video(data[: len(data) * 3 // 4])
    assert 1 <= len(clip.frames) < 10


WHOLE = movie(20)
BAD = {
    "empty": (b"", "empty"),
    "text": (b"hello, I am a text", "text, expected a video"),
    "cut": (WHOLE[: len(WHOLE) // 2], "not readable as video"),
    "noise": (bytes(np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)), "expected a video"),
    "wav": (files.wav(files.sound("noise")), "no video in it"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name):
    data, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        video.load_video(data, name="clip.mp4")
    assert str(caught.value).startswith("clip.mp4: ") and "\n" not in str(caught.value)


def test_no_frames():
    with pytest.raises(ValueError, match="no video in it"):
        video.load_video(compressed("ipod", "aac", 44100, tone(44100, 1.0)))
    empty = WHOLE.replace(b"mdat", b"free", 1)  # headers that point at nothing decodable
    headers_only = bytearray(empty)
    start = headers_only.index(b"free", 40) + 4
    end = headers_only.index(b"moov") - 4
    headers_only[start:end] = b"\0" * (end - start)
    with pytest.raises(ValueError, match=r"without frames|not readable"):
        video.load_video(bytes(headers_only))


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": -1}, {"max_frames": 0}, {"rule": "best"}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="Correct the options"):
        video.load_video(WHOLE, **options)
