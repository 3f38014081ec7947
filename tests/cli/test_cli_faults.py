"""Wrong input: one line on stderr that says what to do, exit status 2, no traceback."""

import json
import os
import warnings

import numpy as np
import pytest

from fastpath.cli.__main__ import main
from fastpath.load import load_model
from tests import tiny

HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no prompt. Use --prompt TEXT"),
        (["--prompt", "hi", "--no-such-flag"], "--no-such-flag"),
        (["--modle", "x.gguf", "--prompt", "hi"], "unknown option --modle"),
        (["--prompt", "--hi"], "unknown option --hi (a text that begins with - is given as --option=TEXT)"),
        (["inspect", "--contxt=5"], "unknown option --contxt "),
        (["hello"], "'hello' is neither a subcommand nor '-'"),
        (["--prompt"], "--prompt"),
        (["--prompt", "hi", "--input", "x.txt"], "not allowed with"),
        (["--prompt", "hi", "--threads", "0"], "'0' is not a whole number from 1 to 256"),
        (["--prompt", "hi", "--threads", "two"], "'two' is not a whole number from 1"),
        (["--prompt", "hi", "--max-tokens", "-1"], "'-1' is not a whole number of at least 1"),
        (["--prompt", "hi", "--max-tokens", "1.5"], "'1.5' is not a whole number"),
        (["--prompt", "hi", "--context", "0"], "--context"),
        (["--prompt", "hi", "--chunk", "0"], "--chunk"),
        (["--prompt", "hi", "--temperature", "-0.1"], "'-0.1' is not a number of at least 0"),
        (["--prompt", "hi", "--temperature", "nan"], "'nan' is not a number"),
        (["--prompt", "hi", "--top-p", "0"], "'0' is not a number above 0 and at most 1"),
        (["--prompt", "hi", "--top-p", "1.1"], "top-p"),
        (["--prompt", "hi", "--min-p", "2"], "min-p"),
        (["--prompt", "hi", "--top-k", "-1"], "top-k"),
        (["--prompt", "hi", "--top-k", str(2**40)], "whole number from 0 to 2147483648"),
        (["--input", ""], "the file to read is empty"),
        (["tokenize", "--input", ""], "the file to read is empty"),
        (["--prompt", "hi", "--repeat-penalty", "0"], "repeat-penalty"),
        (["--prompt", "hi", "--frequency-penalty", "inf"], "frequency-penalty"),
        (["--prompt", "hi", "--seed", "-1"], "seed"),
        (["--prompt", "hi", "--seed", str(2**64)], "seed"),
        (["--prompt", "hi", "--backend", "cuda"], "cuda"),
        (["--prompt", "hi", "--stop"], "--stop"),
        (["--prompt", "hi", "--raw", "--think"], "--raw has no template"),
        (["--prompt", "hi", "--raw", "--system", "x"], "--raw has no template"),
        (["logits", "--prompt", "hi", "--raw", "--think", "--out", "x.npy"], "--raw has no template"),
        (["logits", "--out", "x.npy"], "--tokens --prompt"),
        (["logits", "--tokens", "1,x", "--out", "x.npy"], "'1,x' is not a list of token ids"),
        (["logits", "--tokens", "1,2"], "--out"),
        (["trace", "--tokens", ",", "--out", "x.npz"], "not a list of token ids"),
        (["tokenize"], "TEXT"),
        (["render"], "MESSAGES.json"),
        (["--model", "", "--prompt", "hi"], "the model's name is empty"),
        (["inspect", ""], "the model's name is empty"),
        (["inspect", "--model", ""], "the model's name is empty"),
        (["--prompt", "a\udcff"], "--prompt: byte 1 is not UTF-8 text. Save the text as UTF-8"),
        (["--prompt", "a", "--system", "\udcff"], "--system: byte 0 is not UTF-8"),
        (["--prompt", "a", "--stop", "é\udcff"], "--stop: byte 2 is not UTF-8"),
        (["tokenize", "\udcff"], "byte 0 is not UTF-8"),
        (["tokenize", "\ud800"], "character 0 is not one that UTF-8 can write"),
        (["diff"], "needs two traces"),
        (["diff", "--column", "bf16", "a", "b"], "bf16"),
    ],
)
def test_arguments(fault, words, says):
    assert says in fault(*words)


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory, tiny_path):
    folder = tmp_path_factory.mktemp("bad")
    good = tiny_path.read_bytes()
    files = {
        "html.gguf": HTML,
        "empty.gguf": b"",
        "truncated.gguf": good[: len(good) * 2 // 3],
        "header_cut.gguf": good[:50],
        "lfs.gguf": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tiny.make(folder / "other_arch.gguf", "12b", keys={"general.architecture": "llama"})
    tiny.make(folder / "no_tensor.gguf", "12b", drop=("blk.3.ffn_down.weight",))
    return folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.gguf", "No such file"),
        ("", "folder"),
        ("html.gguf", "HTML"),
        ("empty.gguf", "empty"),
        ("truncated.gguf", "truncated.gguf"),
        ("header_cut.gguf", "header_cut.gguf"),
        ("lfs.gguf", "lfs"),
        ("other_arch.gguf", "'llama'"),
        ("no_tensor.gguf", "blk.3.ffn_down"),
    ],
)
def test_model_files(fault, bad_files, name, says):
    line = fault("--model", bad_files / name, "--prompt", "hi")
    assert says.lower() in line.lower()
    assert fault("inspect", bad_files / name) == line


