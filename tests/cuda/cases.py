"""One launch of every kernel at a small size with everything in it: for mutants and for reports on memory.

A kernel that no case launches fails the tests that go through the table.
"""

import functools

import numpy as np

from fastpath.cuda import attention, device, embedding, kv_types, layout, linear, ops, quantize, tiles
from fastpath.cuda.linear import MANY
from quant import FORMATS
from tests import strategies


@functools.cache
def by_kernel():
    """{kernel name: the first call that launches it}; a call gives an array, or a tuple of arrays."""
    found = {}
    for call in calls():
        for name in _launched_by(call):
            found.setdefault(name, call)
    return found


def call_of(kernel_name):
    assert kernel_name in by_kernel(), f"{kernel_name}: tests/cuda/cases.py has no case that launches it"
    return by_kernel()[kernel_name]


class _Listener:
    """A device that runs nothing."""

    def __init__(self):
        self.names = []

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def put(self, array, dtype):
        return np.asarray(array, dtype)

    constant = put

    def launch(self, kernel, grid, threads, *arguments):
        self.names.append(kernel.name)


def _launched_by(call):
    with device.use(_Listener()) as listener:
        call()
    return listener.names


def calls():
    rng = np.random.default_rng(0)
    return [
        *_small_ops(rng),
        *_products(rng),
        *(call for kind in kv_types.LOADS for call in _pages(rng, kind)),
    ]


def _small_ops(rng):
    x, y = strategies.normal(rng, 3, 2048), strategies.normal(rng, 3, 2048)
    row, angles = strategies.normal(rng, 2048), strategies.normal(rng, 3, 128)
    rows, heads = np.array([2, 0], np.int32), x.reshape(3, 8, 256)
    q_k_v, distances = strategies.normal(rng, 3, 6, 2, 40), strategies.normal(rng, 5, 2, 40)
    yield from (
        lambda: ops.rms_norm(x, row, 1e-6),
        lambda: ops.layer_norm(x, row, row, 1e-6),
        lambda: ops.add(x, y),
        lambda: ops.add_bias(x, row),
        lambda: ops.scale(x, 0.5),
        lambda: ops.standardize(x, row, row),
        lambda: ops.geglu(x, y),
        lambda: ops.softcap(x, 30.0),
        lambda: ops.silu(x),
        lambda: ops.glu(x),
        lambda: ops.clip(x, -1.0, 1.0),
        lambda: ops.rope(heads, angles, angles),
        lambda: ops.get_rows(x, rows),
        lambda: _in_place(ops.set_rows, x, rows, y[:2]),
        lambda: ops.swap_axes(heads),
        lambda: ops.route(x[:, :128].copy(), 8, row[:128].copy()),
        lambda: ops.expert_sum(heads, y[:, :8].copy()),
        lambda: ops.conv2d(x.reshape(8, 24, 32), y[:2, :1152].reshape(8, 32, 3, 3)),
        lambda: ops.causal_conv(x, y.reshape(2048, 3)),
        lambda: ops.mean_pool(x.reshape(24, 256), 4, 2),
        lambda: ops.relative_attention(*q_k_v, distances, row[:40], 1.9, 50.0),
        lambda: ops.top_k(np.tile(x, (1, 3)), 1, 30.0),
        lambda: ops.top_k(np.round(np.tile(x, (1, 3))), 64, 30.0),  # equal ones on both sides of the border
        lambda: tuple(quantize.round_activations(x, 32)),
        lambda: tuple(quantize.round_activations(x, 256)),
    )  # fmt: skip


def _in_place(op, x, *arguments):
    x = x.copy()
    op(x, *arguments)
    return x


def _products(rng):
    """17 steps: three turns of 8 warps, the last of them with one step; 3 steps for tensor cores, and 18 of
    their 64 tokens."""
    long, ids = strategies.normal(rng, 3, 17 * 256), np.array([0, 5, 7], np.int32)
    many = strategies.normal(rng, MANY + 1, 3 * 256)
    for name in layout.CODINGS:
        matrix = layout.device_matrix(strategies.weights(rng, FORMATS[name], 8, long.shape[1]))
        yield lambda w=matrix: linear.linear(long, w, "float")
        yield lambda w=matrix: embedding.embed(w, ids, 39.25)
        if not matrix.coding.is_plain:
            yield lambda w=matrix: linear.linear(long[:2], w, "int8")
            yield lambda w=matrix: linear.linear(long, w, "int8")
            wide = layout.device_matrix(strategies.weights(rng, FORMATS[name], 36, many.shape[1]))
            yield lambda w=wide: linear.linear(many, w, "int8")
    experts = layout.device_matrix(strategies.weights(rng, FORMATS["Q4_K"], 6, 8, 512))
    chosen, x = rng.integers(0, 6, (5, 2)).astype(np.int32), strategies.normal(rng, 5, 512)
    yield lambda: linear.expert_linear(x, experts, chosen, "int8")
    often = rng.integers(0, 2, (40, 3)).astype(np.int32)  # tiles of 64 entries: two of them, and parts
    yield lambda: tiles.tiles_of(often, 2)


def _pages(rng, kind):
    """Two lanes, 640 positions in a ring of pages of 64, heads of 256 in groups of 2."""
    k, v = strategies.normal(rng, 2, 640, 2, 256), strategies.normal(rng, 2, 640, 2, 256)
    *pages, table = strategies.kv_caches(k, v, kind, kind, 64)
    q = strategies.normal(rng, 2, 4, 256, scale=1 / 16)
    lanes, positions = np.array([0, 1], np.int32), np.array([599, 1000], np.int32)

    def write():
        written = pages[0].copy(), pages[1].copy()
        attention.write_kv(k[0, :2], v[0, :2], *written, table, lanes, positions)
        return written

    yield lambda: attention.attention(q, *pages, table, lanes, positions, 512)
    yield write
