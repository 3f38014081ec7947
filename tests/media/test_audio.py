"""Sounds: decoding, resampling, the log-mel front end against transformers, and damaged files."""

import io
import struct

import numpy as np
import pytest

from refimpl.frontend import audio
from tests.media import files
from tests.oracle import goldens
from tests.tolerances import LOG_MEL_ABS, RESAMPLED_ABS, SAME_SOUND_ABS


@pytest.fixture(scope="module")
def golden():
    return goldens.read("media/audio-processor").arrays


@pytest.mark.parametrize("name", files.SOUNDS)
def test_log_mel_equals_transformers(name, golden):
    heard = audio.load_audio(files.wav(files.sound(name)), name=f"{name}.wav")
    assert np.array_equal(heard.samples, files.sound(name)[: audio.MAX_SAMPLES])
    mel, key = audio.log_mel(heard.samples), f"sound/{name}"
    exact = golden[f"{key}/mel-f64"]
    at = np.unique(np.linspace(0, len(mel) - 1, len(exact)).astype(int))
    assert mel.shape == (int(golden[f"{key}/frames"]), 128) and mel.dtype == np.float32
    assert np.abs(mel[at] - exact).max() < LOG_MEL_ABS
    assert np.abs(mel[at[::6]] - golden[f"{key}/mel"]).max() < LOG_MEL_ABS
    assert audio.count_audio_tokens(len(heard.samples)) == golden[f"{key}/tokens"]
    assert audio.count_waveform_tokens(len(heard.samples)) == golden[f"{key}/waveform-tokens"]
    frames = audio.waveform_frames(heard.samples)
    assert len(frames) == golden[f"{key}/waveform-tokens"]
    assert np.array_equal(frames[-1], golden[f"{key}/waveform-last"])


def test_counts_equal_transformers(golden):
    for n, tokens in golden["counts"].tolist():
        assert audio.count_audio_tokens(n) == tokens


# known-faults T4
@pytest.mark.parametrize(
    "n, tokens",
    [(0, 0), (160, 0), (161, 1), (800, 1), (801, 2), (1600, 3), (8000, 13), (16000, 25), (16001, 25),
     (24000, 38), (32000, 50), (80000, 125), (160000, 250), (319840, 500), (479521, 750),
     (480000, 750), (10**7, 750)],
)  # fmt: skip
def test_table_of_counts(n, tokens):
    assert audio.count_audio_tokens(n) == tokens


# --- resampling ------------------------------------------------------------------------------------------


def tone(rate, seconds, hertz=440.0, level=0.5):
    return level * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 32000, 44099, 44100, 48000, 96000, 192000, 7919])
