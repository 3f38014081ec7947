"""`chat`: a conversation in a terminal or a pipe, and the same from files of requests.

conversation   what was said, and how to go on: saved and loaded as JSON
session        one turn: a message in, an answer shown, tools asked for
commands       what begins with a slash
reading        lines of a terminal (prompt_toolkit) or of a pipe
showing        answers on a terminal (rich) or in plain text
script         requests of JSON lines
"""

import argparse

from fastpath.cli import arguments
from fastpath.cli.arguments import real, whole
from fastpath.cli.media import BUDGETS, add_mmproj, add_sampling

MAX_TOKENS = 2048


def add_chat(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    add_mmproj(parser)
    parser.add_argument("--system", metavar="TEXT", type=arguments.text, help="a system message in front")
    parser.add_argument("--think", action="store_true", help="let the model think first")
    parser.add_argument("--tools", metavar="FILE.json", help="a list of function declarations")
    parser.add_argument(
        "--json-schema", metavar="FILE.json", help="answers are JSON that this schema accepts"
    )
    parser.add_argument(
        "--load", metavar="FILE.json", help="a conversation that /save wrote, or a list of messages"
    )
    parser.add_argument("--max-tokens", type=whole(1), metavar="N",
                        help=f"of an answer (default: {MAX_TOKENS})")  # fmt: skip
    parser.add_argument(
        "--image-tokens", type=int, choices=BUDGETS, default=280, help="most soft tokens of an image"
    )
    arguments.add_thinking_budget(parser)
    parser.add_argument(
        "--no-history", action="store_true", help="keep what is typed out of the history file"
    )
    _add_scripts(parser)
    _add_sampling(parser)
    add_sampling(parser.add_argument_group("videos"))
    arguments.add_prefix_cache(parser)
    arguments.add_engine(parser)


def _add_scripts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for scripts (one JSON line out for each in; - is standard input)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--input-jsonl", metavar="FILE", help="every line a request of its own")
    source.add_argument(
        "--multi-turn-jsonl", metavar="FILE", help="every line the next turn of one conversation"
    )
    group.add_argument("--output", metavar="FILE", help="where the lines go (default: standard output)")
    group.add_argument("--parallel", type=whole(1, 64), metavar="N",
                       help="requests of --input-jsonl at the same time: same answers, sooner")  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling (default: temperature 1, top-k 64, top-p 0.95 as Gemma's authors say; scripts: greedy)"
    )
    group.add_argument("--temperature", type=real(0), metavar="X", help="0 takes the likeliest token")
    group.add_argument("--top-k", type=whole(0, 1 << 31), metavar="N")
    group.add_argument("--top-p", type=real(0, 1, open_below=True), metavar="X")
    group.add_argument("--min-p", type=real(0, 1), metavar="X")
    group.add_argument("--repeat-penalty", type=real(0, open_below=True), metavar="X")
    group.add_argument("--presence-penalty", type=real(-100), metavar="X")
    group.add_argument("--frequency-penalty", type=real(-100), metavar="X")
    group.add_argument("--seed", type=whole(0, 2**64 - 1), metavar="N")


def run_chat(args: argparse.Namespace) -> int:
    is_script = args.input_jsonl is not None or args.multi_turn_jsonl is not None
    if not is_script and (args.output is not None or args.parallel is not None):
        raise ValueError(
            "--output and --parallel are for scripts. Give --input-jsonl or --multi-turn-jsonl too."
        )
    if args.multi_turn_jsonl is not None and args.parallel is not None:
        raise ValueError("--parallel: turns of one conversation come one after the other. Leave it out.")
    if is_script:
        from fastpath.cli.chat.script import run_script

        return run_script(args)
    from fastpath.cli.chat.session import run_session

    return run_session(args)
