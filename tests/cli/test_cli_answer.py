"""How an answer is shown: thoughts, content, tool calls, stop strings."""

import pytest

from fastpath.cli.answer import ChatPrinter
from refimpl.frontend.output_parser import Event
from refimpl.frontend.stop_strings import StopStrings


class Script:
    """An output parser that follows a script: each token is the list of events it completes."""

    def push(self, token):
        return token

    def finish(self):
        return [Event("content", "!")]


THOUGHT, TEXT = Event("thought", "hmm"), Event("content", "yes")
CALL = Event("tool_call", '{"city": "Ulm"}', "weather", {"city": "Ulm"})


def shown(tokens, capsys, *, stops=(), show_thought=True, is_tty=False):
    printer = ChatPrinter(Script(), StopStrings(stops), show_thought=show_thought)
    printer.is_tty = is_tty
    ended = [printer.push(token) for token in tokens]
    printer.finish()
    return capsys.readouterr().out, ended


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[TEXT]], "[answer] yes!\n"),
        ([[THOUGHT], [THOUGHT], [], [TEXT], [TEXT]], "[thought] hmmhmm\n[answer] yesyes!\n"),
        ([[THOUGHT, TEXT]], "[thought] hmm\n[answer] yes!\n"),
        (
            [[CALL], [CALL]],
            '[tool call] {"name": "weather", "arguments": {"city": "Ulm"}}\n' * 2 + "[answer] !\n",
        ),
    ],
)
def test_with_thought(capsys, tokens, expected):
    assert shown(tokens, capsys)[0] == expected


def test_without_thought_only_the_answer(capsys):
    assert shown([[THOUGHT], [TEXT]], capsys, show_thought=False)[0] == "yes!\n"


def test_on_a_terminal_the_thought_is_dim(capsys):
    assert shown([[THOUGHT], [TEXT]], capsys, is_tty=True)[0] == "\x1b[2mhmm\x1b[0m\nyes!\n"


def test_a_terminal_is_left_as_it_was(capsys):
    printer = ChatPrinter(Script(), StopStrings(["!"]), show_thought=True)
    printer.is_tty = True
    printer.push([THOUGHT])
    printer.finish()
    assert capsys.readouterr().out.endswith("\x1b[0m\n")


def test_stop_strings_count_in_the_content_only(capsys):
    out, ended = shown([[THOUGHT], [TEXT], [Event("content", "hmm, no")]], capsys, stops=["hmm"])
    assert out == "[thought] hmm\n[answer] yes\n" and ended == [False, False, True]


def test_what_a_stop_string_withheld_is_given_back(capsys):
    assert shown([[Event("content", "a!")]], capsys, stops=["!!!"], show_thought=False)[0] == "a!!\n"
