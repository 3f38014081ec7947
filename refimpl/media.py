"""From files to soft tokens, and where they stand in a prompt, with the reference's encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refimpl.batch import SoftTokens
from refimpl.frontend.image import DEFAULT_BUDGET
from refimpl.frontend.media_file import Source
from refimpl.frontend.media_input import DEFAULT_SAMPLING, Sampling, open_input, read_input
from refimpl.frontend.media_prompt import Encoded, Kind, locate, soft_tokens, user_message
from refimpl.model.audio import encode_audio
from refimpl.model.vision import encode_image


def encode(
    media: Any,
    kind: Kind,
    source: Source,
    *,
    name: str | None = None,
    budget: int = DEFAULT_BUDGET,
    sampling: Sampling = DEFAULT_SAMPLING,
    dtype: Any = np.float32,
    activations: str = "float",
) -> Encoded:
    """Run the encoder of a projector (media_tensors.Media) on a file; arguments as in `open_input`."""
    opened = open_input(media, kind, read_input(media, kind, source, name), budget=budget, sampling=sampling)
    if kind == "audio":
        encoder, run = media.need_audio(), encode_audio
    else:
        encoder, run = media.need_vision(), encode_image
    rows = tuple(run(*encoder, piece, dtype, activations=activations) for piece in opened.pieces)
    return Encoded(opened.part, rows, opened.notes)


def prompt(
    model: Any, text: str, encoded: Sequence[Encoded], *, thinking: bool = False
) -> tuple[list[int], list[SoftTokens]]:
    """A user's message, its media in front of the text (a question by default), as ids and soft tokens."""
    parts = [item.part for item in encoded]
    ids = model.template.render_ids(
        model.tokenizer, [user_message(text, parts)], thinking=thinking, media=parts
    )
    ids, starts = locate(ids, model.tokenizer, parts)
    return ids, soft_tokens(starts, encoded)