def test_resampling_keeps_time_and_height(rate):
    """A swelling tone, sample by sample: no delay, no change of pitch or level; lengths round up."""
    n, seconds = round(rate * 1.3), 1.3
    swell = np.hanning(n)
    got = audio.resample(tone(rate, seconds) * swell, rate)
    assert len(got) == -(-n * 16000 // rate)
    t = np.arange(len(got)) / 16000 * rate / (n - 1)
    want = tone(16000, len(got) / 16000) * (0.5 - 0.5 * np.cos(2 * np.pi * t))
    assert np.abs(got - want[: len(got)])[:-2].max() < RESAMPLED_ABS


def test_resampling_does_not_fold():
    """9 kHz is above what 16 kHz can hold: it must vanish, not return as 7 kHz."""
    swell = np.hanning(48000)
    assert np.abs(audio.resample(tone(48000, 1.0, 9000) * swell, 48000)).max() < RESAMPLED_ABS
    assert np.abs(audio.resample(tone(48000, 1.0, 7000) * swell, 48000)).max() > 0.4


def test_an_end_does_not_reach_the_beginning():
    click = np.zeros(44100)
    click[-1] = 1.0
    assert np.abs(audio.resample(click, 44100)[:8000]).max() < RESAMPLED_ABS


# --- decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_wav(dtype, channels):
    wave = np.stack([tone(16000, 0.2, 200.0 + 50 * c) for c in range(channels)], axis=1)
    if np.dtype(dtype).kind == "f":
        stored = wave.astype(dtype)
    else:
        scale, middle = (127, 128) if dtype is np.uint8 else (np.iinfo(dtype).max, 0)
        stored = (np.rint(wave * scale) + middle).astype(dtype)
    heard = audio.load_audio(files.wav(stored), name="x.mp3")
    assert np.abs(heard.samples - wave.mean(axis=1)).max() < {np.uint8: 0.01}.get(dtype, SAME_SOUND_ABS)
    assert heard.seconds == 0.2 and heard.notes == ()


def test_wav_of_24_bits_extensible():
    wave = tone(16000, 0.1)
    wide = np.rint(wave * 2**23).astype("<i4")
    data = wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    header = (
        struct.pack("<HHIIHH", 0xFFFE, 1, 16000, 48000, 3, 24)
        + struct.pack("<HHIH", 22, 24, 4, 1)
        + b"\0" * 14
    )
    body = b"WAVEJUNK\x03\0\0\0abc\0fmt " + struct.pack("<I", len(header)) + header + b"data"
    body += struct.pack("<I", len(data)) + data
    heard = audio.load_audio(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert np.abs(heard.samples - wave).max() < SAME_SOUND_ABS


def test_wav_of_unknown_length():
    data = bytearray(files.wav(tone(16000, 0.1).astype(np.float32)))
    at = data.index(b"data")
    data[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    assert len(audio.load_audio(bytes(data)).samples) == 1600


def compressed(container: str, codec: str, rate: int, wave: np.ndarray) -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        try:
            stream = out.add_stream(codec, rate=rate, layout="stereo")
            stream.open()
        except Exception as error:
            pytest.skip(f"this build of PyAV does not encode {codec}: {error}")
        frame = av.AudioFrame.from_ndarray(np.stack([wave, wave]).astype(np.float32), "fltp", "stereo")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.format.name, "stereo", rate, frame_size=size)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    "container, codec, rate",
    [("mp3", "libmp3lame", 44100), ("flac", "flac", 44100), ("ogg", "libopus", 48000),
     ("ogg", "libvorbis", 44100), ("ipod", "aac", 44100), ("wav", "pcm_mulaw", 22050),
     ("mp3", "libmp3lame", 16000)],
)  # fmt: skip
def test_compressed_sounds(container, codec, rate):
    """One clip in many forms is one clip: codecs shift it by up to a frame of theirs and lose a little."""
    wave = tone(rate, 1.0, 440.0) * np.hanning(rate)
    heard = audio.load_audio(compressed(container, codec, rate, wave), name="clip.wav").samples
    want = tone(16000, 1.0, 440.0) * np.hanning(16000)
    assert 0 <= len(heard) - 16000 < 1800
    shift = np.argmax(np.correlate(heard, want[4000:12000])) - 4000
    got = heard[max(0, shift) : max(0, shift) + 15000]
    assert abs(shift) < 1300
    assert np.abs(got[2000:12000] - want[max(0, -shift) :][2000:12000]).max() < 0.05


@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1", "7.1"])
@pytest.mark.parametrize("container, codec, rate", [
    ("flac", "flac", 8000), ("flac", "flac", 192000), ("ogg", "libopus", 48000), ("ipod", "aac", 48000),
    ("ipod", "alac", 44100), ("matroska", "pcm_f32le", 96000), ("wav", "pcm_s24le", 192000),
])  # fmt: skip
def test_any_rate_and_layout(container, codec, rate, layout):
    """Every channel has a tone of its own; their mean is heard.  PyAV crashes on eight planes of samples."""
    av = pytest.importorskip("av")
    n, t = av.AudioLayout(layout).nb_channels, np.arange(rate) / rate
    wave = np.stack([0.5 * np.sin(2 * np.pi * 200 * (c + 1) * t) for c in range(n)], axis=1)
    heard = audio.load_audio(with_layout(container, codec, rate, layout, wave)).samples[2000:14000]
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard)))) * 4 / len(heard)
    hertz = np.arange(len(spectrum)) * 16000 / len(heard)
    levels = [spectrum[np.abs(hertz - 200 * (c + 1)) < 20].max() for c in range(n)]
    # lossy codecs keep a band of 120 Hz only of what they take for a subwoofer: the fourth channel
    kept = [level for c, level in enumerate(levels) if codec not in ("aac", "libopus") or n < 6 or c != 3]
    assert np.abs(np.array(kept) - 0.5 / n).max() < (0.1 if codec in ("aac", "libopus") else 0.005) / n
    assert spectrum[hertz > 200 * (n + 1)].max() < 0.02


