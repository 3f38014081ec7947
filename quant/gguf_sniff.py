"""What a file is that was taken for a GGUF model: a name for the usual accidents."""

from __future__ import annotations


def describe_content(head: bytes, size: int) -> str:
    """Say in a few words what a file with these first bytes is."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "an HTML page (a login or error page saved under the model's name?)"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, which stands for the model (`git lfs pull` fetches it)"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= max(size, 1 << 24):
        return "a safetensors file"
    if text.startswith((b"{", b"[")):
        return "JSON text (an error message of a server?)"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "a zip archive (a PyTorch checkpoint?)"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip archive"
    if head.startswith((b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"7z\xbc\xaf")):
        return "a compressed archive"
    if head.startswith((b"lmgg", b"tjgg", b"fmgg", b"algg")):
        return "a GGML file of the time before GGUF (convert it)"
    if head.startswith(b"FUGG"):
        return "a byte-swapped GGUF file"
    if not head.strip(b"\0"):
        return "zero bytes (an interrupted download?)"
    return f"bytes {head[:8]!r}"
