"""Sound files: from bytes to what an audio encoder reads.

    load_audio  any rate, any number of channels -> 16 kHz, one channel, at most 30 s
    log_mel     128 logarithmic mel energies per 10 ms: the input of the conformer (E2B, E4B)
    waveform_frames  640 samples per soft token: the input of the unified model (12B), which has no encoder

A soft token is 40 ms of sound in both.
"""

from __future__ import annotations

import errno
import io
import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from refimpl.frontend.media_file import UNKNOWN, MediaFile, Source, describe, read_media
from refimpl.frontend.wav import is_wave, open_wave

SAMPLE_RATE = 16_000
MAX_SECONDS = 30
MAX_SAMPLES = SAMPLE_RATE * MAX_SECONDS
N_MEL = 128
FRAME, HOP, FFT = 320, 160, 512  # 20 ms of sound every 10 ms, padded to 512 for the transform
MEL_FLOOR = 1e-3
TOKEN_SAMPLES = 640  # 40 ms
MIN_SAMPLES = FRAME // 2 + 1  # below, there is not one whole frame
SHORTEST = "10.1 ms"  # the same, for messages

EXPECTED = "a sound (WAV, MP3, OGG, FLAC or M4A, whatever its name)"
PASSED = 0.95  # of the band up to the lower Nyquist frequency; the rest of it fades out
RATES = (1_000, 400_000)
LOUDEST = 2.0**31  # of float samples; larger ones are no sound, and the encoders would overflow
PIECE = 1  # seconds that are resampled at a time
_NO_MEMORY = (
    "failed to map segment",
    "Cannot allocate memory",
    "cannot allocate memory",
)  # of loading a library


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
    rate, mixed, seconds = _decode(file)
    if not len(mixed):
        raise file.fault("no samples", f"{EXPECTED} of {SHORTEST} or more", "Record or send it again")
    if not np.isfinite(mixed).all():
        first = int(np.argmin(np.isfinite(mixed)))
        raise file.fault(
            f"sample {first} is not a number", "numbers only", "The file is damaged: save it again"
        )
    if (peak := np.abs(mixed).max()) > LOUDEST:
        raise file.fault(
            f"samples up to {peak:.2g}", "-1 .. 1, or whole numbers of 32 bits", "Save it again as 16-bit WAV"
        )
    samples = resample(mixed, rate)[:MAX_SAMPLES].astype(np.float32)
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
        It is done in pieces of about PIECE seconds, each with its neighbourhood of half a second or more on
        both sides (silence before the beginning and behind the end), so that the memory is bounded for all
        rates.  The length of a piece is a whole number of samples at both rates.
        Frequencies in the last 5 % below the lower of the two Nyquist frequencies fade out by a raised
        cosine; so a sample's reach has faded to 1e-8 after half a second (1e-6 from 1 kHz).
    """
    if rate == SAMPLE_RATE:
        return np.asarray(x, np.float64)
    common = math.gcd(rate, SAMPLE_RATE)
    unit, out_unit = rate // common, SAMPLE_RATE // common
    margin, inner = -(-rate // 2 // unit), -(-PIECE * rate // unit)  # in units
    n_units = inner + 2 * margin
    padded = np.zeros(margin * unit + -(-len(x) // (inner * unit)) * inner * unit + margin * unit)
    padded[margin * unit :][: len(x)] = x
    pieces = [np.zeros(0)]
    for start in range(0, len(padded) - 2 * margin * unit, inner * unit):
        whole = _stretch(padded[start : start + n_units * unit], n_units * out_unit)
        pieces.append(whole[margin * out_unit :][: inner * out_unit])
    return np.concatenate(pieces)[: -(-len(x) * SAMPLE_RATE // rate)]


def _stretch(x: np.ndarray, n: int) -> np.ndarray:
    """f64[m] -> f64[n]: the same period at another rate, without what the lower one cannot hold."""
    spectrum = np.fft.rfft(x)
    low = min(len(x), n)
    kept = min(len(spectrum), n // 2 + 1)
    place = np.arange(kept) / (low / 2)  # 1 at the lower Nyquist frequency
    fade = np.clip((place - PASSED) / (1 - PASSED), 0, 1)
    return np.fft.irfft(spectrum[:kept] * (0.5 + 0.5 * np.cos(np.pi * fade)), n) * (n / len(x))


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
    """(rate, f64[n] of all channels' mean, seconds of the whole file); n is a second more than is heard."""
    if is_wave(file.data):
        wave = open_wave(file)
        if wave is not None:
            _check_rate(file, wave.rate)
            return wave.rate, wave.mixed((MAX_SECONDS + 1) * wave.rate), wave.n_frames / wave.rate
    return _decode_with_av(file)


def _decode_with_av(file: MediaFile) -> tuple[int, np.ndarray, float]:
    av = import_av(file)
    try:
        with av.open(io.BytesIO(file.data)) as container:
            if not container.streams.audio:
                raise file.fault("a file without sound", EXPECTED, "Send another file")
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise file.fault("a codec that is not known", EXPECTED, "Convert it, or save it again")
            rate = stream.codec_context.sample_rate
            _check_rate(file, rate)
            pieces, n = [np.zeros(0)], 0
            for frame in container.decode(stream):
                pieces.append(_samples(frame).mean(axis=1))
                n += len(pieces[-1])
                if n > (MAX_SECONDS + 1) * rate:
                    break
            seconds = n / rate
            if n > MAX_SECONDS * rate and container.duration:
                seconds = max(seconds, container.duration / av.time_base)
    except Exception as error:  # decoders raise anything on broken files
        raise unreadable(file, "sound", EXPECTED, error) from error
    return rate, np.concatenate(pieces), seconds


def unreadable(file: MediaFile, kind: str, expected: str, error: Exception) -> Exception:
    """What a fault of PyAV means for the user; one that names the file already stays as it is."""
    if isinstance(error, ValueError) and str(error).startswith(f"{file.name}: "):
        return error
    if isinstance(error, ImportError):  # Pillow's, which resizes frames
        return _unloadable(file, error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EAGAIN):
        # EAGAIN: a decoder's thread that could not begin
        return file.fault("too large to decode", f"a {kind} that fits the memory", "Send it smaller")
    if describe(file.data) != UNKNOWN:
        return file.fault(describe(file.data), expected, f"Convert it, or send the {kind} itself")
    cause = " ".join(str(getattr(error, "strerror", None) or error).split())[:120] or type(error).__name__
    return file.fault(f"not readable as {kind} ({cause})", expected, "It may be cut off or damaged")


def _samples(frame: Any) -> np.ndarray:
    """f64[n, channels] of a decoded frame, whatever its sample format."""
    if frame.format.is_planar and frame.layout.nb_channels >= 8:  # PyAV 18 reads beyond the last plane
        frame = _packed(frame)
    raw = frame.to_ndarray()
    if not frame.format.is_planar:
        raw = raw.reshape(-1, frame.layout.nb_channels).T
    if raw.dtype.kind == "f":
        return raw.T.astype(np.float64)
    if raw.dtype == np.uint8:
        return (raw.T.astype(np.float64) - 128) / 128
    return raw.T / -float(np.iinfo(raw.dtype).min)


def _packed(frame: Any) -> Any:
    """The same frame with the samples of all channels side by side."""
    import av

    packer = av.AudioResampler(frame.format.packed.name, frame.layout, frame.sample_rate)
    (packed,) = packer.resample(frame)
    return packed


def import_av(file: MediaFile) -> Any:
    """PyAV, which only compressed sounds and videos need."""
    if find_spec("av") is None:
        raise file.fault(
            "a file that needs PyAV", "the package av", "Install it: pip install twinpath[media]"
        )
    try:
        import av
    except ImportError as error:
        raise _unloadable(file, error) from error
    return av


def _unloadable(file: MediaFile, error: ImportError) -> Exception:
    """Of a library that is there."""
    cause = " ".join(str(error).split())[:200]
    if any(sign in cause for sign in _NO_MEMORY):
        return MemoryError(f"{file.name}: a library cannot be loaded ({cause})")
    advice = "Install again what is named: pip install --force-reinstall"
    return file.fault(f"a library cannot be loaded ({cause})", "one that works", advice)


def _check_rate(file: MediaFile, rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise file.fault(f"{rate} samples a second", f"{RATES[0]} .. {RATES[1]}", "Save it at 16000 or 44100")
