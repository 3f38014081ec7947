"""Known faults O10 and O14 in general: any value of any type under any key is a model, or one line."""

import numpy as np
import pytest

from refimpl.frontend.chat_template import ChatTemplate
from tests import tiny
from tests.frontend.vocab import small_metadata, tokenizer_from
from tests.refimpl.files import opened

ODD = [
    0, 1, 3, 8, 31, -1, 2**31, 2**32 - 1, 2**63, 0.0, -1.0, 0.25, 1e30, float("nan"), float("inf"),
    True, False, "", "x", ["a", "b"], np.array([], np.int32), np.array([1, 2, 3], np.int32),
    np.array([True, False] * 3 + [True]), np.zeros(7, np.int32), np.array([2**40] * 7), np.array([1.5]),
]  # fmt: skip
MODEL_KEYS = [
    key.removeprefix("gemma4.") for key in tiny.metadata(tiny.shape_of("e2b"), with_vocabulary=False)
]
MODEL_KEYS += [
    "attention.global_head_count_kv",
    "rope.partial_rotary_factor",
    "rope.scaling.factor",
    "expert_count",
]
IDS = ("bos", "eos", "eot", "eom", "unknown")
TOKENIZER_KEYS = [
    "model",
    "tokens",
    "merges",
    "token_type",
    "suppress_tokens",
    *(f"{name}_token_id" for name in IDS),
]


def one_line(make):
    """make() works, or is refused in one line that says what was expected."""
    try:
        make()
    except ValueError as fault:
        assert "\n" not in str(fault) and len(str(fault)) < 500


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_hyper_parameters(key):
    for value in ODD:
        one_line(lambda value=value: opened("e2b", keys={key: value}))


@pytest.mark.parametrize("key", TOKENIZER_KEYS)
def test_vocabulary(key):
    for value in ODD:
        metadata = small_metadata() | {f"tokenizer.ggml.{key}": value}
        one_line(lambda metadata=metadata: tokenizer_from(metadata).encode("the hello"))


def test_template():
    for value in ODD:
        one_line(lambda value=value: ChatTemplate(value, small_family=True, bos="<bos>"))
    with pytest.raises(ValueError, match=r"tokenizer.chat_template: float, expected text"):
        ChatTemplate(0.5, small_family=True, bos="<bos>")
