"""`chat` in a pipe, its commands, its files."""

import json
import subprocess
import sys

import pytest

from fastpath.cli.chat import commands, session
from fastpath.cli.chat.conversation import RECOMMENDED, Conversation, with_files
from tests.docs.test_readme import random_encoders
from tests.media import files

SUM, WHO = "What is 21+14?", "What is Twinpath?"
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}]  # fmt: skip


@pytest.fixture
def chat(twinpath):
    """chat("line", ..., options=[...]) -> Outcome, greedy."""

    def run(*lines, options=()):
        text = "".join(f"{line}\n" for line in lines)
        outcome = twinpath("chat", "--temperature", 0, *options, stdin=text.encode())
        said = [line for line in outcome.err.splitlines(True) if not line.startswith("compiling ")]
        return outcome._replace(err="".join(said))  # without what a first run says

    return run


class TestPipes:
    def test_the_answer_alone_is_on_standard_output(self, chat):
        outcome = chat(SUM)
        assert (outcome.status, outcome.out) == (0, "35\n")
        assert outcome.err.startswith("[2 tokens at ") and "0 of 16 cached" in outcome.err
        assert "\x1b" not in outcome.out + outcome.err

    def test_turns_go_on_from_the_cache(self, chat):
        outcome = chat(WHO, "Who are you?", SUM)
        cached = [int(line.split("; ")[1].split()[0]) for line in outcome.err.splitlines()]
        assert outcome.out.splitlines()[2] == "35" and cached[0] == 0 and cached[2] > cached[1] > 0

    def test_messages_of_several_lines(self, chat, tmp_path):
        chat('"""', "What is", "", '21+14? """', f"/save {tmp_path / 'c.json'}")
        saved = json.loads((tmp_path / "c.json").read_text())
        assert saved["messages"][0]["content"] == "What is\n\n21+14?"
        chat('"""one""" two', '"""', "three", f"/save {tmp_path / 'd.json'}")
        saved = [message["content"] for message in json.loads((tmp_path / "d.json").read_text())["messages"]]
        assert saved[::2] == ['one""" two', "three"]

    def test_quotes_that_nobody_closes(self, chat):
        outcome = chat('"""', "What is", "21+14?")
        assert outcome.status == 0 and "[" in outcome.err and outcome.out

    @pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
    def test_a_reader_that_goes_away_ends_it_without_a_word(self):
        words = [sys.executable, "-m", "fastpath.cli", "chat", "--temperature", "0"]
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        with subprocess.Popen(words, **pipes) as process:
            process.stdout.close()
            process.stdin.write(f"{SUM}\n{SUM}\n".encode())
            process.stdin.close()
            err = process.stderr.read().decode()
            assert process.wait(120) == 141 and "twinpath:" not in err

    def test_bytes_that_are_no_text(self, twinpath):
        outcome = twinpath("chat", "--temperature", 0, stdin=b"What is 21+14?\r\nab\xff\n")
        assert outcome.status == 2 and outcome.out == "35\n"
        assert "standard input: byte 2 is not UTF-8 text" in outcome.err.splitlines()[-1]

    def test_a_slash_as_text(self, chat, tmp_path):
        chat("//help me", f"/save {tmp_path / 'c.json'}")
        assert json.loads((tmp_path / "c.json").read_text())["messages"][0]["content"] == "/help me"

    def test_nothing_comes(self, chat):
        assert chat()[:2] == (0, "") and chat("", "  ")[:2] == (0, "")

    def test_a_line_without_an_answer_is_said_and_counted(self, chat):
        outcome = chat("/nope", SUM)
        assert outcome.status == 2 and outcome.out == "35\n"
        lines = outcome.err.splitlines()
        assert lines[0].startswith("twinpath: /nope: no such command") and "1 of the lines" in lines[-1]

    def test_too_long_a_message_is_taken_back(self, chat, tmp_path):
        outcome = chat("a b c " * 20, SUM, f"/save {tmp_path / 'c.json'}", options=["--context", 40])
        assert "the context holds 40" in outcome.err and "35" in outcome.out
        assert len(json.loads((tmp_path / "c.json").read_text())["messages"]) == 2

    def test_thoughts_are_folded_or_shown(self, chat):
        question = "What is 47+38?"
        folded = chat(question, "/thought", options=["--think"])
        assert "[thought of" in folded.err and "[thought]" not in folded.out
        thought = folded.out.split("\n", 1)[1]
        assert "7+8" in thought
        shown = chat("/think on", "/think show", question)
        assert shown.out.splitlines()[2].startswith("[thought] ") and "7+8" in shown.out


