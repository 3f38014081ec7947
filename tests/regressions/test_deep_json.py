"""JSON nested so deeply that Python's parser gives up: one line, or as if it were not there."""

import numpy as np
import pytest

from fastpath.trace import META, load_trace
from refimpl.frontend.messages import _tool_call
from refimpl.media_tensors import _checkpoint_config

DEEP = "[" * 100_000


def test_in_a_trace(tmp_path):
    np.savez(tmp_path / "deep.npz", **{META: np.array(DEEP), "x": np.zeros(3)})
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(tmp_path / "deep.npz")


def test_in_the_arguments_of_a_tool_call():
    with pytest.raises(ValueError, match="no JSON"):
        _tool_call({"function": {"name": "f", "arguments": DEEP}}, "messages[0]", None)


def test_in_the_configuration_beside_a_shard(tmp_path):
    (tmp_path / "config.json").write_text(DEEP)
    found, notes = _checkpoint_config(tmp_path / "model.safetensors", 8)
    assert found == {} and "was not used" in notes[0]
