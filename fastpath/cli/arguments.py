"""What the subcommands share: one-line errors, checked numbers, texts from files or standard input."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fastpath.cli.settings import take_over

PROG = "twinpath"  # as in __main__, which imports nothing before it must
MAX_DIGITS = 1000  # of a whole number in JSON: Python refuses to convert much longer ones
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0")
MAX_WORD = 300  # characters of a path or a text that a message repeats


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit status 2."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse(self, words: list[str]) -> argparse.Namespace:
        """An unknown option is named first: argparse would speak of the word behind it."""
        for word in words:
            name = word.split("=", 1)[0]
            if word == "--":
                break
            if word.startswith("--") and " " not in word and name not in self._option_string_actions:
                self.error(f"unknown option {name} (a text that begins with - is given as --option=TEXT)")
        take_over(self, self._option_string_actions)
        return self.parse_args(words)

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse hides it when this fails."""
        stream = file or sys.stderr
        if stream is not None:
            stream.write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROG}: {one_line(message)}. See: {self.prog} --help\n")


def one_line(message: str) -> str:
    """A message without line breaks and control characters; of overlong words, such as paths, the beginning
    and the end.
    """
    from refimpl.frontend.terminal import visible

    half = MAX_WORD // 2
    cut = re.compile(rf"(\S{{{half}}})\S{{{half},}}(\S{{{half // 2}}})")
    return visible(cut.sub(r"\1[...]\2", " ".join(message.split())))


def text(given: str) -> str:
    """An argparse type: a text of UTF-8. Python hands over other bytes as halves of surrogate pairs."""
    try:
        os.fsencode(given).decode("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(not_utf8(error.start)) from None
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"character {error.start} is not one that UTF-8 can write") from None
    return given


def not_utf8(byte: int) -> str:
    return f"byte {byte} is not UTF-8 text. Save the text as UTF-8"


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number between two bounds."""
    span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {span}")
        return value

    return convert


def real(minimum: float, maximum: float = math.inf, *, open_below: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number between two bounds."""
    low = f"above {minimum:g}" if open_below else f"of at least {minimum:g}"
    span = f"{low} and at most {maximum:g}" if maximum < math.inf else low

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (minimum < value if open_below else minimum <= value) and value <= maximum
        if not (inside and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return value

    return convert


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def nbytes(text: str) -> int:
    """An argparse type: bytes, as 4000000000, 4000M or 4G."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([KMG]?)", text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 500000000, 500M or 2.5G")
    return size


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="a Gemma 4 GGUF file, or hf:OWNER/REPO[/FILE][@REVISION] (default: the embedded demo)",
    )


def add_template(parser: argparse.ArgumentParser) -> None:
    """How a prompt becomes the ids that the model reads."""
    parser.add_argument("--system", metavar="TEXT", type=text, help="a system message in front")
    parser.add_argument("--think", action="store_true", help="let the model think first")
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: the prompt as it is, after one BOS"
    )


def check_template(args: argparse.Namespace) -> None:
    """Refuses what contradicts itself."""
    if args.raw and (args.think or args.system):
        raise ValueError("--raw has no template, so it has no place for --think or --system. Leave one out.")


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--backend",
        choices=["auto", "cpu", "cuda", "ref"],
        default="auto",
        help="cpu: compiled kernels; cuda: a GPU's; ref: the NumPy definitions under the same composition; "
        "auto: cuda where there is a GPU and the model fits, else cpu (default: auto)",
    )
    group.add_argument(
        "--threads", type=whole(1, 256), metavar="N", help="worker threads of cpu (default: one per CPU)"
    )
    group.add_argument(
        "--activations",
        choices=["int8", "float"],
        default="int8",
        help="how linear layers see their input: rounded to int8 per block, or float32",
    )
    add_kv_type(group)
    group.add_argument(
        "--no-repack",
        action="store_true",
        help="read weights from the mapped file as it lies: half the memory, slower",
    )
    group.add_argument(
        "--no-replay",
        action="store_true",
        help="call every op of every token from Python: same bytes, slower",
    )
    group.add_argument(
        "--context", type=whole(1), metavar="N", help="tokens a sequence may hold (default: the model's)"
    )
    group.add_argument(
        "--chunk", type=whole(1), metavar="N", help="prompt tokens per call (default: 1024 to 2048)"
    )


def add_thinking_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--thinking-budget", type=whole(0), metavar="N",
                        help="tokens of a thought; 0: no limit, asked for or not")  # fmt: skip


def add_prefix_cache(parser: Any) -> None:
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="keep nothing for prompts that begin alike"
    )


def add_kv_type(parser: Any) -> None:
    parser.add_argument(
        "--kv-type",
        type=kv_type,
        default=KV_TYPES[0],
        metavar="T|K,V",
        help=f"what keys and values are kept as: {', '.join(KV_TYPES)}; or one for each "
        f"(default: {KV_TYPES[0]})",
    )


def kv_type(text: str) -> str | tuple[str, str]:
    """An argparse type: one name of KV_TYPES, or two for keys and values."""
    names = text.split(",")
    if len(names) > 2 or not set(names) <= set(KV_TYPES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(KV_TYPES)}, or two like f16,bf16"
        )
    return text if len(names) == 1 else (names[0], names[1])


def dash(text: str) -> str:
    """An argparse type: the "-" that stands for standard input, and no other word."""
    if text != "-":
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is neither a subcommand nor '-'. A prompt comes after --prompt"
        )
    return text


def model_path(given: str | None) -> Path:
    """The file asked for, or the demo. What lies on the Hub is fetched, unless it has been."""
    from fastpath.hub.name import is_hub_name
    from fastpath.load import DEMO

    if given is not None and is_hub_name(given):
        from fastpath.hub.fetch import local_path

        return local_path(given)

    if given == "":
        raise ValueError("the model's name is empty. Give a file, or leave --model out for the demo.")
    if given is None and not DEMO.exists():
        raise ValueError(f"{DEMO}: the embedded demo checkpoint is missing. Give a model: --model FILE.")
    return DEMO if given is None else Path(given)


def token_ids(text: str) -> list[int]:
    """An argparse type: ids with commas or spaces between them."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of token ids like 2,105,9731")
    return ids


def read_text(source: str) -> str:
    """The text of a file, or of standard input for "-"; a byte order mark in front is no part of it."""
    try:
        if source == "-":
            if sys.stdin is None:
                raise ValueError("standard input is closed. Use --prompt TEXT or --input FILE.")
            return sys.stdin.buffer.read().decode("utf-8-sig")
        if not source:
            raise ValueError("the name of the file to read is empty. Name a file, or - for standard input.")
        return Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        name = "standard input" if source == "-" else source
        raise ValueError(f"{name}: {not_utf8(error.start)}.") from error


class _NotANumber(Exception):
    pass


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _NotANumber(f"a number of {len(digits)} digits, at most {MAX_DIGITS} allowed. Write it as text")
    return int(digits)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise _NotANumber(f"the number {number[:40]} is not finite. Write it as text")
    return value


def read_json(source: str, what: str) -> Any:
    return parse_json(read_text(source), source, what)


def parse_json(text: str, where: str, what: str) -> Any:
    """JSON with finite numbers only; `where` it stands and `what` it is are for the one line of a fault."""
    try:
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except _NotANumber as error:
        raise ValueError(f"{where}: {what} are not usable: {error}.") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise ValueError(
            f"{where}: {what} are not valid JSON: {error.msg} at {line}column {error.colno}."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: {what} are nested too deeply to be read.") from error