class TestPrompts:
    @pytest.fixture(autouse=True)
    def _options(self, fault, tiny_path):
        self.fault = lambda *words, **options: fault(
            "--model", tiny_path, "--backend", "ref", *words, **options
        )

    @pytest.mark.parametrize("text", ["", "  \n\t"])
    def test_empty(self, text, tmp_path):
        (tmp_path / "p.txt").write_text(text)
        assert "prompt is empty" in self.fault("--prompt", text)
        assert "prompt is empty" in self.fault("--input", tmp_path / "p.txt")
        assert "prompt is empty" in self.fault("-", stdin=text.encode())

    def test_longer_than_the_context(self):
        assert "the context holds 16" in self.fault("--raw", "--context", 16, "--prompt", "abc " * 20)
        assert "the context holds 512" in self.fault("--prompt", "abc " * 600)

    def test_context_beyond_the_model(self):
        assert "made for 512" in self.fault("--context", 513, "--prompt", "hi")

    def test_not_utf8(self, tmp_path):
        (tmp_path / "p.txt").write_bytes(b"abc\xff")
        assert "p.txt: byte 3 is not UTF-8" in self.fault("--input", tmp_path / "p.txt")
        assert "standard input: byte 0 is not UTF-8" in self.fault("-", stdin=b"\xff")

    def test_input_that_is_no_file(self, tmp_path):
        assert "No such file" in self.fault("--input", tmp_path / "missing.txt")
        assert "directory" in self.fault("--input", tmp_path)

    def test_empty_stop_string(self):
        assert "empty" in self.fault("--prompt", "hi", "--stop", "")

    def test_closed_stdin(self, monkeypatch):
        monkeypatch.setattr("sys.stdin", None)
        assert "standard input is closed" in self.fault("-")


class TestNumbers:
    @pytest.fixture(autouse=True)
    def _options(self, fault, tiny_path):
        model = ("--model", tiny_path, "--backend", "ref")
        self.fault = lambda command, *words: fault(command, *model, *words)

    @pytest.mark.parametrize("command", ["logits", "trace"])
    def test_token_out_of_range(self, command, tmp_path):
        V = tiny.FAMILIES["e2b"].V
        line = self.fault(command, "--tokens", f"2,{V}", "--out", tmp_path / "x")
        assert f"token id {V} is out of range: this model has tokens 0 to {V - 1}" in line
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize("command", ["logits", "trace"])
    def test_more_tokens_than_the_context(self, command, tmp_path):
        line = self.fault(command, "--context", 4, "--tokens", "2,3,4,5,6", "--out", tmp_path / "x")
        assert "5 tokens, the context holds 4" in line

    @pytest.mark.parametrize("command", ["logits", "trace"])
    def test_output_that_cannot_be_written(self, command, tmp_path):
        assert "directory" in self.fault(command, "--tokens", "2", "--out", tmp_path)
        assert "No such file" in self.fault(command, "--tokens", "2", "--out", tmp_path / "no" / "x")

    def test_negative_ids_in_tokenize(self, fault, tiny_path):
        assert "out of range" in fault("tokenize", "--model", tiny_path, "--ids", "2 -1")


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "non-empty JSON list"),
        ('"hi"', "non-empty JSON list"),
        ("[1]", "list of objects"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        ('[{"content": "x"}]', "m.json: messages[0]"),
        (
            '[{"role": "wizard", "content": "x"}]',
            "m.json: messages[0].role: 'wizard', expected one of system",
        ),
        (
            '[{"role": "user", "content": "x", "n": 1e999}]',
            "m.json: messages are not usable: the number 1e999",
        ),
        ('[{"role": "user", "content": "x", "n": NaN}]', "the number NaN is not finite"),
        (
            '[{"role": "user", "content": "x", "n": ' + "1" * 6000 + "}]",
            "m.json: messages are not usable: a number",
        ),
    ],
)
def test_messages(fault, tiny_path, tmp_path, text, says):
    assert says in fault("render", "--model", tiny_path, write(tmp_path / "m.json", text))


