"""The goldens would notice: on the tiny models every weight and every setting moves the logits."""

import re
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
import pytest

from tests import tiny
from tests.refimpl.files import all_logits, arrays_of, opened
from tests.tolerances import ORACLE_F32_ABS

FAR = 100 * ORACLE_F32_ABS  # "notice": a hundred times the tolerance of the comparison

SETTINGS = {
    "attention.sliding_window": lambda v: v + 1,
    "final_logit_softcapping": lambda v: 1.2 * v,
    "rope.freq_base": lambda v: v / 4,
    "rope.freq_base_swa": lambda v: v / 2,
    "attention.layer_norm_rms_epsilon": lambda v: 1e-2,
    "expert_used_count": lambda v: v - 1,
}
VECTORS = ("norm", "head_norm", "output_norm", "layer_scale", "rope")


def moved(family, **changes) -> float:
    """How far the largest logit moves when the model is changed so."""
    return float(np.abs(logits(family, **changes) - plain_logits(family)).max())


def logits(family, **changes):
    return all_logits(*opened(family, **changes), tiny.prompt(family), dtype=np.float32)


plain_logits = cache(logits)


def kinds_of(family):
    """{pattern of tensor names: kind of their values}, the same tensor of all layers under one pattern."""
    plan = tiny.tensor_plan(tiny.shape_of(family))
    return {re.sub(r"^blk\.\d+\.", "blk.*.", name): kind for name, _, kind in plan}


CASES = [(family, pattern) for family in tiny.FAMILIES for pattern in kinds_of(family)]


@pytest.mark.parametrize(("family", "pattern"), CASES)
def test_every_tensor_counts(family, pattern):
    """Vectors become ones, as if dropped; matrices take their inputs in reverse order."""
    is_vector = kinds_of(family)[pattern] in VECTORS
    changed = {
        name: np.ones_like(values) if is_vector else values[..., ::-1]
        for name, values in arrays_of(family).items()
        if fnmatchcase(name, pattern)
    }
    assert moved(family, tensors=changed) > FAR


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_setting_counts(family):
    published = tiny.metadata(tiny.shape_of(family))
    for key, change in SETTINGS.items():
        if f"gemma4.{key}" in published:
            assert moved(family, keys={key: change(published[f"gemma4.{key}"])}) > FAR, key


@pytest.mark.parametrize("family", ["e2b", "e4b"])
def test_unused_keys_of_sharing_layers_do_not_count(family):
    """Published E2B and E4B files have K/V weights in layers that share, as e2b has here: unread."""
    s = tiny.shape_of(family)
    noise = {
        name: np.full_like(values, np.nan)
        for name, values in arrays_of(family).items()
        if (match := re.match(r"blk\.(\d+)\.attn_[kv](_norm)?\.", name)) and s.is_shared(int(match[1]))
    }
    assert bool(noise) == (family == "e2b")
    assert moved(family, tensors=noise) == 0
    assert moved(family, drop=noise) == 0
