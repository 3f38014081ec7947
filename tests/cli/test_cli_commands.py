"""What each command prints and writes, on a tiny model under the reference's op table."""

import builtins
import json
import re

import numpy as np
import pytest

import refimpl.ops
from fastpath.cli.__main__ import main
from fastpath.lanes import Lanes
from fastpath.load import load_model
from tests import tiny
from tests.tolerances import CHUNKS_FLOAT32

IDS = tiny.prompt("e2b")[:11]
TOKENS = ",".join(map(str, IDS))


@pytest.fixture
def options(tiny_path):
    return ("--model", tiny_path, "--backend", "ref")


@pytest.fixture(scope="module")
def model(tiny_path):
    return load_model(tiny_path)


def logits_of(model, **options):
    return Lanes(model, refimpl.ops, **options).extend([(0, IDS)], "all")


class TestHelp:
    def test_main_lists_the_subcommands(self, twinpath):
        outcome = twinpath("--help")
        assert outcome.status == 0
        assert all(
            name in outcome.out for name in ("inspect", "tokenize", "render", "logits", "trace", "diff")
        )

    @pytest.mark.parametrize("command", ["inspect", "tokenize", "render", "logits", "trace", "diff"])
    def test_subcommands(self, twinpath, command):
        outcome = twinpath(command, "--help")
        assert outcome.status == 0 and f"twinpath {command}" in outcome.out


class TestInspect:
    def test_layers_types_and_cache(self, twinpath, tiny_path, model):
        out = twinpath("inspect", tiny_path, "--context", 100, "--chunk", 50).out
        layers = [line.split() for line in out.splitlines() if line[:5].strip().isdecimal()]
        assert len(layers) == model.config.n_layers
        assert layers[3][1:6] == ["global", "-", "4", "1", "32"] and "own" in layers[3]
        assert layers[4][1:6] == ["sliding", "8", "4", "1", "16"] and layers[4][8:10] == ["layer", "2"]
        total = next(line for line in out.splitlines() if line.startswith("total"))
        n_values = sum(t.n_rows * t.row_len for t in model.file.tensors.values())
        assert total.split()[1:3] == [str(len(model.file.tensors)), str(n_values)]

    @pytest.mark.parametrize("kv_type", ["f16", "bf16,f32"])
    @pytest.mark.parametrize("n_seqs", [1, 3])
    def test_bytes_of_the_cache_are_those_that_are_allocated(
        self, twinpath, tiny_path, model, kv_type, n_seqs
    ):
        options = ["--context", 100, "--chunk", 50, "--sequences", n_seqs, "--kv-type", kv_type]
        out = twinpath("inspect", tiny_path, *options).out
        types = tuple(kv_type.split(",")) if "," in kv_type else kv_type
        cache = Lanes(model, refimpl.ops, context_len=100, chunk=50, n_seqs=n_seqs, kv_type=types).cache
        assert f"({cache.nbytes} bytes)" in out
        rows = {
            line.split()[0]: line.split()[1:]
            for line in out.splitlines()
            if line.startswith(("global ", "sliding "))
        }
        assert {kind: int(row[-3]) for kind, row in rows.items()} == {
            kind: pool.n for kind, pool in cache.pools.items()
        }
        assert sum(int(row[-3]) * int(row[-2]) for row in rows.values()) == cache.nbytes
        # layers, heads, size, pages of 64 for 100 positions, or for 7 + 50
        assert rows["global"][:4] == ["1", "1", "32", "2"] and rows["sliding"][:4] == ["3", "1", "16", "2"]

    def test_context_beyond_the_model(self, fault, tiny_path):
        assert "made for 512" in fault("inspect", tiny_path, "--context", 513)


