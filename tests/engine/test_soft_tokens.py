"""Soft tokens in the engine: the reference's bytes on its table, and no byte depends on chunk or prefix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.backend import ops_for
from fastpath.kv.cache import KVCache as FastCache
from fastpath.lanes import Lanes, NotFiniteError
from fastpath.model.text import forward as fast_forward
from fastpath.replay import Replay
from refimpl.batch import PAD, SoftTokens, make_batch
from refimpl.cache import KVCache as ReferenceCache
from refimpl.model.text import forward as reference_forward
from tests import tiny

KINDS = [("e2b", "block256"), ("e4b", "block32"), ("12b", "odd"), ("26b", "block32"), ("31b", "block256")]
BOTH = [("e2b", "block256"), ("26b", "block32")]  # one of each mask
EXAMPLES = settings.default.max_examples // 2


def rows(key, n, D):
    """f32[n, D], about as large as scaled embeddings of the tiny models."""
    return (tiny._bell(f"soft/{key}", (n, D), 1.0)).astype(np.float32)


def conversation(family, D):
    """Words, an image of 15 rows, words, a sound of 5, an image of 4, words: (ids, soft tokens)."""
    words = iter(tiny.prompt(family) + tiny.prompt(family, seed=2))
    ids, soft = [], []
    for n_words, n_rows, vision in ((9, 15, True), (7, 5, False), (2, 4, True), (11, 0, False)):
        ids += [next(words) for _ in range(n_words)]
        if n_rows:
            soft.append(SoftTokens(len(ids), rows(f"{family}/{len(ids)}", n_rows, D), vision))
            ids += [PAD] * n_rows
    return ids, soft


def engine_of(model, **options):
    return Lanes(model, ops_for("cpu"), **({"largest_image": 15} | options))


@pytest.fixture(scope="module")
def cold(tiny_model):
    """cold(family, size) -> (model, ids, soft tokens, f32[T, V]): all logits of one call."""
    known = {}

    def logits(family, size):
        if (family, size) not in known:
            model = tiny_model(family, size)
            ids, soft = conversation(family, model.config.model_dim)
            known[family, size] = model, ids, soft, engine_of(model).extend([(0, ids)], "all", soft={0: soft})
        return known[family, size]

    return logits


# -- the composition ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_same_bytes_as_the_reference(tiny_model, family, activations):
    """Two calls: an image and words, then the rest beside a second sequence with an image."""
    model = tiny_model(family, "odd" if activations == "float" else "block32")
    ids, soft = conversation(family, model.config.model_dim)
    other = [SoftTokens(2, rows("other", 6, model.config.model_dim), True)]
    batches = [
        make_batch([(0, 0, ids[:26], "all")], {0: soft}),
        make_batch([(1, 0, ids[:9], "last"), (0, 26, ids[26:], "all")], {0: soft, 1: other}),
    ]
    found = []
    for forward, table, cls in (
        (reference_forward, (), ReferenceCache),
        (fast_forward, (refimpl.ops,), FastCache),
    ):
        cache, seen = cls(model.config, 2, 64, 40, dtype=np.float32), []
        for batch in batches:
            forward(
                *table,
                model.config,
                model.weights,
                cache,
                batch,
                activations=activations,
                trace=lambda name, array, seen=seen: seen.append((name, np.array(array))),
            )
        found.append(seen)
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]
    for (name, theirs), (_, ours) in zip(*found, strict=True):
        assert ours.tobytes() == theirs.tobytes(), name


def test_soft_rows_are_not_scaled(tiny_model):
    model = tiny_model("26b")
    ids, soft = conversation("26b", model.config.model_dim)
    seen = {}
    engine_of(model).extend(
        [(0, ids)], "last", trace=lambda n, a: seen.setdefault(n, a.copy()), soft={0: soft}
    )
    assert np.array_equal(seen["inp_scaled"][soft[0].start : soft[0].stop], soft[0].rows)


# -- no byte depends on the cuts ----------------------------------------------------------------------


@pytest.mark.parametrize(("family", "size"), KINDS)
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_any_chunk(cold, family, size, data):
    model, ids, soft, expected = cold(family, size)
    engine = engine_of(model, chunk=data.draw(st.integers(1, 45), label="chunk"))
    got = [engine.extend([(0, ids[a:b])], "all", soft={0: soft}) for a, b in engine.plan(len(ids), soft=soft)]
    assert np.concatenate(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("family", "size"), BOTH)
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_after_a_kept_prefix(cold, family, size, data):
    """Text that is in the cache already, then images after it, in turns cut anywhere outside of images."""
    model, ids, soft, expected = cold(family, size)
    engine = engine_of(model, chunk=data.draw(st.integers(1, 45), label="chunk"))
    inside = {p for item in soft if item.vision for p in range(item.start + 1, item.stop)}
    turns = data.draw(
        st.lists(st.sampled_from([p for p in range(1, len(ids)) if p not in inside]), max_size=4)
    )
    start = 0
    for stop in sorted({*turns, len(ids)}):
        got = engine.prefill(ids[start:stop], soft=soft)
        assert got.tobytes() == expected[stop - 1].tobytes(), (start, stop)
        start = stop


@pytest.mark.parametrize(("family", "size"), BOTH)
def test_an_image_in_the_third_turn(cold, family, size):
    """Two turns in words are decoded token by token; the third brings an image: as a cold run, and so is
    what is decoded after it, by replay."""
    model, _, soft, _ = cold(family, size)
    words = tiny.prompt(family, seed=7)
    image = SoftTokens(len(words) + 3, soft[0].rows, True)
    whole = words + words[1:4] + [PAD] * 15 + words[4:20]
    alone = engine_of(model, replay=False).extend([(0, whole)], "all", soft={0: [image]})
    for chunk in (4, 64):
        engine = engine_of(model, chunk=chunk)
        for token_id in words:
            engine.decode(token_id)
        n = image.stop + 2
        assert engine.prefill(whole[len(words) : n], soft=[image]).tobytes() == alone[n - 1].tobytes()
        for i in range(n, len(whole)):
            assert engine.decode(whole[i]).tobytes() == alone[i].tobytes()
        assert engine.replay.program(1) is not None


@pytest.mark.parametrize(("family", "size"), BOTH)
def test_lanes_together(cold, family, size):
    """Two conversations in one call, their images at different places."""
    model, ids, soft, expected = cold(family, size)
    engine = engine_of(model, n_seqs=2)
    engine.extend([(1, ids[:5])])
    got = engine.extend([(0, ids), (1, ids[5:])], "all", soft={0: soft, 1: soft})
    assert got.tobytes() == np.concatenate([expected, expected[5:]]).tobytes()


def test_another_image_another_answer(cold):
    for family, size in BOTH:
        model, ids, soft, expected = cold(family, size)
        other = [SoftTokens(item.start, item.rows[::-1].copy(), item.vision) for item in soft]
        engine = engine_of(model)
        assert engine.prefill(ids, soft=other).tobytes() != expected[-1].tobytes()
        engine.reset()
        assert engine.prefill(ids, soft=soft).tobytes() == expected[-1].tobytes()


# -- chunks and images --------------------------------------------------------------------------------


def test_a_call_is_as_large_as_the_image_and_no_larger(tiny_model):
    """An image of 20 rows at position 10 in chunks of 16: large models take it in a call of 20."""
    for family, whole in (("26b", True), ("e2b", False)):
        model = tiny_model(family)
        item = SoftTokens(10, rows("20", 20, model.config.model_dim), True)
        engine = engine_of(model, chunk=16, largest_image=20)
        plan = engine.plan(40, soft=[item])
        assert plan == ([(0, 10), (10, 30), (30, 40)] if whole else [(0, 16), (16, 32), (32, 40)])
        assert engine.cache.chunk == (20 if whole else 16)
        assert engine.max_cache_bytes >= engine.cache_bytes
    engine = engine_of(tiny_model("26b"), chunk=16, largest_image=0)
    with pytest.raises(ValueError, match="an image of 20 soft tokens, but these lanes take at most 16"):
        engine.prefill([5] * 10 + [PAD] * 20, soft=[item])
    assert engine.length() == 0


def test_what_does_not_fit_is_refused_before_anything_is_written(tiny_model):
    model = tiny_model("26b")
    engine = engine_of(model)
    wrong = [SoftTokens(2, np.ones((3, 80), np.float32), True)]
    with pytest.raises(ValueError, match="soft tokens of width 80, expected 48"):
        engine.prefill([5] * 9, soft=wrong)
    cut = [SoftTokens(2, np.ones((9, 48), np.float32), True)]
    with pytest.raises(ValueError, match="is cut after 4, expected all of it in one call"):
        engine.extend([(0, [5] * 5)], soft={0: cut})
    assert engine.length() == 0 and engine.soft == [[]]


def test_calls_with_soft_tokens_are_not_replayed(tiny_model):
    item = SoftTokens(0, np.ones((1, 48), np.float32), False)
    assert Replay.takes(make_batch([(0, 0, [5], "all")]), 361)
    assert not Replay.takes(make_batch([(0, 0, [5], "all")], {0: [item]}), 361)


def test_the_search_for_nan_sees_the_images(tiny_model):
    """A row of NaN is in the first value of the second run; images are whole in it too."""
    for family in ("e2b", "26b"):
        model = tiny_model(family)
        ids, soft = conversation(family, model.config.model_dim)
        bad = soft[0].rows.copy()
        bad[3, 5] = np.nan
        engine = engine_of(model, chunk=6)
        with pytest.raises(NotFiniteError, match="inp_scaled: NaN or infinity at position 12"):
            engine.prefill(ids, soft=[SoftTokens(soft[0].start, bad, True), *soft[1:]])
