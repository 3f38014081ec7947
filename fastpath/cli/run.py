"""Inference: a prompt in, an answer that streams to standard output."""

import argparse

from fastpath.cli import arguments
from fastpath.cli.arguments import real, whole
from fastpath.cli.media import add_media
from fastpath.cli.parts import Parts


def add_run(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", type=arguments.text, help="what to ask")
    prompt.add_argument("--input", metavar="FILE", help="a UTF-8 file that holds the prompt")
    prompt.add_argument(
        "stdin", nargs="?", type=arguments.dash, metavar="-", help="read the prompt from standard input"
    )
    arguments.add_template(parser)
    add_media(parser)
    parser.add_argument("--max-tokens", type=whole(1), default=100, metavar="N", help="(default: 100)")
    parser.add_argument(
        "--stop",
        nargs="+",
        action="extend",
        type=arguments.text,
        default=[],
        metavar="TEXT",
        help="end at any of these texts",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print times, rates and memory to stderr at the end"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print time, bytes and percent of limit per kind of op and layer to stderr at the end",
    )
    _add_sampling(parser)
    arguments.add_engine(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (greedy unless a temperature is given)")
    group.add_argument(
        "--temperature", type=real(0), default=0.0, metavar="X", help="0 takes the likeliest token"
    )
    group.add_argument(
        "--top-k", type=whole(0, 1 << 31), default=0, metavar="N", help="only the N likeliest; 0: all"
    )
    group.add_argument(
        "--top-p",
        type=real(0, 1, open_below=True),
        default=1.0,
        metavar="X",
        help="only the likeliest that together reach X",
    )
    group.add_argument(
        "--min-p", type=real(0, 1), default=0.0, metavar="X", help="only those above X times the best"
    )
    group.add_argument("--repeat-penalty", type=real(0, open_below=True), default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=real(-100), default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=real(-100), default=0.0, metavar="X")
    group.add_argument(
        "--seed",
        type=whole(0, 2**64 - 1),
        default=0,
        metavar="N",
        help="the draw depends on this and the position only",
    )


def run_run(args: argparse.Namespace) -> int:
    arguments.check_template(args)
    text = _prompt_text(args)
    parts = Parts()
    with parts.measured("imports"):  # numpy and the compiler: only now that the arguments are right
        from fastpath.cli.answer import answer

    return answer(args, text, parts)


def _prompt_text(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.input is not None:
        return arguments.read_text(args.input)
    if args.stdin is not None:
        return arguments.read_text("-")
    if args.media:
        return ""  # a question about the first of them is asked
    raise ValueError(
        f"no prompt. Use --prompt TEXT, --input FILE, or - for standard input. See: {arguments.PROG} --help"
    )