class TestText:
    def test_tokenize_and_back(self, twinpath, tiny_path):
        out = twinpath("tokenize", "--model", tiny_path, "the model\n<|turn>").out
        ids = [int(i) for i in out.splitlines()[0].split(",")]
        assert len(out.splitlines()) == 1 + len(ids)
        assert (
            twinpath("tokenize", "--model", tiny_path, "--ids", out.splitlines()[0]).out
            == "the model\n<|turn>\n"
        )

    def test_bos_special_and_stdin(self, twinpath, tiny_path):
        first = twinpath(
            "tokenize", "--model", tiny_path, "-", "--bos", "--special", stdin=b"<|turn>user"
        ).out
        assert first.startswith("2,15,") and "'<|turn>'" in first

    def test_render(self, twinpath, tiny_path, tmp_path, model):
        messages = [
            {"role": "system", "content": "be the model"},
            {"role": "user", "content": "turn <|turn>"},
        ]
        (tmp_path / "m.json").write_text(json.dumps(messages))
        out = twinpath("render", "--model", tiny_path, tmp_path / "m.json").out
        text, _, ids = out.rstrip("\n").rpartition("\n\n")
        assert text == model.template.render(messages)
        assert [int(i) for i in ids.split(",")] == model.template.render_ids(model.tokenizer, messages)

    def test_render_options(self, twinpath, tiny_path, tmp_path):
        (tmp_path / "t.json").write_text(json.dumps([{
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
        }]))  # fmt: skip
        messages = b'[{"role": "user", "content": "hi"}]'
        plain = twinpath("render", "--model", tiny_path, "-", stdin=messages).out
        full = twinpath(
            "render", "--model", tiny_path, "-", "--think", "--tools", tmp_path / "t.json", stdin=messages
        ).out
        closed = twinpath("render", "--model", tiny_path, "-", "--no-generation-prompt", stdin=messages).out
        assert "<|think|>" in full and "declaration:weather" in full and "<|think|>" not in plain
        assert "<|turn>model" in plain and "<|turn>model" not in closed


class TestLogits:
    def test_the_file_is_float32_and_the_engines(self, twinpath, options, tmp_path, model):
        outcome = twinpath("logits", *options, "--tokens", TOKENS, "--out", tmp_path / "l.npy")
        assert outcome.status == 0 and "float32 [11, 361]" in outcome.out
        got = np.load(tmp_path / "l.npy", allow_pickle=False)
        assert got.dtype == np.float32 and got.tobytes() == logits_of(model).tobytes()

    def test_chunks(self, twinpath, options, tmp_path, model):
        twinpath("logits", *options, "--tokens", TOKENS, "--chunk", 4, "--out", tmp_path / "l.npy")
        np.testing.assert_allclose(np.load(tmp_path / "l.npy"), logits_of(model), rtol=0, atol=CHUNKS_FLOAT32)

    def test_a_prompt_raw_and_in_the_template(self, twinpath, options, tmp_path, model):
        twinpath("logits", *options, "--raw", "--prompt", "<bos>the user", "--out", tmp_path / "raw.npy")
        n_raw = len(model.tokenizer.encode("the user")) + 1
        assert len(np.load(tmp_path / "raw.npy")) == n_raw
        twinpath("logits", *options, "--prompt", "the user", "--out", tmp_path / "chat.npy")
        n_chat = len(np.load(tmp_path / "chat.npy"))
        assert n_chat > n_raw
        twinpath("logits", *options, "--think", "--prompt", "the user", "--out", tmp_path / "think.npy")
        n_think = len(np.load(tmp_path / "think.npy"))
        assert n_think > n_chat
        words = ("--think", "--system", "Be brief.", "--prompt", "the user", "--out", tmp_path / "all.npy")
        twinpath("logits", *options, *words)
        assert len(np.load(tmp_path / "all.npy")) > n_think


@pytest.fixture(scope="module")
def traces(tmp_path_factory, tiny_path):
    """A folder with two traces of one prompt: a.npz in one chunk, b.npz in four."""
    folder = tmp_path_factory.mktemp("traces")
    base = ["trace", "--model", str(tiny_path), "--backend", "ref", "--tokens", TOKENS]
    assert main([*base, "--out", str(folder / "a.npz")]) == 0
    assert main([*base, "--chunk", "3", "--out", str(folder / "b.npz")]) == 0
    return folder


