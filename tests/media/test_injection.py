"""Images, sounds and videos in the text model: against transformers, cut in chunks, after a cached prefix."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from refimpl import ops
from refimpl.batch import PAD, SoftTokens, make_batch, plan_chunks
from refimpl.cache import KVCache
from refimpl.generate import Model, generate
from refimpl.model.text import forward
from tests import tiny
from tests.media import tiny_mmproj, tiny_prompts
from tests.media.conftest import soft_tokens
from tests.oracle import goldens
from tests.oracle.conftest import open_model
from tests.tolerances import CHUNKS_FLOAT32, MODEL_FLOAT64, ORACLE_F32_ABS, ORACLE_F64_ABS

FAMILIES = list(tiny_mmproj.ENCODERS)
BOTH = ["e2b", "26b"]  # one of each mask


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("tiny"), {}

    def make(family):
        if family not in known:
            known[family] = open_model(tiny.make(folder / f"{family}.gguf", family))
        return known[family]

    return make


def soft_of(media, case, dtype=np.float64) -> list[SoftTokens]:
    return [
        SoftTokens(start, soft_tokens(media, name, dtype), name not in tiny_mmproj.CLIPS)
        for start, name in zip(case["starts"], case["media"])
    ]


def run(model, ids, soft, dtype=np.float64, chunk=None, cache=None, start=0):
    """Every traced value of the positions from `start` on, rows in order."""
    whole = model.config.media_attention == "bidirectional"
    chunks = plan_chunks(start, len(ids), chunk or len(ids), soft, whole=whole)
    kv = cache or KVCache(model.config, 1, len(ids), max(b - a for a, b in chunks), dtype)
    pieces: dict[str, list] = {}
    for a, b in chunks:
        batch = make_batch([(0, a, ids[a:b], "all")], {0: soft})
        forward(
            model.config,
            model.weights,
            kv,
            batch,
            trace=lambda k, x: pieces.setdefault(k, []).append(x.copy()),
        )
    return {name: np.concatenate(parts) for name, parts in pieces.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_those_the_oracle_saw(family, model, mmproj_path):
    golden = goldens.read(f"media/model-{family}.transformers-f64")
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in (model(family).path, mmproj_path(family))
    ]
    assert golden.meta["sha256"] == digests
    assert golden.meta["cases"] == {name: case["tokens"] for name, case in tiny_prompts.cases(family).items()}
    assert len(golden.meta["cases"]) >= 5


@pytest.mark.parametrize("chunk", [None, 6, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_transformers(family, chunk, model, media):
    golden = goldens.read(f"media/model-{family}.transformers-f64")
    for name, case in tiny_prompts.cases(family).items():
        found = run(model(family), case["tokens"], soft_of(media(family), case), chunk=chunk)
        check(found, golden, name, ORACLE_F64_ABS)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_transformers(family, model, media):
    golden = goldens.read(f"media/model-{family}.transformers-f64")
    for name, case in tiny_prompts.cases(family).items():
        found = run(model(family), case["tokens"], soft_of(media(family), case, np.float32), np.float32)
        check(found, golden, name, ORACLE_F32_ABS)


def check(found, golden, case, limit) -> None:
    mine = {k: v for k, v in golden.arrays.items() if k.startswith(f"{case}/")}
    assert len(mine) == 3
    for key, want in mine.items():
        got = found[key.split("/")[1]]
        rows = np.unique(np.linspace(0, len(got) - 1, len(want)).astype(int))
        error = goldens.max_abs_in_deviations(got[rows], want)
        assert error <= limit, f"{key}: {error:.2g}"


# --- the mask, against its definition --------------------------------------------------------------------


def sees(layout, i, j, window):
    """Position i sees position j: within the window behind, and before it or in the same image."""
    same_image = any(a <= i < b and a <= j < b for a, b, vision in layout if vision)
    return i - j < window and (j <= i or same_image)


def random_layout(rng):
    """Items (start, stop, is vision) with at least one word between, and the length of the sequence."""
    layout, at = [], int(rng.choice([0, 1, 5, 30, 55]))
    for _ in range(rng.integers(0, 5)):
        stop = at + int(rng.integers(1, 9))
        layout.append((at, stop, bool(rng.random() < 0.7)))
        at = stop + int(rng.integers(1, 5))
    return layout, at + int(rng.integers(1, 7))


def test_mask_equals_its_definition():
    """1300 layouts: several items, any window, lanes of different lengths, chunks and rings that wrap; what a
    query sees is read from the output of attention over equal scores and one-hot values."""
    rng = np.random.default_rng(11)
    H, wrapped, later, several = 64, 0, 0, 0
    for _ in range(1300):
        window = int(rng.integers(1, 13))
        n_lanes = int(rng.integers(1, 3))
        layouts = [random_layout(rng) for _ in range(n_lanes)]
        soft = {
            lane: [SoftTokens(a, np.zeros((b - a, 2)), vision) for a, b, vision in layout]
            for lane, (layout, _) in enumerate(layouts)
        }
        chunk = int(rng.integers(1, 12))
        plans = [plan_chunks(0, n, chunk, soft[lane], whole=True) for lane, (_, n) in enumerate(layouts)]
        largest = max(b - a for plan in plans for a, b in plan)
        layer = SimpleNamespace(index=0, owns_kv=True, window=window, n_kv_heads=1, head_dim=H)
        config = SimpleNamespace(layers=[layer])
        cache = KVCache(config, n_lanes, max(n for _, n in layouts), largest, ring=bool(rng.random() < 0.8))
        kv = cache.layer(0)
        for step in range(max(map(len, plans))):
            parts = [
                (lane, plan[step][0], [7] * (plan[step][1] - plan[step][0]), "none")
                for lane, plan in enumerate(plans)
                if step < len(plan)
            ]
            batch = make_batch(parts, soft)
            values = np.eye(H, dtype=np.float32)[batch.positions % H][:, None]
            ops.write_kv(np.zeros_like(values), values, *kv, batch.seq_ids, batch.positions)
            zeros = np.zeros((batch.n_tokens, 1, H), np.float32)
            out = ops.attention(zeros, *kv, batch.seq_ids, batch.positions, window, batch.ends)[:, 0]
            for t in range(batch.n_tokens):
                layout, n = layouts[batch.seq_ids[t]]
                i = int(batch.positions[t])
                want = [j for j in range(n) if sees(layout, i, j, window)]
                assert sorted(j % H for j in want) == np.nonzero(out[t])[0].tolist()
                assert np.allclose(out[t].max(), 1 / len(want))
            wrapped += batch.positions.max() >= 32 * kv[0].shape[2]
            later += step > 0
        several += any(len(layout) > 1 for layout, _ in layouts)
    assert wrapped > 100 and later > 1000 and several > 400


def test_global_layers_and_the_small_family_stay_causal(model, media):
    """Changing a later row of an image moves an earlier one in sliding layers of the large family only."""
    for family in BOTH:
        case = tiny_prompts.cases(family)["image"]
        soft = soft_of(media(family), case)
        ids, first = case["tokens"], case["starts"][0]
        changed = [SoftTokens(soft[0].start, soft[0].rows.copy(), True)]
        changed[0].rows[5] += 0.5
        before, after = run(model(family), ids, soft), run(model(family), ids, changed)
        kinds = [layer.window for layer in model(family).config.layers]
        moved = np.abs(before["kqv_out-0"] - after["kqv_out-0"]).max(axis=1) > 1e-9
        assert kinds[0] is not None
        assert moved[first + 4] == (family == "26b") and moved[first + 5]
        assert not moved[:first].any()  # words before the image
        if family == "26b":
            # the first global layer alone: give it what the layers before made, causally
            i = kinds.index(None)
            assert np.array_equal(before[f"kqv_out-{i}"][:first], after[f"kqv_out-{i}"][:first])


def test_audio_is_causal_everywhere(model, media):
    for family in ("e2b", "12b"):
        case = tiny_prompts.cases(family)["image-audio"]
        soft = soft_of(media(family), case)
        changed = [soft[0], SoftTokens(soft[1].start, soft[1].rows.copy(), False)]
        changed[1].rows[-1] += 0.5
        before, after = (run(model(family), case["tokens"], s)["result_output"] for s in (soft, changed))
        last = soft[1].stop - 1
        assert np.array_equal(before[:last], after[:last])
        assert np.abs(before[last] - after[last]).max() > 1e-3


# --- laws ------------------------------------------------------------------------------------------------


def test_text_only_is_untouched(model):
    ids = tiny.prompt("26b")
    m = model("26b")
    plain, empty = run(m, ids, []), run(m, ids, [SoftTokens(len(ids) + 3, np.ones((2, 48)), True)])
    assert np.array_equal(plain["result_output"], empty["result_output"])
    assert make_batch([(0, 0, ids, "all")], {0: []}).soft is None


def test_soft_rows_are_not_scaled_and_ids_under_them_do_not_matter(model, media):
    case = tiny_prompts.cases("e2b")["image"]
    soft = soft_of(media("e2b"), case)
    found = run(model("e2b"), case["tokens"], soft)
    assert np.array_equal(found["inp_scaled"][soft[0].start : soft[0].stop], soft[0].rows)
    other = list(case["tokens"])
    other[soft[0].start : soft[0].stop] = [99] * len(soft[0].rows)
    assert np.array_equal(run(model("e2b"), other, soft)["result_output"], found["result_output"])
    batch = make_batch([(0, 0, other, "none")], {0: soft})
    assert (batch.token_ids[soft[0].start : soft[0].stop] == PAD).all()


@pytest.mark.parametrize("family", BOTH)
def test_a_shifted_image_means_the_same_to_what_follows(family, model, media):
    """The same words and image later in a prompt.  In the first layer, a sliding one, only distances count:
    as soon as the words before are out of sight, rows are the same but for the rounding of angles."""
    case = tiny_prompts.cases(family)["image"]
    soft = soft_of(media(family), case)
    m, ids = model(family), case["tokens"]
    want = run(m, ids, soft)["l_out-0"]  # the first layer is a sliding one
    shift = 3 * m.config.layers[0].window
    words = [300] * shift
    moved = [SoftTokens(item.start + shift, item.rows, item.vision) for item in soft]
    got = run(m, words + ids, moved)["l_out-0"][shift:]
    seen = m.config.layers[0].window - 1
    assert np.abs(got[seen:] - want[seen:]).max() < 1e-9


@pytest.mark.parametrize("family", BOTH)
def test_an_image_after_a_cached_prefix(family, model, media):
    """A prefix in a call of its own, with and without images in it; then the rest: as the cold run."""
    case = tiny_prompts.cases(family)["two-images"]
    for dtype, limit in ((np.float64, MODEL_FLOAT64), (np.float32, CHUNKS_FLOAT32)):
        soft = soft_of(media(family), case, dtype)
        m, ids = model(family), case["tokens"]
        cold = run(m, ids, soft, dtype)["result_output"]
        for n_cached in (1, 8, soft[0].start, soft[0].stop, soft[1].start - 1, len(ids) - 1):
            kv = KVCache(m.config, 1, len(ids), len(ids), dtype)
            run(m, ids[:n_cached], soft, dtype, cache=kv)
            warm = run(m, ids, soft, dtype, cache=kv, start=n_cached)["result_output"]
            assert np.abs(warm - cold[n_cached:]).max() < limit


@pytest.mark.parametrize("family", BOTH)
def test_two_prompts_in_one_call(family, model, media):
    cases = tiny_prompts.cases(family)
    m = model(family)
    pair = [cases["image"], cases["video"]]
    soft = {lane: soft_of(media(family), case) for lane, case in enumerate(pair)}
    longest = max(len(case["tokens"]) for case in pair)
    kv = KVCache(m.config, 2, longest, longest, np.float64)
    batch = make_batch([(lane, 0, case["tokens"], "all") for lane, case in enumerate(pair)], soft)
    together = forward(m.config, m.weights, kv, batch)
    at = 0
    for lane, case in enumerate(pair):
        alone = run(m, case["tokens"], soft[lane])["result_output"]
        assert np.abs(together[at : at + len(alone)] - alone).max() < MODEL_FLOAT64
        at += len(alone)


def test_plan_never_cuts_an_image_when_it_must_not():
    image = SoftTokens(10, np.zeros((20, 2)), True)
    assert plan_chunks(0, 40, 16, [image], whole=True) == [(0, 10), (10, 30), (30, 40)]
    assert plan_chunks(0, 40, 16, [image]) == [(0, 16), (16, 32), (32, 40)]
    sound = SoftTokens(10, np.zeros((20, 2)), False)
    assert plan_chunks(0, 40, 16, [sound], whole=True) == [(0, 16), (16, 32), (32, 40)]
    assert plan_chunks(5, 5, 16) == []
    rng = np.random.default_rng(3)
    for _ in range(500):
        layout, n = random_layout(rng)
        items = [SoftTokens(a, np.zeros((b - a, 2)), vision) for a, b, vision in layout]
        chunk, start = int(rng.integers(1, 20)), 0
        chunks = plan_chunks(start, n, chunk, items, whole=True)
        assert [a for a, _ in chunks] + [n] == [start] + [b for _, b in chunks]
        for item in items:
            assert not item.vision or any(a <= item.start and item.stop <= b for a, b in chunks)
        largest = max((b - a for a, b, vision in layout if vision), default=0)
        assert all(0 < b - a <= max(chunk, largest) for a, b in chunks)


def test_a_cut_image_is_refused(model, media):
    case = tiny_prompts.cases("26b")["image"]
    soft, m = soft_of(media("26b"), case), model("26b")
    kv = KVCache(m.config, 1, 60, 60, np.float64)
    with pytest.raises(ValueError, match="the image that ends at position 21 is cut after 9"):
        forward(m.config, m.weights, kv, make_batch([(0, 0, case["tokens"][:10], "last")], {0: soft}))
    small = model("e2b")
    kv = KVCache(small.config, 1, 60, 60, np.float64)
    forward(small.config, small.weights, kv, make_batch([(0, 0, case["tokens"][:10], "last")], {0: soft}))


def test_wrong_widths_and_overlaps(model):
    m = model("26b")
    kv = KVCache(m.config, 1, 60, 60)
    batch = make_batch([(0, 0, [5] * 9, "last")], {0: [SoftTokens(2, np.zeros((3, 80)), True)]})
    with pytest.raises(ValueError, match="soft tokens of width 80, expected 48"):
        forward(m.config, m.weights, kv, batch)
    two = [SoftTokens(2, np.zeros((3, 48)), True), SoftTokens(4, np.zeros((3, 48)), True)]
    with pytest.raises(ValueError, match="in order and apart"):
        make_batch([(0, 0, [5] * 9, "last")], {0: two})


@pytest.mark.parametrize("family", BOTH)
def test_generate_with_an_image(family, model, media):
    case = tiny_prompts.cases(family)["image"]
    soft, m = soft_of(media(family), case, np.float32), model(family)
    tokenizer = SimpleNamespace(suppress_ids=(), eog_ids=())
    whole = Model(m.config, m.weights, tokenizer, None)
    answers = [
        list(generate(whole, case["tokens"], max_tokens=6, soft=soft, chunk=chunk)) for chunk in (512, 4)
    ]
    blind = list(generate(whole, case["tokens"], max_tokens=6))
    assert answers[0] == answers[1] and len(answers[0]) == 6
    assert (answers[0] != blind) == (family == "e2b")  # the other one says the same word to everything
