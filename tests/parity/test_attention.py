"""Attention on caches of every type: against float64, and the same bytes whatever is computed together."""

import numpy as np
import pytest

import fastpath.cpu as cpu
import refimpl.ops
from fastpath.cpu import threads
from refimpl.kv_types import KV_TYPES, own_pages, shapes_of
from refimpl.ops.attention import narrow, widen
from tests import strategies, tolerances

TYPES = ("f32", "f16", "bf16")
EVERY_TYPE = (*TYPES, "q8_0", "q4_0")
PAIRS = [(t, t) for t in EVERY_TYPE] + [("f16", "f32"), ("bf16", "f16"), ("q8_0", "q4_0"), ("f16", "q8_0")]
SHAPES = {  # query heads, key heads, head size, slots, window; the last position is far beyond the slots
    "E2B global": (8, 1, 512, 160, None),
    "E2B sliding": (8, 1, 256, 128, 97),
    "26B global": (16, 2, 512, 96, None),
    "26B sliding": (4, 2, 256, 160, 128),
    "one head": (1, 1, 64, 64, 33),
    "odd": (15, 5, 33, 96, 64),
    "tiny": (3, 3, 1, 64, 7),
}


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


def call(rng, shape, types, T, *, n_seqs=1):
    """The last T positions of a sequence, or of several, whose ring has wrapped."""
    N, K, H, S, window = SHAPES[shape]
    caches = strategies.kv_caches(*(strategies.normal(rng, n_seqs, S, K, H) for _ in "kv"), *types)
    last = S - 1 if window is None else 3 * S - 5
    n = T // n_seqs
    T = n * n_seqs
    q = strategies.normal(rng, T, N, H, scale=4 * H**-0.5)
    positions = np.tile(np.arange(last - n + 1, last + 1, dtype=np.int32), n_seqs)
    if window is not None and n > S - window + 1:
        pytest.skip("a ring holds no more tokens of one call")
    return q, *caches, np.repeat(np.arange(n_seqs, dtype=np.int32), n), np.maximum(positions, 0), window


