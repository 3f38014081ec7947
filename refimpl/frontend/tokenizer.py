"""Text to token ids and back: Gemma 4's byte-pair encoding, built from the vocabulary in a GGUF file.

Encoding  spaces become U+2581, every character (or, where the vocabulary lacks it, every one of its UTF-8
          bytes as a `<0xHH>` token) is a symbol, and the pair of neighbours that stands earliest in the list
          of merges is joined until no pair of neighbours is in it (bpe.py).  There is no split into words.
Markers   `<|turn>`, `<bos>`, `<|"|>` and the like are one token each, and no text makes them: `encode` writes
          a marker only when asked to (`parse_special=True`): a user who types one has typed characters.
Decoding  the bytes of all tokens end to end, read as UTF-8.  A stream holds back the bytes of an unfinished
          character.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refimpl.frontend.bpe import Bpe, Tables, make_tables, vocabulary
from refimpl.frontend.bpe_kept import kept
from refimpl.frontend.bpe_library import make_library

SPACE = "\u2581"  # how the vocabulary spells a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
MAX_TEXT = 1 << 24  # characters: twice what the longest context (262,144) of the longest tokens (31) can hold

END_OF_GENERATION = ("<eos>", "<turn|>", "<|tool_response>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_MARKER = re.compile(
    r"<\|[^\n]*>|<[^\n]*\|>"
)  # user-defined like a finetune's words, yet not for users to type


class _File(Protocol):
    """The part of `quant.GGUFFile` that is read here."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Tokenizer:
    """The vocabulary of one model file.

    n_vocab       number of tokens
    bos_id        the token in front of every prompt
    eog_ids       the tokens that end generation: those of `END_OF_GENERATION` that this vocabulary has, and
                  the file's own
    suppress_ids  tokens that must not be sampled (the file's `suppress_tokens`)
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int] | None = None,
        *,
        bos_id: int | None = None,
        unk_id: int | None = None,
        eog_ids: Iterable[int] = (),
        suppress_ids: Iterable[int] = (),
        keep_tables: Callable[[Callable[[], Tables]], Tables] = lambda make: make(),
    ):
        self._tokens = tokens
        self.n_vocab = len(self._tokens)
        types = np.full(self.n_vocab, NORMAL) if token_types is None else np.asarray(token_types)
        if types.shape != (self.n_vocab,):
            raise ValueError(
                f"tokenizer.ggml.token_type: {types.size} entries, but tokenizer.ggml.tokens has "
                f"{self.n_vocab}; both lists come from one converter run: convert the model again"
            )
        user_defined = {i: tokens[i] for i in np.flatnonzero(types == USER_DEFINED).tolist()}
        control = np.flatnonzero((types == CONTROL) | (types == UNKNOWN))
        self._special: dict[int, str] = {i: tokens[i] for i in control.tolist()}
        self._special |= {i: text for i, text in user_defined.items() if _MARKER.fullmatch(text)}
        added = {text: i for i, text in user_defined.items() if i not in self._special}
        self._special_ids = {text: i for i, text in self._special.items()}
        self._plain_splitter = _splitter(added)
        self._special_splitter = _splitter(added | self._special_ids)
        self._split_ids = added | self._special_ids
        self._bytes: dict[int, bytes] = {}

        self._unk = self._tokens[unk_id] if unk_id is not None else None
        tables = keep_tables(lambda: make_tables(self._ids, merges, self._unk))
        self._bpe = Bpe(tables, lambda: make_library(self._ids, merges, self._unk))

        bos = self.id_of("<bos>") if bos_id is None else bos_id
        if bos is None:
            raise ValueError(
                "tokenizer.ggml.bos_token_id: missing, and no token is spelled <bos>, with which every "
                "Gemma 4 prompt begins; convert the model again"
            )
        self.bos_id: int = bos
        named = (self.id_of(text) for text in END_OF_GENERATION)
        self.eog_ids = frozenset([*eog_ids, *(i for i in named if i is not None)])
        self.suppress_ids = tuple(suppress_ids)

    @classmethod
    def from_gguf(cls, file: _File, keep_in: Path | None = None) -> "Tokenizer":
        """The tokenizer of an open GGUF file; a fault of its metadata is a `ValueError` of one line.

        keep_in  a folder for what takes long to make (bpe_kept.py)
        """
        metadata = file.metadata
        model = metadata.get("tokenizer.ggml.model")
        if model != "gemma4":
            found = "is missing" if model is None else f"is {model!r}"
            raise ValueError(
                f"tokenizer.ggml.model {found}, expected 'gemma4'; this file does not carry Gemma 4's "
                "tokenizer (another model family, or a file without a vocabulary)"
            )
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        merges = _strings(metadata, "tokenizer.ggml.merges")
        n_vocab = len(tokens)
        ends = (_token_id(metadata, f"tokenizer.ggml.{key}", n_vocab) for key in END_KEYS)
        return cls(
            tokens,
            merges,
            metadata.get("tokenizer.ggml.token_type"),
            bos_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", n_vocab),
            unk_id=_token_id(metadata, "tokenizer.ggml.unknown_token_id", n_vocab),
            eog_ids=[i for i in ends if i is not None],
            suppress_ids=_token_ids(metadata, "tokenizer.ggml.suppress_tokens", n_vocab),
            keep_tables=lambda make: kept(keep_in, metadata, make),
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """How the markers are spelled: what `encode(parse_special=True)` reads as tokens and typed text must
        not become.
        """
        return tuple(self._special_ids)

    # -- vocabulary --------------------------------------------------------------------------------

    def id_of(self, piece: str) -> int | None:
        """The id of the token spelled exactly `piece` (a space is U+2581), or None."""
        found = self._special_ids.get(piece)
        return self._ids.get(piece) if found is None else found

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Made when somebody asks: 0.2 s for the real vocabulary, and the tables answer most questions."""
        return vocabulary(self._tokens, set(self._special_ids) - {self._unk})

    def piece(self, token_id: int) -> str:
        """How the vocabulary spells a token."""
        return self._tokens[_check_id(token_id, "token id", self.n_vocab)]

    @property
    def special_ids(self) -> list[int]:
        """All tokens for which `is_special` holds, in order."""
        return sorted(self._special)

    def is_special(self, token_id: int) -> bool:
        """True for the tokens that are markup and no part of the text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; one byte, possibly of an unfinished character, for the `<0xHH>`
        tokens.
        """
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.piece(token_id)
            byte = _BYTE_TOKEN.fullmatch(piece)
            found = bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode("utf-8", "replace")
            self._bytes[token_id] = found
        return found

    # -- text to ids -------------------------------------------------------------------------------

    def set_up(self) -> None:
        """What the first long text would otherwise wait for, and who runs beside it (bpe.py)."""
        self._bpe.set_up()

    def encode(
        self, text: str | bytes, *, add_bos: bool = False, parse_special: bool = False, fence: str = ""
    ) -> list[int]:
        """Token ids of a text.

        add_bos        one BOS in front, however many `parse_special` found there
        parse_special  read markers (`<|turn>`) as the tokens they name; otherwise they are characters like
                       all others
        fence          a character that is dropped once markers have been read: one inside a marker keeps it
                       from being read
        """
        text = _clean(text)
        splitter = self._special_splitter if parse_special else self._plain_splitter
        ids: list[int] = []
        for k, part in enumerate(splitter.split(text) if splitter else (text,)):
            if k % 2:  # re.split with one group: text, marker, text, marker, ..., text
                ids.append(self._split_ids[part])
            elif part:
                plain = part.replace(fence, "") if fence else part
                ids += self._bpe.encode(plain.replace(" ", SPACE))
        if add_bos:
            n_found = next((n for n, i in enumerate(ids) if i != self.bos_id), len(ids))
            ids[:n_found] = [self.bos_id]
        return ids

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        shown = (i for i in map(int, ids) if not (skip_special and i in self._special))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def stream(self, *, skip_special: bool = False) -> "StreamDecoder":
        """A decoder for one token at a time, whose pieces joined are what `decode` gives."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Decodes one token at a time.  What `push` gives, joined with what `flush` gives, equals `decode` of all
    ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: "" while a character is unfinished."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(int(token_id)))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character was left unfinished; the decoder is as new
        afterwards.
        """
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def unused_character(texts: Iterable[str]) -> str:
    """A character for private use that occurs in none of the texts: it is no white space and has no case."""
    used: set[str] = set().union(*texts)
    for candidate in chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
        if chr(candidate) not in used:
            return chr(candidate)
    raise ValueError("text: it uses all 137,468 characters for private use, expected at least one unused")


