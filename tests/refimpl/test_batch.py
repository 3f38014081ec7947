"""Batch: the arrays of some parts, and what is refused."""

import numpy as np
import pytest

from refimpl.batch import make_batch


def test_parts_lie_end_to_end():
    batch = make_batch([(3, 5, [10, 11, 12], "last"), (0, 0, np.array([7, 8]), "all"), (1, 9, [4], "none")])
    assert batch.n_tokens == 6
    assert batch.token_ids.tolist() == [10, 11, 12, 7, 8, 4]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 9]
    assert batch.seq_ids.tolist() == [3, 3, 3, 0, 0, 1]
    assert batch.logit_rows.tolist() == [2, 3, 4]
    arrays = batch.token_ids, batch.positions, batch.seq_ids, batch.logit_rows
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "no sequences"),
        ([(0, 0, [], "last")], "part 0: got no tokens"),
        ([(0, 0, [1], "last"), (0, 1, [2], "last")], "part 1: lane 0 is in the batch twice"),
        ([(-1, 0, [1], "last")], "got lane -1"),
        ([(0, -1, [1], "last")], "start -1"),
        ([(0, 0, [-1], "last")], "token id or position out of range"),
        ([(0, 0, [1 << 31], "last")], "token id or position out of range"),
        ([(0, (1 << 31) - 1, [1], "last")], "token id or position out of range"),
        ([(0, 0, [1], "first")], "logits 'first', expected 'last', 'all' or 'none'"),
    ],
)
def test_refusals(parts, says):
    with pytest.raises(ValueError, match=says) as fault:
        make_batch(parts)
    assert "\n" not in str(fault.value)
