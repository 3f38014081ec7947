"""`chat` on a terminal: keys, history, markdown, Ctrl+C."""

import io
import json
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpath.cli.chat import reading, showing
from fastpath.cli.chat.showing import split_blocks
from fastpath.interrupts import Held
from fastpath.talk.events import Call, Text, Thought
from tests.cli import terminal
from tests.cli.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal

pytest.importorskip("prompt_toolkit", reason="the extra `chat` is not installed")
pytest.importorskip("rich", reason="the extra `chat` is not installed")
WAITS = r"\n>"
ANSWERED = r"to the first[^\]]*\]"


@pytest.fixture
def keys():
    """keys(text, history) -> what a reader makes of these keys."""
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    def read(text: str, n: int = 1, history: Path | None = None):
        with create_pipe_input() as pipe:
            pipe.send_text(text)
            words = ["/image", "/info", "/quit"]
            reader = reading.Keys(
                lambda: words, frozenset(["/image"]), history, input=pipe, output=DummyOutput()
            )
            return [reader.read() for _ in range(n)]

    return read


class TestKeys:
    def test_enter_sends(self, keys):
        assert keys("hello\rthere\r", 2) == ["hello", "there"]

    def test_alt_enter_begins_a_line(self, keys):
        assert keys(f"one{ALT_ENTER}two\r") == ["one\ntwo"]

    def test_a_paste_of_several_lines_is_one_message(self, keys):
        assert keys("\x1b[200~a\nb\n\x1b[201~\r") == ["a\nb\n"]

    def test_quotes(self, keys):
        assert keys('"""\rone\rtwo\r"""\r') == ["one\ntwo"]

    def test_ctrl_c_empties_the_line_and_then_leaves(self, keys):
        assert keys(f"abc{CTRL_C}def\r") == ["def"]
        with pytest.raises(KeyboardInterrupt):
            keys(CTRL_C)

    def test_ctrl_d(self, keys):
        assert keys(CTRL_D) == [None]

    def test_history_outlives_the_program_and_is_private(self, keys, tmp_path, monkeypatch):
        monkeypatch.setattr("fastpath.user_cache.folder", lambda: tmp_path / "new")
        path = reading.history_file()
        assert path.stat().st_mode & 0o077 == 0
        keys(f"first{ALT_ENTER}line\r", history=path)
        assert keys(f"{UP}\r", history=path) == ["first\nline"]

    def test_no_place_for_a_history(self, monkeypatch):
        monkeypatch.setattr("fastpath.user_cache.folder", lambda: None)
        assert reading.history_file() is None

    @pytest.mark.parametrize(
        "text, expected",
        [("/i", {"/image", "/info"}), ("/q", {"/quit"}), ("hello /i", set()), ("/info x", set())],
    )
    def test_completion_of_commands(self, text, expected):
        assert {c.text for c in self._completions(text)} == expected

    def test_completion_of_paths(self, tmp_path):
        (tmp_path / "photo.jpg").touch()
        assert [c.text for c in self._completions(f"/image {tmp_path}/ph")] == ["oto.jpg"]

    @staticmethod
    def _completions(text):
        from prompt_toolkit.document import Document

        completer = reading._completer(lambda: ["/image", "/info", "/quit"], frozenset(["/image"]))
        return list(completer.get_completions(Document(text), None))


class TestWithoutTheExtra:
    @pytest.mark.parametrize("missing", ["rich", "prompt_toolkit"])
    def test_lines_and_plain_text_and_a_word_about_it(self, monkeypatch, missing):
        monkeypatch.setitem(sys.modules, missing, None)
        for module in (reading, showing):
            monkeypatch.setattr(module, "is_terminal", lambda stream: True)
        made = reading.open_reader(lambda: [], frozenset(), history=False)
        assert isinstance(made, reading.Lines) == (missing == "prompt_toolkit")
        assert isinstance(showing.open_shower(), showing.Plain) == (missing == "rich")
        assert reading.could_be_nicer()

    def test_nothing_is_missing_in_a_pipe(self):
        assert not reading.could_be_nicer()


