"""The goldens would notice: on the tiny models every weight and every setting changes the logits."""

import re
from fnmatch import fnmatchcase

import numpy as np
import pytest

import quant
from tests import tiny
from tests.oracle.conftest import open_model
from tests.tolerances import ORACLE_F32_ABS

FAR = 100 * ORACLE_F32_ABS  # "notice" means a hundred times the tolerance of the comparison

SETTINGS = {
    "gemma4.attention.sliding_window": lambda v: v + 1,
    "gemma4.final_logit_softcapping": lambda v: 1.2 * v,
    "gemma4.rope.freq_base": lambda v: v / 4,
    "gemma4.rope.freq_base_swa": lambda v: v / 2,
    "gemma4.attention.layer_norm_rms_epsilon": lambda v: 1e-2,
    "gemma4.attention.sliding_window_pattern": lambda v: [True, *v[1:-1], False][: len(v)],
    "gemma4.expert_used_count": lambda v: v - 1,
}
NEUTRAL = {"norm": 1.0, "head_norm": 1.0, "output_norm": 1.0, "layer_scale": 1.0, "rope": 1.0}


@pytest.fixture
def moved(model, tmp_path):
    """moved(family, tensors=f, keys=...) -> how far the largest logit moves when the model is changed so."""

    def measure(family, change=None, **arguments):
        path = tiny.make(tmp_path / "changed.gguf", family, **arguments)
        if change is not None:
            file = quant.open_gguf(path)
            tensors = {name: change(name, tensor) for name, tensor in file.tensors.items()}
            quant.write_gguf(tmp_path / "changed-2.gguf", file.metadata, tensors)
            path = tmp_path / "changed-2.gguf"
        tokens = tiny.prompt(family)
        return float(np.abs(open_model(path).logits(tokens) - model(family).logits(tokens)).max())

    return measure


def kinds_of(family):
    """{name of a tensor without its layer: kind of its values}, for the tensors that are used."""
    shape = tiny.shape_of(family)
    out = {}
    for name, _, kind in tiny.tensor_plan(shape):
        out.setdefault(re.sub(r"^blk\.\d+\.", "blk.*.", name), kind)
    return out


CASES = [(family, pattern) for family in tiny.FAMILIES for pattern in kinds_of(family)]


@pytest.mark.parametrize("family, pattern", CASES, ids=lambda x: x)
def test_every_tensor_counts(family, pattern, moved):
    """Vectors become neutral (ones), matrices are scaled: as if a loader or an op had dropped the tensor."""
    kind = kinds_of(family)[pattern]

    def change(name, tensor):
        if not fnmatchcase(name, pattern):
            return tensor
        values = tensor.dequantize()
        return quant.QTensor.from_array(
            np.full_like(values, NEUTRAL[kind]) if kind in NEUTRAL else values * np.float32(0.9), "F32", name
        )

    assert moved(family, change) > FAR


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_setting_counts(family, key, moved):
    published = tiny.metadata(tiny.shape_of(family))
    if key not in published or published[key] == SETTINGS[key](published[key]):
        pytest.skip(f"{family} has no other value of {key}")
    assert moved(family, keys={key: SETTINGS[key](published[key])}) > FAR


def test_unused_keys_of_sharing_layers_do_not_count(moved):
    """Published E2B and E4B files have K/V weights in the layers that share; they are noise here."""
    assert moved("e2b", kv_in_shared=False) == 0
    assert moved("e4b", kv_in_shared=True) == 0
