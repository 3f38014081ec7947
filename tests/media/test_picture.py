"""Pictures of what the model sees: right size, readable back, and what is under the grid is the canvas."""

import io

import numpy as np
import pytest
from PIL import Image

from refimpl.frontend.audio import load_audio
from refimpl.frontend.image import fit, load_image
from refimpl.frontend.picture import audio_picture, image_picture, picture_of, png_bytes
from tests.media import files
from tests.media.test_audio import tone


def test_image():
    canvas = fit(files.picture("photo"), 70)
    picture = image_picture(canvas)
    assert picture.shape == canvas.shape
    # the lower half of every token but its frame is untouched
    for y in range(0, canvas.shape[0], 48):
        for x in range(0, canvas.shape[1], 48):
            assert np.array_equal(
                picture[y + 24 : y + 48, x + 1 : x + 48], canvas[y + 24 : y + 48, x + 1 : x + 48]
            )
    numbers = picture.reshape(picture.shape[0] // 48, 48, -1, 48, 3)[:, 1:18, :, 1:24].swapaxes(1, 2)
    under = canvas.reshape(picture.shape[0] // 48, 48, -1, 48, 3)[:, 1:18, :, 1:24].swapaxes(1, 2)
    drawn = np.abs(numbers.astype(int) - under).max(axis=(2, 3, 4))
    assert (drawn > 30).all()  # a number in every token


def test_audio():
    low, high = (audio_picture(load_audio(files.wav(tone(16000, 1.0, f)))) for f in (300.0, 5000.0))
    assert low.shape == high.shape == (256 + 16, 25 * 24, 3)
    assert low[:256].mean(axis=(1, 2)).argmax() > high[:256].mean(axis=(1, 2)).argmax()  # low tones are lower
    silent = audio_picture(load_audio(files.wav(np.zeros(16000, np.float32))))
    assert silent[:256, 1:24].max() == 0
    long = audio_picture(load_audio(files.wav(tone(16000, 30.0))))
    assert long.shape == (10 * (256 + 16), 80 * 24, 3)  # 750 soft tokens, 80 in a line, each eighth numbered


def test_files(tmp_path):
    picture = picture_of(files.png(files.picture("photo-small")), budget=70)
    (tmp_path / "seen.png").write_bytes(png_bytes(picture))
    assert np.array_equal(load_image(tmp_path / "seen.png"), picture)
    assert picture_of(files.wav(tone(16000, 0.2))).shape == (272, 5 * 24, 3)
    for data, message in ((b"hello", "text, expected an image, a sound or a video"), (b"", "empty")):
        with pytest.raises(ValueError, match=message):
            picture_of(data)


def test_damaged_files_are_not_taken_for_another_kind():
    """FFmpeg reads a cut JPEG as a video of one frame, and says of a broken WAV that it is no video."""
    jpeg = io.BytesIO()
    Image.fromarray(files.picture("photo")).save(jpeg, "JPEG")
    wave = files.wav(files.sound("noise"))
    for data, message in (
        (jpeg.getvalue()[:5000], "incomplete image"),
        (wave[:36], "WAV file without sound"),
    ):
        with pytest.raises(ValueError, match=message):
            picture_of(data)


def test_what_a_broken_file_was_is_said():
    pytest.importorskip("av")
    from tests.media.test_video import movie

    mp4, mov = movie(20), movie(20, container="mov", codec="mpeg4")
    noise = bytes(np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8))
    for data, message in (
        (noise, "x: bytes of no known format, expected an image, a sound or a video"),
        (mov[: len(mov) // 2], "x: neither pictures nor sound in it, expected a video"),
        (mp4[: len(mp4) // 2], "x: not readable as video .* expected a video"),
        (b"OggS" + noise, "x: not readable as sound .* expected a sound"),
    ):
        with pytest.raises(ValueError, match=message):
            picture_of(data, name="x")


def test_video():
    pytest.importorskip("av")
    from tests.media.test_video import movie

    picture = picture_of(movie(45))
    assert picture.shape == (336, 5 * 432, 3)
