"""Videos: which frames are shown, at which times, and damaged files."""

import builtins
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


def with_sound(wave: np.ndarray, rate: int = 44100) -> bytes:
    """A second of ten frames, and a sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        picture, sound = out.add_stream("mpeg4", rate=10), out.add_stream("aac", rate=rate, layout="mono")
        picture.width, picture.height, picture.pix_fmt = 64, 48, "yuv420p"
        for _ in range(10):
            out.mux(
                picture.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24"))
            )
        out.mux(picture.encode())
        frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], "fltp", "mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            sound.format.name, "mono", rate, frame_size=sound.codec_context.frame_size
        )
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(sound.encode(piece))
        out.mux(sound.encode())
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


@pytest.mark.parametrize("container, codec", [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mov", "mpeg4")])
def test_times_begin_at_the_first_frame(container, codec):
    """A clip that was cut out of a longer one begins late; a recording may stand still for hours."""
    late = video.load_video(movie(30, container=container, codec=codec, pts=range(70, 100)))
    assert [frame.seconds for frame in late.frames] == [0, 1, 2] and shown(late) == [0, 10, 20]
    still = video.load_video(movie(3, container=container, codec=codec, pts=[0, 10, 72000]), name="v")
    assert len(still.frames) == 60 and "more than 60 frames" in still.notes[0]
    seconds = np.array([frame.seconds for frame in still.frames])
    assert shown(still) == ((seconds >= 1).astype(int) + (seconds >= 7200)).tolist() and seconds[-1] > 7000


def test_one_frame():
    clip = video.load_video(movie(1))
    assert [frame.seconds for frame in clip.frames] == [0] and shown(clip) == [0]
    assert len(video.load_video(movie(1), rule="uniform").frames) == 1


def test_frames_are_counted_by_their_own_budget():
    """40 frames of 1920 x 1080 are 40 x 66 soft tokens (known-faults N2), of 640 x 480 63 each (N1)."""
    clip = video.load_video(movie(40, fps=1, size=(1920, 1080), codec="mpeg4"))
    assert [frame.pixels.shape[0] * frame.pixels.shape[1] // 48**2 for frame in clip.frames] == [66] * 40
    clip = video.load_video(movie(3, fps=1, size=(640, 480), pts=[0, 3, 62], codec="mpeg4"), fps=1 / 3)
    assert {frame.pixels.shape[0] * frame.pixels.shape[1] // 48**2 for frame in clip.frames} == {63}


def test_random_damage_is_one_line_or_a_video():
    rng = np.random.default_rng(6)
    for container, codec in (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mov", "mpeg4")):
        whole = np.frombuffer(movie(20, container=container, codec=codec), np.uint8)
        for _ in range(25):
            broken = whole.copy()
            broken[rng.integers(0, len(broken), rng.integers(1, 12))] = rng.integers(0, 256)
            try:
                clip = video.load_video(broken[: rng.integers(8, len(broken) + 1)].tobytes(), name="v.mp4")
                assert 1 <= len(clip.frames) <= 60
            except ValueError as fault:
                assert "\n" not in str(fault) and str(fault).startswith("v.mp4: ")


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


def test_thinned_by_one_frame_is_said():
    clip = video.load_video(movie(61, fps=1, codec="mpeg4"), name="clip.mp4")
    assert len(clip.frames) == 60 and "would be 61, more than 60 frames" in clip.notes[0]
    assert video.load_video(movie(60, fps=1, codec="mpeg4")).notes == ()


def test_uniform_frames_can_be_fewer():
    clip = video.load_video(movie(100), rule="uniform", max_frames=3)
    assert shown(clip) == [0, 33, 66] and clip.notes == ()


def test_the_end_of_patience_is_said(monkeypatch):
    monkeypatch.setattr(video, "MAX_DECODED", 25)
    clip = video.load_video(movie(100), name="clip.mp4")
    assert shown(clip) == [0, 10, 20]
    assert "clip.mp4: 3 of 10 frames are shown, the last one of 00:02" in clip.notes[0]


def test_an_image_is_no_video():
    """FFmpeg reads one, even a cut JPEG, as a video of one frame."""
    for data, kind in (
        (files.png(files.picture("dot")), "PNG"),
        (files.encoded(files.picture("photo"), ".jpg")[:5000], "JPEG"),
    ):
        with pytest.raises(
            ValueError, match=rf"v: an image \({kind}\), expected a video .* Send it as an image"
        ):
            video.load_video(data, name="v")


@pytest.mark.parametrize(
    ("says", "fault", "told"),
    [
        ("libx.so: failed to map segment from shared object", MemoryError, "v: a library cannot be loaded"),
        ("libx.so: undefined symbol", ValueError, "v: a library cannot be loaded .* Install again"),
    ],
)
@pytest.mark.parametrize("library", ["av", "PIL"])
def test_a_library_that_does_not_load_is_not_missing(monkeypatch, library, says, fault, told):
    """PyAV reads the file; Pillow brings its frames to their size."""
    real = builtins.__import__

    def refuse(name, *rest):
        if name == library:
            raise ImportError(says)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(fault, match=told):
        video.load_video(WHOLE, name="v")


@pytest.mark.parametrize(
    "refused", [MemoryError(), av.error.BlockingIOError(11, "no thread"), OSError(12, "no")]
)
def test_no_memory_is_no_damage(monkeypatch, refused):
    def refuse(*given):
        raise refused

    monkeypatch.setattr(video, "_load", refuse)
    with pytest.raises(ValueError, match="v: too large to decode, expected a video that fits the memory"):
        video.load_video(WHOLE, name="v")
