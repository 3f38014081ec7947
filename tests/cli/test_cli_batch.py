"""--batch-file: results in the order of the lines, each the answer that a run of its own gives."""

import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from fastpath.cli import batch_line
from fastpath.load import DEMO, load_model
from tests.media import files, tiny_mmproj

SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.98, "min_p": 0.01, "seed": 11}
ASKED = [
    {"prompt": "Who are you?"},
    {"prompt": "What is 47+38?", "max_tokens": 9},
    {"prompt": "Who are you?", "stop": ["demo"], "id": "same words"},
    {"prompt": "Tell me a story.", "max_tokens": 30, **SAMPLED},
    {"prompt": "The sky", "raw": True, "max_tokens": 12, "stop": "zz"},
    {"prompt": "What is 47+38?", "system": "Be short.", "max_tokens": 20},
    {"prompt": "Tell me a story.", "max_tokens": 30, **SAMPLED, "seed": 12},
]


def words_of(asked):
    """The same request as a command line."""
    words = []
    for name, value in asked.items():
        if name == "id":
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, *(value if isinstance(value, list) else [value])]
    return words


@pytest.fixture
def batch(twinpath, tmp_path):
    """batch([request, ...], words...) -> (the outcome, its results); requests may be lines as they are."""

    def run(requests, *words):
        path = tmp_path / "requests.jsonl"
        lines = [line if isinstance(line, str) else json.dumps(line) for line in requests]
        path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
        outcome = twinpath("--batch-file", path, *words)
        return outcome, [json.loads(line) for line in outcome.out.splitlines()]

    return run


@pytest.fixture(scope="module")
def alone():
    """The answers to ASKED, by a process's own runs."""
    from contextlib import redirect_stdout

    from fastpath.cli.__main__ import main

    texts = []
    for asked in ASKED:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main([str(word) for word in words_of(asked)]) == 0
        texts.append(out.getvalue().removesuffix("\n"))
    return texts


@pytest.mark.parametrize(
    "words", [[], ["--parallel", 1], ["--parallel", 3, "--chunk", 7], ["--batch", 3, "--kv-memory", "2M"]]
)
def test_each_line_is_answered_as_alone(batch, alone, words):
    outcome, results = batch(ASKED, *words)
    assert outcome.status == 0, outcome.err
    assert [r["text"] for r in results] == alone
    assert [r["id"] for r in results] == [1, 2, "same words", 4, 5, 6, 7]
    assert {r["reason"] for r in results} == {"stop", "length"}


def test_usage_is_counted(batch):
    """One at a time: the second finds all of the first prompt but its last token, which is computed again."""
    outcome, (first, second) = batch([ASKED[0], ASKED[0]], "--parallel", 1, "--stats")
    model = load_model(DEMO)
    messages = [{"role": "user", "content": ASKED[0]["prompt"]}]
    n = len(model.template.render_ids(model.tokenizer, messages))
    n_answer = len(model.tokenizer.encode(first["text"])) + 1  # and the end of the turn
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == n
    assert (first["usage"]["cached_tokens"], second["usage"]["cached_tokens"]) == (0, n - 1)
    assert first["usage"]["completion_tokens"] in (n_answer - 1, n_answer)
    assert f"{2 * n} tokens, {n - 1} of them from the prefix cache" in outcome.err


