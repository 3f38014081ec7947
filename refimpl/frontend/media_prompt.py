"""Placeholders of a rendered prompt, and the soft tokens that stand in their place.

A chat template writes `<|image|>`, `<|audio|>` or `<|video|>` where a message has such a part.  The model was
trained on this, n being the number of soft tokens:

    image   <|image> n x <|image|> <image|>
    audio   <|audio> n x <|audio|> <audio|>
    video   00:00 <|image> n x <|video|> <image|> 00:01 <|image> ...       mm:ss, one space between frames
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from refimpl.batch import PAD, SoftTokens
from refimpl.frontend.video import stamp

Kind = Literal["image", "audio", "video"]
DEFAULT_QUESTIONS = {
    "image": "Describe this image.",
    "audio": "Transcribe this recording.",
    "video": "Describe this video.",
}
_PLACEHOLDER = re.compile(r"<\|(image|audio|video)\|>")


class _Tokenizer(Protocol):
    def id_of(self, piece: str) -> int | None: ...


@dataclass(frozen=True)
class MediaPart:
    """One image, sound or video of a prompt.

    counts   soft tokens; of a video those of every frame
    seconds  when the frames of a video are shown
    """

    kind: Kind
    counts: tuple[int, ...]
    seconds: tuple[float, ...] = ()

    def text(self) -> str:
        """What replaces the placeholder."""
        soft = [f"<|{self.kind}|>" * n for n in self.counts]
        if self.kind == "audio":
            return f"<|audio>{soft[0]}<audio|>"
        if self.kind == "image":
            return f"<|image>{soft[0]}<image|>"
        frames = zip(self.seconds, soft, strict=True)
        return " ".join(f"{stamp(seconds)} <|image>{rows}<image|>" for seconds, rows in frames)


@dataclass(frozen=True)
class Encoded:
    """A file, seen or heard: its part of the prompt, and the rows f[n, D] of each image, sound or frame."""

    part: MediaPart
    rows: tuple[np.ndarray, ...]
    notes: tuple[str, ...] = ()


def user_message(text: str, parts: Sequence[MediaPart]) -> dict[str, Any]:
    """A message with media in front of its text; with nothing said, a question of the first one's kind."""
    if not parts:
        return {"role": "user", "content": text}
    asked = text if text.strip() else DEFAULT_QUESTIONS[parts[0].kind]
    content = [{"type": part.kind} for part in parts]
    return {"role": "user", "content": [*content, {"type": "text", "text": asked}]}


def soft_tokens(starts: Sequence[int], encoded: Sequence[Encoded]) -> list[SoftTokens]:
    """What stands at the starts that `locate` found.  Of a video every frame is an item of its own."""
    rows = [(r, item.part.kind != "audio") for item in encoded for r in item.rows]
    return [SoftTokens(start, r, vision) for start, (r, vision) in zip(starts, rows, strict=True)]


def placeholders(text: str) -> list[str]:
    """The kinds of a rendered prompt's placeholders, in order."""
    return _PLACEHOLDER.findall(text)


def expand(text: str, parts: Sequence[MediaPart]) -> str:
    """Write the parts in the places of a rendered prompt's placeholders, in order."""
    found = placeholders(text)
    if found != [part.kind for part in parts]:
        raise ValueError(
            f"prompt: its messages have {_listed(found)}, given were {_listed([p.kind for p in parts])}; "
            "expected the same in the same order. Give one file for every part"
        )
    waiting = iter(parts)
    return _PLACEHOLDER.sub(lambda match: next(waiting).text(), text)


def locate(
    ids: Sequence[int], tokenizer: _Tokenizer, parts: Sequence[MediaPart]
) -> tuple[list[int], list[int]]:
    """Find the soft tokens of an encoded prompt.

    Returns:
        the ids with PAD in their places, and the position of the first one of every image, sound and frame
    """
    kinds = {tokenizer.id_of(f"<|{kind}|>"): kind for kind in ("image", "audio", "video")}
    kinds.pop(None, None)
    counts = [(part.kind, n) for part in parts for n in part.counts]
    starts, at = [], 0
    for kind, n in counts:
        while at < len(ids) and ids[at] not in kinds:
            at += 1
        if n < 1 or [kinds.get(i) for i in ids[at : at + n]] != [kind] * n:
            raise ValueError(
                f"prompt: {n} soft tokens of an {kind} expected at position {at}, which are not all there. "
                f"Does the vocabulary have <|{kind}|>?"
            )
        starts.append(at)
        at += n
    if any(i in kinds for i in ids[at:]):
        raise ValueError("prompt: more placeholders than soft tokens. Give one file for every part")
    return [PAD if i in kinds else int(i) for i in ids], starts


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "no media"
