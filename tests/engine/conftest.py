"""Tiny models of every family, written and opened once per run."""

from functools import cache

import pytest

from fastpath.load import load_model
from tests import tiny

FORMATS = {
    "odd": {},
    "block32": {
        "*_exps.weight": "Q5_1",
        "*ffn_down*": "Q8_0",
        "*attn_k*": "Q5_0",
        "*attn_v*": "Q4_1",
        "*proj*": "MXFP4",
        "*": "Q4_0",
    },
    "block256": {
        "*_exps.weight": "Q4_K",
        "*ffn_down*": "Q6_K",
        "*attn_v*": "Q5_K",
        "*embd*": "Q6_K",
        "*": "Q4_K",
    },
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """tiny_model(family, size) -> Model; the sizes but "odd" store their matrices quantised."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def make(family: str, size: str = "odd"):
        return load_model(
            tiny.make(folder / f"{family}-{size}.gguf", family, size=size, formats=FORMATS[size])
        )

    return make
