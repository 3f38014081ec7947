"""`tokenize` and `render`: what the model reads, as ids and as text."""

import argparse
import json
import sys
from collections.abc import Callable

from fastpath.cli import arguments


def add_tokenize(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "text", nargs="?", metavar="TEXT", type=arguments.text, help="the text; - reads standard input"
    )
    source.add_argument("--input", metavar="FILE", help="a UTF-8 file with the text")
    source.add_argument(
        "--ids", type=arguments.token_ids, metavar="2,105,...", help="the other way: ids to text"
    )
    parser.add_argument("--bos", action="store_true", help="put one BOS in front")
    parser.add_argument(
        "--special", action="store_true", help="read markers like <|turn> as the tokens they name"
    )


def run_tokenize(args: argparse.Namespace) -> int:
    """First line: ids. Then one line per token: its id and its spelling. With --ids: the text."""
    from fastpath.cli.setup import open_model

    model = open_model(args)
    tokenizer = model.tokenizer
    if args.ids is not None:
        model.check_ids(args.ids)
        print(tokenizer.decode(args.ids))
        return 0
    if args.input is not None:
        text = arguments.read_text(args.input)
    else:
        text = arguments.read_text("-") if args.text == "-" else args.text
    ids = tokenizer.encode(text, add_bos=args.bos, parse_special=args.special)
    print(",".join(map(str, ids)))
    for token_id in ids:
        print(f"{token_id:8d}  {tokenizer.piece(token_id)!r}")
    return 0


def add_render(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    parser.add_argument(
        "messages", metavar="MESSAGES.json", help='a list of {"role": ..., "content": ...}; - reads stdin'
    )
    parser.add_argument("--tools", metavar="TOOLS.json", help="a list of function declarations")
    parser.add_argument("--think", action="store_true", help="with thinking on")
    parser.add_argument(
        "--no-generation-prompt", action="store_true", help="without the opening of the model's turn"
    )


def run_render(args: argparse.Namespace) -> int:
    """The prompt's text, an empty line, its ids."""
    from fastpath.cli.setup import open_model
    from refimpl.frontend.messages import normalize_tools

    messages = _list_of_objects(args.messages, "messages", _check_messages)
    tools = None if args.tools is None else _list_of_objects(args.tools, "tools", normalize_tools)
    model = open_model(args)
    options = {"tools": tools, "thinking": args.think, "add_generation_prompt": not args.no_generation_prompt}
    sys.stdout.write(model.template.render(messages, **options))
    print("\n")
    print(",".join(map(str, model.template.render_ids(model.tokenizer, messages, **options))))
    return 0


def _check_messages(messages: list[dict]) -> None:
    from refimpl.frontend.messages import normalize_messages

    normalize_messages(messages, null=None, fold_results=False)


def _list_of_objects(source: str, what: str, check: Callable[[list[dict]], object]) -> list[dict]:
    """A list that `check` accepts; a fault names the file."""
    value = arguments.read_json(source, what)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        got = json.dumps(value)[:40]
        raise ValueError(f"{source}: {what} must be a non-empty JSON list of objects, got {got}.")
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source}: {what} are nested too deeply to be read.") from error
    return value
