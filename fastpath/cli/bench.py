"""`bench`: speed, in rows like llama-bench's, against what this machine can read and multiply."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from fastpath.cli import arguments
from fastpath.cli.arguments import whole

REPETITIONS = 5
MAX_TOKENS = 1 << 20


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", metavar="FILE", help="a Gemma 4 GGUF file (default: the demo); see --synthetic"
    )
    parser.add_argument(
        "--synthetic",
        metavar="SIZE:RECIPE",
        help="random weights of a published size, such as E2B:Q4_0; written once, into the cache folder or "
        "to --model FILE",
    )
    parser.add_argument("--vocab", metavar="FILE", help="take the synthetic file's vocabulary from this one")
    group = parser.add_argument_group("tests (each value may be a list: 512,2048)")
    _numbers(group, "-p", "--n-prompt", 0, "512", "prompt tokens; 0: no such test")
    _numbers(group, "-n", "--n-gen", 0, "128", "decoded tokens; 0: no such test")
    _numbers(group, "-d", "--depth", 0, "0", "tokens that are in the cache before")
    _numbers(group, "--batch", None, 1, "1", "sequences that are decoded together in one call")
    group.add_argument(
        "--turn", type=_list_of(whole(1, MAX_TOKENS)), metavar="N,...",
        help="time to the first token of a turn of N tokens after -d others, which are in the prefix cache",
    )  # fmt: skip
    group.add_argument(
        "--engine",
        action="store_true",
        help="steps of the engine, -n of them with --batch requests: what scheduler and pages take",
    )
    group.add_argument(
        "--image", type=_list_of(whole(1, 1120)), metavar="N,...",
        help="encode images of as many soft tokens, instead of text",
    )  # fmt: skip
    group.add_argument(
        "--audio", type=_list_of(whole(1, 30)), metavar="S,...", help="encode sounds of as many seconds"
    )
    group.add_argument(
        "--mmproj", metavar="FILE", help="their encoders (default: synthetic ones of E2B, written once)"
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=whole(1),
        metavar="N",
        help="prompt tokens per call (default: 1024 to 2048)",
    )
    group.add_argument(
        "-r", "--repetitions", type=whole(1, 1000), default=REPETITIONS, metavar="N",
        help=f"of each test, after one to warm up (default: {REPETITIONS})",
    )  # fmt: skip
    parser.set_defaults(backend="cpu")
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--threads", "-t", type=whole(1, 256), metavar="N", help="(default: one per logical CPU)"
    )
    group.add_argument(
        "--kv-type", type=arguments.kv_type, metavar="T|K,V", help="what keys and values are kept as (f16)"
    )
    group.add_argument("--no-repack", action="store_true", help="weights stay as the file holds them")
    group.add_argument("--no-replay", action="store_true", help="decode without recorded programs")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    group.add_argument(
        "--profile", action="store_true", help="also: time, bytes, percent of limit per kind of op"
    )
    group.add_argument("--kernels", action="store_true", help="rates of single kernels instead of a model's")


def _numbers(group, short: str, long: str | None, least: int, default: str, what: str) -> None:
    names = [short] if long is None else [short, long]
    group.add_argument(*names, type=_list_of(whole(least, MAX_TOKENS)), default=default, metavar="N,...",
                       help=f"{what} (default: {default})")  # fmt: skip


def _list_of(convert: Callable[[str], int]) -> Callable[[str], list[int]]:
    def numbers(text: str) -> list[int]:
        return [convert(part) for part in text.split(",")]

    return numbers


def run_bench(args: argparse.Namespace) -> int:
    from fastpath.bench import session
    from fastpath.cpu import threads

    if args.threads is not None:
        threads.set_num_threads(args.threads)
    if args.kernels:
        return session.print_kernel_rates(as_json=args.json)
    if args.image or args.audio:
        rows, text = _encoders(args)
    elif args.turn or args.engine:
        from fastpath.bench import requests

        rows, text = requests.run(args, _path(args))
    else:
        rows, text = session.run(args, _path(args))
    print(json.dumps(rows, indent=2) if args.json else text)
    return 0


def _encoders(args: argparse.Namespace):
    from fastpath.bench import encoders, projector

    path = projector.ensure(encoders.DEFAULT) if args.mmproj is None else Path(args.mmproj)
    return encoders.run(path, args.image or [], args.audio or [], args.repetitions, profile=args.profile)


def _path(args: argparse.Namespace) -> Path:
    if args.vocab is not None and args.synthetic is None:
        raise ValueError("--vocab is for --synthetic SIZE:RECIPE. Leave it out, or ask for such a model.")
    if args.synthetic is None:
        return arguments.model_path(args.model)
    from fastpath.bench import synthetic
    from fastpath.cli.setup import say

    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if (percent := 100 * done // total) >= shown + 10 or done == total:
            shown = percent
            say(f"writing {args.synthetic}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    path = None if args.model is None else Path(args.model)
    path = synthetic.ensure(
        args.synthetic, path, vocab=None if args.vocab is None else Path(args.vocab), progress=progress
    )
    say(f"synthetic model: {path}, {path.stat().st_size / 1e9:.2f} GB, kept until you delete it")
    return path
