"""Tiny encoders, written and opened once per run."""

from functools import cache

import numpy as np
import pytest

from refimpl.frontend.image import fit, load_image
from refimpl.media_tensors import load_media
from refimpl.model.audio import encode_audio
from refimpl.model.vision import encode_image
from tests.media import files, tiny_mmproj, tiny_prompts


@pytest.fixture(scope="session")
def mmproj_path(tmp_path_factory):
    """mmproj_path(family) -> path of its tiny encoders."""
    folder = tmp_path_factory.mktemp("mmproj")
    return cache(lambda family: tiny_mmproj.make(folder / f"mmproj-{family}.gguf", family))


@pytest.fixture(scope="session")
def media(mmproj_path):
    """media(family) -> Media."""
    return cache(lambda family: load_media(mmproj_path(family)))


def soft_tokens(media, name, dtype=np.float32, trace=None, **options) -> np.ndarray:
    """Of a canvas or a clip, or of a picture that has to be resized, by its name."""
    if name in files.PICTURES:
        canvas = fit(load_image(files.png(files.picture(name))), tiny_prompts.FILE_BUDGET)
        return encode_image(*media.need_vision(), canvas, dtype, trace=trace, **options)
    if name in tiny_mmproj.CANVASES:
        return encode_image(*media.need_vision(), tiny_mmproj.canvas(name), dtype, trace=trace, **options)
    return encode_audio(*media.need_audio(), tiny_mmproj.clip(name), dtype, trace=trace, **options)


def all_inputs(media) -> list[str]:
    return [*tiny_mmproj.CANVASES, *(tiny_mmproj.CLIPS if media.audio else ())]
