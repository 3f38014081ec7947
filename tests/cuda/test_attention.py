"""Attention over pages against its definition over one array; bytes do not depend on pages or batch."""

import numpy as np
import pytest
from hypothesis import given, settings

import refimpl.ops
from fastpath.cuda import attention, device
from refimpl.ops.attention import narrow, widen
from tests import strategies, tolerances
from tests.cuda.executors import EXECUTORS

EXAMPLES = {"ir": 12, "sm_80": 2, "sm_90": 4}


def _in_pages(rng, cache, P):
    """A cache [R, K, S/32, ...] cut into pages of P positions, in any order; what is nobody's is NaN."""
    R, K, blocks = cache.shape[:3]
    per_page = P // 32
    E, spare = blocks // per_page, 3
    pages = np.empty((R * E + spare, K, per_page, *cache.shape[3:]), cache.dtype)
    pages[...] = 0x7FFF if cache.dtype == np.uint16 else np.nan
    table = rng.permutation(R * E + spare)[: R * E].reshape(R, E).astype(np.int32)
    for r in range(R):
        for e in range(E):
            pages[table[r, e]] = cache[r, :, e * per_page : (e + 1) * per_page]
    return pages, table


def _in_few_types(case):
    """The same case with few pairs of types, because each is a kernel: equal ones, and one that is mixed."""
    types = tuple(str(case[name].dtype) for name in ("k_cache", "v_cache"))
    if types != ("float16", "uint16"):
        k_type = case["k_cache"].dtype
        case["v_cache"] = narrow(widen(case["v_cache"], np.float32), k_type)
    return case


def _arguments(rng, case):
    """The same case with its cache in pages; both caches have one table."""
    blocks = case["k_cache"].shape[2]
    P = 32 * int(rng.choice([n for n in range(1, blocks + 1) if blocks % n == 0]))
    seed = int(rng.integers(0, 2**31))
    k_pages, table = _in_pages(np.random.default_rng(seed), case["k_cache"], P)
    v_pages, _ = _in_pages(np.random.default_rng(seed), case["v_cache"], P)
    return {
        "k_pages": k_pages, "v_pages": v_pages, "table": table,
        "seq_ids": case["seq_ids"].astype(np.int32), "positions": case["positions"].astype(np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attention(executor):
    @settings(max_examples=EXAMPLES[executor])
    @given(case=strategies.attention(), rng=strategies.generators())
    def check(case, rng):
        case = _in_few_types(case)
        paged = _arguments(rng, case)
        ends = case["ends"]
        depth = int((paged["positions"] if ends is None else ends).max()) + 1
        with device.use(EXECUTORS[executor]):
            got = attention.attention(case["q"], **paged, window=case["window"], ends=ends, depth=depth)
        want = refimpl.ops.attention(**{**case, "q": case["q"].astype(np.float64)})
        tolerances.check("attention", case, (got,), (want,))

    check()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_write_kv(executor):
    @settings(max_examples=EXAMPLES[executor])
    @given(case=strategies.write_kv(), rng=strategies.generators())
    def check(case, rng):
        case = _in_few_types(case)
        paged = _arguments(rng, case)
        with device.use(EXECUTORS[executor]):
            attention.write_kv(case["k"], case["v"], **paged)
        refimpl.ops.write_kv(**case)
        again = _arguments(np.random.default_rng(0), case)  # any order: compare through the tables
        for name in ("k_pages", "v_pages"):
            got = [paged[name][page] for page in paged["table"].reshape(-1)]
            want = [again[name][page] for page in again["table"].reshape(-1)]
            np.testing.assert_array_equal(_flat(got), _flat(want))

    check()


def _flat(pages):
    """[R * E, K, P/32, ...] pages -> their blocks in the order of lanes and positions."""
    return np.concatenate([np.moveaxis(page, 1, 0) for page in pages])


@pytest.mark.parametrize("heads", [(8, 2, 256), (16, 1, 512), (10, 2, 72)])
def test_real_heads_and_the_batch(heads):
    """Real head sizes, groups of 4, 16 and 5, more than one piece: as defined, and alone as in a batch."""
    N, K, H = heads
    rng = np.random.default_rng(N)
    S, window = 320, 290
    k, v = strategies.normal(rng, 2, S, K, H), strategies.normal(rng, 2, S, K, H)
    k_cache, v_cache = strategies.kv_caches(k, v, "bf16", "bf16")
    q = strategies.normal(rng, 3, N, H, scale=1 / np.sqrt(H))
    case = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "window": window, "ends": None,
        "seq_ids": np.array([0, 1, 0], np.int32), "positions": np.array([300, 650, 17], np.int32),
    }  # fmt: skip
    wide, narrow = _arguments(rng, case), _arguments(rng, case)
    with device.use(EXECUTORS["ir"]):
        got = attention.attention(q, **wide, window=window, depth=651)
        rows = {name: narrow[name][1:2] for name in ("seq_ids", "positions")}
        alone = attention.attention(q[1:2], **{**narrow, **rows}, window=window, depth=1024)
    want = refimpl.ops.attention(**{**case, "q": q.astype(np.float64)})
    tolerances.check("attention", case, (got,), (want,))
    assert got[1].tobytes() == alone[0].tobytes()