class TestTraceAndDiff:
    def test_equal_traces_are_within_budget(self, twinpath, traces):
        outcome = twinpath("diff", traces / "a.npz", traces / "b.npz")
        assert outcome.status == 0
        assert "budget column: int8" in outcome.out and "within budget: all" in outcome.out

    def test_the_first_name_over_is_named(self, twinpath, traces, tmp_path):
        arrays = dict(np.load(traces / "a.npz", allow_pickle=False))
        for name in ("kqv_out-2", "l_out-4", "result_output"):
            arrays[name] = arrays[name] * 1.5
        np.savez(tmp_path / "c.npz", **arrays)
        outcome = twinpath("diff", traces / "a.npz", tmp_path / "c.npz")
        assert outcome.status == 1
        assert (
            outcome.out.splitlines()[-1].startswith("OVER: 3 of")
            and "kqv_out-2" in outcome.out.splitlines()[-1]
        )

    def test_a_wrong_row_is_named(self, twinpath, traces, tmp_path):
        arrays = dict(np.load(traces / "a.npz", allow_pickle=False))
        arrays["Kcur_pos-2"] = arrays["Kcur_pos-2"].copy()
        arrays["Kcur_pos-2"][5] *= 1.5
        np.savez(tmp_path / "c.npz", **arrays)
        outcome = twinpath("diff", traces / "a.npz", tmp_path / "c.npz", "--column", "different")
        assert outcome.status == 1
        assert outcome.out.splitlines()[-1].endswith("is Kcur_pos-2, worst at position 5")
        assert all(len(line) < 110 for line in outcome.out.splitlines()[3:])

    def test_a_trace_of_another_engine(self, twinpath, traces, tmp_path):
        """No metadata, heads joined, one name missing, one unknown."""
        arrays = dict(np.load(traces / "a.npz", allow_pickle=False))
        del arrays["__meta__"], arrays["Kcur-1"]
        arrays = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
        np.savez(tmp_path / "other.npz", **arrays, mystery=np.ones(3))
        outcome = twinpath("diff", traces / "a.npz", tmp_path / "other.npz")
        assert outcome.status == 0
        assert "budget column: different" in outcome.out
        assert "only in A: Kcur-1" in outcome.out and "only in B: mystery" in outcome.out

    def test_unlike_traces_are_noticed(self, twinpath, traces, tmp_path, options):
        twinpath("trace", *options, "--tokens", TOKENS[:-1] + "7", "--out", tmp_path / "d.npz")
        assert "different prompts" in twinpath("diff", traces / "a.npz", tmp_path / "d.npz").out

    def test_the_budget_is_printed(self, twinpath):
        outcome = twinpath("diff", "--budget")
        assert outcome.status == 0 and "| `l_out` |" in outcome.out


def interrupted_at(n):
    """Lanes.forward, whose n-th call is ended by Ctrl+C."""
    forward, calls = Lanes.forward, []

    def interrupted(self, *given, **options):
        calls.append(given)
        if len(calls) == n:
            raise KeyboardInterrupt
        return forward(self, *given, **options)

    return interrupted