class TestMarkdown:
    def test_blocks_end_at_empty_lines_outside_of_code(self):
        text = "One\ntwo\n\n```py\na\n\nb\n```\nthree"
        done, rest = split_blocks(text)
        assert done == "One\ntwo\n\n```py\na\n\nb\n```\n" and rest == "three"
        assert split_blocks("```\na\n\nb") == ("", "```\na\n\nb")
        assert split_blocks("~~~\n```\n\n~~~\n") == ("~~~\n```\n\n~~~\n", "")
        assert split_blocks("a\n") == ("", "a\n")

    @given(
        st.lists(st.sampled_from(["a", "\n", "\n\n", "```", "~~~", "- b", "    ", "1. c"]), max_size=12),
        st.data(),
    )
    def test_blocks_do_not_depend_on_how_the_text_comes(self, pieces, data):
        """Cut where lines end, as soon as they do, or all at once: the same."""
        text = "".join(pieces)
        done, rest = split_blocks(text)
        assert done + rest == text
        cut = data.draw(st.integers(0, len(text)))
        first, pending = split_blocks(text[:cut])
        second, last = split_blocks(pending + text[cut:])
        assert (first + second, last) == (done, rest)

    @pytest.fixture
    def show(self):
        from rich.console import Console

        out = io.StringIO()
        show = showing.Formatted(
            Console(file=out, force_terminal=True, width=40, height=10, color_system=None)
        )
        show.plain = lambda: terminal.ESCAPES.sub("", out.getvalue())
        return show

    def test_what_is_said_is_formatted(self, show, monkeypatch):
        monkeypatch.setattr(showing, "DRAW_S", 0)
        for piece in ("# Ti", "tle\n\nSome **bo", "ld** words\n\n- one\n", "- two\n"):
            show.said(Text(0, piece))
        show.ended()
        assert "Title" in show.plain() and "Some bold words" in show.plain() and "• two" in show.plain()
        assert show.live is None and show.plain().rstrip().splitlines()[-1].strip() == "• two"

    def test_thoughts_are_folded_or_shown(self, show):
        for shown in (False, True):
            show.shows_thoughts = shown
            show.said(Thought(0, "deep thought"))
            show.said(Text(0, "42"))
            show.ended()
            said = show.plain()
            assert ("[thought of 2 words" in said) if not shown else said.count("deep thought") >= 1

    def test_calls(self, show):
        show.said(Call(0, 0, "c", "f", '{"a":1}', {"a": 1}))
        show.ended()
        assert '[calls f {"a":1}]' in show.plain()

    def test_a_block_higher_than_the_screen_shows_its_end(self, show):
        show.pending = "\n".join(f"line {k}" for k in range(100))
        assert str(show._preview()).splitlines()[-1] == "line 99"
        assert len(str(show._preview()).splitlines()) <= 10 - 3

    def test_what_a_model_writes_moves_no_cursor(self, show):
        show.said(Text(0, "a\x1b[2Jb\x07c\x9bd"))
        show.ended()
        assert "\x1b[2J" not in show.console.file.getvalue() and "\x07" not in show.plain()


class TestHeld:
    def test_ctrl_c_comes_in_free_places_only(self):
        done = []
        with pytest.raises(KeyboardInterrupt), Held() as ctrl_c:
            with ctrl_c.free():
                done.append("free")
            signal.raise_signal(signal.SIGINT)
            done.append("not interrupted")
            with ctrl_c.free():
                done.append("never")
        assert done == ["free", "not interrupted"]

    def test_at_once_in_a_free_place_and_as_ever_afterwards(self):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), Held() as ctrl_c, ctrl_c.free():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
        with Held():
            signal.raise_signal(signal.SIGINT)  # nobody asks: forgotten
        assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals of POSIX")