class TestCommands:
    def test_help_lists_every_command(self, chat):
        out = chat("/help").out
        assert all(f"\n{name} " in f"\n{out}" for name in commands.COMMANDS)
        assert {"/help", "/system", "/think", "/image", "/audio", "/video", "/tools", "/sampling", "/save",
                "/load", "/retry", "/undo", "/info", "/quit"} <= set(commands.COMMANDS)  # fmt: skip

    def test_beginnings_are_enough_where_they_are_clear(self, chat):
        assert "memory" in chat("/inf").out
        assert "did you mean /system or /schema or /sampling or /save?" in chat("/s").err

    @pytest.mark.parametrize(
        "line", ["/undo 2", "/retry now", "/q please", "/info x", "/thought 1", "/help me"]
    )
    def test_commands_that_stand_alone(self, chat, line):
        outcome = chat(SUM, line, "/undo")
        assert " alone\n" in outcome.err and f"[taken back: {SUM}]" in outcome.err

    def test_system(self, chat):
        outcome = chat("/system Answer in French.", "/system", "/system -")
        assert outcome.out.splitlines() == ["system: Answer in French."] * 2 + ["system: none"]

    def test_undo_and_retry(self, chat, tmp_path):
        path = tmp_path / "c.json"
        outcome = chat(SUM, WHO, "/undo", "/retry", f"/save {path}")
        assert outcome.out.splitlines()[0] == outcome.out.splitlines()[-1] == "35"
        roles = [message["role"] for message in json.loads(path.read_text())["messages"]]
        assert roles == ["user", "assistant"] and f"[taken back: {WHO}]" in outcome.err

    @pytest.mark.parametrize("command", ["/undo", "/retry"])
    def test_nothing_to_take_back(self, chat, command):
        assert "nothing was asked so far" in chat(command).err

    def test_sampling(self, chat):
        outcome = chat("/sampling default", "/sampling top-k=7 seed=3, max_tokens=2", "/sampling greedy", WHO)
        assert outcome.out.splitlines()[:3] == [
            "sampling: temperature=1 top_k=64 top_p=0.95 max_tokens=2048",
            "sampling: temperature=1 top_k=7 top_p=0.95 seed=3 max_tokens=2",
            "sampling: greedy seed=3 max_tokens=2",
        ]
        assert "[2 tokens" in outcome.err and "cut off" in outcome.err

    @pytest.mark.parametrize(
        "word, says",
        [("top_k=x", "'x', expected a number"), ("top_p=2", "top_p"), ("heat=1", "heat=1: expected greedy"),
         ("max_tokens=0", "at least 1"), ("seed=1.5", "seed")],
    )  # fmt: skip
    def test_faults_of_sampling_change_nothing(self, chat, word, says):
        outcome = chat(f"/sampling top_k=9 {word}", "/sampling")
        assert says in outcome.err.splitlines()[0] and outcome.out == "sampling: greedy max_tokens=2048\n"

    def test_faults_are_lines(self, chat, tmp_path):
        (tmp_path / "bad.json").write_text('{"kind": 1')
        outcome = chat(
            f"/load {tmp_path / 'bad.json'}", f"/load {tmp_path / 'none.json'}", "/save",
            "/tools nothing.json", "/think twice", "/image nothing.png",
            f"/save {tmp_path / 'no' / 'folder.json'}",
        )  # fmt: skip
        lines = outcome.err.splitlines()
        assert len(lines) == 8 and all(line.startswith("twinpath: ") for line in lines) and outcome.out == ""

    def test_retry_draws_anew(self):
        talk = Conversation(sampling=RECOMMENDED)
        talk.say("a")
        talk.messages.append({"role": "assistant", "content": "b"})
        assert talk.options().params.seed == 0
        assert talk.retry() and talk.options().params.seed == 1 and len(talk.messages) == 1
        assert talk.retry() and talk.options().params.seed == 2
        talk.say("c")
        assert talk.options().params.seed == 0

    def test_info(self, chat):
        out = chat(SUM, "/info").out
        assert "twinpath-demo.gguf" in out and "2 messages, 23 of 4096 tokens" in out and "greedy" in out


