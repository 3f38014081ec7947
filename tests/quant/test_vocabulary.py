"""The real Gemma 4 vocabulary: right, and fast to open."""

import time
from pathlib import Path

import numpy as np
import pytest

import quant

VOCABULARY = Path(__file__).parents[2].parent / "shared" / "data" / "ggml-vocab-gemma-4.gguf"

pytestmark = pytest.mark.skipif(
    not VOCABULARY.exists(), reason=f"the real vocabulary is not here ({VOCABULARY.name} in ../shared/data)"
)


@pytest.fixture(scope="module")
def model():
    return quant.open_gguf(VOCABULARY)


def test_opens_fast():
    """0.13 s was measured; the bound is for machines that do other things, too (gguf's reader needs 20 s)."""
    start = time.perf_counter()
    quant.open_gguf(VOCABULARY)
    assert time.perf_counter() - start < 3


def test_counts_and_scalars(model):
    tokens, merges = model.metadata["tokenizer.ggml.tokens"], model.metadata["tokenizer.ggml.merges"]
    assert (len(tokens), len(merges)) == (262144, 514906)
    assert model.metadata["tokenizer.ggml.token_type"].dtype == np.int32
    assert model.metadata["tokenizer.ggml.scores"].shape == (262144,)
    assert model.metadata["gemma4.attention.sliding_window_pattern"].sum() == 25
    assert model.tensors == {}


def test_strings_one_by_one_and_all_at_once(model):
    """The special tokens stand in spec/prompt-format and in the tokenizer's own keys."""
    tokens = model.metadata["tokenizer.ggml.tokens"]
    ids = {
        name: model.metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("bos", "eos", "unknown", "padding")
    }
    assert {name: tokens[i] for name, i in ids.items()} == {
        "bos": "<bos>",
        "eos": "<eos>",
        "unknown": "<unk>",
        "padding": "<pad>",
    }
    everything = tokens.tolist()
    for i in (0, 1, 105, 106, 70000, 262143, -1):
        assert tokens[i] == everything[i]
    assert tokens[100:103] == everything[100:103]
    assert "".join(everything[-3:]).encode() == b"".join(tokens.raw(i) for i in (-3, -2, -1))
    with pytest.raises(IndexError, match="item 262144 of 262144"):
        tokens[262144]