class TestTerminals:
    """Whole processes."""

    def test_a_conversation(self, tmp_path):
        with Terminal("chat", "--temperature", 0, "--no-history") as screen:
            screen.expect("say something, or /help")
            screen.expect(WAITS)
            screen.send(f"What is 21+14?{ENTER}")
            assert "35" in screen.expect(ANSWERED)
            screen.expect(WAITS)
            screen.send(f"/save {tmp_path / 'c.json'}{ENTER}")
            screen.expect("2 messages saved")
            screen.send(f"/quit{ENTER}")
            assert screen.wait() == 0
        assert json.loads((tmp_path / "c.json").read_text())["messages"][1]["content"] == "35"

    def test_ctrl_c_stops_the_answer_and_then_the_program(self, tiny_path):
        """The tiny model never ends an answer."""
        words = ("chat", "--model", tiny_path, "--backend", "ref", "--no-history")
        with Terminal(*words) as screen:
            screen.expect("/help")
            screen.expect(WAITS)
            screen.send(f"go on and on{ENTER}")
            screen.expect(r"go on and on\s+\S[^>]*\S")  # some of the answer
            screen.send(CTRL_C)
            screen.expect(r"\[stopped\]")
            screen.expect(WAITS)
            screen.send(f"/info{ENTER}")
            screen.expect(r"2 messages, \d+ of 512 tokens")
            screen.expect(WAITS)
            screen.send(CTRL_C)
            screen.expect("twinpath: interrupted")
            assert screen.wait() == 130

    def test_a_tool_loop_by_hand(self, tmp_path):
        """The call is shown, its result asked for; Ctrl+C and Ctrl+D in its place end the answer only."""
        function = {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}
        (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": function}]))
        asks = r"result of get_weather>"
        with Terminal("chat", "--temperature", 0, "--no-history") as screen:
            screen.expect(WAITS)
            screen.send(f"/tools {tmp_path / 'tools.json'}{ENTER}")
            screen.expect("tools: get_weather")
            screen.expect(WAITS)
            screen.send(f"What is the weather in Oslo?{ENTER}")
            assert '[calls get_weather {"city": "Oslo"}]' in screen.expect(asks)
            screen.send(f"20 degrees{ENTER}")
            assert "20 degrees" in screen.expect(r"degrees.*\n\[\d+ tokens[^\]]*\]")
            for key, said in ((CTRL_C, r"\[stopped\]"), (CTRL_D, r"\[no result of get_weather")):
                screen.expect(WAITS)
                screen.send(f"What is the weather in Oslo?{ENTER}")
                screen.expect(asks)
                screen.send(key)
                screen.expect(said)
            screen.expect(WAITS)
            screen.send(f"What is 21+14?{ENTER}")
            assert "35" in screen.expect(ANSWERED)
            screen.expect(WAITS)
            screen.send(f"/quit{ENTER}")
            assert screen.wait() == 0

    def test_a_window_may_change_its_size_while_an_answer_comes(self, tiny_path):
        with Terminal("chat", "--model", tiny_path, "--backend", "ref", "--no-history") as screen:
            screen.expect(WAITS)
            screen.send(f"go on{ENTER}")
            screen.expect(r"go on\s+\S[^>]*\S")
            for size in ((8, 20), (40, 120), (3, 9)):
                screen.resize(*size)
                screen.expect(r"\S", timeout=20)
            screen.send(CTRL_C)
            screen.expect(r"\[stopped\]")
            screen.expect(WAITS)
            screen.send(CTRL_D)
            assert screen.wait() == 0

    def test_a_dumb_terminal_gets_letters_only(self):
        with Terminal("chat", "--temperature", 0, term="dumb") as screen:
            screen.expect("> ")
            screen.send("What is 21+14?\n")
            screen.expect(ANSWERED)
            screen.send(CTRL_D)
            assert screen.wait() == 0
        assert "\x1b" not in screen.raw and "35\r\n" in screen.raw

    def test_no_colour_if_none_is_wanted(self):
        with Terminal("chat", "--temperature", 0, "--no-history", NO_COLOR="1") as screen:
            screen.expect(WAITS)
            screen.send(f"What is Twinpath?{ENTER}")
            screen.expect(ANSWERED)
            screen.expect(WAITS)  # before it, the terminal itself takes Ctrl+D, and nobody hears of it
            screen.send(CTRL_D)
            assert screen.wait() == 0
        styles = [
            int(code)
            for found in re.findall(r"\x1b\[([\d;]*)m", screen.raw)
            for code in found.split(";")
            if code
        ]
        assert not [code for code in styles if 30 <= code <= 49 or 90 <= code <= 107]
