"""The embedded checkpoint is the default: the compiled engine and the definitions give one answer."""

import pytest

import refimpl.kv_types
from fastpath import repack
from fastpath.cli.arguments import KV_TYPES
from fastpath.cpu import packing
from fastpath.load import DEMO, load_model


@pytest.mark.parametrize("words", [["--prompt", "Who are you?"], ["--think", "--prompt", "What is 47+38?"]])
def test_the_same_answer_from_both_op_tables(twinpath, words):
    compiled, defined = (twinpath(*words, "--backend", backend) for backend in ("cpu", "ref"))
    assert compiled.status == 0 and compiled.out == defined.out
    assert ("[thought]" in compiled.out) == ("--think" in words)
    assert "--think" not in words or compiled.out.endswith("85.\n")


def test_statistics_go_to_stderr(twinpath):
    outcome = twinpath("--prompt", "Hello", "--stats", "--max-tokens", 4, "--threads", 1)
    assert "tokens/s" in outcome.err and "tokens/s" not in outcome.out


def test_each_part_of_a_start_is_in_the_statistics(twinpath):
    lines = dict(
        line.split(maxsplit=1)
        for line in twinpath("--prompt", "Hello", "--stats", "--max-tokens", 4).err.splitlines()
    )
    parts = {part.split()[0]: float(part.split()[1]) for part in lines["load"].split(": ")[1].split(", ")}
    names = ["interpreter", "imports", "header", "tokenizer", "prompt", "cache", "kernels", "repack"]
    assert [name for name in names if name in parts] == list(parts)
    assert set(names) - set(parts) <= {"interpreter"}  # of which only Linux tells
    assert abs(sum(parts.values()) - float(lines["load"].split()[0])) < 0.01 * len(names)
    assert " on " in lines["kernels"] and "thread" in lines["kernels"]
    model = load_model(DEMO)
    assert f"{model.packed().private_bytes / 1e6:.1f} MB packed" in lines["weights"]


@pytest.mark.parametrize(
    "words",
    [["--no-repack"], ["--no-replay"], ["--no-repack", "--no-replay"], ["--threads", 1], ["--threads", 3]],
)
def test_how_it_is_computed_does_not_change_the_answer(twinpath, words):
    plain, other = (twinpath("--prompt", "What is 47+38?", *more) for more in ([], words))
    assert other == plain and plain.status == 0


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16,bf16", "f32,f16", "q8_0"])
def test_types_of_keys_and_values(twinpath, kv_type):
    compiled, defined = (
        twinpath("--prompt", "Who are you?", "--kv-type", kv_type, "--backend", backend)
        for backend in ("cpu", "ref")
    )
    assert compiled.status == 0 and compiled.out == defined.out


@pytest.mark.parametrize("kv_type", ["q5_0", "", "f16,f16,f16", "f16,", "F16", "f64"])
def test_other_types_are_refused(fault, kv_type):
    assert "f16, bf16, f32" in fault("--prompt", "Hi", "--kv-type", kv_type)


def test_the_types_are_those_of_the_cache():
    assert {*KV_TYPES, "f64"} == {*refimpl.kv_types.KV_TYPES}


def test_memory_that_is_not_there(fault, twinpath, monkeypatch):
    monkeypatch.setattr(repack, "available_bytes", lambda: 1000)
    assert "--no-repack" in fault("--prompt", "Hello")
    assert twinpath("--prompt", "Hello", "--no-repack", "--max-tokens", 1).status == 0


def test_interrupted_while_packing(twinpath, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "pack", interrupted)
    assert twinpath("--prompt", "Hello") == (130, "", "twinpath: interrupted\n")


def test_inspect_needs_no_name(twinpath):
    assert "Twinpath" in twinpath("inspect").out
