"""Attention over pages against its definition; bytes do not depend on pages or batch."""

import numpy as np
import pytest
from hypothesis import given, settings

import refimpl.ops
from fastpath.cuda import attention, device, kv_types
from refimpl.ops.attention import _find, _load, _store, widen
from tests import strategies, tolerances
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu.traffic import Profiler

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


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    "heads", [(8, 2, 256), (16, 1, 512), (10, 2, 72), (2, 2, 40), (6, 2, 96), (8, 1, 130)]
)
def test_real_heads_and_the_batch(heads, kind):
    """Real head sizes, groups of 1 to 16, more than one piece: as defined, and alone as in a batch."""
    N, K, H = heads
    rng = np.random.default_rng(N)
    S, window = 320, 290
    k, v = strategies.normal(rng, 2, S, K, H), strategies.normal(rng, 2, S, K, H)
    q = strategies.normal(rng, 3, N, H, scale=1 / np.sqrt(H))
    names = ("k_pages", "v_pages", "table")
    wide, narrow = (
        dict(zip(names, strategies.kv_caches(k, v, kind, kind, page), strict=True)) for page in (160, 32)
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


def _one_lane(rng, S, N, K, H, positions, window, scale=1.0):
    """float16 pages of one lane, and a query for each of some positions."""
    k, v = strategies.normal(rng, 2, 1, S, K, H)
    *pages, table = strategies.kv_caches(k, v, "f16", "f16", 64)
    positions = np.array(positions, np.int32)
    q = strategies.normal(rng, len(positions), N, H, scale=scale / np.sqrt(H))
    return {
        "q": q, "k_pages": pages[0], "v_pages": pages[1], "table": table,
        "seq_ids": np.zeros(len(positions), np.int32), "positions": positions, "window": window,
    }  # fmt: skip


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("power", [2.0**40, 2.0**17, 2.0**-100])
def test_queries_of_any_size(power, executor):
    """Queries beyond float16, and so small that it has none of them: bytes, if keys are as much smaller."""
    case = _one_lane(np.random.default_rng(3), 128, 3, 1, 72, [127, 70], None, 4.0)
    case["k_pages"] = np.round(case["k_pages"] * 2).astype(np.float16)  # small integers
    moved = min(max(power, 2.0**-12), 2.0**20)  # what keys can take as float16
    q = case["q"] * np.float32(power)
    with device.use(EXECUTORS[executor]):
        got = attention.attention(**{**case, "q": q, "k_pages": case["k_pages"] * np.float16(1 / moved)})
        want = attention.attention(**{**case, "q": case["q"] * np.float32(power / moved)})
    assert got.tobytes() == want.tobytes() and np.isfinite(got).all()
    largest = np.abs(q).max()
    assert largest > 65504 or largest < 2.0**-24


@pytest.mark.parametrize("filling", [np.nan, np.inf, 0.0])
def test_what_nobody_sees_may_be_anything(filling):
    """Behind the last position, before the window, in halves of pieces: bytes."""
    rng, window = np.random.default_rng(4), 20
    for position in (5, 31, 32, 50, 63, 64, 83, 100, 127):
        case = _one_lane(rng, 128, 4, 2, 40, [position], window)
        first = max(0, position - window + 1)
        unseen = np.array([p for p in range(128) if not first <= p <= position])
        numbers, blocks, places = _find(case["k_pages"], case["table"], 0, unseen)
        with device.use(EXECUTORS["ir"]):
            want = attention.attention(**case)
            for pages in (case["k_pages"], case["v_pages"]):
                pages[numbers, :, blocks, :, places] = filling
            got = attention.attention(**case)
        assert got.tobytes() == want.tobytes() and np.isfinite(got).all()


def test_a_head_that_is_not_a_number():
    """NaN and infinity in a query are met by that head alone."""
    case = _one_lane(np.random.default_rng(5), 64, 8, 1, 64, [63], None)
    with device.use(EXECUTORS["ir"]):
        want = attention.attention(**case)
        for special in (np.nan, np.inf):
            case["q"][0, 2, 5] = special
            got = attention.attention(**case)
            others = [0, 1, 3, 4, 5, 6, 7]
            assert np.isnan(got[0, 2]).all() and got[0, others].tobytes() == want[0, others].tobytes()


def test_pages_are_read_in_whole_sectors():
    """Of float16, for whole pieces and others: 16 bytes of keys and 8 of values for a lane."""
    case = _one_lane(np.random.default_rng(6), 192, 4, 1, 256, [180], 150)
    with device.use(Profiler()) as profiler:
        attention.attention(**case)
    sites = [s for s in profiler.sites["attention_part_f16_f16"] if s.instruction.startswith("ld.global")]
    keys = [s for s in sites if s.n_bytes == 16 and s.efficiency == 1]
    values = [s for s in sites if s.n_bytes == 8]
    assert len(keys) == 8 and len(values) == 2 * 16 and all(s.efficiency == 1 for s in values)
