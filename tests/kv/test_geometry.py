"""Pages and bytes from a config alone; numbers by hand."""

import numpy as np
import pytest

from fastpath.kv.cache import KVCache
from fastpath.kv.geometry import GLOBAL, SLIDING, cache_bytes, entries, pages_of, plan
from tests.kv.geometries import config, layer, mixed, published_12b


def test_pages_that_neighbours_touch_at_most():
    assert [pages_of(n, 64) for n in (1, 2, 65, 66, 129, 130)] == [1, 2, 2, 3, 3, 4]
    for page in (32, 96):
        for n in range(1, 300):
            assert pages_of(n, page) == max((a + n - 1) // page - a // page + 1 for a in range(page))


def test_a_line_holds_the_context_and_a_ring_the_window_before_a_call_and_the_call():
    assert entries(None, 4096, 16, 64) == 64
    assert entries(None, 4097, 16, 64) == 65
    assert entries(8, 4096, 16, 64) == 2  # 7 + 16 positions
    assert entries(512, 131072, 1024, 64) == 25  # 1535 positions: 24 pages, or 25 where they begin inside one
    assert entries(512, 256, 1024, 64) == 4  # a short context needs no ring


def test_bytes_of_a_published_model():
    """12B at 65536 tokens in f16: 1 GiB of global pages; the rings hold the window and a call."""
    found = plan(published_12b(), 1, 65536, 1024, "f16", 64)
    assert found.kinds[GLOBAL].nbytes == 8 * 65536 * 1 * (512 + 512) * 2 == 1 << 30
    ring = 33 * 64  # positions: 1023 + 1024, wherever the first of them is
    assert found.kinds[SLIDING].nbytes == 40 * ring * 8 * (256 + 256) * 2
    assert found.nbytes == cache_bytes(published_12b(), 1, 65536, 1024, "f16", 64)
    assert found.page_bytes == {GLOBAL: 8 * 64 * 1024 * 2, SLIDING: 40 * 64 * 8 * 512 * 2}
    four = plan(published_12b(), 4, 65536, 1024, "f16", 64)
    assert four.nbytes == 4 * found.nbytes


def test_shared_layers_own_nothing():
    found = plan(mixed(8), 1, 64, 8, "f16").kinds
    assert [x.index for x in found[SLIDING].layers] == [0, 2]
    assert [x.index for x in found[GLOBAL].layers] == [1]


def test_a_model_may_have_one_kind_only():
    assert list(plan(config(layer(0)), 1, 64, 8, "f16").kinds) == [GLOBAL]
    assert list(plan(config(layer(0, 8)), 1, 64, 8, "f16").kinds) == [SLIDING]


def test_pages_as_asked_for():
    few = plan(mixed(8), 4, 640, 8, "f16", 64, n_pages={GLOBAL: 3})
    assert few.kinds[GLOBAL].n_pages == 3 and few.kinds[SLIDING].n_pages == 4 * 2
    more = plan(
        mixed(8), 4, 640, 8, "f16", 64, lambda full: {name: k.n_pages + 5 for name, k in full.kinds.items()}
    )
    assert [kind.n_pages for kind in more.kinds.values()] == [4 * 10 + 5, 4 * 2 + 5]


@pytest.mark.parametrize(
    "kv_type", ["f32", "f16", "bf16", ("f16", "f32"), ("bf16", "f16"), np.dtype(np.float64)]
)
@pytest.mark.parametrize(("capacity", "page"), [(1, 32), (31, 64), (33, 32), (256, 96), (1000, 64)])
def test_the_estimate_is_what_a_cache_takes(capacity, page, kv_type):
    both = mixed(40)
    named = {"dtype": kv_type} if isinstance(kv_type, np.dtype) else {"kv_type": kv_type}
    cache = KVCache(both, 2, capacity, 50, page=page, **named)
    assert cache.nbytes == cache.geometry.nbytes == plan(both, 2, capacity, 50, kv_type, page).nbytes


@pytest.mark.parametrize("page", [0, 16, 48, -32])
def test_pages_are_whole_blocks(page):
    with pytest.raises(ValueError, match="expected a multiple of 32"):
        plan(mixed(8), 1, 64, 8, "f16", page)