class TestTools:
    @pytest.fixture
    def tools(self, tmp_path):
        (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
        return tmp_path / "tools.json"

    def test_declared(self, chat, tools):
        assert chat("/tools", options=["--tools", tools]).out == "tools: get_weather\n"
        assert chat(f"/tools {tools}", "/tools -").out.splitlines() == ["tools: get_weather", "tools: none"]

    def test_results_are_asked_for_and_the_model_goes_on(self):
        """A scripted exchange: a call, its result, the answer."""
        from fastpath.talk.events import Call, Finish, Text, Usage

        usage = Usage(5, 3, 2, 0, 0.0, 0.1, 0.1, 0.1)
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
        }
        turns = [
            [Call(0, 0, "c1", "get_weather", '{"city":"Rome"}', {"city": "Rome"}),
             Finish(0, "tool_calls", usage, {"role": "assistant", "content": None, "tool_calls": [call]})],
            [Text(0, "Sunny."), Finish(0, "stop", usage, {"role": "assistant", "content": "Sunny."})],
        ]  # fmt: skip
        seen = []

        class Exchange:
            encoders = None

            def prepare(self, messages, options, fetch):
                seen.append(json.loads(json.dumps(messages)))
                return len(seen) - 1

            def answer(self, prompt):
                yield from turns[prompt]

        talk, show = Conversation(tools=TOOLS), _Show()
        reader = _Reader(["Weather?", '{"sky": "clear"}', None])
        session.Session(Exchange(), talk, reader, show).run()
        assert seen[1][-1] == {
            "role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": {"sky": "clear"},
        }  # fmt: skip
        assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
        assert reader.prompts == ["> ", "result of get_weather> ", "> "]


class _Reader:
    def __init__(self, lines):
        self.lines, self.prompts = iter(lines), []

    def read(self, prompt="> "):
        self.prompts.append(prompt)
        return next(self.lines)

    def hushed(self):
        from contextlib import nullcontext

        return nullcontext()


class _Show:
    shows_thoughts = False

    def __init__(self):
        self.notes = []

    def said(self, said): ...

    def ended(self): ...

    def note(self, text):
        self.notes.append(text)

    def text(self, text): ...


class TestStopping:
    def test_what_came_stays_and_the_program_too(self):
        from fastpath.talk.events import Text, Thought

        class Exchange:
            encoders = None

            def prepare(self, *given):
                return None

            def answer(self, prompt):
                yield Thought(0, "hm")
                yield Text(0, "Half an ")
                raise KeyboardInterrupt

        talk, show = Conversation(), _Show()
        session.Session(Exchange(), talk, _Reader(["Tell me", None]), show).run()
        assert show.notes == ["[stopped]"]
        assert talk.messages[1:] == [{"role": "assistant", "content": "Half an ", "reasoning_content": "hm"}]

    def test_a_pipe_ends_with_it(self):
        class Exchange:
            encoders = None

            def prepare(self, *given):
                raise KeyboardInterrupt

        made = session.Session(Exchange(), Conversation(), _Reader(["a", "b"]), _Show(), is_person=False)
        with pytest.raises(KeyboardInterrupt):
            made.run()
        assert made.show.notes == ["[stopped]"]

    def test_before_anything_came_the_message_is_taken_back(self):
        class Exchange:
            encoders = None

            def prepare(self, *given):
                raise KeyboardInterrupt

        talk, show = Conversation(), _Show()
        session.Session(Exchange(), talk, _Reader(["Tell me", None]), show).run()
        assert talk.messages == [] and show.notes == ["[stopped]"]