def test_the_next_turn_finds_the_turns_before(batch):
    turns = [{"role": "user", "content": "Who are you?"}]
    _, (first,) = batch([{"messages": turns}])
    longer = [*turns, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Hi"}]
    _, (again, second) = batch([{"messages": turns}, {"messages": longer}], "--parallel", 1)
    assert again["text"] == first["text"]
    assert second["usage"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_thoughts_and_tool_calls_stand_apart(batch, twinpath):
    alone = twinpath("--think", "--prompt", "What is 47+38?").out
    _, (result,) = batch([{"prompt": "What is 47+38?", "think": True}])
    assert alone == f"[thought] {result['thought']}\n[answer] {result['text']}\n"
    assert "tool_calls" not in result


def test_options_hold_for_lines_that_say_nothing(batch):
    words = ["--max-tokens", 4, "--stop", "small", "--system", "Be short."]
    asked = [
        {"prompt": "Who are you?"},
        {"prompt": "Who are you?", "max_tokens": 40, "system": "", "stop": []},
    ]
    _, (short, long) = batch(asked, *words)
    assert short["usage"]["completion_tokens"] == 4 and short["reason"] == "length"
    assert "small" in long["text"] and long["usage"]["prompt_tokens"] < short["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "its contents are not valid JSON: Expecting value at column 1"),
        ('{"prompt": "a"', "not valid JSON"),
        ("[1, 2]", "[1, 2], expected an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "Hi", "seed": ' + "9" * 2000 + "}", "2000 digits"),
        ('{"prompt": "Hi", "temperature": NaN}', "not finite"),
        ('{"prompt": "\udcff"}', "is not UTF-8"),
        ({}, "expected either a prompt or messages"),
        ({"prompt": "a", "messages": []}, "expected either a prompt or messages"),
        ({"prompt": "a", "max_token": 3}, "unknown field 'max_token', expected some of prompt,"),
        ({"prompt": 7}, "prompt: 7, expected a text"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"messages": []}, "expected a list with at least one message"),
        ({"messages": "Hi"}, "messages: 'Hi', expected a list"),
        ({"messages": [{"role": "clown", "content": "a"}]}, "messages[0].role: 'clown'"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "Leave one out"),
        ({"prompt": "a", "raw": True, "system": "b"}, "raw has no template"),
        ({"prompt": "a", "raw": "yes"}, "raw: 'yes', expected true or false"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: 0, expected a whole number of at least 1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "stop": [1]}, "stop: [1], expected texts that are not empty"),
        ({"prompt": "a", "stop": ""}, "stop: an empty text"),
        ({"prompt": "a", "id": [1]}, "id: [1], expected a text or a number"),
        ({"prompt": "a", "images": ["none.png"]}, "none"),
        ({"prompt": "word " * 5000}, "the context holds"),
    ],
)
def test_a_bad_line_is_one_error_and_the_others_go_on(batch, line, says):
    good = {"prompt": "Who are you?", "max_tokens": 3}
    outcome, results = batch([good, line, good], "--context", 300)
    assert outcome.status == 1 and len(results) == 3
    assert results[0]["text"] == results[2]["text"] != ""
    error = results[1]["error"]
    assert says in error and "requests.jsonl, line 2: " in error and "\n" not in error, error
    assert outcome.err.splitlines()[-1].startswith("1 of 3 lines got an error, the first: ")


def test_a_bad_line_keeps_its_id(batch):
    _, (result,) = batch([{"prompt": "a", "id": "mine", "top_p": 2}])
    assert result["id"] == "mine" and "top_p" in result["error"]


def test_blank_lines_count_and_have_no_result(batch):
    _, results = batch(["", {"prompt": "Who are you?", "max_tokens": 1}, "  \t", "x", ""])
    assert [r["id"] for r in results] == [2, 4] and "line 4" in results[1]["error"]


def test_an_endless_line_is_not_read_into_memory(batch, monkeypatch):
    monkeypatch.setattr(batch_line, "MAX_LINE", 100)
    asked = [{"prompt": "a" * 99}, {"prompt": "Hi", "max_tokens": 1}]
    _, (long, short) = batch(asked)
    assert "line 1: longer than 100 bytes" in long["error"] and short["id"] == 2 and "text" in short


def test_the_last_line_may_lack_its_end_and_the_first_may_have_a_mark(twinpath):
    stdin = b'\xef\xbb\xbf{"prompt": "Who are you?", "max_tokens": 2}\r\n{"prompt": "Hi", "max_tokens": 1}'
    outcome = twinpath("--batch-file", "-", stdin=stdin)
    assert outcome.status == 0 and len(outcome.out.splitlines()) == 2
    bad = twinpath("--batch-file", "-", stdin=b"{}")
    assert "standard input, line 1: " in json.loads(bad.out)["error"]


def test_files_that_hold_nothing_to_answer(fault, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    assert "empty.jsonl: no requests." in fault("--batch-file", tmp_path / "empty.jsonl")
    assert "none.jsonl: No such file" in fault("--batch-file", tmp_path / "none.jsonl")
    assert "Is a directory" in fault("--batch-file", tmp_path)
    assert "the batch file is empty" in fault("--batch-file", "")
    assert "standard input: no requests" in fault("--batch-file", "-", stdin=b"")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "Hi"], "not allowed with"),
        (["--image", "a.png"], "media belong to single lines"),
        (["--profile"], "--profile looks at one answer"),
        (["--parallel", 0], "'0' is not a whole number from 1"),
        (["--kv-memory", "4GB"], "'4GB' is not a number of bytes"),
        (["--kv-memory", "0"], "'0' is not a number of bytes"),
        (["--kv-memory", "1K"], "1000 bytes for keys and values, but 8 sequences need at least"),
    ],
)
def test_options_that_do_not_fit(fault, tmp_path, words, says):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Hi"}')
    assert says in fault("--batch-file", path, *words)


