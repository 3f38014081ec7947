"""Laws of the compiled ops: the bytes of a row depend on that row alone.

Not on the rows beside it, on the number of threads, on who computes which item, on the slot where a key lies.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpath.cpu as cpu
from fastpath.cpu import threads
from quant import FORMATS
from refimpl.kv_types import own_pages
from tests import strategies

BY_ROW = {  # op: arguments that have a row per token
    "rms_norm": ("x",),
    "linear": ("x",),
    "expert_linear": ("x", "expert_ids"),
    "rope": ("x", "cos", "sin"),
    "attention": ("q", "seq_ids", "positions"),
    "geglu": ("gate", "up"),
    "softcap": ("x",),
    "route": ("router_logits",),
    "expert_sum": ("y", "expert_weights"),
    "embed": ("ids",),
    "add": ("x", "y"),
    "scale": ("x",),
}


def _bytes(op, case):
    with np.errstate(all="ignore"):
        result = getattr(cpu, op)(**case)
    return [part.tobytes() for row in zip(*_tuple(result), strict=True) for part in row]


def _tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


@pytest.mark.parametrize("op", BY_ROW)
@settings(max_examples=15)
@given(data=st.data())
def test_a_row_alone_and_in_any_batch(op, data):
    case = data.draw(getattr(strategies, op)(), label=op)
    n = len(case[BY_ROW[op][0]])
    whole = _bytes(op, case)
    per_row = len(whole) // n
    order = data.draw(st.permutations(range(n)), label="order")
    for cut in ([[t] for t in range(n)], [order], [order, order]):
        for rows in cut:
            by_row = [name for name in (*BY_ROW[op], "ends") if case.get(name) is not None]
            part = {**case, **{name: case[name][rows] for name in by_row}}
            assert _bytes(op, part) == [whole[per_row * t + i] for t in rows for i in range(per_row)]


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "F16", "IQ3_S"])
def test_threads_do_not_change_a_product(name, n_threads):
    rng = np.random.default_rng(1)
    weight = strategies.weights(rng, FORMATS[name], 400, 512)
    x = strategies.normal(rng, 7, 512)
    results = set()
    for n in (1, 2, 3, 8):
        n_threads(n)
        results |= {cpu.linear(x, weight, "int8").tobytes() for _ in range(3)}
    assert len(results) == 1


def test_threads_do_not_change_the_other_ops(n_threads):
    rng = np.random.default_rng(2)
    q = strategies.normal(rng, 6, 8, 64)
    kv = strategies.kv_caches(*(strategies.normal(rng, 2, 512, 2, 64) for _ in range(2)))
    lanes, positions = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 250, 499, 31, 32, 400])
    gate = strategies.normal(rng, 60, 3000, scale=4)
    results = set()
    for n in (1, 2, 5):
        n_threads(n)
        parts = [
            cpu.attention(q, *kv, lanes, positions, None),
            cpu.geglu(gate, gate),
            cpu.softcap(gate, 30.0),
            cpu.rms_norm(gate, gate[0], 1e-6),
            cpu.rope(q, gate[:6, :32], gate[:6, 32:64]),
            *cpu.route(gate[:50, :128], 8, None),
        ]
        results.add(b"".join(part.tobytes() for part in parts))
    assert len(results) == 1


def test_many_callers_at_once():
    """One pool serves any number of Python threads; who finds it busy computes alone, to the same bytes."""
    rng = np.random.default_rng(3)
    weight, x = strategies.weights(rng, FORMATS["Q4_0"], 640, 256), strategies.normal(rng, 20, 5, 256)
    alone = [cpu.linear(rows, weight, "int8").tobytes() for rows in x]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda rows: cpu.linear(rows, weight, "int8").tobytes(), list(x) * 5))
    assert together == alone * 5


@settings(max_examples=25)
@given(
    st.integers(1, 90),
    st.integers(0, 200),
    st.integers(1, 100),
    st.sampled_from([6, 32, 72]),
    st.sampled_from(["f16", "f32", "q8_0", "q4_0"]),
)
def test_attention_does_not_see_the_ring(window, p, more_slots, H, kv_type):
    """Keys of the same positions in rings of different sizes, or in no ring: same bytes."""
    rng = np.random.default_rng(p)
    keys, values = strategies.normal(rng, p + 1, 1, H), strategies.normal(rng, p + 1, 1, H)
    q = strategies.normal(rng, 1, 3, H, scale=0.3)
    results = set()
    for S in (min(window, p + 1), window + more_slots, p + 1 + more_slots):
        S = -(-S // 32) * 32
        kv = *strategies.poisoned(2, S, 1, H, kv_type), own_pages(2)
        for position in range(p + 1):
            at = np.array([position])
            cpu.write_kv(keys[at], values[at], *kv, np.array([1]), at)
        results.add(cpu.attention(q, *kv, np.array([1]), np.array([p]), window).tobytes())
    assert len(results) == 1


def test_an_expert_is_a_matrix():
    rng = np.random.default_rng(4)
    for name in ("Q5_0", "Q5_K", "BF16", "TQ2_0"):
        stack = strategies.weights(rng, FORMATS[name], 5, 21, 256)
        x, ids = strategies.normal(rng, 6, 256), rng.integers(0, 5, (6, 3)).astype(np.int32)
        y = cpu.expert_linear(x, stack, ids, "int8")
        for t in range(6):
            for a in range(3):
                alone = cpu.linear(x[t : t + 1], stack.expert(ids[t, a]), "int8")
                assert alone.tobytes() == y[t, a].tobytes()


def test_results_go_where_out_says():
    rng = np.random.default_rng(6)
    x = strategies.normal(rng, 3, 64)
    weight = strategies.weights(rng, FORMATS["Q8_0"], 20, 64)
    out = np.full((3, 20), np.nan, np.float32)
    assert cpu.linear(x, weight, "int8", out=out) is out
    assert np.array_equal(out, cpu.linear(x, weight, "int8"))
    same = x.copy()
    assert cpu.rms_norm(same, None, 1e-6, out=same) is same  # in place
    assert np.array_equal(same, cpu.rms_norm(x, None, 1e-6))
    with pytest.raises(ValueError, match=r"out is float32\[3, 19\].*expected .*\[3, 20\]"):
        cpu.linear(x, weight, "int8", out=out[:, :19])
