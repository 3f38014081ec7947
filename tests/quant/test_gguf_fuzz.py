"""Thousands of damaged files: each loads or is refused with one ValueError, without a crash or a hang."""

import struct
import tracemalloc

import numpy as np
import pytest

import quant
from quant import gguf_parse
from tests.quant import handmade

EXTREME = [
    0,
    1,
    2**7,
    2**8 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
N_CASES = 4000


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """One to three random injuries."""
    raw = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(raw)))
        extreme = EXTREME[rng.integers(len(EXTREME))]
        match rng.integers(0, 8):
            case 0:
                raw[at] ^= 1 << rng.integers(8)
            case 1:
                raw[at] = rng.integers(256)
            case 2:
                raw[at : at + 8] = struct.pack("<Q", extreme)
            case 3:
                raw[at : at + 4] = struct.pack("<I", extreme % 2**32)
            case 4:
                del raw[at : at + int(rng.integers(1, 40))]
            case 5:
                raw[at:at] = rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8).tobytes()
            case 6:
                raw[at:at] = raw[at : at + int(rng.integers(1, 200))]
            case 7:
                del raw[at:]
        if not raw:
            return b"\0"
    return bytes(raw)


def use(part: gguf_parse.Part) -> None:
    """What a loader would do with it."""
    for value in part.metadata.values():
        if isinstance(value, quant.gguf.StringArray):
            value.tolist()
    for tensor in part.tensors.values():
        assert tensor.nbytes <= part.nbytes
        tensor.rows([0])


def outcome(raw: bytes) -> str:
    try:
        use(gguf_parse.parse_part(raw, "m.gguf"))
    except ValueError as fault:
        message = str(fault)
        assert "\n" not in message and message.startswith("m.gguf: "), message
        return "refused"
    return "loaded"


@pytest.fixture
def little_memory():
    """Fails when the test held 20 MB at a time, touched or not: these files have a few hundred bytes.

    Not by the process's largest resident size, which other tests have raised before.
    """
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6


def test_damaged_files_load_or_are_refused(little_memory):
    rng = np.random.default_rng(20)
    whole = handmade.small_file()
    outcomes = [outcome(damaged(whole, rng)) for _ in range(N_CASES)]
    # Both happen often: the injuries are neither harmless nor always fatal.
    assert min(outcomes.count("refused"), outcomes.count("loaded")) > N_CASES // 20


def test_extreme_numbers_at_every_position(little_memory):
    """And so in place of every length, count, dim, type and offset."""
    whole = handmade.small_file()
    for at in range(len(whole) - 8):
        for extreme in (0, 2**31, 2**40, 2**61, 2**63, 2**64 - 1):
            outcome(whole[:at] + struct.pack("<Q", extreme) + whole[at + 8 :])


def test_damaged_files_on_disk(tmp_path):
    rng = np.random.default_rng(21)
    whole = handmade.small_file()
    path = tmp_path / "m.gguf"
    for _ in range(200):
        path.write_bytes(damaged(whole, rng))
        try:
            with quant.open_gguf(path) as model:
                assert model.nbytes == path.stat().st_size
        except ValueError as fault:
            assert str(path) in str(fault)


def test_a_vocabulary_of_nothing_costs_no_more_than_its_bytes():
    """Empty strings: the largest number of items that a file of this size can hold."""
    n = 1 << 16
    raw = handmade.file([handmade.pair_array("a", handmade.STRING, [], count=n) + bytes(8 * n)])
    tracemalloc.start()
    try:
        part = gguf_parse.parse_part(raw, "m.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(part.metadata["a"]) == n and peak < 5 * len(raw)
