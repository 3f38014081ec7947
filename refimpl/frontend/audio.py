"""Sound files: from bytes to what an audio encoder reads.

    load_audio  any rate, any number of channels -> 16 kHz, one channel, at most 30 s
    log_mel     128 logarithmic mel energies per 10 ms: the input of the conformer (E2B, E4B)
    waveform_frames  640 samples per soft token: the input of the unified model (12B), which has no encoder

A soft token is 40 ms of sound in both.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from refimpl.frontend.media_file import MediaFile, Source, describe, read_media
from refimpl.frontend.wav import is_wave, open_wave

SAMPLE_RATE = 16_000
MAX_SECONDS = 30
MAX_SAMPLES = SAMPLE_RATE * MAX_SECONDS
N_MEL = 128
FRAME, HOP, FFT = 320, 160, 512  # 20 ms of sound every 10 ms, padded to 512 for the transform
MEL_FLOOR = 1e-3
TOKEN_SAMPLES = 640  # 40 ms
MIN_SAMPLES = FRAME // 2 + 1  # below, there is not one whole frame

EXPECTED = "a sound (WAV, MP3, OGG, FLAC or M4A, whatever its name)"
PASSED = 0.95  # of the band up to the lower Nyquist frequency; the rest of it fades out
RATES = (1_000, 1_000_000)


@dataclass(frozen=True)
class Sound:
    """What is heard of a file.

    Shapes:
        samples  f32[n]  16 kHz, -1 .. 1, n <= 480,000
        seconds  float   how long the file is, as far as it was read or says itself
        notes    what the user should know: that the end is not heard
    """

    samples: np.ndarray
    seconds: float
    notes: tuple[str, ...] = ()


def load_audio(source: Source, *, name: str | None = None) -> Sound:
    """Decode a sound by its content, mix its channels down and bring it to 16 kHz.

    Raises:
        ValueError: one line that names the file
    """
    file = read_media(source, "a sound", name)
    rate, channels, seconds = _decode(file)
    if not len(channels):
        raise file.fault("no samples", f"{EXPECTED} of 10 ms or more", "Record or send it again")
    if not np.isfinite(channels).all():
        first = int(np.argmin(np.isfinite(channels).all(axis=1)))
        raise file.fault(
            f"sample {first} is not a number", "numbers only", "The file is damaged: save it again"
        )
    samples = resample(channels.mean(axis=1), rate)[:MAX_SAMPLES].astype(np.float32)
    notes: tuple[str, ...] = ()
    if seconds * SAMPLE_RATE > MAX_SAMPLES + 0.5:
        notes = (
            f"{file.name}: {seconds:.1f} s of sound, the model hears {MAX_SECONDS} s at most: what follows "
            f"0:{MAX_SECONDS} was cut off. Send longer sounds in pieces",
        )
    return Sound(samples, seconds, notes)


def resample(x: np.ndarray, rate: int) -> np.ndarray:
    """Bring a signal to 16 kHz, without delay: band-limited interpolation.

        out[n] = the trigonometric polynomial through x, at time n / 16000

    Shapes:
        x  f64[n]
    Returns:
        f64[ceil(n * 16000 / rate)]

    Notes:
        The signal is made periodic with at least half a second of silence behind it, so that its end does
        not reach its beginning; the length of the period is a whole number of samples at both rates.
        Frequencies in the last 5 % below the lower of the two Nyquist frequencies fade out by a raised
        cosine.
    """
    if rate == SAMPLE_RATE:
        return np.asarray(x, np.float64)
    common = math.gcd(rate, SAMPLE_RATE)
    unit, out_unit = rate // common, SAMPLE_RATE // common
    n_units = -(-(len(x) + rate // 2) // unit)
    spectrum = np.fft.rfft(np.asarray(x, np.float64), n_units * unit)
    kept = min(len(spectrum), n_units * out_unit // 2 + 1)
    place = np.arange(kept) / (n_units * min(unit, out_unit) / 2)  # 1 at the lower Nyquist frequency
    fade = np.clip((place - PASSED) / (1 - PASSED), 0, 1)
    wave = np.fft.irfft(spectrum[:kept] * (0.5 + 0.5 * np.cos(np.pi * fade)), n_units * out_unit)
    return wave[: -(-len(x) * SAMPLE_RATE // rate)] * (out_unit / unit)


# -- what the conformer reads -------------------------------------------------------------------------


def count_mel_frames(n_samples: int) -> int:
    """Frames whose samples are all there."""
    n_samples = min(n_samples, MAX_SAMPLES)
    return 0 if n_samples < MIN_SAMPLES else (n_samples - MIN_SAMPLES) // HOP + 1


def count_audio_tokens(n_samples: int) -> int:
    """Soft tokens of the conformer: two convolutions, each with a stride of 2."""
    return -(-count_mel_frames(n_samples) // 4)


def log_mel(samples: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Logarithmic mel energies.

        frame t = 320 samples from 160 t - 160 on (zeros before the beginning), times a periodic Hann window
        out[t] = ln(M |rfft_512(frame t)| + 1e-3)

    Shapes:
        samples  f[n], 16 kHz
        dtype    of the result; it is computed in float64
    Returns:
        f[T, 128]

    Notes:
        A frame needs one sample more than it uses: the published front end cuts frames of 321 samples, for a
        pre-emphasis that is switched off.
        Magnitudes, not their squares; the logarithm is natural; 1e-3 is added, not a lower limit.
    """
    n_frames = count_mel_frames(len(samples))
    padded = np.concatenate([np.zeros(FRAME // 2), samples[:MAX_SAMPLES].astype(np.float64)])
    starts = HOP * np.arange(n_frames)[:, None]
    frames = padded[starts + np.arange(FRAME)] * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME))
    energies = np.abs(np.fft.rfft(frames, FFT)) @ mel_filters()
    return np.log(energies + MEL_FLOOR).astype(dtype)


@cache
def mel_filters() -> np.ndarray:
    """f64[257, 128]: triangles whose corners are equally spaced from 0 to 8 kHz on the mel scale of HTK,
    mel = 2595 log10(1 + f/700), each with the height 1.
    """
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    corners = 700 * (10 ** (np.linspace(0, top, N_MEL + 2) / 2595) - 1)
    bins = np.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)[:, None]
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    return np.clip(np.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)), 0, None)


