"""Attention over pages against its definition; bytes do not depend on pages or batch."""

import numpy as np
import pytest
from hypothesis import given, settings

import refimpl.ops
from fastpath.cuda import attention, device, kv_types
from refimpl.ops.attention import _find, _load, _store, widen
from tests import strategies, tolerances
from tests.cuda.executors import EXECUTORS

EXAMPLES = {"ir": 8, "sm_80": 2, "sm_90": 2}  # beside test_kernels.py: types that differ, NaN and infinity
MIXED = ("f16", "q8_0")


def _in_few_types(case, H):
    """The same case with few pairs of types, because each is a kernel: equal ones, and one that is mixed."""
    k_type, v_type = (kv_types.name_of(case[name]) for name in ("k_pages", "v_pages"))
    if v_type == k_type or (k_type, v_type) == MIXED:
        return case
    table, v_pages = case["table"], case["v_pages"]
    n_pages, K, blocks = v_pages.shape[:3]
    pages = strategies.poisoned(n_pages, 32 * blocks, K, H, (k_type, k_type))[1]
    for lane in range(len(table)):
        found = _find(v_pages, table, lane, np.arange(32 * blocks * table.shape[1]))
        _store(_load(v_pages, found, False, np.float32)[..., :H], pages, found, False)
    return {**case, "v_pages": pages}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attention(executor):
    @settings(max_examples=EXAMPLES[executor])
    @given(case=strategies.attention())
    def check(case):
        case = _in_few_types(case, case["q"].shape[-1])
        with device.use(EXECUTORS[executor]):
            got = attention.attention(**case)
        want = refimpl.ops.attention(**{**case, "q": case["q"].astype(np.float64)})
        tolerances.check("attention", case, (got,), (want,))

    check()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_write_kv(executor):
    """Bytes, those that nobody writes as well."""

    @settings(max_examples=EXAMPLES[executor])
    @given(case=strategies.write_kv(), rng=strategies.generators())
    def check(case, rng):
        case = _in_few_types(case, case["k"].shape[-1])
        x = case["k"]
        for special in rng.choice([0, 1e-35, np.nan, np.inf, 65504, 1e6], 2):
            x[tuple(rng.integers(0, n) for n in x.shape)] = special
        got, want = ({**case, **{n: case[n].copy() for n in ("k_pages", "v_pages")}} for _ in range(2))
        with np.errstate(all="ignore"), device.use(EXECUTORS[executor]):
            attention.write_kv(**got)
            refimpl.ops.write_kv(**want)
        for name in ("k_pages", "v_pages"):
            np.testing.assert_array_equal(*(as_numbers(pages[name]) for pages in (got, want)))

    check()


def as_numbers(pages):
    """Floats as they are, since one NaN is as good as another; everything else as bytes."""
    return pages if pages.dtype == np.uint8 else widen(pages, np.float32)


@pytest.mark.parametrize("kind", kv_types.LOADS)
def test_positions_that_share_a_byte(kind):
    """Two sequences side by side, 45 positions of each, from odd places: pairs are new, or one of them is."""
    rng = np.random.default_rng(6)
    pages = strategies.kv_caches(*strategies.normal(rng, 2, 2, 96, 2, 40), kind, kind, 32)
    lanes, positions = np.repeat([0, 1], 45).astype(np.int32), np.r_[7:52, 23:68].astype(np.int32)
    k, v = strategies.normal(rng, 2, 90, 2, 40)
    got, want = ([array.copy() for array in pages] for _ in range(2))
    with device.use(EXECUTORS["ir"]):
        attention.write_kv(k, v, *got, lanes, positions)
    refimpl.ops.write_kv(k, v, *want, lanes, positions)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(as_numbers(ours), as_numbers(theirs))


@pytest.mark.parametrize("heads", [(8, 2, 256), (16, 1, 512), (10, 2, 72)])
def test_real_heads_and_the_batch(heads):
    """Real head sizes, groups of 4, 16 and 5, more than one piece: as defined, and alone as in a batch."""
    N, K, H = heads
    rng = np.random.default_rng(N)
    S, window = 320, 290
    k, v = strategies.normal(rng, 2, S, K, H), strategies.normal(rng, 2, S, K, H)
    q = strategies.normal(rng, 3, N, H, scale=1 / np.sqrt(H))
    names = ("k_pages", "v_pages", "table")
    wide, narrow = (
        dict(zip(names, strategies.kv_caches(k, v, "bf16", "bf16", page), strict=True)) for page in (160, 32)
    )
    tokens = {
        "seq_ids": np.array([0, 1, 0], np.int32), "positions": np.array([300, 650, 17], np.int32),
    }  # fmt: skip
    with device.use(EXECUTORS["ir"]):
        got = attention.attention(q, **wide, **tokens, window=window)
        one = {name: array[1:2] for name, array in tokens.items()}
        alone = attention.attention(q[1:2], **narrow, **one, window=window)
    case = {"q": q, **wide, **tokens, "window": window}
    want = refimpl.ops.attention(**{**case, "q": q.astype(np.float64)})
    tolerances.check("attention", case, (got,), (want,))
    assert got[1].tobytes() == alone[0].tobytes()


def test_first_columns_of_a_table_and_many_launches(monkeypatch):
    """Bytes: whatever the table's width, and tokens in one launch or in several."""
    rng = np.random.default_rng(9)
    k, v = strategies.normal(rng, 2, 1, 640, 1, 48)
    *pages, table = strategies.kv_caches(k, v, "f16", "f16", 64)
    q = strategies.normal(rng, 5, 3, 48, scale=0.1)
    tokens = np.zeros(5, np.int32), np.array([0, 255, 256, 300, 319], np.int32)
    with device.use(EXECUTORS["ir"]):
        whole = attention.attention(q, *pages, table, *tokens, None)
        monkeypatch.setattr(attention, "SCRATCH", 4 * 3 * 2 * 50 * 2)
        cut = attention.attention(q, *pages, table[:, :5], *tokens, None)
    assert whole.tobytes() == cut.tobytes()
