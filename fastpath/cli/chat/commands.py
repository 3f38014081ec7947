"""What begins with a slash: each command a function of the session and of the rest of its line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastpath.cli.chat.conversation import (
    GREEDY,
    RECOMMENDED,
    SAMPLING,
    Conversation,
    read_schema,
    read_tools,
    sampling_of,
    text_of,
)

if TYPE_CHECKING:
    from fastpath.cli.chat.session import Session

Run = Callable[["Session", str], None]


@dataclass(frozen=True)
class Command:
    given: str
    does: str
    run: Run
    is_path: bool = False


def run_command(session: Session, line: str) -> None:
    """
    Raises:
        ValueError, OSError: one line
    """
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = [each for each in COMMANDS if each.startswith(name)]
        if len(near) != 1:
            known = f"did you mean {' or '.join(near)}?" if near else "/help lists those that there are"
            raise ValueError(f"{name}: no such command; {known} (a message that begins with / is written //)")
        name = near[0]
        command = COMMANDS[name]
    if rest.strip() and not command.given:
        raise ValueError(f"{name} {rest.strip()}: expected {name} alone")
    command.run(session, rest.strip())


def _help(session: Session, rest: str) -> None:
    rows = [f"{f'{name} {each.given}':26} {each.does}" for name, each in COMMANDS.items()]
    session.show.text("\n".join([*rows, HELP]))


HELP = '''
A message of several lines stands between lines of three quotes ("""); on a terminal Alt+Enter begins a line.
Ctrl+C stops an answer; at an empty prompt it leaves, as Ctrl+D does.'''


def _system(session: Session, rest: str) -> None:
    if rest:
        session.talk.system = "" if rest == "-" else rest
    session.show.text(f"system: {session.talk.system or 'none'}")


def _think(session: Session, rest: str) -> None:
    talk = session.talk
    if rest in ("on", "off"):
        talk.thinking = rest == "on"
    elif rest in ("show", "fold"):
        session.show.shows_thoughts = rest == "show"
    elif not rest:
        talk.thinking = not talk.thinking
    else:
        raise ValueError(f"/think {rest}: expected on, off, show or fold")
    session.show.text(f"thinking: {thinking_line(session)}")


def thinking_line(session: Session) -> str:
    is_on, is_shown = session.talk.thinking, session.show.shows_thoughts
    return f"{'on' if is_on else 'off'}, thoughts {'shown' if is_shown else 'folded'}"


def _thought(session: Session, rest: str) -> None:
    found = (message.get("reasoning_content") for message in reversed(session.talk.messages))
    session.show.text(next(filter(None, found), "no thought so far"))


def _attach(kind: str) -> Run:
    def attach(session: Session, rest: str) -> None:
        if rest == "-":
            session.files.clear()
        for path in _paths(rest) if rest != "-" else []:
            session.attach(kind, path)
        names = ", ".join(path.name for _, path in session.files)
        session.show.text(f"with the next message: {names or 'no files'}")

    return attach


def _paths(rest: str) -> list[Path]:
    """Paths as a shell would read them; one with spaces may stand as it is, as terminals paste it."""
    if rest and Path(rest).expanduser().exists():
        return [Path(rest).expanduser()]
    try:
        return [Path(word).expanduser() for word in shlex.split(rest)]
    except ValueError as error:
        raise ValueError(f"{rest}: {error}, expected paths") from None


def _tools(session: Session, rest: str) -> None:
    if rest:
        session.talk.tools = [] if rest in ("-", "off") else read_tools(rest)
    names = [tool.get("function", tool).get("name", "?") for tool in session.talk.tools]
    session.show.text(f"tools: {', '.join(names) or 'none'}")


def _schema(session: Session, rest: str) -> None:
    if rest:
        session.talk.schema = None if rest in ("-", "off") else read_schema(rest)
    session.show.text("answers: free" if session.talk.schema is None else "answers: JSON by the schema")


def _sampling(session: Session, rest: str) -> None:
    """Words like top_k=40, greedy and default."""
    talk, words = session.talk, rest.replace(",", " ").split()
    sampling, most = talk.sampling, talk.max_tokens
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_").lstrip("_")
        if word in ("greedy", "default"):
            sampling = replace(GREEDY if word == "greedy" else RECOMMENDED, seed=sampling.seed)
        elif equals and name in (*SAMPLING, "max_tokens"):
            number = _number(name, value)
            if name != "max_tokens":
                sampling = sampling_of({name: number}, sampling)
            elif isinstance(number, int) and number >= 1:
                most = number
            else:
                raise ValueError(f"max_tokens: {value}, expected a whole number of at least 1")
        else:
            raise ValueError(
                f"{word}: expected greedy, default, or NAME=NUMBER with max_tokens, {', '.join(SAMPLING)}"
            )
    talk.sampling, talk.max_tokens = sampling, most
    session.show.text("sampling: " + sampling_line(talk))


def _number(name: str, text: str) -> float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r}, expected a number") from None


def sampling_line(talk: Conversation) -> str:
    if talk.sampling.temperature == 0:
        said = ["greedy"]
    else:
        said = [f"{name}={getattr(talk.sampling, name):g}" for name in ("temperature", "top_k", "top_p")]
    plain = vars(GREEDY)
    said += [
        f"{name}={value:g}" for name in SAMPLING[3:] if (value := getattr(talk.sampling, name)) != plain[name]
    ]
    return " ".join([*said, f"max_tokens={talk.max_tokens or 'all'}"])


def _save(session: Session, rest: str) -> None:
    session.talk.save(str(Path(_needed("/save", rest)).expanduser()))
    session.show.note(f"[{len(session.talk.messages)} messages saved: {rest}]")


def _load(session: Session, rest: str) -> None:
    talk = Conversation.load(str(Path(_needed("/load", rest)).expanduser()))
    talk.max_tokens = talk.max_tokens or session.talk.max_tokens
    session.talk = talk
    for message in talk.messages:
        if text := text_of(message):
            session.show.text(f"{message['role']}: {text}")
    session.show.note(f"[{len(talk.messages)} messages loaded: {rest}]")


def _needed(name: str, rest: str) -> str:
    if not rest:
        raise ValueError(f"{name}: expected the name of a file behind it")
    return rest


def _retry(session: Session, rest: str) -> None:
    if not session.talk.retry():
        raise ValueError("/retry: nothing was asked so far")
    session.answer()


def _undo(session: Session, rest: str) -> None:
    message = session.talk.undo()
    if message is None:
        raise ValueError("/undo: nothing was asked so far")
    session.show.note(f"[taken back: {text_of(message)}]")


def _info(session: Session, rest: str) -> None:
    session.show.text(session.info())


def _quit(session: Session, rest: str) -> None:
    session.is_over = True


COMMANDS = {
    "/help": Command("", "this", _help),
    "/system": Command("[TEXT]", "the system message; - for none", _system),
    "/think": Command("[on|off|show|fold]", "whether the model thinks, and whether one sees it", _think),
    "/thought": Command("", "the last thought in full", _thought),
    "/image": Command("FILE...", "show it with the next message; - takes files back", _attach("image"), True),
    "/audio": Command("FILE...", "play it with the next message", _attach("audio"), True),
    "/video": Command("FILE...", "show it with the next message", _attach("video"), True),
    "/tools": Command("[FILE]", "functions that the model may call; - for none", _tools, True),
    "/schema": Command("[FILE]", "JSON schema of the answers; - for none", _schema, True),
    "/sampling": Command("[NAME=N ...]", "such as temperature=0.7 top_k=40; greedy; default", _sampling),
    "/save": Command("FILE", "the conversation, as JSON", _save, True),
    "/load": Command("FILE", "one that was saved", _load, True),
    "/retry": Command("", "another answer to the last message", _retry),
    "/undo": Command("", "take the last message and its answer back", _undo),
    "/info": Command("", "model, context, memory, settings", _info),
    "/quit": Command("", "leave", _quit),
}