def _splitter(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of the texts, the longest where several begin at one place."""
    longest_first = sorted((t for t in texts if t), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _clean(text: str | bytes) -> str:
    """Text that UTF-8 can write: what is no character becomes U+FFFD."""
    if isinstance(text, bytes | bytearray):
        text = bytes(text).decode("utf-8", "replace")
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"text: {len(text)} characters, at most {MAX_TEXT} fit any context; give a shorter text"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # halves of surrogate pairs: join the pairs, replace the single ones
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    value = metadata.get(key)
    if value is None:
        raise ValueError(f"{key}: missing; Gemma 4's tokenizer needs it: convert the model again")
    if (
        isinstance(value, str)
        or not hasattr(value, "__len__")
        or (len(value) and not isinstance(value[0], str))
    ):
        raise ValueError(
            f"{key}: {type(value).__name__}, expected an array of strings; convert the model again"
        )
    return value


def _token_id(metadata: Mapping[str, Any], key: str, n_vocab: int) -> int | None:
    value = metadata.get(key)
    return None if value is None else _check_id(value, key, n_vocab)


def _token_ids(metadata: Mapping[str, Any], key: str, n_vocab: int) -> list[int]:
    value = metadata.get(key)
    if value is None:
        return []
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise ValueError(f"{key}: {value!r}, expected an array of token ids; convert the model again")
    return [_check_id(i, key, n_vocab) for i in value]


def _check_id(value: Any, where: str, n_vocab: int) -> int:
    try:
        token_id = None if isinstance(value, (bool, np.bool_)) else value.__index__()
    except (AttributeError, TypeError):  # TypeError: an array, whose __index__ has no answer
        token_id = None
    if token_id is None:
        shown = " ".join(repr(value).split())[:60]
        raise ValueError(f"{where}: {shown} is no token id, expected 0 to {n_vocab - 1}")
    if not 0 <= token_id < n_vocab:
        raise ValueError(
            f"{where}: {token_id}, expected 0 to {n_vocab - 1} (the vocabulary has {n_vocab} tokens)"
        )
    return token_id
