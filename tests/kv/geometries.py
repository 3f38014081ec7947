"""Configs of layers without a model."""

from types import SimpleNamespace


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


def mixed(window):
    """Two kinds, an owner of each that others read, and two layers of one kind."""
    return config(
        layer(0, window), layer(1), layer(2, window), layer(3, kv_from=1), layer(4, window, kv_from=2)
    )


def published_12b():
    """48 layers: 40 sliding with 8 KV heads of 256 and window 1024, 8 global with 1 KV head of 512."""
    is_global = [(i + 1) % 6 == 0 for i in range(48)]
    return config(*(layer(i, None, None, 1, 512) if g else layer(i, 1024, None, 8, 256)
                    for i, g in enumerate(is_global)))  # fmt: skip
