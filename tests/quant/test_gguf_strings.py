"""Finding the strings of an array: guesses and steps give what steps alone give."""

import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.gguf_strings import CutShort, find_strings

# short text, as in a vocabulary; bytes that look like length fields; lengths that need two bytes
string = st.one_of(
    st.binary(min_size=1, max_size=12).map(lambda raw: raw.replace(b"\0", b"a")),
    st.sampled_from(
        [b"", b"\0", b"\0" * 9, b"\2" + b"\0" * 7, b"\1" + b"\0" * 7 + b"a", b"a" * 256, b"b" * 300]
    ),
)


def record(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def by_steps(raw: bytes, pos: int, count: int):
    starts = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", raw, pos)
        starts.append(pos + 8)
        pos += 8 + length
    return starts, pos


@given(st.lists(string, max_size=400), st.integers(1, 30), st.binary(max_size=20), st.binary(max_size=20))
def test_as_by_steps(strings, times, before, after):
    whole = before + b"".join(map(record, strings)) * times + after
    count = len(strings) * times
    starts, end = find_strings(memoryview(whole), len(before), count)
    assert (starts.tolist(), end) == by_steps(whole, len(before), count)


@given(st.lists(string, min_size=1, max_size=200), st.data())
def test_cut_anywhere(strings, data):
    records = [record(raw) for raw in strings]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CutShort) as caught:
        find_strings(memoryview(whole[:cut]), 0, len(strings))
    i = caught.value.i
    assert caught.value.at == sum(map(len, records[:i]))
    assert sum(map(len, records[:i])) <= cut < sum(map(len, records[: i + 1]))


@pytest.mark.parametrize("length", [2**8, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_lengths_beyond_the_file(length):
    whole = record(b"abc") * 200 + struct.pack("<Q", length) + b"abc"
    with pytest.raises(CutShort) as caught:
        find_strings(memoryview(whole), 0, 201)
    assert caught.value.i == 200


@pytest.mark.parametrize("raw", [b"", b"a" * 256, b"\0" * 8])
def test_strings_that_no_guess_finds_take_no_longer_than_a_loop(raw):
    whole = record(raw) * 20_000
    began = time.thread_time()
    starts, end = find_strings(memoryview(whole), 0, 20_000)
    assert time.thread_time() - began < 0.5  # a look at all the rest for each string would take minutes
    assert end == len(whole) and (starts[1:] - starts[:-1] == 8 + len(raw)).all()
