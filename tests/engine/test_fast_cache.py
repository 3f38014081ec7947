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
    lines = 8 * 65536 * 1 * 512 * 2 * 2
    rings = 40 * (1023 + 1025) * 8 * 256 * 2 * 2
    assert cache_bytes(config(*layers), 1, 65536, 1025) == lines + rings


def test_shared_layers_own_nothing():
    shared = config(layer(0, 8), layer(1), layer(2, 8, kv_from=0), layer(3, kv_from=1))
    cache = KVCache(shared, 1, 64, 8, kv_type="f16")
    assert list(cache.owners()) == [0, 1]
    assert cache.nbytes == cache_bytes(shared, 1, 64, 8)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", ("f16", "f32"), ("bf16", "f16")])
@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 256, 1000])
def test_the_estimate_is_what_a_full_cache_takes(capacity, kv_type):
    both = config(layer(0, 40), layer(1))
    cache = KVCache(both, 2, capacity, 50, kv_type=kv_type)
    cache.reserve(capacity)
    assert cache.nbytes == cache_bytes(both, 2, capacity, 50, kv_type)


def test_types_of_keys_and_values():
    cache = KVCache(config(layer(0)), 1, 64, 8, kv_type=("f16", "bf16"))
    assert [array.dtype for array in cache.layer(0)[:2]] == [np.float16, np.uint16]
    assert cache.dtype == np.float32
    assert [array.dtype for array in KVCache(config(layer(0)), 1, 64, 8).layer(0)[:2]] == [np.float32] * 2
    for wrong in ("int8", ("f16", "q8_0"), ("f16",)):
        with pytest.raises(ValueError, match="expected one or two of f64, f32, f16, bf16"):
            KVCache(config(layer(0)), 1, 64, 8, kv_type=wrong)


def test_arrays_begin_at_a_cache_line():
    for n in (1, 3):
        for array in KVCache(config(layer(0, n_kv_heads=n)), n, 64, 8, kv_type="f16").layer(0)[:2]:
            assert array.ctypes.data % 64 == 0


def test_growing_doubles_keeps_what_is_there_and_stops_at_the_capacity():
    cache = KVCache(config(layer(0, 8), layer(1)), 1, 1000, 300)
    assert [pair[1].shape[2] for pair in (cache.layer(0), cache.layer(1))] == [8, 8]
    for i in (0, 1):
        k, v, _ = cache.layer(i)
        k[:] = np.arange(256, dtype=np.float32).reshape(8, 1, 32) + i
        v[:] = np.arange(256, dtype=np.float32).reshape(8, 1, 32, 1) + i
    cache.reserve(256)
    assert cache.n_growths == 0
    cache.reserve(257)
    assert [array.shape[2] for array in cache.layer(0)[:2]] == [10, 10]  # 7 + 300, in steps of 32
    assert [array.shape[2] for array in cache.layer(1)[:2]] == [16, 16]
    assert (cache.layer(1)[1][0, 0, :8, 0, :, 0].ravel() == np.arange(256) + 1).all()
    assert (cache.layer(0)[1][0, 0, :8, 0, :, 3].ravel() == np.arange(256)).all()
    assert (cache.layer(1)[0][0, 0, :8, 2].ravel() == np.arange(256) + 1).all()
    cache.reserve(1000)
    assert cache.layer(1)[1].shape[2] == 32 and cache.n_growths == 2
    with pytest.raises(AssertionError):
        cache.reserve(1001)
