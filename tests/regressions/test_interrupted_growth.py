"""A cache that was interrupted while it grew is as good as one that was not; threads may share an engine."""

import threading

import numpy as np
import pytest

from fastpath.backend import ops_for
from fastpath.cache import FIRST_SLOTS
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO)


@pytest.fixture(scope="module")
def ids(model):
    return list(np.random.default_rng(3).integers(0, model.config.vocab_size, FIRST_SLOTS + 40))


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("replay", [True, False])
def test_growth_ends_in_the_middle(model, ids, monkeypatch, fault, replay):
    """The third layer to grow is not allocated any more: the next call goes on with the same bytes."""
    engines = [Lanes(model, ops_for("cpu"), replay=replay) for _ in range(2)]
    for engine in engines:
        engine.prefill(ids[: FIRST_SLOTS - 2])
        engine.decode(ids[FIRST_SLOTS - 2])
        engine.decode(ids[FIRST_SLOTS - 1])
    broken, whole = engines
    grow, calls = broken.cache._grow, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 3:
            raise fault
        grow(*args)

    monkeypatch.setattr(broken.cache, "_grow", fails_once)
    with pytest.raises(fault):
        broken.decode(ids[FIRST_SLOTS])
    for token in ids[FIRST_SLOTS:]:
        assert broken.decode(token).tobytes() == whole.decode(token).tobytes()


def test_two_threads_share_an_engine(model, ids):
    """Each with a lane of its own, over the border at which the cache grows."""
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
