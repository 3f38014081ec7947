"""A call that was interrupted, in the cache or later, is as if it had not been; threads may share lanes."""

import threading

import numpy as np
import pytest

import fastpath.lanes
from fastpath.backend import ops_for
from fastpath.kv.geometry import PAGE
from fastpath.kv.integrity import check_integrity
from fastpath.kv.pages import PagePool
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO)


@pytest.fixture(scope="module")
def ids(model):
    return list(np.random.default_rng(3).integers(0, model.config.vocab_size, 256 + 40))


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("at", [1, 2])
def test_reserving_ends_in_the_middle(model, ids, monkeypatch, fault, replay, at):
    """The token wants a page of each kind, and gets none or one: the next call goes on, same bytes."""
    broken, whole = (Lanes(model, ops_for("cpu"), replay=replay) for _ in range(2))
    for engine in (broken, whole):
        engine.prefill(ids[: PAGE - 2])
        engine.decode(ids[PAGE - 2])
        engine.decode(ids[PAGE - 1])
    take, calls = PagePool.take, []

    def fails_once(pool):
        if pool in broken.cache.pools.values():
            calls.append(pool.name)
            if len(calls) == at:
                raise fault
        return take(pool)

    monkeypatch.setattr(PagePool, "take", fails_once)
    with pytest.raises(fault):
        broken.decode(ids[PAGE])
    check_integrity(broken.cache)
    for token in ids[PAGE:]:
        assert broken.decode(token).tobytes() == whole.decode(token).tobytes()
    check_integrity(broken.cache)
    assert len(set(calls)) == 2


@pytest.mark.parametrize("replay", [True, False])
def test_a_call_that_does_not_end_leaves_no_pages(model, ids, monkeypatch, replay):
    """Two pages are reserved for it. The same tokens again, others, or an earlier place: the same bytes."""
    broken, whole = (Lanes(model, ops_for("cpu"), replay=replay) for _ in range(2))
    for engine in (broken, whole):
        engine.prefill(ids[: PAGE - 5])
    with monkeypatch.context() as patch:
        patch.setattr("fastpath.lanes.forward", interrupted(fastpath.lanes.forward))
        with pytest.raises(KeyboardInterrupt):
            broken.extend([(0, ids[: PAGE + 10])])
    assert broken.cache.length(0) == 2 * PAGE + 5
    check_integrity(broken.cache)
    for token in ids[PAGE - 5 : PAGE + 5]:
        assert broken.decode(token).tobytes() == whole.decode(token).tobytes()
    for engine in (broken, whole):
        engine.truncate(PAGE - 9)
    assert broken.tokens == whole.tokens and broken.cache.length(0) == PAGE - 9
    again = [engine.prefill(ids[:40]).tobytes() for engine in (broken, whole)]
    assert again[0] == again[1]
    check_integrity(broken.cache)


def interrupted(forward):
    """The call has begun: pages are there, keys are not."""

    def run(ops, config, weights, cache, batch, **options):
        cache.reserve(batch)
        raise KeyboardInterrupt

    return run


def test_two_threads_share_an_engine(model, ids):
    """Each with a lane of its own, over borders of pages."""
    alone = Lanes(model, ops_for("cpu"))
    alone.prefill(ids[:200])
    expected = [alone.decode(token).tobytes() for token in ids[200:]]
    engine, found = Lanes(model, ops_for("cpu"), n_seqs=2), {}

    def run(lane):
        engine.prefill(ids[:200], lane=lane)
        found[lane] = [engine.decode(token, lane=lane).tobytes() for token in ids[200:]]

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}
