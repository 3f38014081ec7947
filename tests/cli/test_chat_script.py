"""`chat --input-jsonl` and `--multi-turn-jsonl`: a line of JSON for each."""

import json

import pytest

from tests.cli.test_chat import TOOLS
from tests.docs.test_readme import random_encoders
from tests.media import files

SUM, WHO = "What is 21+14?", "What is Twinpath?"


@pytest.fixture
def script(twinpath, tmp_path):
    """script("--input-jsonl", line, ..., options=[...]) -> (outcome, the objects that came)."""

    def run(mode, *lines, options=()):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        outcome = twinpath("chat", mode, path, *options)
        return outcome, [json.loads(line) for line in outcome.out.splitlines()]

    return run


def test_texts_and_objects(script):
    outcome, said = script(
        "--input-jsonl", json.dumps(SUM), "", {"id": "b", "prompt": WHO, "max_tokens": 2},
        {"id": 0, "messages": [{"role": "user", "content": SUM}], "stop": "5"},
        {"id": None, "role": "user", "content": SUM, "system": "Be brief."},
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    assert [line.get("id") for line in said] == [None, "b", 0, None]
    assert said[0]["content"] == "35" and said[2]["content"] == "3"
    assert [line["finish_reason"] for line in said[:3]] == ["stop", "length", "stop"]
    usage = said[1]["usage"]
    assert usage["generated"] == 2 and usage["prompt"] > 5 and "tokens_per_second" in usage


def test_greedy_unless_a_line_says_otherwise(script):
    _, said = script("--input-jsonl", *[{"prompt": WHO, "temperature": 3, "seed": k} for k in range(6)])
    assert len({line["content"] for line in said}) > 1
    _, said = script("--input-jsonl", *[{"prompt": WHO, "seed": k} for k in range(3)])
    assert len({line["content"] for line in said}) == 1


def test_lines_that_are_no_requests(script):
    bad = [
        ("not json", "not valid JSON"), ("3", "expected a text or an object"),
        ('{"prompts": 1}', "'prompts'"),
        ('{"id": 7}', "nothing to answer"), ('{"prompt": "a", "messages": []}', "prompt and messages"),
        ('{"prompt": 3}', "prompt: 3"), ('{"messages": {}}', "messages"),
        ('{"prompt": "a", "top_p": 7}', "top_p"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"), ('{"prompt": "a", "think": 1}', "think"),
        ('{"prompt": "a", "stop": [1]}', "stop"), ('{"prompt": "a", "tools": [3]}', "tools[0]"),
        ('{"prompt": "a", "tool_choice": "must"}', "tool_choice"), ('{"prompt": "a", "image": 3}', "image"),
        ('{"prompt": "a", "image": "none.png"}', "encoders"),
        ('{"prompt": "a", "json_schema": 3}', "json_schema"), ('{"content": [{"type": "rune"}]}', "rune"),
        ('{"prompt": " "}', "it is empty"), ("[" * 100_000, "nested too deeply"),
    ]  # fmt: skip
    outcome, said = script("--input-jsonl", *[line for line, _ in bad], json.dumps(SUM))
    assert outcome.status == 2 and said[-1]["content"] == "35" and len(said) == len(bad) + 1
    for n, (says, line) in enumerate(zip((says for _, says in bad), said), start=1):
        assert says in line["error"] and "\n" not in line["error"], (says, line)
        assert line.get("line") == n or line.get("id") == 7
    assert "19 of 20 lines have no answer" in outcome.err


def test_many_at_a_time_say_the_same(script):
    lines = [{"id": k, "prompt": f"What is {k}+{2 * k}?", "temperature": k % 2, "seed": k} for k in range(9)]
    _, alone = script("--input-jsonl", *lines)
    _, together = script("--input-jsonl", *lines, options=["--parallel", 4])
    assert [(a["id"], a["content"]) for a in alone] == [(b["id"], b["content"]) for b in together]


def test_turns(script):
    outcome, said = script(
        "--multi-turn-jsonl", {"role": "system", "content": "Be brief."}, json.dumps(WHO),
        {"id": "x", "prompt": SUM}, '{"messages": []}', {"prompt": "Who are you?"},
    )  # fmt: skip
    assert outcome.status == 2 and len(said) == 4
    assert said[1]["id"] == "x" and "a turn is one message" in said[2]["error"]
    prompts = [line["usage"]["prompt"] for line in said if "usage" in line]
    assert prompts == sorted(prompts) and said[3]["usage"]["cached"] > 0


def test_turns_with_a_tool(script):
    """An answer comes after the last result of several."""
    _, said = script(
        "--multi-turn-jsonl",
        {"prompt": "Weather?", "tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
        {"role": "tool", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "name": "get_weather", "content": "rain"}, options=["--max-tokens", 4],
    )  # fmt: skip
    assert len(said) == 2 and said[0]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert said[0]["finish_reason"] in ("tool_calls", "length") and said[1]["usage"]["generated"] <= 4


def test_a_schema(script, tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(schema))
    _, said = script("--input-jsonl", json.dumps(SUM), options=["--json-schema", tmp_path / "s.json"])
    assert set(json.loads(said[0]["content"])) == {"n"}
    _, said = script("--input-jsonl", {"prompt": SUM, "json_schema": schema})
    assert set(json.loads(said[0]["content"])) == {"n"}


def test_the_output_is_a_file(script, tmp_path):
    out = tmp_path / "out.jsonl"
    outcome, said = script("--input-jsonl", json.dumps(SUM), options=["--output", out])
    assert outcome.status == 0 and said == [] and json.loads(out.read_text())["content"] == "35"
    outcome, _ = script("--input-jsonl", json.dumps(SUM), options=["--output", tmp_path / "in.jsonl"])
    assert outcome.status == 2 and "is a file that is read itself" in outcome.err


def test_what_was_answered_outlives_ctrl_c(script, tmp_path, monkeypatch):
    from fastpath.cli.chat import script as module

    go_on = module._go_on

    def interrupted(exchange, talk, line, **options):
        if line.number == 3:
            raise KeyboardInterrupt
        return go_on(exchange, talk, line, **options)

    monkeypatch.setattr(module, "_go_on", interrupted)
    out = tmp_path / "out.jsonl"
    outcome, _ = script("--input-jsonl", *[json.dumps(SUM)] * 4, options=["--output", out])
    assert outcome.status == 130 and "2 of 4 lines were answered" in outcome.err
    assert [json.loads(line)["content"] for line in out.read_text().splitlines()] == ["35", "35"]


def test_files(script, tmp_path):
    picture = tmp_path / "p.jpg"
    picture.write_bytes(files.encoded(files.picture("photo-small"), ".jpg"))
    options = ["--mmproj", random_encoders(tmp_path / "mmproj.gguf"), "--max-tokens", 2]
    lines = [{"image": str(picture)}, {"prompt": "What?", "image": [str(picture), str(picture)]}]
    outcome, said = script("--input-jsonl", *lines, {"image": "none.png"}, options=options)
    assert said[1]["usage"]["prompt"] > said[0]["usage"]["prompt"] > 20, outcome
    assert "none.png" in said[2]["error"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--output", "x"], "for scripts"),
        (["--parallel", "2"], "for scripts"),
        (["--multi-turn-jsonl", "x", "--parallel", "2"], "one after the other"),
        (["--input-jsonl", "none.jsonl"], "none.jsonl"),
        (["--input-jsonl", "x", "--multi-turn-jsonl", "y"], "not allowed with"),
        (["--tools", "none.json"], "none.json"),
        (["--json-schema", "none.json"], "none.json"),
        (["--top-p", "0"], "--top-p"),
    ],
)
def test_faults_before_the_model(fault, options, says):
    assert says in fault("chat", *options, stdin=b"")


def test_an_empty_file(fault, tmp_path):
    (tmp_path / "e.jsonl").write_text("\n \n")
    assert "no lines in it" in fault("chat", "--input-jsonl", tmp_path / "e.jsonl")
