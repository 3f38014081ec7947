"""One model in every spelling that converters use: the same logits, bit for bit."""

import numpy as np
import pytest

from tests import tiny

FAMILIES = list(tiny.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "spelling",
    [dict(fused=("qkv",)), dict(fused=("gate_up",)), dict(fused=("qkv", "gate_up"), aliases=True)],
    ids=["qkv", "gate_up", "all with aliases"],
)
def test_fused_and_renamed_tensors(family, spelling, model, variant):
    other = variant(family, **spelling)
    assert other.weights.unused == ()
    same_logits(other, model(family))


@pytest.mark.parametrize("experts", ["split", "numbered"])
def test_experts(experts, model, variant):
    same_logits(variant("26b", experts=experts), model("26b"))


@pytest.mark.parametrize("family", FAMILIES)
def test_period_instead_of_a_pattern(family, variant):
    """A pattern that repeats may be written as one number."""
    s = tiny.shape_of(family)
    key = "gemma4.attention.sliding_window_pattern"
    array = variant(family, keys={key: [(i + 1) % 3 != 0 for i in range(s.n_layers)]}) if _even(s) else None
    if array is None:
        pytest.skip(f"{family}: heads of the two kinds differ, and its pattern has no period")
    want = array.logits(tiny.prompt(family))
    assert np.array_equal(variant(family, keys={key: 3}).logits(tiny.prompt(family)), want)


def _even(s: tiny.Shape) -> bool:
    return s.pattern == ("LLG" * s.n_layers)[: s.n_layers]


def test_head_of_its_own(variant):
    """An output matrix that equals the embedding is the tied head; another one is not."""
    tied, own = variant("12b"), None
    want = tied.logits(tiny.prompt("12b"))
    own = variant("12b", tied=False)
    assert not np.allclose(own.logits(tiny.prompt("12b")), want)
    assert own.weights.output is not own.weights.token_embd


@pytest.mark.parametrize("family", ["12b", "26b", "31b"])
def test_lying_head_size_is_repaired(family, model, variant):
    same_logits(
        variant(
            family,
            keys={
                "gemma4.attention.key_length": 64,
                "gemma4.attention.key_length_swa": 8,
                "gemma4.rope.dimension_count": None,
                "gemma4.rope.dimension_count_swa": None,
            },
        ),
        model(family),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "keys",
    [
        {"gemma4.rope.freq_base_swa": None, "gemma4.rope.local.freq_base": 1e4},
        {"gemma4.rope.freq_base_swa": None},
        {"gemma4.embedding_length": None},
        {"gemma4.attention.layer_norm_rms_epsilon": None},
    ],
    ids=["alias of the base", "default base", "width from the weights", "default eps"],
)
def test_aliases_and_defaults_of_keys(family, keys, model, variant):
    same_logits(variant(family, keys=keys), model(family), exact="epsilon" not in str(keys))


def same_logits(a, b, *, exact=True):
    tokens = tiny.prompt(next(f for f in FAMILIES if b.path.stem == f"tiny-{f}"))
    got, want = a.logits(tokens), b.logits(tokens)
    assert np.array_equal(got, want) if exact else np.allclose(got, want)
