"""Laws of the whole model: batching, chunking and caching change nothing; every part has its own effect."""

import re
from pathlib import Path

import numpy as np
import pytest

from refimpl.cache import KVCache
from tests import tiny, tolerances
from tests.refimpl.files import all_logits, arrays_of, opened, run

FAMILIES = tuple(tiny.FAMILIES)
MODES = {  # (dtype, activations, format of the matrices, tolerance)
    "float64": (np.float64, "float", "F32", tolerances.MODEL_FLOAT64),
    "float32": (np.float32, "float", "F32", tolerances.CHUNKS_FLOAT32),
    "int8": (np.float32, "int8", "Q8_0", 0.0),
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Families whose matrices are Q8_0, all rows multiples of 32: int8 arithmetic everywhere."""
    from quant import open_gguf
    from refimpl.config import Config
    from refimpl.tensors import load_weights

    folder, models = tmp_path_factory.mktemp("q8"), {}
    for family in FAMILIES:
        path = tiny.make(folder / f"{family}.gguf", family, size="block32", formats={"*": "Q8_0"})
        file = open_gguf(path)
        config = Config.from_gguf(file)
        models[family] = config, load_weights(file, config)
    return models


def model_of(family, mode, quantised):
    return quantised[family] if MODES[mode][2] == "Q8_0" else opened(family)


def close(got, want, tolerance):
    assert want.std() > 0.5  # logits worth comparing
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


# --- one call or many -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_caches_change_nothing(family, mode, quantised):
    """Cuts of a prompt that wraps the window three times, on a ring just large enough."""
    dtype, activations, _, tolerance = MODES[mode]
    config, weights = model_of(family, mode, quantised)
    ids = tiny.prompt(family)
    T = len(ids)
    want = all_logits(config, weights, ids, dtype=dtype, activations=activations)
    cuts = [[5, 1, 9, 2, T - 17], [8] * (T // 8) + [T % 8]]
    if mode == "float64":
        cuts += [[1] * T, [T - 1, 1]]
    for sizes in cuts:
        cache = KVCache(config, 1, T, max(sizes), dtype)
        got, start = [], 0
        for size in sizes:
            part = [(0, start, ids[start : start + size], "all")]
            got.append(run(config, weights, part, cache=cache, activations=activations))
            start += size
        close(np.concatenate(got), want, tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_batch_do_not_meet(family, mode, quantised):
    """Three sequences at different places, prefill and decode in one call, in lanes out of order."""
    dtype, activations, _, tolerance = MODES[mode]
    config, weights = model_of(family, mode, quantised)
    ids = tiny.prompt(family)
    a, b, c = ids[:21], ids[5:17], ids[8:29]
    cache = KVCache(config, 3, 32, 21, dtype)
    options = {"cache": cache, "activations": activations}
    run(config, weights, [(2, 0, a[:13], "none"), (0, 0, c[:20], "none")], **options)
    got = run(
        config, weights, [(2, 13, a[13:], "all"), (1, 0, b, "last"), (0, 20, c[20:], "last")], **options
    )
    want = [all_logits(config, weights, x, dtype=dtype, activations=activations) for x in (a, b, c)]
    close(got, np.concatenate([want[0][13:], want[1][-1:], want[2][-1:]]), tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_ring_is_a_line(family):
    """Known fault A7: 90 tokens one by one, window 8: rings and full-length caches give equal bytes."""
    config, weights = opened(family)
    ids = (tiny.prompt(family) * 4)[:90]
    caches = KVCache(config, 1, 90, 1, ring=True), KVCache(config, 1, 90, 1, ring=False)
    assert caches[0].nbytes < caches[1].nbytes
    for p, token_id in enumerate(ids):
        outs = [run(config, weights, [(0, p, [token_id], "last")], cache=cache) for cache in caches]
        np.testing.assert_array_equal(*outs)


def test_only_wanted_rows_reach_the_head():
    config, weights = opened("e2b")
    ids = tiny.prompt("e2b")
    whole = all_logits(config, weights, ids)
    assert whole.shape == (33, 361)
    close(run(config, weights, [(0, 0, ids, "last")]), whole[-1:], tolerances.MODEL_FLOAT64)
    nothing = run(config, weights, [(0, 0, ids, "none")])
    assert nothing.shape == (0, 361)


def test_old_cache_contents_do_not_matter():
    """A lane is used again without being cleared: positions from 0 on overwrite what is there."""
    config, weights = opened("e4b")
    ids = tiny.prompt("e4b")
    cache = KVCache(config, 1, 64, 37, np.float64)
    for k, v, _ in (cache.layer(i) for i in (0, 1, 2, 3, 4)):
        k[:], v[:] = np.nan, np.nan
    got = run(config, weights, [(0, 0, ids, "all")], cache=cache)
    np.testing.assert_array_equal(got, all_logits(config, weights, ids))


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_follows_float64(family):
    config, weights = opened(family)
    ids = tiny.prompt(family)
    single = all_logits(config, weights, ids, dtype=np.float32)
    assert single.dtype == np.float32
    close(single, all_logits(config, weights, ids), tolerances.MODEL_FLOAT32)


def test_int8_activations_are_a_rounding(quantised):
    config, weights = quantised["12b"]
    ids = tiny.prompt("12b")
    exact = all_logits(config, weights, ids)
    rounded = all_logits(config, weights, ids, dtype=np.float32, activations="int8")
    error = np.abs(rounded - exact)
    assert 1e-4 < error.mean() < 0.1 * exact.std()


# --- every part has its effect, where it should ----------------------------------------------------


def first_change(family, name, change, ids=None, **spelling):
    """The first position whose logits change when a tensor does; None for no change."""
    ids = tiny.prompt(family) if ids is None else ids
    arrays = arrays_of(family)
    before = all_logits(*opened(family, **spelling), ids)
    after = all_logits(*opened(family, tensors={name: change(arrays[name].copy())}, **spelling), ids)
    changed = np.abs(after - before).max(axis=1) > 1e-9
    return int(changed.argmax()) if changed.any() else None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_matters(family):
    shape = tiny.shape_of(family)
    for name in arrays_of(family):
        i = int(name.split(".")[1]) if name.startswith("blk.") else -1
        unread = i >= shape.n_layers - shape.n_shared and name.split(".")[2] in (
            "attn_k",
            "attn_v",
            "attn_k_norm",
        )
        got = first_change(family, name, lambda a: a * 1.1 + 0.01, ids=tiny.prompt(family)[:12])
        assert (got is None) == unread, name


def test_position_of_a_change():
    """A table row matters from its token on, through the window of no layer but the whole: causality."""
    ids = tiny.prompt("e2b")
    at = 11
    assert ids.index(ids[at]) == at

    def change(table):
        table[ids[at]] += 1
        return table

    assert first_change("e2b", "token_embd.weight", change) == 0  # tied: the head sees it everywhere
    assert first_change("e2b", "per_layer_token_embd.weight", change) == at


def test_zero_gate_is_no_per_layer_embedding():
    """geglu(0, anything) is 0, and the norm of 0 is 0: the layer adds nothing, whatever the table holds."""
    gates = {f"blk.{i}.inp_gate.weight": np.zeros((20, 48)) for i in range(7)}
    tables = {"per_layer_token_embd.weight": arrays_of("e2b")["per_layer_token_embd.weight"] * -3}
    ids = tiny.prompt("e2b")
    outs = [all_logits(*opened("e2b", tensors=gates | more), ids) for more in ({}, tables)]
    np.testing.assert_array_equal(*outs)


def test_values_are_keys_before_their_norm():
    """Known fault A11: with attn_v equal to attn_k in all global layers nothing changes."""
    arrays = arrays_of("12b")
    copies = {f"blk.{i}.attn_v.weight": arrays[f"blk.{i}.attn_k.weight"] for i in (2, 5)}
    config, weights = opened("12b", tensors=copies)
    assert not any(layer.k_is_v for layer in config.layers)
    ids = tiny.prompt("12b")
    np.testing.assert_array_equal(all_logits(config, weights, ids), all_logits(*opened("12b"), ids))


def test_expert_scale_acts_once():
    """Known fault D3: the scale of an expert, or its down matrix multiplied by it."""
    arrays, moved = arrays_of("26b"), {}
    for i in range(5):
        down, scale = f"blk.{i}.ffn_down_exps.weight", f"blk.{i}.ffn_down_exps.scale"
        moved[down] = arrays[down] * arrays[scale][:, None, None]
        moved[scale] = np.ones(7)
    ids = tiny.prompt("26b")
    outs = [all_logits(*opened("26b", tensors=changed), ids) for changed in ({}, moved)]
    close(*outs, tolerances.SCALE_MOVED)


def test_equal_experts_are_one_ffn():
    """Whatever the router says, shares of equal experts add up to one expert."""
    arrays, equal = arrays_of("26b"), {}
    for i in range(5):
        for part in ("gate_up_exps", "down_exps"):
            name = f"blk.{i}.ffn_{part}.weight"
            equal[name] = np.repeat(arrays[name][:1], 7, axis=0)
        equal[f"blk.{i}.ffn_down_exps.scale"] = np.ones(7)
    routers = {f"blk.{i}.ffn_gate_inp.weight": -arrays[f"blk.{i}.ffn_gate_inp.weight"] for i in range(5)}
    ids = tiny.prompt("26b")
    outs = [all_logits(*opened("26b", tensors=equal | more), ids) for more in ({}, routers)]
    close(*outs, tolerances.MODEL_FLOAT64)


def test_sliding_layers_see_their_window_only():
    """A model of sliding layers and one owner: a token out of reach of the windows changes nothing."""
    keys = {"attention.sliding_window_pattern": [True] * 6, "attention.sliding_window": 2}
    keys |= {"attention.key_length_swa": 32, "rope.dimension_count_swa": 32}
    only_sliding = {name: a for name, a in arrays_of("12b").items() if name.startswith(("blk.2.", "blk.5."))}
    v = {name.replace("attn_k", "attn_v"): a for name, a in only_sliding.items() if "attn_k.weight" in name}
    config, weights = opened("12b", keys=keys, tensors=v, drop=("rope_freqs.weight",))
    assert [layer.window for layer in config.layers] == [2] * 6
    ids = tiny.prompt("12b")
    other = [ids[0], ids[1] + 1, *ids[2:]]
    outs = [all_logits(config, weights, x) for x in (ids, other)]
    changed = np.abs(outs[0] - outs[1]).max(axis=1) > 0
    assert changed[1:8].all() and not changed[8:].any()  # six layers look back one position each


# --- trace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_names_are_those_of_the_glossary(family):
    config, weights = opened(family)
    ids, seen = tiny.prompt(family), {}
    all_logits(config, weights, ids, trace=lambda name, array: seen.setdefault(name, array))
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
    text = text[text.index("## Traced values\n") : text.index("## Traced values of the encoders")]
    listed = {
        name for row in re.findall(r"^\|(.*?)\|", text, re.M) for name in re.findall(r"`([\w-]+)`", row)
    }
    listed |= {"ffn_norm_1-0"}
    general = {re.sub(r"-\d+$", "-0", name) for name in seen}
    assert general <= listed
    assert all(len(array) == len(ids) for array in seen.values())
    if family == "e2b":
        assert listed - general == {n for n in listed if "moe" in n} | {
            "ffn_norm_1-0",
            "ffn_norm_2-0",
            "ffn_mlp-0",
        }


# --- refusals -------------------------------------------------------------------------------------


def test_what_a_cache_cannot_hold():
    config, weights = opened("12b")
    cache = KVCache(config, 2, 16, 4)

    def refuses(parts, says):
        with pytest.raises(ValueError, match=says):
            run(config, weights, parts, cache=cache)

    refuses([(0, 13, [5] * 4, "last")], r"position 16, expected at most 15\. The context is full")
    refuses([(2, 0, [5], "last")], r"lanes \[2\], expected 0 .. 1")
    refuses([(0, 0, [5] * 5, "last")], r"5 tokens of one sequence, expected at most 4")
    refuses([(0, 0, [361], "last")], r"token id 361, expected 0 .. 360")
    assert run(config, weights, [(0, 12, [5] * 4, "last"), (1, 0, [360], "last")], cache=cache).shape == (
        2,
        361,
    )


def test_cache_sizes():
    """Known fault C3: bytes of a sliding layer do not grow with the context; layers that share have none."""
    config, _ = opened("e2b")
    cache = KVCache(config, 2, 1000, 25, np.float32)
    assert [a.shape for a in cache.layer(0)[:2]] == [
        (2, 1, 1, 16, 32),
        (2, 1, 1, 1, 32, 32),
    ]  # 8 - 1 + 25 positions
    assert [a.shape for a in cache.layer(3)[:2]] == [(2, 1, 32, 32, 32), (2, 1, 32, 1, 32, 32)]
    assert cache.nbytes == 4 * 2 * (3 * 32 * (16 + 32) + 1024 * 2 * 32)  # values of 16 take 32
    assert KVCache(config, 1, 1000, 26).layer(0)[1].shape[2] == 2
    assert KVCache(config, 1, 20, 26).layer(0)[1].shape[2] == 1  # whole blocks of 32
    small = KVCache(config, 2, 1000, 25, kv_type=("bf16", "f16"))
    assert small.dtype == np.float32 and small.nbytes == cache.nbytes // 2
    assert [a.dtype for a in small.layer(3)[:2]] == [np.uint16, np.float16]