def test_tools_that_are_no_list(fault, tiny_path, tmp_path):
    messages = write(tmp_path / "m.json", json.dumps([{"role": "user", "content": "x"}]))
    tools = write(tmp_path / "t.json", '{"name": "f"}')
    assert "tools must be a non-empty JSON list" in fault(
        "render", "--model", tiny_path, messages, "--tools", tools
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": [1]}, "parameters.properties: [1], expected an object"),
        ({"properties": {"q": {"properties": "x"}}}, "parameters.properties.'q'.properties: 'x', expected"),
        ({"properties": {"q": {"anyOf": 1}}}, "parameters.properties.'q'.anyOf: 1, expected a list"),
        ({"allOf": True}, "parameters.allOf: True, expected a list"),
    ],
)
def test_tools_with_odd_schemas(fault, tiny_path, tmp_path, schema, says):
    messages = write(tmp_path / "m.json", json.dumps([{"role": "user"}]))
    function = {"name": "f", "parameters": {"type": "object", **schema}}
    tools = write(tmp_path / "t.json", json.dumps([{"type": "function", "function": function}]))
    line = fault("render", "--model", tiny_path, messages, "--tools", tools)
    assert f"t.json: tools[0].function.{says}" in line


def test_a_message_without_content_is_empty(twinpath, tiny_path, tmp_path):
    messages = write(tmp_path / "m.json", json.dumps([{"role": "user"}]))
    outcome = twinpath("render", "--model", tiny_path, messages)
    assert outcome.status == 0 and "<|turn>user\n<turn|>" in outcome.out


def test_traces(fault, tmp_path):
    assert "No such file" in fault("diff", tmp_path / "a.npz", tmp_path / "b.npz")
    (tmp_path / "a.npz").write_bytes(b"nothing")
    assert "not a trace" in fault("diff", tmp_path / "a.npz", tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    np.savez(tmp_path / "c.npz", y=np.ones(3))
    assert "no name in common" in fault("diff", tmp_path / "b.npz", tmp_path / "c.npz")


def test_overlong_words_are_cut(fault):
    for words in (["inspect", "a" * 5000], ["--prompt", "x", "--seed", "1" * 5000 + "x"]):
        line = fault(*words)
        assert len(line) < 600 and "[...]" in line


def test_a_broken_template_names_the_file(fault, tmp_path):
    for source in ("{% for %}", "{{ messages.nothing.at.all }}", "{{ raise_exception('no') }}"):
        path = tiny.make(tmp_path / "m.gguf", "12b", keys={"tokenizer.chat_template": source})
        line = fault("--model", path, "--backend", "ref", "--prompt", "hi")
        assert f"{path}: chat template: " in line and "raw prompt" in line


def test_damaged_weights_under_the_reference(tmp_path):
    """NumPy's warnings say nothing that the line does not say."""
    path = tiny.make(tmp_path / "broken.gguf", "e2b")
    data = bytearray(path.read_bytes())
    at = bytes(data).index(load_model(path).file.tensors["blk.1.attn_q_norm.weight"].data.tobytes())
    data[at : at + 8] = np.float32([np.nan, np.inf]).tobytes()
    path.write_bytes(data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        status = main(["--model", str(path), "--backend", "ref", "--prompt", "hi"])
    assert status == 2 and said == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(12, "Cannot allocate memory"), OSError(12, "Cannot allocate memory", "x.gguf"), MemoryError(),
        MemoryError("Unable to allocate 9.3 GiB"), RuntimeError("can't start new thread"),
        ImportError("libfoo.so: failed to map segment from shared object"),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--prompt", "hi"], "--context and --chunk"), (["bench", "-p", "1"], "--batch"),
        (["inspect"], "Free memory"),
    ],
)  # fmt: skip
def test_memory_is_named_with_numbers(fault, monkeypatch, error, words, advice):
    """Under a limit of addresses, as by `ulimit -v`: Python and NumPy say it in many ways."""
    import resource

    from fastpath.cli import __main__

    def refused(words):
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda which: (2_000_000_000, 2_000_000_000))
    monkeypatch.setattr(__main__, "_run", refused)
    line = fault(*words)
    assert "out of memory" in line and "permissions" not in line and advice in line
    assert "2000 MB of addresses (ulimit -v)" in line
    assert str(error).removeprefix("[Errno 12] ").split(":")[0] in line


def test_memory_is_named_when_a_library_speaks_of_permissions(fault, monkeypatch):
    """As llvmlite does, whose words stand before the system's."""
    from fastpath.cli import __main__

    def refused(words):
        try:
            raise OSError("lib.so: failed to map segment from shared object")
        except OSError as error:
            raise OSError("not found, or the permissions are incorrect") from error

    monkeypatch.setattr(__main__, "_run", refused)
    line = fault("--prompt", "hi")
    assert "out of memory: lib.so: failed to map" in line and "permissions" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_model_without_permission(fault, tmp_path, tiny_path):
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny_path.read_bytes())
    path.chmod(0)
    assert "Permission denied" in fault("inspect", path)
