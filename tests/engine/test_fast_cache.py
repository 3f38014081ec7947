"""The cache: how large, how it grows, who owns what."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastpath.cache import KVCache, cache_bytes, layer_slots


def layer(index, window=None, kv_from=None, n_kv_heads=1, head_dim=4):
    owner = index if kv_from is None else kv_from
    return SimpleNamespace(
        index=index,
        window=window,
        kv_from=owner,
        owns_kv=owner == index,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
    )


def config(*layers):
    return SimpleNamespace(layers=layers)


def test_slots_of_a_ring_hold_the_window_before_a_chunk_and_the_chunk():
    assert layer_slots(None, 4096, 16) == 4096
    assert layer_slots(8, 4096, 16) == 32  # 7 + 16 = 23, in steps of 32
    assert layer_slots(8, 4096, 26) == 64  # 7 + 26 = 33
    assert layer_slots(512, 256, 1024) == 256  # a short cache needs no ring


def test_bytes_of_a_published_geometry():
    """12B: 48 layers, 40 sliding with 8 KV heads of 256, 8 global with 1 KV head of 512, window 1024."""
    layers = [
        layer(
            i,
            *((None,) if (i + 1) % 6 == 0 else (1024,)),
            n_kv_heads=1 if (i + 1) % 6 == 0 else 8,
            head_dim=512 if (i + 1) % 6 == 0 else 256,
        )
        for i in range(48)
    ]
    lines = 8 * 65536 * 1 * 512 * 2 * 4
    rings = 40 * (1023 + 1025) * 8 * 256 * 2 * 4
    assert cache_bytes(config(*layers), 1, 65536, 1025) == lines + rings


def test_shared_layers_own_nothing():
    shared = config(layer(0, 8), layer(1), layer(2, 8, kv_from=0), layer(3, kv_from=1))
    cache = KVCache(shared, 1, 64, 8)
    assert list(cache.owners()) == [0, 1]
    assert cache.nbytes == cache_bytes(shared, 1, 64, 8)


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 256, 1000])
def test_the_estimate_is_what_a_full_cache_takes(capacity):
    both = config(layer(0, 40), layer(1))
    cache = KVCache(both, 2, capacity, 50)
    cache.reserve(capacity)
    assert cache.nbytes == cache_bytes(both, 2, capacity, 50)


def test_growing_doubles_keeps_what_is_there_and_stops_at_the_capacity():
    cache = KVCache(config(layer(0, 8), layer(1)), 1, 1000, 300)
    assert [pair.shape[1] for pair in (cache.layer(0)[0], cache.layer(1)[0])] == [256, 256]
    for i in (0, 1):
        for array in cache.layer(i):
            array[:] = np.arange(256, dtype=np.float32)[None, :, None, None] + i
    cache.reserve(256)
    assert cache.n_growths == 0
    cache.reserve(257)
    assert cache.layer(0)[0].shape[1] == 320  # 7 + 300, in steps of 32
    assert cache.layer(1)[1].shape[1] == 512
    assert (cache.layer(1)[1][0, :256, 0, 0] == np.arange(256) + 1).all()
    assert (cache.layer(0)[0][0, :256, 0, 3] == np.arange(256)).all()
    cache.reserve(1000)
    assert cache.layer(1)[0].shape[1] == 1024 and cache.n_growths == 2
    with pytest.raises(AssertionError):
        cache.reserve(1001)
