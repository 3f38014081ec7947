"""The same encoding by the `tokenizers` library, for much text: see bpe.py."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def make_library(ids: Mapping[str, int], merges: Sequence[str], unk: str | None) -> Any:
    """The library's object for a vocabulary that `bpe.make_tables` has accepted."""
    from tokenizers import Tokenizer, models  # here: short prompts do without it

    has_bytes = all(f"<0x{b:02X}>" in ids for b in range(256))
    bpe = models.BPE(
        vocab=dict(ids), merges=_Pairs(merges), unk_token=unk, fuse_unk=True, byte_fallback=has_bytes
    )
    return Tokenizer(bpe)


class _Pairs(Sequence):
    """The merges as pairs, made while the library reads them: a list would take 100 MB for a moment."""

    def __init__(self, merges: Sequence[str]):
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, rank: Any) -> Any:
        return tuple(self._merges[rank].split(" "))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return (tuple(merge.split(" ")) for merge in self._merges)
