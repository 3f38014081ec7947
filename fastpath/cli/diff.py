"""`diff`: two traces against the error budget; the first name that is over is where to look."""

import argparse

from fastpath.cli.output import tell
from fastpath.error_budget import COLUMNS, markdown, order_of, split_name


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", nargs="?", metavar="A.npz", help="the trace that errors are measured against")
    parser.add_argument(
        "b", nargs="?", metavar="B.npz", help="the other one; of any engine that has llama.cpp's names"
    )
    parser.add_argument(
        "--column",
        choices=COLUMNS,
        help="of the budget (default: that of both traces' activations if they agree, else 'different')",
    )
    parser.add_argument(
        "--budget", action="store_true", help="print the budget as it stands in docs/numerics.md"
    )


def run_diff(args: argparse.Namespace) -> int:
    """0: all within budget; 1: some name is over."""
    if args.budget:
        print(markdown())
        return 0
    if args.a is None or args.b is None:
        raise ValueError(
            "diff needs two traces: twinpath diff A.npz B.npz (made by: twinpath trace --out FILE.npz)."
        )
    from fastpath.trace import column_for, compare, load_trace

    a, b = load_trace(args.a), load_trace(args.b)
    column = args.column or column_for(a, b)
    differences = compare(a, b, column)
    if not differences:
        raise ValueError(
            f"{args.a} and {args.b} have no name in common. Names are llama.cpp's: inp_scaled, Qcur-0, ..."
        )
    tell(f"A {_describe(args.a, a)}")
    tell(f"B {_describe(args.b, b)}")
    print(f"budget column: {column}\n")
    _print_table(differences)
    _print_missing(a, b)
    _warn_if_unlike(a, b)
    over = [d for d in differences if d.is_over]
    if over:
        first = over[0].name if over[0].row is None else f"{over[0].name}, worst at position {over[0].row}"
        print(f"\nOVER: {len(over)} of {len(differences)} names; the first in computation is {first}")
        return 1
    print(f"\nwithin budget: all {len(differences)} names")
    return 0


def _describe(path: str, trace) -> str:
    meta = trace.meta
    if not meta:
        return f"{path}: {len(trace.arrays)} names, no metadata (another engine)"
    said = ", ".join(str(meta[key]) for key in ("engine", "model", "backend", "activations") if key in meta)
    return f"{path}: {len(trace.arrays)} names, {said}"


def _print_table(differences) -> None:
    """The worst row stands beside its position; its limit is shown where it is over."""
    print(f"{'name':28}{'max abs':>11}{'normalised':>11}{'budget':>9}{'worst row':>11}{'at':>6}  verdict")
    for d in differences:
        budget = "-" if d.limit is None else f"{d.limit:.1e}"
        at = "-" if d.row is None else str(d.row)
        print(
            f"{d.name:28}{d.max_abs:11.2e}{d.normalised:11.2e}{budget:>9}"
            f"{d.row_error:11.2e}{at:>6}  {_verdict(d)}"
        )


def _verdict(d) -> str:
    if d.note:
        return d.note
    if d.is_row_over:
        return f"OVER: row limit {d.row_limit:.1e}"
    return "OVER" if d.is_over else "no budget" if d.limit is None else "ok"


def _print_missing(a, b) -> None:
    """One line for each side, names of several layers together."""
    for label, names in (("A", a.arrays.keys() - b.arrays.keys()), ("B", b.arrays.keys() - a.arrays.keys())):
        layers: dict[str, list[int | None]] = {}
        for base, layer in map(split_name, sorted(names, key=order_of)):
            layers.setdefault(base, []).append(layer)
        if layers:
            tell(f"only in {label}: {', '.join(_spelled(*item) for item in layers.items())}")


def _spelled(base: str, layers: list[int | None]) -> str:
    if layers == [None]:
        return base
    return f"{base}-{layers[0]}" if len(layers) == 1 else f"{base} in {len(layers)} layers"


def _warn_if_unlike(a, b) -> None:
    for key in ("tokens", "sha256", "model_bytes"):
        if key in a.meta and key in b.meta and a.meta[key] != b.meta[key]:
            print(f"note: the traces are of different {'prompts' if key == 'tokens' else 'model files'}")
            return
