"""The demo's small vocabulary: same tokenizer kind as Gemma 4, a few hundred entries.

Merge-rank BPE over the whole text (a space is U+2581, nothing is split into words first), byte fallback,
and the real special tokens by their real strings. Almost all merges are chains that begin with a capital or
a punctuation mark, so that a lower-case word stays a row of letters: spelling and reversing then work on
letters. The exceptions build the two role names.
"""

from __future__ import annotations

from functools import lru_cache

SPACE = "\u2581"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Order as in the real vocabulary; `<|turn>` and friends keep the token types of the real file.
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
SPECIALS = [
    ("<|tool>", CONTROL),
    ("<tool|>", CONTROL),
    ("<|tool_call>", USER_DEFINED),
    ("<tool_call|>", USER_DEFINED),
    ("<|tool_response>", USER_DEFINED),
    ("<tool_response|>", USER_DEFINED),
    ('<|"|>', USER_DEFINED),
    ("<|think|>", CONTROL),
    ("<|channel>", USER_DEFINED),
    ("<channel|>", USER_DEFINED),
    ("<|turn>", CONTROL),
    ("<turn|>", CONTROL),
]
MEDIA = ["<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"]

# Roles: the first pair of each is rare in lower-case words.
WORD_MERGES = [("u", "s"), ("us", "e"), ("use", "r"), ("o", "d"), ("od", "e"), ("ode", "l"), ("m", "odel")]

PHRASES = [
    "What is ",
    "Spell ",
    "Reverse ",
    "Compute ",
    "Extract ",
    "How ",
    "You ",
    "Please ",
    "The answer is ",
    "Ones: ",
    "Tens: ",
    "Hundreds: ",
    "I am ",
    "I can ",
    "It is ",
    "My name is ",
    "Twinpath",
    "Gemma 4",
    "NumPy",
    "Numba",
    "GGUF",
    "JSON",
    "Hello",
    "Python",
    "STRING",
    "OBJECT",
    '{"',
    '"}',
    '": ',
    ', "',
    ", ",
    "{description:",
    ",parameters:",
    "{properties:",
    "{city:",
    "{type:",
    "{value:",
    ",type:",
    ",required:[",
]
RUNS = [("\n", 4), (SPACE, 4)]
EXTRA_CHARS = (
    "\t\u00e4\u00e9\u00f1\u00f6\u00fc\u00df\u00b0\u20ac\u00a3\u2019\u201c\u201d\u2026\u2013\u00d7\u00f7\u2212"
)
SIZE = 640


def _chain(phrase: str) -> list[tuple[str, str]]:
    """Merges that build `phrase` from left to right."""
    text = phrase.replace(" ", SPACE)
    return [(text[:i], text[i]) for i in range(1, len(text))]


@lru_cache(maxsize=1)
def build() -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """Tokens, token types and merges (by rank); token ids are list positions."""
    merges: list[tuple[str, str]] = []
    for char, longest in RUNS:  # longest first, as in the real table
        for total in range(longest, 1, -1):
            merges += [(char * left, char * (total - left)) for left in range(total - 1, 0, -1)]
    merges += WORD_MERGES
    for phrase in PHRASES:
        merges += [pair for pair in _chain(phrase) if pair not in merges]

    tokens, types = list(CONTROLS), [CONTROL] * len(CONTROLS)
    for token, kind in SPECIALS:
        tokens.append(token), types.append(kind)
    singles = ["\n", SPACE] + [chr(c) for c in range(33, 127)] + list(EXTRA_CHARS)
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [BYTE] * 256
    for token in singles + [left + right for left, right in merges]:
        if token not in tokens:
            tokens.append(token), types.append(NORMAL)
    fill = SIZE - len(MEDIA) - len(tokens)
    assert fill >= 0, f"the vocabulary needs {SIZE - fill} entries and has {SIZE}"
    tokens += [f"<unused{i}>" for i in range(fill)] + MEDIA
    types += [NORMAL] * fill + [CONTROL] * len(MEDIA)
    return tokens, types, merges


@lru_cache(maxsize=1)
def tokenizer():
    """The vocabulary as a `tokenizers` object; it adds no BOS by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens, types, merges = build()
    bpe = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tok = Tokenizer(bpe)
    tok.normalizer = normalizers.Replace(" ", SPACE)
    tok.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types) if k == CONTROL]
    )
    tok.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED])
    return tok


@lru_cache(maxsize=1)
def ids() -> dict[str, int]:
    """Token string to id."""
    return {t: i for i, t in enumerate(build()[0])}


if __name__ == "__main__":
    toks, kinds, table = build()
    used = len([t for t in toks if not t.startswith("<unused")])
    print(f"{len(toks)} tokens, {used} in use, {len(table)} merges")
    text = "<|turn>user\nWhat is 47+38?<turn|>\n<|channel>thought\nOnes: 7+8=15<channel|>It is 85.<turn|>"
    print(tokenizer().encode(text, add_special_tokens=False).tokens)
    for phrase in PHRASES:
        got = tokenizer().encode(phrase, add_special_tokens=False).tokens
        assert len(got) == 1, got
