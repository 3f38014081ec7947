"""WAV files: RIFF chunks to numbers in -1 .. 1."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from refimpl.frontend.media_file import MediaFile

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
UNKNOWN_SIZE = (0, 0xFFFFFFFF)  # what programs write that do not yet know how long the sound will be
ADVICE = "Save it again as 16-bit WAV"
PIECE = 1 << 16  # samples that are decoded at a time


@dataclass(frozen=True)
class Wave:
    """The header of a file, and its sound, not yet decoded."""

    file: MediaFile
    rate: int
    n_channels: int
    code: int
    bits: int
    data: memoryview

    @property
    def n_frames(self) -> int:
        return len(self.data) // (self.n_channels * self.bits // 8)

    def mixed(self, n: int) -> np.ndarray:
        """The mean of all channels, of the first n samples: f64[n].  Read in pieces: many channels of many
        samples are no reason to hold all of them as float64."""
        n = min(n, self.n_frames)
        pieces = (self._read(at, min(at + PIECE, n)).mean(axis=1) for at in range(0, n, PIECE))
        return np.concatenate([np.zeros(0), *pieces])

    def _read(self, start: int, stop: int) -> np.ndarray:
        """f64[stop - start, channels]."""
        width = self.bits // 8
        n = stop - start
        raw = np.frombuffer(self.data, np.uint8)[start * self.n_channels * width :][
            : n * self.n_channels * width
        ]
        if self.code == FLOAT:
            values = raw.view(f"<f{width}").astype(np.float64)
        elif width == 1:  # the only unsigned one
            values = (raw.astype(np.float64) - 128) / 128
        else:  # the bytes become the upper ones of an int32
            wide = np.zeros((n * self.n_channels, 4), np.uint8)
            wide[:, 4 - width :] = raw.reshape(-1, width)
            values = wide.view("<i4")[:, 0] / 2.0**31
        return values.reshape(n, self.n_channels)


def is_wave(data: bytes) -> bool:
    return data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"


def open_wave(file: MediaFile) -> Wave | None:
    """Read the header.  None: a WAV file with a codec that is not read here."""
    at, end = 12, len(file.data)
    form: tuple[int, int, int, int] | None = None
    while at + 8 <= end:
        name, size = file.data[at : at + 4], struct.unpack_from("<I", file.data, at + 4)[0]
        at += 8
        if name == b"fmt ":
            form = _format(file, file.data[at : at + size])
            if form[0] not in (PCM, FLOAT):
                return None
        elif name == b"data":
            if form is None:
                raise file.fault("sound before its format", "a 'fmt ' chunk first", ADVICE)
            return _wave(file, form, at, size)
        at += size + size % 2
    raise file.fault("a WAV file without sound", "a 'data' chunk", "It may be cut off: copy it again")


def _wave(file: MediaFile, form: tuple[int, int, int, int], at: int, size: int) -> Wave:
    code, n_channels, rate, bits = form
    there = len(file.data) - at
    if size in UNKNOWN_SIZE or file.data[:4] == b"RF64":
        size = there
    if size > there:
        raise file.fault(
            f"cut off: {there} bytes of sound", f"{size} as its header says", "Copy or save it again"
        )
    return Wave(file, rate, n_channels, code, bits, memoryview(file.data)[at : at + size])


def _format(file: MediaFile, chunk: bytes) -> tuple[int, int, int, int]:
    """Code, channels, rate and bits of a sample."""
    if len(chunk) < 16:
        raise file.fault(f"a 'fmt ' chunk of {len(chunk)} bytes", "16 or more", ADVICE)
    code, n_channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == EXTENSIBLE and len(chunk) >= 26:
        code = struct.unpack_from("<H", chunk, 24)[0]
    sound = (code == PCM and bits in (8, 16, 24, 32)) or (code == FLOAT and bits in (32, 64))
    if code in (PCM, FLOAT) and not (sound and 1 <= n_channels <= 64 and align == n_channels * bits // 8):
        raise file.fault(
            f"{n_channels} channels of {bits} bits in {align} bytes",
            "1 .. 64 channels of 8, 16, 24 or 32 bits, or float",
            ADVICE,
        )
    return code, n_channels, rate, bits