# -- what the unified model reads ---------------------------------------------------------------------


def waveform_frames(samples: np.ndarray) -> np.ndarray:
    """f[n] -> f[ceil(n / 640), 640]: the samples themselves, the last frame padded with zeros."""
    samples = samples[:MAX_SAMPLES]
    return np.pad(samples, (0, -len(samples) % TOKEN_SAMPLES)).reshape(-1, TOKEN_SAMPLES)


def count_waveform_tokens(n_samples: int) -> int:
    return -(-min(n_samples, MAX_SAMPLES) // TOKEN_SAMPLES)


# -- decoding -----------------------------------------------------------------------------------------


def _decode(file: MediaFile) -> tuple[int, np.ndarray, float]:
    """(rate, f64[n, channels], seconds of the whole file); n is a second more than is heard at most."""
    if is_wave(file.data):
        wave = open_wave(file)
        if wave is not None:
            _check_rate(file, wave.rate)
            return wave.rate, wave.read((MAX_SECONDS + 1) * wave.rate), wave.n_frames / wave.rate
    return _decode_with_av(file)


def _decode_with_av(file: MediaFile) -> tuple[int, np.ndarray, float]:
    av = import_av(file)
    try:
        with av.open(io.BytesIO(file.data)) as container:
            if not container.streams.audio:
                raise file.fault("a file without sound", EXPECTED, "Send another file")
            stream = container.streams.audio[0]
            rate = stream.codec_context.sample_rate
            _check_rate(file, rate)
            pieces, n = [], 0
            for frame in container.decode(stream):
                pieces.append(_samples(frame))
                n += len(pieces[-1])
                if n > (MAX_SECONDS + 1) * rate:
                    break
            seconds = n / rate
            if n > MAX_SECONDS * rate and container.duration:
                seconds = max(seconds, container.duration / av.time_base)
    except av.FFmpegError as error:
        if describe(file.data) != "bytes of no known format":
            raise file.fault(describe(file.data), EXPECTED, "Convert it, or send the sound itself") from error
        cause = " ".join(str(error.strerror).split())
        raise file.fault(
            f"not readable as sound ({cause})", EXPECTED, "It may be cut off or damaged"
        ) from error
    channels = {piece.shape[1] for piece in pieces}
    if len(channels) > 1:  # a stream may change its layout: all are mixed down in any case
        pieces = [piece.mean(axis=1, keepdims=True) for piece in pieces]
    return rate, np.concatenate(pieces) if pieces else np.zeros((0, 1)), seconds


def _samples(frame: Any) -> np.ndarray:
    """f64[n, channels] of a decoded frame, whatever its sample format."""
    raw = frame.to_ndarray()
    if not frame.format.is_planar:
        raw = raw.reshape(-1, frame.layout.nb_channels).T
    if raw.dtype.kind == "f":
        return raw.T.astype(np.float64)
    if raw.dtype == np.uint8:
        return (raw.T.astype(np.float64) - 128) / 128
    return raw.T / -float(np.iinfo(raw.dtype).min)


def import_av(file: MediaFile) -> Any:
    """PyAV, which only compressed sounds and videos need."""
    try:
        import av
    except ImportError as error:
        raise file.fault(
            "a file that needs PyAV", "the package av", "Install it: pip install twinpath[media]"
        ) from error
    return av


def _check_rate(file: MediaFile, rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise file.fault(f"{rate} samples a second", f"{RATES[0]} .. {RATES[1]}", "Save it at 16000 or 44100")
