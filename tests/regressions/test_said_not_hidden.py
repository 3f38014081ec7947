"""Known faults of engines that went on in silence: what is ignored or ends early is said."""

import numpy as np
import pytest

import refimpl.ops
from fastpath.cli.__main__ import main
from fastpath.engine import Engine
from fastpath.generate import generate
from fastpath.load import load_model
from quant import QTensor, open_gguf, write_gguf
from refimpl.frontend.sampling import SamplingParams
from refimpl.frontend.tokenizer import Tokenizer
from tests import tiny
from tests.frontend.vocab import small_metadata


def rewritten(path, change):
    """The tiny 12b model with tensors changed in place: change(dict of name -> QTensor)."""
    file = open_gguf(tiny.make(path.with_name("plain.gguf"), "12b"))
    tensors = dict(file.tensors)
    change(tensors)
    write_gguf(path, {key: file.metadata.typed(key) for key in file.metadata}, tensors)
    return path


def test_d1_a_tensor_that_nothing_reads_is_named(tmp_path, capsys):
    def add(tensors):
        tensors["blk.0.attn_q.bias"] = QTensor.from_array(np.ones(96, np.float32), "F32", "blk.0.attn_q.bias")

    path = rewritten(tmp_path / "m.gguf", add)
    assert (
        main(["--model", str(path), "--backend", "ref", "--raw", "--prompt", "a", "--max-tokens", "1"]) == 0
    )
    assert "note: tensors of this file that are not used: blk.0.attn_q.bias\n" in capsys.readouterr().err


def test_d5_a_token_for_ever_ends_at_the_limit(tmp_path):
    """All logits equal: token 0 each time.  No hidden penalty, and the reason is the length."""

    def mute(tensors):
        tensors["output_norm.weight"] = QTensor.from_array(
            np.zeros(80, np.float32), "F32", "output_norm.weight"
        )

    model = load_model(rewritten(tmp_path / "m.gguf", mute))
    generation = generate(Engine(model, refimpl.ops), tiny.prompt("12b")[:5], SamplingParams(), 12)
    assert list(generation) == [0] * 12
    assert generation.reason == "length"


@pytest.mark.parametrize("command", ["trace", "logits"])
def test_the_model_is_not_overwritten_by_its_own_numbers(tmp_path, capsys, command):
    """Truncating a mapped file would end the process by a signal, and the model with it."""
    path = tiny.make(tmp_path / "m.gguf", "12b")
    before = path.read_bytes()
    words = [command, "--model", path, "--backend", "ref", "--tokens", "2,5", "--out", path]
    assert main([str(word) for word in words]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_o14_a_token_of_a_million_characters():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] += ["x" * (1 << 20)]
    metadata["tokenizer.ggml.token_type"] += [1]
    tokenizer = Tokenizer(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.merges"],
        metadata["tokenizer.ggml.token_type"],
        bos_id=metadata["tokenizer.ggml.tokens"].index("<bos>"),
    )
    assert tokenizer.decode([tokenizer.n_vocab - 1]) == "x" * (1 << 20)
    assert tokenizer.decode(tokenizer.encode("the hello")) == "the hello"
