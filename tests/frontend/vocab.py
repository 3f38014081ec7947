"""Vocabularies for the tests of the frontend: a small one made here, and the real one where `../shared` has
it.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from refimpl.frontend.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
REAL = SHARED / "ggml-vocab-gemma-4.gguf"

needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"the real Gemma 4 vocabulary is not there: {REAL}")

CONTROL_TOKENS = ["<pad>", "<eos>", "<bos>", "<|tool>", "<tool|>", "<|think|>", "<|turn>", "<turn|>"]
CONTROL_TOKENS += ["<|image|>", "<|audio|>", "<|video|>"]
# The converter marks these as user-defined; <b> stands for words that a finetune added.
USER_TOKENS = ["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>"]
USER_TOKENS += ["<channel|>", "<b>"]
LETTERS = "\n\t\u2581abcdehlortuw<|>é,."
MERGES = [
    "\u2581 \u2581",
    "t h",
    "th e",
    "\u2581 the",
    "h e",
    "l l",
    "he ll",
    "hell o",
    "\u2581\u2581 \u2581\u2581",
]
MERGES += [
    "o u",
    "th ou",
    "\n \n",
    "a b",
    "b a",
    "ab a",
    "ab ab",
    "\u2581the \u2581\u2581",
    "< |",
    "| >",
    "th t",
]


def small_metadata() -> dict:
    """`tokenizer.*` metadata of the small vocabulary: markers, bytes, letters, and what the merges make."""
    tokens, types = ["<unk>"], [UNKNOWN]
    for texts, kind in (
        (CONTROL_TOKENS, CONTROL),
        (USER_TOKENS, USER_DEFINED),
        ([f"<0x{b:02X}>" for b in range(256)], BYTE),
        (list(LETTERS), NORMAL),
        (list(dict.fromkeys(merge.replace(" ", "") for merge in MERGES)), NORMAL),
    ):
        tokens += texts
        types += [kind] * len(texts)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<bos>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<eos>"),
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tokenizer_from(metadata: dict) -> Tokenizer:
    return Tokenizer.from_gguf(SimpleNamespace(metadata=metadata))


@cache
def small() -> Tokenizer:
    return tokenizer_from(small_metadata())


@cache
def real_file():
    from quant import open_gguf

    return open_gguf(REAL)


@cache
def real() -> Tokenizer:
    return Tokenizer.from_gguf(real_file())


def plain_bpe(text: str, tokens: list[str], merges: list[str]) -> list[int]:
    """The definition, as slow as it is short: join the earliest of the merges, at its first place, until none
    applies.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        found = [(ranks[pair], k) for k, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not found:
            break
        _, k = min(found)
        pieces[k : k + 2] = [pieces[k] + pieces[k + 1]]
    bytes_of = [[piece] if piece in ids else [f"<0x{b:02X}>" for b in piece.encode()] for piece in pieces]
    return [ids[piece] for group in bytes_of for piece in group]