def test_pictures_of_lines(batch, twinpath, tmp_path):
    """Those of a prompt stand in front of it, those of messages where these say."""
    import numpy as np

    D = load_model(DEMO).config.model_dim
    tensors = tiny_mmproj.tensors_of("e2b")
    replace = {
        "mm.input_projection.weight": np.resize(tensors["mm.input_projection.weight"], (D, 36)),
        "mm.a.input_projection.weight": np.resize(tensors["mm.a.input_projection.weight"], (D, 24)),
        "v.position_embd.weight": np.resize(tensors["v.position_embd.weight"], (2, 80, 36)),
    }
    keys = {"clip.vision.projection_dim": D, "clip.audio.projection_dim": D}
    mmproj = tiny_mmproj.make(tmp_path / "mmproj.gguf", "e2b", replace=replace, keys=keys)
    photo, talk = tmp_path / "photo.png", tmp_path / "talk.wav"
    photo.write_bytes(files.encoded(files.picture("photo-small"), ".png"))
    talk.write_bytes(files.wav(files.sound("chirp")))
    words = ["--mmproj", mmproj, "--image-tokens", 70, "--max-tokens", 6]
    text = "What is on the table?"
    alone = twinpath(*words, "--image", photo, "--prompt", text)
    assert alone.status == 0, alone.err
    content = [{"type": "audio"}, {"type": "image"}, {"type": "text", "text": text}]
    both = twinpath(*words, "--audio", talk, "--image", photo, "--prompt", text)
    asked = [
        {"prompt": text, "images": [str(photo)]},
        {
            "messages": [{"role": "user", "content": content}],
            "images": [str(photo)],
            "audio": [str(talk)],
        },
        {"messages": [{"role": "user", "content": content}], "audio": [str(talk)]},
        {"messages": [{"role": "user", "content": "Hi"}], "audio": [str(talk)]},
    ]
    _, results = batch(asked, *words)
    assert [r["text"] + "\n" for r in results[:2]] == [alone.out, both.out]
    assert "more parts of kind image than it names files" in results[2]["error"]
    assert "names more files than its messages have parts" in results[3]["error"]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_leaves_what_is_done(tiny_path, tmp_path):
    """A short line, and one that would take long: of that what there is. Nothing is said twice."""
    path = tmp_path / "requests.jsonl"
    asked = [
        {"prompt": "the user", "max_tokens": 2},
        {"prompt": "the user", "max_tokens": 480},
        {"prompt": "x"},
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    command = [sys.executable, "-m", "fastpath.cli", "--model", str(tiny_path), "--backend", "ref", "--raw"]
    command += ["--batch-file", str(path), "--parallel", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    rest = [json.loads(line) for line in out.splitlines()]
    assert (process.returncode, err) == (130, b"")
    assert first["reason"] == "length" and first["usage"]["completion_tokens"] == 2
    assert [r["reason"] for r in rest] == ["interrupted"] * len(rest) and [r["id"] for r in rest] == [2, 3]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_who_writes_a_line_and_waits_is_answered(tiny_path):
    """Standard input stays open: an answer, and a fault, come before the next line does; Ctrl+C ends it."""
    command = [sys.executable, "-m", "fastpath.cli", "--model", str(tiny_path), "--backend", "ref", "--raw"]
    command += ["--batch-file", "-", "--parallel", "4", "--max-tokens", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        killer = threading.Timer(100, process.kill)
        killer.start()
        for i, (line, field) in enumerate(
            [(b'{"prompt": "the user"}', "text"), (b"{", "error"), (b'{"prompt": "x"}', "text")]
        ):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
            assert result["id"] == i + 1 and field in result
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
        err = process.stderr.read().decode()
        killer.cancel()
    assert code == 130 and "Traceback" not in err and "Fatal" not in err, err
