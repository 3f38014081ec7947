"""`models`: published files, which of them fit this machine, and one of them with what belongs to it."""

import argparse
from typing import Any

from fastpath.cli.arguments import whole

GB = 1e9
LINE = "{:16}{:>8}{:>9}{:>9}{:>9}  {:5}{}"


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fetch",
        metavar="ID",
        help="download this model, its projector and its drafter into the Hub's cache",
    )
    parser.add_argument(
        "--context",
        type=whole(1),
        metavar="N",
        default=8192,
        help="tokens to have memory for (default: 8192)",
    )
    parser.add_argument("--no-mmproj", action="store_true", help="fetch no projector")
    parser.add_argument("--no-draft", action="store_true", help="fetch no drafter, which no option uses yet")


def run_models(args: argparse.Namespace) -> int:
    if args.fetch is not None:
        return _fetch(args)
    _print_list(args.context)
    return 0


def _print_list(context: int) -> None:
    from fastpath import memory
    from fastpath.hub.catalogue import CATALOGUE
    from fastpath.hub.fetch import cached, is_installed

    free = memory.available_bytes()
    known = "the system does not say how much is free" if free is None else f"{free / GB:.1f} GB are free"
    print(f"memory   {known}; needed is what a conversation of {context} tokens with images takes\n")
    print(LINE.format("id", "GB", "mmproj", "drafter", "needed", "fits", "here"))
    for entry in CATALOGUE:
        need = entry.bytes_needed(context)
        fits = "?" if free is None else "yes" if need <= free else "no"
        here = "yes" if is_installed() and cached(entry.model.name) else "-"
        drafter = f"{entry.drafters[0].gb:.3f}" if entry.drafters else "-"
        print(LINE.format(
            entry.id, f"{entry.model.gb:.3f}", f"{entry.projectors[0].gb:.3f}", drafter, f"{need / GB:.1f}",
            fits, here,
        ))  # fmt: skip
    for entry in CATALOGUE:
        print(f"\n{entry.id}")
        for kind, piece in _files(entry):
            print(f"  {kind:10}{piece.name}")
        print(
            f"  terms     https://huggingface.co/{entry.base} and https://huggingface.co/{entry.model.repo}"
        )
    print(
        "\nFetch one with: twinpath models --fetch ID. That a file needs no account says nothing of its\n"
        "terms: read those of the base model and of the conversion before you use it or pass it on."
    )


def _files(entry: Any) -> list[tuple[str, Any]]:
    every = (("model", entry.model), *(("mmproj", piece) for piece in entry.projectors))
    return [*every, *(("drafter", piece) for piece in entry.drafters)]


def _fetch(args: argparse.Namespace) -> int:
    from fastpath import memory
    from fastpath.cli.setup import say
    from fastpath.hub import catalogue
    from fastpath.hub.fetch import check_installed, fetch

    entry = catalogue.find(args.fetch)
    check_installed()
    free, need = memory.available_bytes(), entry.bytes_needed(args.context)
    if free is not None and need > free:
        say(f"note: {entry.id} needs {need / GB:.1f} GB of memory, {free / GB:.1f} GB are free")
    say(
        f"note: terms to read: https://huggingface.co/{entry.base}, https://huggingface.co/{entry.model.repo}"
    )
    wanted = [("--model", entry.model)]
    if not args.no_mmproj:
        wanted.append(("--mmproj", entry.projectors[0]))
    for option, piece in wanted:
        print(f"{option:14}{fetch(piece.name, refresh=True, say=say)}", flush=True)
    if entry.drafters and not args.no_draft:
        path = fetch(entry.drafters[0].name, refresh=True, say=say)
        say(f"note: the drafter is at {path}; no option uses it yet")
    return 0