class TestFiles:
    def test_what_is_saved_loads_again(self, tmp_path):
        talk = Conversation("Be brief.", [], True, TOOLS, {"type": "object"}, RECOMMENDED, 77)
        talk.say("Look", [("image", tmp_path / "a b.png")])
        talk.messages.append({"role": "assistant", "content": "ü", "reasoning_content": "x"})
        talk.save(str(tmp_path / "c.json"))
        assert Conversation.load(str(tmp_path / "c.json")) == talk

    def test_the_command_line_comes_before_the_file(self, chat, tmp_path):
        path = tmp_path / "c.json"
        Conversation("Be brief.", sampling=RECOMMENDED, max_tokens=77).save(str(path))
        out = chat("/sampling", "/system", options=["--load", path, "--system", "Sing."]).out
        assert out.splitlines() == ["sampling: greedy max_tokens=77", "system: Sing."]
        options = ["--load", path, "--max-tokens", 9, "--top-k", 5, "--temperature", 2]
        assert "temperature=2 top_k=5 top_p=0.95 max_tokens=9" in chat("/sampling", options=options).out

    def test_a_list_of_messages(self, tmp_path):
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
        ]
        (tmp_path / "m.json").write_text(json.dumps(messages))
        talk = Conversation.load(str(tmp_path / "m.json"))
        assert talk.system == "S" and talk.messages == messages[1:]

    @pytest.mark.parametrize(
        "text, says",
        [
            ("", "not valid JSON"),
            ("[1]", r"messages[0]: 1"),
            ("3", "no conversation: 3"),
            ('{"kind": "twinpath conversation", "version": 2}', "version 2, expected 1"),
            (
                '{"kind": "twinpath conversation", "version": 1, "messages": {}}',
                "messages: {}, expected list",
            ),
            ('{"kind": "twinpath conversation", "version": 1, "sampling": {"top_p": 3}}', "top_p"),
            ('{"kind": "twinpath conversation", "version": 1, "sampling": {"choice": 3}}', "'choice'"),
            ('{"kind": "twinpath conversation", "version": 1, "max_tokens": true}', "max_tokens: True"),
            ('{"kind": "twinpath conversation", "version": 1, "tools": [{}]}', "tools[0]"),
            ('[{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}]', "expected a URL"),
            ("[" * 100_000, "nested too deeply"),
        ],
    )
    def test_damaged_files_are_one_line(self, fault, tmp_path, text, says):
        (tmp_path / "c.json").write_text(text)
        line = fault("chat", "--load", tmp_path / "c.json", stdin=b"")
        assert str(tmp_path / "c.json") in line and says in line

    def test_loaded_and_gone_on_with(self, chat, tmp_path):
        path = tmp_path / "c.json"
        first = chat("Who are you?", WHO, f"/save {path}")
        again = chat(f"/load {path}", SUM)
        assert again.out.splitlines()[-1] == "35" and "assistant: " in again.out
        assert chat(SUM, options=["--load", path]).out == "35\n" and first.status == 0

    @pytest.fixture
    def mmproj(self, tmp_path):
        return random_encoders(tmp_path / "mmproj.gguf")

    def test_a_picture_and_a_sound(self, chat, tmp_path, mmproj):
        picture, sound = tmp_path / "a photo.jpg", tmp_path / "talk.wav"
        picture.write_bytes(files.encoded(files.picture("photo-small"), ".jpg"))
        sound.write_bytes(files.wav(files.sound("chirp")))
        options = ["--mmproj", mmproj, "--max-tokens", 3]
        outcome = chat(f"/image {picture}", f"/audio '{sound}'", "What?", "And now?", "/info",
                       f"/save {tmp_path / 'c.json'}", options=options)  # fmt: skip
        assert outcome.status == 0, outcome.err
        assert (
            "[a photo.jpg: " in outcome.err and "with the next message: a photo.jpg, talk.wav" in outcome.out
        )
        content = json.loads((tmp_path / "c.json").read_text())["messages"][0]["content"]
        assert content == with_files("What?", [("image", picture), ("audio", sound)])
        again = chat(f"/load {tmp_path / 'c.json'}", "/undo", "And now?", options=options)
        assert again.out.splitlines()[-1] == outcome.out.splitlines()[3]
        picture.unlink()
        gone = chat(f"/load {tmp_path / 'c.json'}", "Go on", options=options)
        assert gone.status == 2 and "a photo.jpg: No such file" in gone.err

    def test_without_encoders_the_right_ones_are_asked_for(self, chat, tmp_path):
        outcome = chat("/image x.jpg")
        assert "--mmproj" in outcome.err and outcome.err.splitlines()[0].startswith("twinpath: ")