class TestInference:
    def expected(self, model, prompt, n):
        ids = model.tokenizer.encode(prompt, add_bos=True)
        for _ in range(n):
            logits = Lanes(model, refimpl.ops).prefill(ids)
            logits[list(model.tokenizer.suppress_ids)] = -np.inf
            ids.append(int(logits.argmax()))
        return ids[-n:]

    def test_raw(self, twinpath, options, model, tmp_path):
        tokens = self.expected(model, "the user", 5)
        text = model.tokenizer.decode(tokens) + "\n"
        (tmp_path / "p.txt").write_text("the user")
        for source in (["--prompt", "the user"], ["--input", tmp_path / "p.txt"], ["-"]):
            outcome = twinpath(*options, "--raw", *source, "--max-tokens", 5, stdin=b"the user")
            assert outcome == (0, text, "")

    def test_a_stop_string(self, twinpath, options, model):
        text = model.tokenizer.decode(self.expected(model, "the user", 5))
        outcome = twinpath(
            *options, "--raw", "--prompt", "the user", "--stop", "zzz", text[1:3], "--max-tokens", 5
        )
        assert outcome.out == text[: text.find(text[1:3])] + "\n"

    def test_chat_and_statistics(self, twinpath, options):
        outcome = twinpath(*options, "--system", "the", "--prompt", "user", "--max-tokens", 3, "--stats")
        assert outcome.status == 0
        assert [line.split()[0] for line in outcome.err.splitlines()] == [
            "load",
            "backend",
            "kernels",
            "weights",
            "prefill",
            "decode",
            "cache",
            "memory",
        ]

    def test_progress_of_a_long_prompt(self, twinpath, options):
        outcome = twinpath(*options, "--raw", "--prompt", "the " * 10, "--chunk", 8, "--max-tokens", 1)
        assert outcome.err.splitlines()[0] == "prompt: 8 of 13 tokens"

    def test_a_seed_gives_the_same_answer_again(self, twinpath, options):
        words = (*options, "--raw", "--prompt", "the", "--max-tokens", 6, "--temperature", 1)
        first, again, other = (twinpath(*words, "--seed", seed).out for seed in (1, 1, 2))
        assert first == again != other

    def test_interrupted_keeps_what_was_said(self, twinpath, options, model, monkeypatch):
        tokens = self.expected(model, "the user", 3)
        monkeypatch.setattr(Lanes, "forward", interrupted_at(4))  # the prompt's, and the third of those after
        outcome = twinpath(*options, "--raw", "--prompt", "the user", "--max-tokens", 9, "--stats")
        assert outcome.status == 130 and outcome.out == model.tokenizer.decode(tokens) + "\n"
        assert "ended by: interrupted" in outcome.err

    @pytest.mark.parametrize("module", ["fastpath.cli.arguments", "fastpath.cli.answer"])
    def test_interrupted_in_an_import(self, twinpath, options, monkeypatch, module):
        plain = builtins.__import__

        def interrupted(name, *given, **options):
            if name == module:
                raise KeyboardInterrupt
            return plain(name, *given, **options)

        monkeypatch.setattr(builtins, "__import__", interrupted)
        outcome = twinpath(*options, "--prompt", "user")
        monkeypatch.undo()
        assert outcome == (130, "", "twinpath: interrupted\n")

    def test_interrupted_prompt_counts_the_tokens_that_were_read(self, twinpath, options, monkeypatch):
        monkeypatch.setattr(Lanes, "forward", interrupted_at(3))
        outcome = twinpath("--prompt", "Hello there", *options, "--chunk", "4", "--stats")
        assert outcome.status == 130
        assert "prefill  8 tokens in" in outcome.err and "ended by: interrupted" in outcome.err

    def test_raw_has_one_bos(self, twinpath, options):
        counts = set()
        for bos in ("", "<bos>", "<bos><bos>"):
            said = twinpath(*options, "--raw", "--prompt", f"{bos}the user", "--max-tokens", 1, "--stats").err
            counts.add(re.search(r"^prefill +(\d+) tokens", said, re.MULTILINE)[1])
        assert len(counts) == 1, counts


class TestOutputFiles:
    """A file that a command writes is whole, or what it was."""

    @pytest.fixture(params=["logits", "trace"])
    def write(self, request, twinpath, options):
        return lambda out: twinpath(request.param, *options, "--tokens", TOKENS, "--out", out)

    def test_a_fault_leaves_the_old_file(self, write, tmp_path, monkeypatch):
        (tmp_path / "f").write_bytes(b"old")
        for error, status in ((KeyboardInterrupt, 130), (OSError(28, "No space left on device"), 2)):

            def failing(self, *given, error=error, **options):
                raise error

            monkeypatch.setattr(Lanes, "extend", failing)
            assert write(tmp_path / "f").status == status
            assert write(tmp_path / "new").status == status
            assert [path.name for path in tmp_path.iterdir()] == ["f"]
            assert (tmp_path / "f").read_bytes() == b"old"

    def test_replaced_with_its_permissions_behind_its_link(self, write, tmp_path):
        (tmp_path / "f").write_bytes(b"old")
        (tmp_path / "f").chmod(0o640)
        (tmp_path / "link").symlink_to("f")
        assert write(tmp_path / "link").status == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "f").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "f").stat().st_size > 100
        assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "link"]

    def test_never_the_model(self, fault, options, tiny_path):
        assert "is the model itself" in fault("logits", *options, "--tokens", "2", "--out", tiny_path)


def test_a_byte_order_mark_is_no_text(twinpath, tiny_path):
    outputs = [
        twinpath("tokenize", "-", "--model", tiny_path, stdin=bom + b"hi").out
        for bom in (b"", b"\xef\xbb\xbf")
    ]
    assert outputs[0] == outputs[1] != ""