@pytest.mark.parametrize("types", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, types):
    """The reference widens the same stored numbers: what is left is float32 arithmetic."""
    rng = np.random.default_rng(1)
    for T in (1, 3, 30):
        q, k, v, table, lanes, positions, window = call(rng, shape, types, T)
        case = {
            "q": q, "k_pages": k, "v_pages": v, "table": table,
            "seq_ids": lanes, "positions": positions, "window": window,
        }  # fmt: skip
        want = refimpl.ops.attention(**{**case, "q": q.astype(np.float64)})
        tolerances.check("attention", case, (cpu.attention(**case),), (want,))


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("bf16", "f16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_tokens_at_once(shape, types, n_threads):
    """1 to 40, in order, on 1 to 3 threads: the bytes of each token alone."""
    rng = np.random.default_rng(2)
    largest = min(40, SHAPES[shape][3] - (SHAPES[shape][4] or 0))
    q, *kv, lanes, positions, window = call(rng, shape, types, largest)
    alone = [cpu.attention(q[t:][:1], *kv, lanes[t:][:1], positions[t:][:1], window) for t in range(len(q))]
    for T in range(1, largest + 1):
        n_threads(1 + T % 3)
        got = cpu.attention(q[-T:], *kv, lanes[-T:], positions[-T:], window)
        assert got.tobytes() == np.concatenate(alone[-T:]).tobytes(), T


@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_tokens_that_see_ahead(shape, n_threads):
    """Images of 9 tokens, and some text: whoever is computed together, the same bytes; with ends of their
    own the same bytes as without; and a token that sees ahead reads what the one behind it sees too."""
    rng = np.random.default_rng(7)
    q, *kv, lanes, positions, window = call(
        rng, shape, ("f16", "f16"), 30 if SHAPES[shape][4] is None else 24
    )
    ends = np.where(np.arange(len(q)) % 12 < 9, positions - np.arange(len(q)) % 12 + 8, positions)
    ends = np.minimum(ends, positions[-1]).astype(np.int32)
    alone = [
        cpu.attention(q[t:][:1], *kv, lanes[t:][:1], positions[t:][:1], window, ends[t:][:1])
        for t in range(len(q))
    ]
    for T in range(1, len(q) + 1):
        n_threads(1 + T % 3)
        got = cpu.attention(q[-T:], *kv, lanes[-T:], positions[-T:], window, ends[-T:])
        assert got.tobytes() == np.concatenate(alone[-T:]).tobytes(), T
    own = cpu.attention(q, *kv, lanes, positions, window, positions.copy())
    assert own.tobytes() == cpu.attention(q, *kv, lanes, positions, window).tobytes()
    if window is None:
        behind = cpu.attention(q, *kv, lanes, ends, window)
        assert got.tobytes() == behind.tobytes()


def test_an_end_before_its_position_is_refused():
    q, *kv, lanes, positions, window = call(np.random.default_rng(8), "one head", ("f32", "f32"), 2)
    for ends in (positions - 1, positions + 64):
        with pytest.raises(ValueError, match="slots"):
            cpu.attention(q, *kv, lanes, positions, window, ends)


@pytest.mark.parametrize("kv_type", EVERY_TYPE)
@pytest.mark.parametrize("n_seqs", [2, 5])
@pytest.mark.parametrize("shape", ["E2B sliding", "26B global", "odd"])
def test_sequences_side_by_side(shape, n_seqs, kv_type):
    rng = np.random.default_rng(3)
    for T in (n_seqs, 6 * n_seqs):
        q, *kv, lanes, positions, window = call(rng, shape, (kv_type, kv_type), T, n_seqs=n_seqs)
        got = cpu.attention(q, *kv, lanes, positions, window)
        for lane in range(n_seqs):
            rows = lanes == lane
            alone = cpu.attention(q[rows], *kv, lanes[rows], positions[rows], window)
            assert got[rows].tobytes() == alone.tobytes()
        order = rng.permutation(len(q))
        shuffled = cpu.attention(q[order], *kv, lanes[order], positions[order], window)
        assert shuffled.tobytes() == got[order].tobytes()


@pytest.mark.parametrize("kv_type", EVERY_TYPE)
@pytest.mark.parametrize(
    "kind", ["huge scores", "equal", "zero", "denormal", "one key wins", "largest numbers"]
)
def test_adversarial_numbers(kind, kv_type):
    """What a real model never shows; many and few tokens agree in every byte, and both with float64."""
    rng = np.random.default_rng(4)
    R, S, K, H, T, N = 1, 96, 1, 64, 24, 4
    q = strategies.normal(rng, T, N, H)
    k, v = (strategies.normal(rng, R, S, K, H) for _ in "kv")
    if kind == "huge scores":
        q *= 100  # scores of thousands: one key takes all, and exp of the others is 0
    elif kind == "equal":
        k[:] = 1
        v[:] = 0.5
    elif kind == "zero":
        q[:] = 0
        v[:, ::2] = 0
    elif kind == "denormal":
        k *= np.float32(1e-6)  # denormal in float16
        v *= np.float32(1e-6)
        q *= np.float32(1e-38)
    elif kind == "one key wins":
        k[0, 40] = q[5, 0] * 30
    elif kind == "largest numbers":
        v[:] = np.where(rng.random(v.shape) < 0.5, 65504, -65504)
    caches = strategies.kv_caches(k, v, kv_type, kv_type)
    lanes, positions = np.zeros(T, np.int32), np.arange(S - T, S, dtype=np.int32)
    got = cpu.attention(q, *caches, lanes, positions, None)
    alone = [cpu.attention(q[t:][:1], *caches, lanes[:1], positions[t:][:1], None) for t in range(T)]
    assert got.tobytes() == np.concatenate(alone).tobytes()
    case = {"q": q, "k_pages": caches[0], "v_pages": caches[1]}
    want = refimpl.ops.attention(q.astype(np.float64), *caches, lanes, positions, None)
    tolerances.check("attention", case, (got,), (want,))


@pytest.mark.parametrize("kv_type", TYPES)
def test_an_infinite_value_stays_where_it_is_seen(kv_type):
    """Position 70 holds infinity; rows before it, and those whose window has left it, must not take 0 * inf
    for a number, alone or together."""
    rng = np.random.default_rng(5)
    k, v = (strategies.normal(rng, 1, 96, 2, 40) for _ in "kv")
    v[0, 70, 1, 3] = np.inf
    caches = strategies.kv_caches(k, v, kv_type, kv_type)
    q, lanes, positions = (
        strategies.normal(rng, 30, 6, 40),
        np.zeros(30, np.int32),
        np.arange(60, 90, dtype=np.int32),
    )
    for window in (None, 15):
        got = cpu.attention(q, *caches, lanes, positions, window)
        sees = (positions >= 70) & (positions < 70 + (window or 96))
        assert np.array_equal(~np.isfinite(got).all(axis=(1, 2)), sees)
        assert np.isfinite(got[:, :3]).all() and np.isfinite(np.delete(got, 3, axis=2)).all()
        alone = [cpu.attention(q[t:][:1], *caches, lanes[:1], positions[t:][:1], window) for t in range(30)]
        assert got.tobytes() == np.concatenate(alone).tobytes()


SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 65504.0, 65519.99, 65520.0, -65520.0, 1e30, np.inf, -np.inf, 6.1e-5, 6.0975e-5,
    5.96e-8, 2.98e-8, 2.9802322e-8, 2.9802326e-8, 1e-8, -1e-10, 1e-38, 1e-42, 1.00048828125, 1.0014648,
    3.3895314e38, 1.00390625, 1.01171875, -1.00390625,
]  # fmt: skip


