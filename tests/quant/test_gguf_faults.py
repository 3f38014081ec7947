"""What is wrong with a file is said in one ValueError: file, place, found, expected, and what to do."""

import os
import struct
import time

import pytest

import quant
from quant import gguf_parse
from tests.quant import handmade as h
from tests.quant.handmade import file, pair, pair_array, tensor

F32_DATA = bytes(64)


def fault_of(raw: bytes) -> str:
    """The message for these bytes, checked to be one line that begins with the file."""
    with pytest.raises(ValueError) as caught:
        gguf_parse.parse_part(raw, "m.gguf")
    message = str(caught.value)
    assert message.startswith("m.gguf: ") and "\n" not in message and len(message) < 500
    return message


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def lfs_pointer() -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 4588000000\n"


NOT_GGUF = {
    "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML page"),
    "html after a mark": (b"\xef\xbb\xbf \n<html>", "an HTML page"),
    "git lfs": (lfs_pointer(), "a Git LFS pointer"),
    "json": (b'{"error": "Repository not found"}', "JSON text"),
    "safetensors": (u64(30) + b'{"w":{"dtype":"F32"}}' + bytes(80), "a safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "a gzip archive"),
    "ggml": (b"tjgg" + bytes(60), "a GGML file of the time before GGUF"),
    "swapped": (b"FUGG" + bytes(60), "a byte-swapped GGUF file"),
    "zeros": (bytes(100), "zero bytes"),
    "one byte": (b"G", "bytes b'G'"),
    "other": (b"\x7fELF\x02\x01\x01", "bytes b'\\x7fELF"),
}


@pytest.mark.parametrize("name", NOT_GGUF)
def test_other_files_are_recognised(name):
    raw, found = NOT_GGUF[name]
    message = fault_of(raw)
    assert f"byte 0: got {found}" in message
    assert "expected a GGUF model" in message and "Check what was downloaded" in message


ARRAY_OF_ARRAYS = h.text("a") + struct.pack("<IIQ", h.ARRAY, h.ARRAY, 1) + struct.pack("<IQ", h.U8, 1) + b"x"

