"""Joining: as the slow definition, as the library; tables that are kept, or cannot be."""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpath.load import DEMO
from quant import open_gguf, write_gguf
from refimpl.frontend import bpe, bpe_kept
from refimpl.frontend.bpe import Bpe, make_tables, vocabulary
from refimpl.frontend.bpe_library import make_library
from refimpl.frontend.tokenizer import Tokenizer
from tests.frontend.vocab import (
    LETTERS,
    MERGES,
    needs_real,
    plain_bpe,
    real,
    real_file,
    small,
    small_metadata,
)

mergeable = st.text(alphabet=LETTERS.replace(" ", ""), max_size=60)
any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def small_bpe(*, without=(), unk="<unk>", merges=MERGES):
    """(encoding here, by the library, tokens) with the small vocabulary, less some of its tokens."""
    tokens = [t for t in small_metadata()["tokenizer.ggml.tokens"] if t not in without]
    ids = vocabulary(tokens, {"<|turn>"})
    return Bpe(make_tables(ids, merges, unk), lambda: None).join, make_library(ids, merges, unk), tokens


def by_library(library, text):
    return library.encode(text, add_special_tokens=False).ids


JOIN, LIBRARY, TOKENS = small_bpe()
NO_BYTES = small_bpe(without=[f"<0x{b:02X}>" for b in range(256)])
ONE_BYTE_LESS = small_bpe(without=["<0xC3>"])


@given(st.one_of(mergeable, any_text))
def test_three_ways(text):
    expected = plain_bpe(text, TOKENS, MERGES)
    assert JOIN(text.replace(" ", "\u2581")) == expected
    assert by_library(LIBRARY, text.replace(" ", "\u2581")) == expected


@pytest.mark.parametrize("vocabulary", [NO_BYTES, ONE_BYTE_LESS], ids=["no bytes", "one byte less"])
@given(st.one_of(mergeable, any_text, st.text(alphabet="aé\u4e00th\u4e01", max_size=20)))
def test_unknown_characters_are_one_token_per_run(vocabulary, text):
    join, library, _ = vocabulary
    assert join(text) == by_library(library, text)


@given(st.lists(st.sampled_from("ab"), max_size=40).map("".join), st.randoms(use_true_random=False))
def test_merges_in_any_order(text, rng):
    """No list of merges that training makes, but files may hold it: short before long is not assumed."""
    merges = ["a b", "b a", "a a", "b b", "ab a", "a ba", "aa b", "ab ab", "ab b", "bb a", "aba b"]
    rng.shuffle(merges)
    tokens = ["a", "b", *dict.fromkeys(merge.replace(" ", "") for merge in merges), "<unk>"]
    ids = vocabulary(tokens, set())
    join = Bpe(make_tables(ids, merges, "<unk>"), lambda: None).join
    assert join(text) == plain_bpe(text, tokens, merges)
    assert join(text) == by_library(make_library(ids, merges, "<unk>"), text)


def test_of_equal_merges_the_last_counts():
    merges = ["a b", "b a", "a b"]
    ids = vocabulary(["a", "b", "ab", "ba", "<unk>"], set())
    join = Bpe(make_tables(ids, merges, "<unk>"), lambda: None).join
    assert join("aba") == by_library(make_library(ids, merges, "<unk>"), "aba") == [0, 3]


def test_without_merges_every_character_is_a_token():
    ids = vocabulary(["a", "b", "<unk>"], set())
    assert Bpe(make_tables(ids, [], "<unk>"), lambda: None).join("abxa") == [0, 1, 2, 0]


