"""A vocabulary of the published size without the published words.

262,144 pieces and about as many merges as the real one (522,000; 514,906), so that loading a tokenizer
takes as long; markers and bytes have their real ids.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from fastpath.bench.sizes import VOCAB

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # tokenizer.ggml.token_type
MARKERS = {
    CONTROL: {
        0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>",
        98: "<|think|>", 105: "<|turn>", 106: "<turn|>", 255999: "<|image>", 256000: "<|audio>",
        258880: "<|image|>", 258881: "<|audio|>", 258882: "<image|>", 258883: "<audio|>", 258884: "<|video|>",
    },
    USER_DEFINED: {
        48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>',
        100: "<|channel>", 101: "<channel|>",
    },
    BYTE: {238 + byte: f"<0x{byte:02X}>" for byte in range(256)},
}  # fmt: skip
SPACE = "\u2581"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHARACTERS = [SPACE, "\n", *map(chr, range(33, 127))]


def tokenizer_metadata() -> dict[str, object]:
    """Every tokenizer.* key that our tokenizer and llama.cpp's read; no chat template: the built-in one."""
    fixed = {i: (text, kind) for kind, texts in MARKERS.items() for i, text in texts.items()}
    pieces = _pieces()
    tokens, types = [], []
    for i in range(VOCAB):
        text, kind = fixed[i] if i in fixed else (next(pieces), NORMAL)
        tokens.append(text)
        types.append(kind)
    words = [token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL and len(token) > 1]
    t = "tokenizer.ggml."
    return {
        t + "model": "gemma4",
        t + "tokens": tokens,
        t + "scores": np.full(VOCAB, -1000.0, np.float32),
        t + "token_type": np.array(types, np.int32),
        t + "merges": list(_merges(words)),
        t + "bos_token_id": 2,
        t + "eos_token_id": 1,
        t + "unknown_token_id": 3,
        t + "padding_token_id": 0,
        t + "mask_token_id": 4,
        t + "add_space_prefix": False,
        t + "add_bos_token": True,
    }


def _pieces() -> Iterator[str]:
    """Characters, then every word over the alphabet, short ones first; a space stands in front only."""
    yield from CHARACTERS
    length = 2
    while True:
        for letters in product(SPACE + LETTERS, *[LETTERS] * (length - 1)):
            yield "".join(letters)
        length += 1


def _merges(words: list[str]) -> Iterator[str]:
    """Both ways to make a word of one letter and a shorter word, as the real list has several of each."""
    for word in words:
        yield f"{word[:-1]} {word[-1]}"
        if len(word) > 2:
            yield f"{word[0]} {word[1:]}"