# name: (bytes, the parts of the message that must be there)
FAULTS = {
    "version 1": (file(version=1), ["byte 4, version", "got 1", "2 or 3", "Convert"]),
    "version 4": (file(version=4), ["byte 4, version", "got 4"]),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), ["version", "big-endian", "little-endian"]),
    "many keys": (file(n_keys=1 << 40), ["number of metadata keys", "1099511627776", "at most 0"]),
    "many tensors": (file(n_tensors=1 << 63), ["number of tensors", "9223372036854775808"]),
    "key length": (
        file([u64(1 << 30) + bytes(152)]),
        ["key 0 of 1", "a string of 1073741824 bytes", "65535"],
    ),
    "empty key": (file([pair("", h.U32, 1)]), ["key 0 of 1", "an empty key"]),
    "key not utf-8": (file([pair(b"\xff\xfe", h.U8, 1)]), ["key 0 of 1", "UTF-8"]),
    "key twice": (file([pair("a.b", h.U8, 1), pair("a.b", h.U8, 2)]), ["'a.b'", "a second time"]),
    "value kind": (file([h.text("a") + struct.pack("<IQ", 13, 0)]), ["'a'", "value kind 13", "0 .. 12"]),
    "string value": (
        file([h.text("a") + struct.pack("<IQ", h.STRING, 900)]),
        ["'a'", "to the end", "expected 900"],
    ),
    "long string": (file([h.text("a") + struct.pack("<IQ", h.STRING, 1 << 40)]), ["'a'", "16777216"]),
    "string not utf-8": (file([pair("a", h.STRING, b"ab\xc3")]), ["'a'", "UTF-8"]),
    "bool of 2": (file([pair("a", h.BOOL, 2)]), ["'a'", "the byte 2", "a bool"]),
    "bools of 255": (file([pair_array("a", h.BOOL, [1, 0, 255])]), ["'a' (bool[3])", "the byte 255"]),
    "array count": (
        file([pair_array("a", h.U8, [1], count=1 << 40)]),
        ["'a' (u8[1099511627776])", "1099511627776"],
    ),
    "array overflow": (
        file([pair_array("a", h.F64, [1], count=1 << 61)]),
        ["'a'", "expected 18446744073709551616"],
    ),
    "strings count": (
        file([pair_array("a", h.STRING, ["x"], count=1 << 61)]),
        ["'a'", "to the end of the file"],
    ),
    "string in array": (
        file([pair_array("a", h.STRING, ["x", "y"], count=3) + u64(1 << 63) + bytes(40)]),
        ["'a' (str[3]), item 2 of 3", "a string longer than the file"],
    ),
    "nested arrays": (file([ARRAY_OF_ARRAYS]), ["'a'", "an array of arrays"]),
    "array of kind 99": (
        file([h.text("a") + struct.pack("<IIQ", h.ARRAY, 99, 0)]),
        ["'a'", "an array of kind 99"],
    ),
    **{
        f"alignment {kind} {v}": (
            file([pair("general.alignment", kind, v)]),
            ["'general.alignment'", f"got {v} (", "a power of two, 8 .. 1048576"],
        )
        for kind, v in [
            (h.U32, 0),
            (h.U32, 3),
            (h.U32, 4),
            (h.U32, 48),
            (h.U32, 1 << 30),
            (h.I32, 32),
            (h.U64, 32),
        ]
    },
    "empty tensor name": (file([], [tensor("", [4], 0, 0)], F32_DATA), ["tensor 0 of 1", "an empty name"]),
    "long tensor name": (
        file([], [tensor("x" * 256, [4], 0, 0)], F32_DATA),
        ["name of tensor 0 of 1", "255"],
    ),
    "name not utf-8": (file([], [tensor(b"\x80", [4], 0, 0)], F32_DATA), ["name of tensor 0 of 1", "UTF-8"]),
    "tensor twice": (
        file([], [tensor("w", [4], 0, 0), tensor("w", [4], 0, 32)], F32_DATA),
        ["tensor 'w'", "two of this name"],
    ),
    "five dims": (
        file([], [tensor("w", [1, 1, 1, 1, 1], 0, 0)], F32_DATA),
        ["tensor 'w'", "5 dims", "at most 4"],
    ),
    "2^32-1 dims": (
        file([], [tensor("w", [1], 0, 0, n_dims=2**32 - 1)], F32_DATA),
        ["tensor 'w'", "4294967295 dims"],
    ),
    "zero dim": (file([], [tensor("w", [0], 0, 0)], F32_DATA), ["tensor 'w'", "dims [0]", "at least 1"]),
    "huge dim": (file([], [tensor("w", [1 << 63], 0, 0)], F32_DATA), ["tensor 'w'", "below 2^63"]),
    "overflowing dims": (file([], [tensor("w", [1 << 32, 1 << 32], 0, 0)], F32_DATA), ["'w'", "a file of"]),
    "type 31": (
        file([], [tensor("w", [32], 31, 0)], F32_DATA),
        ["tensor 'w'", "type 31 is not supported", "Q4_0"],
    ),
    "type 99": (
        file([], [tensor("w", [32], 99, 0)], F32_DATA),
        ["tensor 'w'", "type 99 is not supported", "NVFP4"],
    ),
    "partial block": (
        file([], [tensor("w", [33], 2, 0)], F32_DATA),
        ["'w'", "row of 33", "Q4_0 block of 32"],
    ),
    "unaligned": (
        file([], [tensor("w", [4], 0, 16)], F32_DATA),
        ["'w' (F32 [4])", "offset 16", "a multiple of 32"],
    ),
    "overlap": (
        file([], [tensor("a", [12], 0, 0), tensor("b", [4], 0, 32)], F32_DATA),
        ["tensor 'b'", "offset 32, inside 'a'", "48 or more"],
    ),
    "beyond the end": (
        file([], [tensor("w", [17], 0, 0)], F32_DATA),
        ["'w' (F32 [17])", "a file of 128 bytes", "132"],
    ),
    "offset wraps": (file([], [tensor("w", [4], 0, (1 << 64) - 32)], F32_DATA), ["'w'", "a file of"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_described(name):
    raw, parts = FAULTS[name]
    message = fault_of(raw)
    for part in parts:
        assert part in message, message


def test_a_limit_on_the_number_of_keys_holds_for_big_files():
    pairs = [pair(f"{i:05x}", h.BOOL, 0) for i in range((1 << 16) + 1)]
    assert "expected at most 65536" in fault_of(file(pairs))


def test_the_small_file_is_right():
    part = gguf_parse.parse_part(h.small_file(), "m.gguf")
    assert part.metadata["a.text"].tolist() == ["", "a", "Größe", "▁the"]
    assert list(part.tensors) == ["norm.weight", "blk.0.attn_q.weight"]


def test_cut_at_every_byte():
    whole = h.small_file()
    for size in range(len(whole)):
        fault_of(whole[:size])


def test_every_cut_names_its_place():
    """In metadata the key or its number, in the tensor list the tensor, in the data the first tensor cut."""
    whole = h.small_file()
    assert "magic" not in fault_of(whole[:2])
    assert "number of tensors" in fault_of(whole[:12])
    assert "key 0 of" in fault_of(whole[:30]) or "number of metadata keys" in fault_of(whole[:30])
    assert "tensor 'blk.0.attn_q.weight' (Q8_0 [3, 32])" in fault_of(whole[:-1])
    assert "download it again" in fault_of(whole[:-1])


def test_missing_padding_after_the_last_tensor_is_no_loss():
    assert len(h.small_file()) % 32 != 0
    assert gguf_parse.parse_part(h.small_file() + bytes(26), "m.gguf").nbytes % 32 == 0


def test_tensors_may_stand_in_any_order():
    raw = file([], [tensor("b", [8], 0, 32), tensor("a", [8], 0, 0)], struct.pack("<16f", *range(16)))
    part = gguf_parse.parse_part(raw, "m.gguf")
    assert part.tensors["b"].dequantize().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert part.tensors["a"].dequantize().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_other_alignments():
    for alignment in (8, 64, 4096):
        pairs = [pair("general.alignment", h.U32, alignment)]
        raw = file(pairs, [tensor("w", [4], 0, 0)], struct.pack("<4f", 1, 2, 3, 4), alignment=alignment)
        part = gguf_parse.parse_part(raw, "m.gguf")
        assert part.alignment == alignment and part.tensors["w"].dequantize().tolist() == [1, 2, 3, 4]


def test_no_dims_is_a_single_number():
    raw = file([], [tensor("w", [], 0, 0)], struct.pack("<f", 2.5))
    assert gguf_parse.parse_part(raw, "m.gguf").tensors["w"].dequantize().tolist() == [2.5]


def test_text_that_is_not_utf8_in_an_array_is_named_when_read():
    part = gguf_parse.parse_part(file([pair_array("a", h.STRING, ["x", b"\xff\xfe", "z"])]), "m.gguf")
    strings = part.metadata["a"]
    assert strings[0] == "x" and strings[-1] == "z" and strings.raw(1) == b"\xff\xfe"
    for read in (lambda: strings[1], strings.tolist):
        with pytest.raises(ValueError, match=r"m\.gguf: key 'a' \(str\[3\]\), item 1: got .* expected UTF-8"):
            read()


def test_files_on_disk(tmp_path):
    with pytest.raises(FileNotFoundError):
        quant.open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ValueError, match="is a folder"):
        quant.open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device"):  # and nobody waits for a writer
        quant.open_gguf(tmp_path / "pipe")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty\.gguf: is empty \(0 bytes\)"):
        quant.open_gguf(empty)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(h.small_file()[:-1])
    with pytest.raises(ValueError, match=r"cut\.gguf: tensor 'blk"):
        quant.open_gguf(cut)


def test_names_of_folders_and_files_in_any_script(tmp_path):
    path = tmp_path / "Dépôt Модели" / "\u3000m 'x'.gguf"
    path.parent.mkdir()
    path.write_bytes(h.small_file())
    for spelling in (path, str(path)):
        with quant.open_gguf(spelling) as file_:
            assert file_.path == path and len(file_.tensors) == 2


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="needs Linux to ask for the resident memory"
)
def test_sixteen_gigabytes_open_without_reading_the_weights(tmp_path):
    """A file with a hole: 8 tensors of 2 GB."""
    rows, columns = 1 << 19, 4096  # F16... as Q8_0: 4096/32*34 bytes a row
    row_bytes = columns // 32 * 34
    tensors = [tensor(f"blk.{i}.w", [columns, rows], 8, i * rows * row_bytes) for i in range(8)]
    head = file([], tensors)
    path = tmp_path / "big.gguf"
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + 8 * rows * row_bytes)
    before, start = resident_bytes(), time.perf_counter()
    model = quant.open_gguf(path)
    took, grown = time.perf_counter() - start, resident_bytes() - before
    assert model.nbytes > 16e9 and len(model.tensors) == 8
    assert grown < 20e6 and took < 5
    assert not model.tensors["blk.7.w"].rows([rows - 1]).any()