@needs_real
def test_real_vocabulary_as_by_the_library():
    merges = real_file().metadata["tokenizer.ggml.merges"]
    library = make_library(real()._ids, merges, "<unk>")
    rng = random.Random(1)
    words = [real().piece(rng.randrange(real().n_vocab)) for _ in range(3000)]
    texts = ["".join(words), "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(3000)), "ab" * 2000]
    for text in texts:
        assert real()._bpe.join(text) == by_library(library, text)


def test_much_text_goes_through_the_library():
    tokens = small_metadata()["tokenizer.ggml.tokens"]
    ids = vocabulary(tokens, set())
    made = []

    def make():
        made.append(1)
        return SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=["library"]))

    encoding = Bpe(make_tables(ids, MERGES, None), make)
    piece = "a" * (bpe.CHARACTERS_BEFORE_LIBRARY // 2)
    assert encoding.encode(piece) == encoding.encode(piece) == [ids["a"]] * len(piece) and not made
    assert encoding.encode("a") == encoding.encode("a") == ["library"] and made == [1]


# -- kept tables -----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    """Metadata as a file holds it; lists of Python strings are not kept."""
    write_gguf(tmp_path / "v.gguf", small_metadata(), {})
    return open_gguf(tmp_path / "v.gguf")


@pytest.fixture
def made(monkeypatch):
    """Counts how often tables are made."""
    calls = []
    make = bpe.make_tables
    monkeypatch.setattr(
        "refimpl.frontend.tokenizer.make_tables", lambda *args: calls.append(1) or make(*args)
    )
    return calls


TEXT = "hello the abab \u2581 \u00e9\u4e00"


def test_made_once(file, made, tmp_path):
    first, second = Tokenizer.from_gguf(file, tmp_path), Tokenizer.from_gguf(file, tmp_path)
    assert first.encode(TEXT) == second.encode(TEXT)
    assert made == [1] and len(list(tmp_path.glob("vocabulary-*.npz"))) == 1
    assert not list(tmp_path.glob(".*"))


def test_another_vocabulary_is_another_file(file, made, tmp_path):
    Tokenizer.from_gguf(file, tmp_path)
    for change in (
        {"merges": MERGES[:-1]},
        {"unknown_token_id": 5},
        {"token_type": [1] * len(small_metadata()["tokenizer.ggml.tokens"])},
    ):
        metadata = small_metadata() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        write_gguf(tmp_path / "w.gguf", metadata, {})
        Tokenizer.from_gguf(open_gguf(tmp_path / "w.gguf"), tmp_path)
    assert len(made) == 4 and len(list(tmp_path.glob("vocabulary-*.npz"))) == 4


@pytest.mark.parametrize("cut", [0, 1, 0.5, 0.99])
def test_a_file_cut_short_is_made_again(file, made, tmp_path, cut):
    expected = Tokenizer.from_gguf(file, tmp_path).encode(TEXT)
    (path,) = tmp_path.glob("vocabulary-*.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole)) if cut < 1 else 1])
    assert Tokenizer.from_gguf(file, tmp_path).encode(TEXT) == expected
    assert path.read_bytes() == whole and len(made) == 2


def test_a_damaged_file_is_made_again(file, tmp_path):
    expected = Tokenizer.from_gguf(file, tmp_path)._bpe._tables
    (path,) = tmp_path.glob("vocabulary-*.npz")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    flags = whole.index(b"PK\1\2") + 8  # of the first entry in the directory: bit 0 says that it is encrypted
    for at in (flags, *rng.integers(0, len(whole), 60)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 if at == flags else 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        found = Tokenizer.from_gguf(file, tmp_path)._bpe._tables
        assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def test_a_folder_that_takes_nothing(file, made, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    expected = small().encode("the")
    made.clear()  # of `small`, if it was the first time
    for folder in (blocked, blocked / "in it", tmp_path / "not there", None):
        assert Tokenizer.from_gguf(file, folder).encode("the") == expected
    assert len(made) == 4


def test_old_files_go(file, tmp_path, monkeypatch):
    monkeypatch.setattr(bpe_kept, "KEEP_FILES", 3)
    for n in range(5):
        (tmp_path / f"vocabulary-{n}.npz").write_bytes(b"")
        os.utime(tmp_path / f"vocabulary-{n}.npz", (2e9 + n, 2e9 + n))
    (tmp_path / "of-somebody-else.npz").write_bytes(b"")
    os.utime(tmp_path / "vocabulary-4.npz", (1e9, 1e9))
    Tokenizer.from_gguf(file, tmp_path)
    left = {path.name for path in tmp_path.glob("*.npz")}
    assert {"vocabulary-2.npz", "vocabulary-3.npz", "of-somebody-else.npz"} <= left and len(left) == 4


def test_long_texts_go_another_way_through_the_library_and_have_the_same_ids():
    text = "Words, wörds and 世界 in many lines.\n" * 200
    assert len(text) > bpe.MUCH
    tokenizer = Tokenizer.from_gguf(open_gguf(DEMO))
    joined = tokenizer.encode(text), tokenizer.encode(text[:50])
    tokenizer.set_up()
    assert (tokenizer.encode(text), tokenizer.encode(text[:50])) == joined