def with_layout(container: str, codec: str, rate: int, layout: str, wave: np.ndarray) -> bytes:
    """f64[n, channels] as a file."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        try:
            stream = out.add_stream(codec, rate=rate, layout=layout)
            stream.open()
        except Exception as error:
            pytest.skip(f"this build of PyAV does not encode {codec} of {layout}: {error}")
        frame = av.AudioFrame.from_ndarray(wave.astype(np.float32).reshape(1, -1), "flt", layout)
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.format.name, layout, rate, frame_size=size)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2, 6, 8, 64])
def test_channels_of_wav(channels):
    wave = np.stack([tone(16000, 0.1, 100.0 + 20 * c) for c in range(channels)], axis=1)
    heard = audio.load_audio(files.wav(wave.astype(np.float32), 16000))
    assert np.abs(heard.samples - wave.mean(axis=1)).max() < SAME_SOUND_ABS


def test_the_sound_of_a_video():
    """A file with both: its sound is heard.  A file with pictures only has none."""
    pytest.importorskip("av")
    from tests.media.test_video import movie, with_sound

    heard = audio.load_audio(with_sound(tone(44100, 1.0)), name="talk.mp4")
    assert 16000 <= len(heard.samples) < 17000 and np.abs(heard.samples).max() > 0.4
    with pytest.raises(ValueError, match="a file without sound"):
        audio.load_audio(movie(5))


def test_faults_m2_24_khz():
    """1.7 s at 24 kHz are 43 soft tokens (known-faults M2)."""
    heard = audio.load_audio(files.wav(tone(24000, 1.7).astype(np.float32), 24000))
    assert audio.count_audio_tokens(len(heard.samples)) == 43


def test_pieces_of_resampling_do_not_show():
    """Seven seconds are three pieces: the same as one period of all, the definition, worked out here."""
    rng = np.random.default_rng(4)
    for rate in (8000, 44100, 7919, 192000):
        x = rng.standard_normal(7 * rate)
        n = 8 * rate  # seconds of a period: the signal and silence
        spectrum = np.fft.rfft(x, n)[: 8 * min(rate, 16000) // 2 + 1]
        place = np.arange(len(spectrum)) / (8 * min(rate, 16000) / 2)
        fade = 0.5 + 0.5 * np.cos(np.pi * np.clip((place - 0.95) / 0.05, 0, 1))
        want = np.fft.irfft(spectrum * fade, 8 * 16000)[: 7 * 16000] * (16000 / rate)
        assert np.abs(audio.resample(x, rate) - want).max() < RESAMPLED_ABS


def test_odd_rates_take_little_memory():
    """A prime rate: 31 s of one were once a single transform of 5 GB."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    audio.load_audio(files.wav(np.full(6 * 399_989, 99, np.uint8), 399_989))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # kilobytes


def test_random_damage_is_one_line_or_a_sound():
    rng = np.random.default_rng(8)
    forms = [files.wav(files.sound("chirp")), files.wav((9000 * files.sound("chirp")).astype(np.int16))]
    for container, codec in (("mp3", "libmp3lame"), ("flac", "flac"), ("ogg", "libopus"), ("ipod", "aac")):
        forms.append(compressed(container, codec, 48000, tone(48000, 0.3)))
    for whole in forms:
        for _ in range(25):
            broken = np.frombuffer(whole, np.uint8).copy()
            broken[rng.integers(0, len(broken), rng.integers(1, 12))] = rng.integers(0, 256)
            try:
                audio.load_audio(broken[: rng.integers(8, len(broken) + 1)].tobytes(), name="t.mp3")
            except ValueError as fault:
                assert "\n" not in str(fault) and str(fault).startswith("t.mp3: ")


def test_long_sounds_are_cut_and_said_so():
    heard = audio.load_audio(files.wav(tone(8000, 31.0).astype(np.float32), 8000), name="talk.wav")
    assert len(heard.samples) == 480_000 and heard.seconds == 31
    assert heard.notes == (
        "talk.wav: 31.0 s of sound, the model hears 30 s at most: what follows 0:30 was cut off. "
        "Send longer sounds in pieces",
    )
    assert audio.load_audio(files.wav(np.zeros(480_000, np.float32))).notes == ()


def test_a_long_compressed_sound_is_not_decoded_to_its_end():
    data = compressed("mp3", "libmp3lame", 16000, tone(16000, 45.0))
    heard = audio.load_audio(data)
    assert len(heard.samples) == 480_000 and 44 < heard.seconds < 46 and len(heard.notes) == 1


# --- what is no sound ------------------------------------------------------------------------------------

WAV = files.wav(files.sound("noise"))
BAD = {
    "empty": (b"", "empty"),
    "text": (b"hello, I am a text", "text, expected a sound"),
    "no-samples": (files.wav(np.zeros(0, np.float32)), "no samples"),
    "nan": (files.wav(np.array([0, 0.5, np.nan, 0] * 500, np.float32)), "sample 2 is not a number"),
    "infinity": (files.wav(np.array([[0, 0], [0, np.inf]] * 500, np.float32)), "sample 1 is not a number"),
    "overflow": (files.wav(np.full(800, 1e38, np.float32)), r"samples up to 1e\+38, expected -1 \.\. 1"),
    "cut": (WAV[:-100], "cut off: 31900 bytes of sound, expected 32000"),
    "head": (WAV[:30], "a 'fmt ' chunk of 10 bytes"),
    "format-only": (WAV[:36], "without sound"),
    "no-channels": (WAV[:22] + b"\0\0" + WAV[24:], "0 channels"),
    "odd-bits": (WAV[:34] + b"\x05\0" + WAV[36:], "of 5 bits"),
    "slow": (files.wav(np.zeros(500, np.float32), 10), "10 samples a second"),
    "fast": (files.wav(np.zeros(500, np.float32), 1_000_000_000), "1000000000 samples a second"),
    "noise": (bytes(np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)), "expected a sound"),
    "image": (files.png(files.picture("three")), "expected a sound"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name):
    data, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        audio.load_audio(data, name="talk.wav")
    assert str(caught.value).startswith("talk.wav: ") and "\n" not in str(caught.value)
