"""The answer to a prompt, as it comes: thought and content apart, stop strings, Ctrl+C, statistics."""

import argparse
import json
import sys
from typing import Protocol

from fastpath.backend import ops_for
from fastpath.cli.media import open_files
from fastpath.cli.parts import Parts
from fastpath.cli.setup import open_engine, open_model, prepare, prompt_ids, say
from fastpath.generate import generate
from refimpl.frontend.output_parser import OutputParser
from refimpl.frontend.sampling import SamplingParams
from refimpl.frontend.stop_strings import StopStrings

INTERRUPTED = 130
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def answer(args: argparse.Namespace, text: str, parts: Parts) -> int:
    """Prints the answer. Ctrl+C ends it with what was said so far, and status 130.

    parts  how long it took to get here
    """
    with parts.measured("header"):
        model = open_model(args)
    with parts.measured("tokenizer"):
        _ = model.tokenizer
    files, soft = None, []
    if args.media or args.mmproj is not None:
        with parts.measured("media"):
            files = open_files(args, model)
    with parts.measured("prompt"):
        ids, starts = prompt_ids(model, text, args, files)
    with parts.measured("imports"):
        ops_for(args.backend)
    with parts.measured("cache"):
        engine = open_engine(args, model, files=files)
    engine.lanes.check_room(len(ids), advice=files.shorter if files else None)
    printer = _printer(args, model.tokenizer, ids)
    del model  # the engine's will be another one, with packed weights
    n_compiled = prepare(args, engine.lanes, len(ids), "last", parts, files)
    if files is not None:
        with parts.measured("media"):
            soft = files.encode(starts)
    profile = _profile(args, engine)
    generation = generate(
        engine,
        ids,
        _params(args),
        args.max_tokens,
        progress=_progress(len(ids), engine.lanes.chunk),
        soft=soft,
    )
    status = 0
    try:
        for token_id in generation:
            if printer.push(token_id):
                generation.reason = "stop"
                break
    except KeyboardInterrupt:
        status, generation.reason = INTERRUPTED, "interrupted"
    generation.end()
    printer.finish()
    if args.stats:
        from fastpath.cli.stats import print_stats

        print_stats(args, engine.lanes, generation, parts, n_compiled, files)
    if profile is not None:
        _hold_lane(engine, len(ids) + generation.n_decoded)
        for line in ["", *profile.text().splitlines()]:
            say(line)
    return status


def _hold_lane(engine, n: int) -> None:
    """Pages where the last token stood: --profile computes it again, and its lane was given back."""
    engine.forget_prefixes()
    engine.lanes.cache.reserve_spans([(0, n - 1, n)])


def _profile(args: argparse.Namespace, engine):
    """What watches the engine for --profile."""
    if not args.profile:
        return None
    from fastpath.bench.profile import Profile

    return Profile(engine.lanes)


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
    )


def _progress(n_tokens: int, chunk: int):
    """Prompts of one chunk need none; longer ones show where they are."""
    if n_tokens <= chunk:
        return None
    return lambda done, total: say(f"prompt: {done} of {total} tokens")


class Printer(Protocol):
    def push(self, token_id: int) -> bool: ...  # True: a stop string was met, ask for no more
    def finish(self) -> None: ...


def _printer(args: argparse.Namespace, tokenizer, ids: list[int]) -> Printer:
    if args.raw:
        return RawPrinter(tokenizer, StopStrings(args.stop))
    return ChatPrinter(OutputParser(tokenizer, ids), StopStrings(args.stop), show_thought=args.think)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class RawPrinter:
    """Every token's text, markers included."""

    def __init__(self, tokenizer, stops: StopStrings):
        self.decoder, self.stops = tokenizer.stream(), stops

    def push(self, token_id: int) -> bool:
        _write(self.stops.push(self.decoder.push(token_id)))
        return self.stops.stopped

    def finish(self) -> None:
        _write(self.stops.push(self.decoder.flush()) + self.stops.flush() + "\n")


class ChatPrinter:
    """Content as it is; thoughts dimmed on a terminal, labelled elsewhere, or left out; tool calls as JSON.

    Stop strings are looked for in the content: a thought may speak of anything.
    """

    def __init__(self, parser: OutputParser, stops: StopStrings, *, show_thought: bool):
        self.parser, self.stops, self.show_thought = parser, stops, show_thought
        self.is_tty = sys.stdout.isatty()
        self.kind: str | None = None

    def push(self, token_id: int) -> bool:
        for event in self.parser.push(token_id):
            self._show(event)
        return self.stops.stopped

    def finish(self) -> None:
        if not self.stops.stopped:
            for event in self.parser.finish():
                self._show(event)
        rest = self.stops.flush()
        if rest:
            self._switch("content")
        _write(rest + (PLAIN if self.kind == "thought" and self.is_tty else "") + "\n")

    def _show(self, event) -> None:
        if event.kind == "thought":
            if self.show_thought and event.text:
                self._switch("thought")
                _write(event.text)
        elif event.kind == "content":
            text = self.stops.push(event.text)
            if text:
                self._switch("content")
                _write(text)
        else:
            self._switch("tool_call")
            _write(json.dumps({"name": event.name, "arguments": event.arguments}, ensure_ascii=False))

    def _switch(self, kind: str) -> None:
        """What stands between two kinds of output."""
        if kind == self.kind and kind != "tool_call":
            return
        before = "" if self.kind is None else "\n"
        if self.is_tty:
            before = (PLAIN if self.kind == "thought" else "") + before + (DIM if kind == "thought" else "")
            label = "tool call: " if kind == "tool_call" else ""
        else:
            label = {
                "thought": "[thought] ",
                "content": "[answer] " if self.show_thought else "",
                "tool_call": "[tool call] ",
            }[kind]
        _write(before + label)
        self.kind = kind
