"""Bytes of an image, a sound or a video, from a path or from memory, and faults that name them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 1 << 30  # a file is read whole; nobody sends more than this for 30 s of sound or 60 frames

UNKNOWN = "bytes of no known format"

Source = str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class MediaFile:
    """What a user sent."""

    name: str
    data: bytes

    def fault(self, got: str, expected: str, advice: str) -> ValueError:
        return ValueError(f"{self.name}: {got}, expected {expected}. {advice}")


def read_media(source: Source, kind: str, name: str | None = None) -> MediaFile:
    """Read a file, or take bytes as they are.

    Args:
        source: a path, or the content itself
        kind: what is expected, for messages: "an image", "a sound", "a video"
        name: for messages, where the source is bytes
    """
    if isinstance(source, bytes | bytearray | memoryview):
        file = MediaFile(name or f"{kind.split()[-1]} in memory", bytes(source))
    else:
        if not os.fspath(source):
            raise ValueError(f"the name of the file is empty, expected {kind}. Name a file")
        path = Path(source)
        try:
            if not path.is_file():
                got = "a folder" if path.is_dir() else "something that is not a file"
                if not path.exists():
                    got = "no such file"
                raise ValueError(f"{path}: {got}, expected {kind}. Check the path")
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise ValueError(
                    f"{path}: {size} bytes, expected at most {MAX_BYTES}. Cut it or write it smaller"
                )
            file = MediaFile(name or str(path), path.read_bytes())
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error.strerror or error}), expected {kind}. Check the file"
            ) from error
    if not file.data:
        raise file.fault("empty (0 bytes)", kind, "Send the file again")
    return file


def begins_as(data: bytes) -> str | None:
    """ "video" or "sound" by the first bytes, for messages; containers of both count as videos."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip") or data[:4] == b"\x1aE\xdf\xa3":
        return "video"
    return "sound" if data.startswith((b"OggS", b"fLaC", b"ID3")) else None


def describe(data: bytes) -> str:
    """What some bytes look like, for a file that is not what it should be."""
    head = data[:512]
    if head.lstrip()[:9].lower() in (b"<!doctype", b"<html>") or head.lstrip()[:5].lower() == b"<html":
        return "a web page"
    if data[:4] == b"%PDF":
        return "a PDF document"
    if data[:2] == b"PK":
        return "a ZIP archive"
    if data[:4] == b"GGUF":
        return "a GGUF model"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # not only a character cut at the end of the sample
            return UNKNOWN
        text = head[: error.start].decode("utf-8")
    return "text" if text.isprintable() or not any(ord(c) < 9 for c in text) else UNKNOWN
