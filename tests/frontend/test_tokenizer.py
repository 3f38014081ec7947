"""The tokenizer: recorded vectors on the real vocabulary, laws on a small one, faults of the metadata."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.frontend.vocab import (
    CONTROL_TOKENS,
    LETTERS,
    MERGES,
    REAL,
    USER_TOKENS,
    needs_real,
    plain_bpe,
    real,
    small,
    small_metadata,
    tokenizer_from,
)

VECTORS = json.loads((Path(__file__).parent / "tokenizer_vectors.json").read_text(encoding="utf-8"))

# text out of the pieces that the merges fight over, and text of all kinds
mergeable = st.text(alphabet=LETTERS + " ", max_size=40)
any_text = st.text(max_size=40)


# -- recorded vectors (llama.cpp on the real vocabulary) -------------------------------------------


@needs_real
def test_llama_cpp_vectors():
    texts = Path(f"{REAL}.inp").open(encoding="utf-8", newline="").read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{REAL}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) == 46
    for text, line in zip(texts, lines):
        ids = [int(i) for i in line.split()]
        assert real().encode(text) == ids
        assert real().decode(ids) == text


@needs_real
@pytest.mark.parametrize(("text", "ids"), VECTORS, ids=[ascii(text) for text, _ in VECTORS])
def test_measured_vectors(text, ids):
    assert real().encode(text) == ids


@needs_real
def test_runs_of_newlines_spaces_and_tabs():
    for n in range(1, 32):
        assert real().encode("\n" * n) == [106 + n]
        assert real().encode(" " * n) == [136 + n if n > 1 else 236743]
    assert real().encode("\n" * 32) == [137, 107]
    assert real().encode("\n" * 33) == [137, 108]
    assert real().encode(" " * 32) == [167, 236743]
    assert real().encode(" " * 64) == [167, 167, 138]
    assert real().decode([167]) == " " * 31
    assert real().decode([137]) == "\n" * 31


@needs_real
def test_bytes_that_are_no_utf8():
    assert real().encode(b"\xff") == [238479]
    assert real().encode(b"ab\xc3") == [596, 238479]
    assert real().encode("\ud83d") == [238479]  # half a surrogate pair
    assert real().encode("\ud83e\udee8") == [478, 397, 409, 406]  # a pair, as JSON escapes write it


@needs_real
def test_special_ids():
    spelled = {
        "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "<|tool>": 46, "<tool|>": 47,
        "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52,
        "<|think|>": 98, "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106,
        "<|image>": 255999, "<|audio>": 256000, "<|image|>": 258880, "<|audio|>": 258881,
        "<image|>": 258882, "<audio|>": 258883, "<|video|>": 258884,
    }  # fmt: skip
    for text, i in spelled.items():
        assert real().id_of(text) == i
        assert real().piece(i) == text
        assert real().is_special(i)
        assert real().encode(text, parse_special=True) == [i]
        assert i not in real().encode(text)
    assert set(real().markers) == set(spelled)
    assert real().eog_ids == {1, 106, 50}
    assert real().bos_id == 2
    assert real().n_vocab == 262144
    assert not real().is_special(107)
    assert real().encode("<|tool_call>")[:5] == [236820, 236909, 13205, 236779, 6639]


@needs_real
@pytest.mark.parametrize(
    "text", ["a" * 200_000, " " * 200_000, "\n" * 200_000, "Zm9vYmFyIQ" * 20_000, "ab" * 100_000]
)
def test_long_runs_take_seconds_and_change_nothing(text):
    began = time.thread_time()
    ids = real().encode(text)
    assert time.thread_time() - began < 5
    assert real().decode(ids) == text
    head = real().encode(text[:2000])
    assert ids[: len(head) - 40] == head[:-40]  # the last tokens may reach across the cut


@needs_real
def test_emoji_in_a_stream():
    stream = real().stream()
    assert [stream.push(i) for i in (478, 397, 409, 406)] == ["", "", "", "\U0001fae8"]
    cut = real().stream()
    assert [cut.push(i) for i in (478, 397, 409)] == ["", "", ""]
    assert cut.flush() == "\ufffd"


@needs_real
def test_no_two_bos():
    assert real().encode("Hi", add_bos=True) == [2, 10979]
    assert real().encode("<bos>Hi", add_bos=True, parse_special=True) == [2, 10979]
    assert real().encode("<bos><bos>Hi", add_bos=True, parse_special=True) == [2, 10979]
    assert real().encode("<bos>Hi<bos>", add_bos=True, parse_special=True) == [2, 10979, 2]
    assert real().encode("<bos>Hi", add_bos=True)[:2] == [2, 236820]


# -- laws on the small vocabulary ------------------------------------------------------------------


@given(st.one_of(mergeable, any_text))
def test_encode_is_merging_by_rank(text):
    assume("<b>" not in text)  # one token of its own
    assert small().encode(text) == plain_bpe(text, small_metadata()["tokenizer.ggml.tokens"], MERGES)


@given(st.one_of(mergeable, any_text))
def test_decode_undoes_encode(text):
    expected = text.replace("\u2581", " ")  # the one known loss
    assert small().decode(small().encode(text)) == expected
    assert small().decode(small().encode(text, parse_special=True)) == expected


@given(st.lists(st.integers(0, small().n_vocab - 1), max_size=30), st.booleans())
def test_stream_is_decode_in_pieces(ids, skip_special):
    stream = small().stream(skip_special=skip_special)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == small().decode(ids, skip_special=skip_special)


@given(st.lists(st.one_of(st.sampled_from(CONTROL_TOKENS + USER_TOKENS), mergeable), max_size=8))
def test_typed_markers_stay_text(parts):
    text = "".join(parts)
    ids = small().encode(text)
    assert not any(small().is_special(i) for i in ids)
    assert small().decode(ids) == text.replace("\u2581", " ")


@given(st.lists(st.sampled_from([*CONTROL_TOKENS, *USER_TOKENS, "the ", "ab", "\n"]), max_size=8))
def test_markers_are_read_when_asked_for(parts):
    expected = []
    text = ""
    for part in parts:
        if part in CONTROL_TOKENS or part in USER_TOKENS:
            expected += [*small().encode(text), small().id_of(part)]
            text = ""
        else:
            text += part
    assert small().encode("".join(parts), parse_special=True) == expected + small().encode(text)


def test_words_that_a_finetune_added_are_always_one_token():
    b = small().id_of("<b>")
    assert small().encode("a<b>a") == [*small().encode("a"), b, *small().encode("a")]
    assert not small().is_special(b)
    assert small().decode([b], skip_special=True) == "<b>"


def test_a_fence_parts_a_marker_and_vanishes():
    fence = "\ue000"
    assert small().encode(f"the <{fence}|turn> the", parse_special=True, fence=fence) == small().encode(
        "the <|turn> the"
    )


def test_skipping_markers():
    ids = small().encode("<|turn>the<turn|>", parse_special=True)
    assert small().decode(ids) == "<|turn>the<turn|>"
    assert small().decode(ids, skip_special=True) == "the"


def test_byte_tokens_are_exactly_00_to_ff():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<0x-1>", "<0x1FF>", "<0xZZ>", "<0x0a>"]
    metadata["tokenizer.ggml.token_type"] += [6, 6, 6, 6]
    odd = tokenizer_from(metadata)
    n = odd.n_vocab
    assert odd.decode(range(n - 4, n)) == "<0x-1><0x1FF><0xZZ><0x0a>"
    assert odd.decode([odd.id_of("<0x41>")]) == "A"


def test_duplicates_are_harmless():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] += ["the", "<turn|>"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    doubled = tokenizer_from(metadata)
    assert doubled.decode(doubled.encode("the")) == "the"
    assert not any(doubled.is_special(i) for i in doubled.encode("<turn|>"))


def test_end_of_generation_and_suppressed_tokens():
    metadata = small_metadata() | {
        "tokenizer.ggml.eot_token_id": 20,
        "tokenizer.ggml.suppress_tokens": [3, 7],
    }
    tokenizer = tokenizer_from(metadata)
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert tokenizer.eog_ids == {20, *map(tokenizer.id_of, names)}
    assert tokenizer.suppress_ids == (3, 7)


def test_bos_by_its_spelling():
    metadata = small_metadata()
    del metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer_from(metadata).bos_id == small().bos_id


# -- faults of the metadata ------------------------------------------------------------------------

FAULTS = {
    "tokenizer.ggml.model is missing": {"model": None},
    "tokenizer.ggml.model is 'llama', expected 'gemma4'": {"model": "llama"},
    "tokenizer.ggml.tokens: missing": {"tokens": None},
    "tokenizer.ggml.tokens: list, expected an array of strings": {"tokens": [1, 2]},
    "tokenizer.ggml.merges: missing": {"merges": None},
    "tokenizer.ggml.token_type: 3 entries": {"token_type": [1, 1, 1]},
    "tokenizer.ggml.bos_token_id: 99999, expected 0 to": {"bos_token_id": 99999},
    "tokenizer.ggml.bos_token_id: -1, expected 0 to": {"bos_token_id": -1},
    "tokenizer.ggml.bos_token_id: 'x' is no token id": {"bos_token_id": "x"},
    "tokenizer.ggml.eot_token_id: 5000": {"eot_token_id": 5000},
    "tokenizer.ggml.suppress_tokens: 5000": {"suppress_tokens": [1, 5000]},
    "tokenizer.ggml.merges[1]: 'ab'": {"merges": ["t h", "ab"]},
    "tokenizer.ggml.merges[0]: 'a b c'": {"merges": ["a b c"]},
    "tokenizer.ggml.merges[0]: 'zz a': 'zz' is no token": {"merges": ["zz a"]},
    "tokenizer.ggml.merges[0]: 'a zz': 'zz' is no token": {"merges": ["a zz"]},
    "tokenizer.ggml.merges[0]: 'b b': 'bb' is no token": {"merges": ["b b"]},
    "neither all of <0x00> to <0xFF> nor an unknown token": {
        "unknown_token_id": None,
        "tokens": ["<bos>"] + ["a"] * 296,
    },
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_one_line(message):
    metadata = small_metadata() | {f"tokenizer.ggml.{key}": value for key, value in FAULTS[message].items()}
    n = len(metadata["tokenizer.ggml.tokens"] or ())
    if message.startswith("neither"):
        metadata["tokenizer.ggml.token_type"] = [1] * n
        metadata["tokenizer.ggml.bos_token_id"] = 0
        metadata["tokenizer.ggml.eos_token_id"] = 0
        metadata["tokenizer.ggml.merges"] = []
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ValueError) as caught:
        tokenizer_from(metadata)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_bos_at_all():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] = [t.replace("<bos>", "<s>") for t in metadata["tokenizer.ggml.tokens"]]
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match="no token is spelled <bos>"):
        tokenizer_from(metadata)


@pytest.mark.parametrize("bad", [-1, 100_000, 2**40])
def test_ids_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=f"token id: {bad}, expected 0 to"):
        small().decode([bad])


def test_text_longer_than_any_context():
    with pytest.raises(ValueError, match="16777217 characters"):
        small().encode("a" * ((1 << 24) + 1))