@pytest.mark.parametrize("kv_type", TYPES)
def test_writing_rounds_to_nearest_even(kv_type):
    """NumPy is the judge of float16, the test below of bfloat16; ties, overflow, denormals, any bits."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 1 << 32, 4096 - len(SPECIAL), dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([np.array(SPECIAL, np.float32), bits.view(np.float32)]).reshape(64, 1, 64)
    k_pages, v_pages = (np.zeros(shape, KV_TYPES[kv_type]) for shape in shapes_of(1, 64, 1, 64))
    cpu.write_kv(x, x, k_pages, v_pages, own_pages(1), np.zeros(64, np.int32), np.arange(64, dtype=np.int32))
    want = narrow(x, v_pages.dtype)[:, 0]
    got_k = k_pages[0, 0].transpose(0, 2, 1).reshape(64, 64)
    got_v = v_pages[0, 0].transpose(0, 2, 1, 3).reshape(64, 64)
    for got in (got_k, got_v):
        is_nan = np.isnan(x[:, 0])
        assert np.array_equal(got.view(f"u{got.itemsize}")[~is_nan], want.view(f"u{got.itemsize}")[~is_nan])
        assert np.isnan(widen(got, np.float32)[is_nan]).all()


@pytest.mark.parametrize("kv_type", TYPES)
def test_writing_into_several_sequences(kv_type):
    """Each token into its own lane, in any order, and nothing beside it."""
    rng, dtype = np.random.default_rng(9), KV_TYPES[kv_type]
    mine, its = (
        [*(np.full(shape, 7, dtype) for shape in shapes_of(3, 64, 2, 33)), own_pages(3)] for _ in "ab"
    )
    lanes = np.array([2, 0, 1, 1, 2, 0, 2], np.int32)
    positions = np.array([5, 70, 31, 32, 63, 0, 128], np.int32)
    k, v = (strategies.normal(rng, 7, 2, 33) for _ in "kv")
    cpu.write_kv(k, v, *mine, lanes, positions)
    refimpl.ops.write_kv(k, v, *its, lanes, positions)
    for got, want in zip(mine, its, strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (3.3895314e38, 0x7F7F), (3.4e38, 0x7F80),
     (-0.0, 0x8000), (np.inf, 0x7F80), (np.nan, 0x7FC0), (9.2e-41, 0x0001), (4.5e-41, 0x0000)],
)  # fmt: skip
def test_bfloat16_by_hand(value, bits):
    """1 + 2^-8 is a tie and goes to the even 1; 1 + 3 * 2^-8 goes up; the smallest denormal is 9.2e-41."""
    assert narrow(np.array([value], np.float32), np.dtype(np.uint16))[0] == bits
    k_pages, v_pages = (np.zeros(shape, np.uint16) for shape in shapes_of(1, 32, 1, 1))
    x = np.full((1, 1, 1), value, np.float32)
    cpu.write_kv(x, x, k_pages, v_pages, own_pages(1), np.zeros(1, np.int32), np.full(1, 33, np.int32))
    assert k_pages[0, 0, 0, 0, 1] == v_pages[0, 0, 0, 0, 1, 0] == bits
