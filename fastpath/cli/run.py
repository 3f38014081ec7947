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
    prompt.add_argument(
        "--batch-file",
        metavar="FILE.jsonl",
        help="many requests, one JSON object a line (- is standard input): see below",
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
    _add_batch(parser)
    arguments.add_engine(parser)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "many requests (--batch-file)",
        'lines like {"prompt": "Hi", "max_tokens": 20} or {"messages": [...]}, each with any of id, system, '
        "think, raw, tools, images, audio, videos, max_tokens, stop, temperature, top_k, top_p, min_p, "
        "repeat_penalty, presence_penalty, frequency_penalty, seed; what a line leaves out is as the options "
        "say. Results come in the order of the lines",
    )
    group.add_argument(
        "--parallel",
        "--batch",
        type=whole(1, 1024),
        default=8,
        metavar="N",
        help="requests that are computed at the same time (default: 8)",
    )
    group.add_argument(
        "--kv-memory",
        type=arguments.nbytes,
        metavar="BYTES",
        help="for keys and values of all of them, and of prefixes that are kept; such as 4G (default: for N "
        "full contexts, half of the free memory at most)",
    )


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
    parts = Parts()
    if args.batch_file is not None:
        return _run_batch(args, parts)
    text = _prompt_text(args)
    with parts.measured("imports"):  # numpy and the compiler: only now that the arguments are right
        from fastpath.cli.answer import answer

    return answer(args, text, parts)


def _run_batch(args: argparse.Namespace, parts: Parts) -> int:
    if args.media:
        raise ValueError(
            "--batch-file: media belong to single lines. Name them there: images, audio, videos, each a list."
        )
    if args.profile:
        raise ValueError("--batch-file: --profile looks at one answer. Leave one of them out.")
    with parts.measured("imports"):
        from fastpath.cli.batch import answer_lines

    return answer_lines(args, parts)


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
        f"no prompt. Use --prompt TEXT, --input FILE, --batch-file FILE.jsonl, or - for standard input. "
        f"See: {arguments.PROG} --help"
    )
