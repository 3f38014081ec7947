"""Pictures and sounds made from a seed, the same on every machine: python -m tests.media.files FOLDER.

The oracles read the files; the tests make the same arrays again.  Pictures are PNG, sounds are float32 WAV:
both hold exactly what was put in.
"""

import argparse
import io
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np

from tests.tiny import _seed

# name: height, width, kind
PICTURES = {
    "photo": (480, 640, "photo"),
    "photo-large": (1080, 1920, "photo"),
    "photo-tall": (1000, 700, "photo"),
    "photo-small": (75, 100, "photo"),
    "fits": (768, 768, "photo"),
    "noise": (301, 199, "noise"),
    "checks": (250, 400, "checks"),
    "dot": (1, 1, "noise"),
    "pair": (2, 2, "noise"),
    "three": (3, 1000, "photo"),
    "flat": (10, 1000, "photo"),
    "line": (1, 2000, "noise"),
    "column": (1000, 10, "photo"),
}

# name: samples at 16 kHz, kind
SOUNDS = {
    "chirp": (1600, "chirp"),
    "noise": (8000, "noise"),
    "silence": (4000, "silence"),
    "voice": (16001, "voice"),
    "shortest": (161, "noise"),
    "one-token": (800, "voice"),
    "two-tokens": (801, "voice"),
    "quiet": (5000, "quiet"),
    "long": (31 * 16000, "voice"),
}


def _bits(key: str, n: int) -> np.ndarray:
    return np.random.Philox(key=_seed(f"media/{key}")).random_raw(n)


def _uniform(key: str, *shape: int) -> np.ndarray:
    """f64, 0 .. 1"""
    return ((_bits(key, int(np.prod(shape))) >> np.uint64(11)) * 2.0**-53).reshape(shape)


@cache
def picture(name: str) -> np.ndarray:
    """u8[H, W, 3]"""
    height, width, kind = PICTURES[name]
    y, x = np.mgrid[:height, :width]
    if kind == "noise":
        return (256 * _uniform(name, height, width, 3)).astype(np.uint8)
    if kind == "checks":  # hard edges at all distances from the grid of the result
        return np.stack([255 * ((x // 7 + y // 5) % 2), 255 * (x // 3 % 2), 255 * (y // 2 % 2)], -1).astype(
            np.uint8
        )
    # slopes, edges of objects, fine texture: what photographs are made of; integers only, for equal bits
    out = np.empty((height, width, 3), np.int64)
    for c, (a, b) in enumerate(((3, 7), (5, 2), (2, 5))):
        slope = (a * x * 255 // max(1, width - 1) + b * y * 255 // max(1, height - 1)) // (a + b)
        disc = 90 * ((2 * x - width) ** 2 + (3 * y - height) ** 2 < min(height, width) ** 2 // 2)
        stripes = 40 * ((x * (c + 2) + y * 3) // 11 % 2)
        out[..., c] = slope // 2 + disc + stripes
    grain = (16 * _uniform(name, height, width, 3)).astype(np.int64)
    return np.clip(out + grain, 0, 255).astype(np.uint8)


def sound(name: str) -> np.ndarray:
    """f32[n]"""
    n, kind = SOUNDS[name]
    if kind == "silence":
        return np.zeros(n, np.float32)
    if kind in ("noise", "quiet"):
        level = 0.3 if kind == "noise" else 1e-4
        return (level * (2 * _uniform(name, n) - 1)).astype(np.float32)
    # triangle waves (no libm): a rising one, or three that fade, with breath
    t = np.arange(n) / 16000
    if kind == "chirp":
        return (0.5 * _triangle(200 * t + 10000 * t * t)).astype(np.float32)
    tones = 0.3 * _triangle(130 * t) + 0.2 * _triangle(410 * t) + 0.1 * _triangle(2750 * t)
    swell = 1 - np.abs(2 * (3 * t % 1) - 1)
    return (tones * swell + 0.01 * (2 * _uniform(name, n) - 1)).astype(np.float32)


def _triangle(phase: np.ndarray) -> np.ndarray:
    return 1 - 4 * np.abs(phase % 1 - 0.5)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of u8[H, W, 3], by hand."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + chunk(b"IEND", b"")
    )


def wav(samples: np.ndarray, rate: int = 16000, *, code: int | None = None) -> bytes:
    """A WAV file of f32, i32, i16 or u8 samples [n] or [n, channels]."""
    samples = np.atleast_2d(samples.T).T
    code = (3 if samples.dtype.kind == "f" else 1) if code is None else code
    channels, width = samples.shape[1], samples.dtype.itemsize
    header = struct.pack(
        "<HHIIHH", code, channels, rate, rate * channels * width, channels * width, 8 * width
    )
    data = samples.astype(samples.dtype.newbyteorder("<")).tobytes()
    body = (
        b"WAVEfmt " + struct.pack("<I", len(header)) + header + b"data" + struct.pack("<I", len(data)) + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def encoded(pixels: np.ndarray, extension: str, **options) -> bytes:
    """An image file as imageio writes it."""
    import imageio.v3 as imageio

    file = io.BytesIO()
    imageio.imwrite(file, pixels, extension=extension, plugin="pillow", **options)
    return file.getvalue()


def write(folder: Path) -> None:
    for name in PICTURES:
        (folder / f"{name}.png").write_bytes(png(picture(name)))
    for name in SOUNDS:
        (folder / f"{name}.wav").write_bytes(wav(sound(name)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
