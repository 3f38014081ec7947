"""llama.cpp beside ours: `make bench-peers LLAMA_BENCH=/path/to/llama-bench`.

Each row of the table is one pair of commands, run in turn (A B A B A B), each in a fresh process, with the
same file, threads and number of tokens. Results are kept in docs/performance.json after every pair, so that
a run can be interrupted, continued, and done in parts; docs/performance.md is written from that file.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastpath.bench import synthetic
from fastpath.bench.peers_page import page
from fastpath.bench.peers_rows import ROWS, Row, Run
from fastpath.cli.arguments import Parser, one_line, whole

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "performance.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- written by make bench-peers -->\n", "<!-- end -->\n"


def main(words: Sequence[str] | None = None) -> int:
    """Faults are one line; what was measured before is kept."""
    try:
        return _main(_arguments(words))
    except KeyboardInterrupt:
        _say("bench-peers: interrupted; the next run goes on from here")
        return 130
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _stop(f"{place}{error.strerror or error}. Check the path and the permissions")
    except ValueError as error:
        _stop(str(error))


def _stop(message: str) -> NoReturn:
    raise SystemExit(f"bench-peers: {one_line(message)}")


def _main(args: argparse.Namespace) -> int:
    wanted = [row for row in ROWS if row.name in args.rows]
    results = _load()
    if not args.only_write:
        results["machine"] = _describe(args)
        files = _Files(Path(args.models) if args.models else None, keep=args.keep)
        for i, row in enumerate(wanted):
            _run_row(row, args, results, files)
            files.done(row.model, [later.model for later in wanted[i + 1 :]])
    _write_page(results)
    return 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m fastpath.bench.peers", description=__doc__)
    names = [row.name for row in ROWS]

    def rows(text: str) -> list[str]:
        chosen = [name for name in names if text == "all" or name in text.split(",")]
        if unknown := set(text.split(",")) - {"all", *names}:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not a row; there are {', '.join(names)}")
        return chosen

    def option(name: str, default: str | None = None) -> str | None:
        return os.environ.get(name) or default  # a text: checked like one on the command line

    def add(name: str, help: str, **options: Any) -> None:
        variable = name.removeprefix("--").replace("-", "_").upper()
        parser.add_argument(name, help=f"{help} ({variable}=)", **options)

    n_cpus = str(len(os.sched_getaffinity(0)))
    add("--llama-bench", "llama.cpp's llama-bench", default=option("LLAMA_BENCH"))
    add("--rows", "names, or all", type=rows, default=option("ROWS", "all"))
    add("--rounds", "pairs of each row", type=whole(1, 1000), default=option("ROUNDS", "3"))
    add("--threads", "of both", type=whole(1, 256), default=option("THREADS", n_cpus))
    add("--models", "folder of files like e2b-q4_0.gguf", default=option("MODELS"))
    add("--prefix", "put before each command: taskset ..", type=_words, default=option("PREFIX", ""))
    add("--again", "measure rows anew that have results", action="store_true", default=bool(option("AGAIN")))
    add("--keep", "do not delete files that were written for this", action="store_true",
        default=bool(option("KEEP")))  # fmt: skip
    parser.add_argument("--only-write", action="store_true", help="write the page from the results again")
    args = parser.parse(list(sys.argv[1:] if words is None else words))
    bench = args.llama_bench
    if not args.only_write and not (bench and os.path.isfile(bench) and os.access(bench, os.X_OK)):
        parser.error(
            f"llama-bench: got {bench!r}, expected a program. Set LLAMA_BENCH=/path/to/it "
            "(docs/performance.md says how to build one)"
        )
    if args.models and os.path.exists(args.models) and not os.path.isdir(args.models):
        parser.error(f"models: {args.models} is a file, expected a folder. Set MODELS to the one it is in")
    return args


def _words(text: str) -> list[str]:
    """An argparse type: words as a shell takes them apart."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a command: {error}") from None


class _Files:
    """The model files of the rows: from a folder that the user has, or written when needed and deleted."""

    def __init__(self, folder: Path | None, *, keep: bool):
        self.folder, self.keep = folder, keep
        self.written: set[Path] = set()

    def place(self, model: str) -> Path:
        return (self.folder or synthetic.folder()) / (model.replace(":", "-").lower() + ".gguf")

    def path(self, model: str) -> Path:
        """The file, written if it is not there."""
        path = self.place(model)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _say(f"writing {path}")
            synthetic.write(model, path)
            self.written.add(path)
        return path

    def done(self, model: str, later: list[str]) -> None:
        """Files share the page cache: one that is not needed any more leaves it."""
        path = self.place(model)
        if model in later or not path.exists():  # the second: all of its rows had results
            return
        if path in self.written and not self.keep:
            path.unlink()
        else:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run_row(row: Row, args: argparse.Namespace, results: Run, files: _Files) -> None:
    kept = results["rows"].setdefault(row.name, {})
    if args.again:
        kept.clear()
    pairs = kept.setdefault("pairs", [])
    peer = Path(args.llama_bench).with_name(row.peer)
    if not peer.exists():
        kept["missing"] = f"{row.peer} is not beside llama-bench: build that target too"
        _say(f"{row.name}: {kept['missing']}")
        return
    kept.pop("missing", None)
    path, is_first = None, True
    while len(pairs) < args.rounds:
        path = path or files.path(row.model)
        values = {"m": str(path), "t": str(args.threads)}
        theirs = _command(str(peer), row.peer_words, values)
        ours = _command(f"{sys.executable} -m fastpath.cli", row.our_words, values)
        if is_first:
            _read(path)
            _run(ours, args.prefix)  # kernels are compiled
            is_first = False
        pair = {
            "commit": _commit(),
            "llama.cpp": _figures(row, theirs, row.read_peer, *_run(theirs, args.prefix)),
            "ours": _figures(row, ours, row.read_ours, *_run(ours, args.prefix)),
        }
        _say(f"{row.name}, pair {len(pairs) + 1} of {args.rounds}: {_summary(row, pair)}")
        pairs.append(pair)
        kept["commands"] = {"llama.cpp": _shown(row.peer, row.peer_words, row, args),
                            "ours": _shown("python -m fastpath.cli", row.our_words, row, args)}  # fmt: skip
        _save(results)


def _read(path: Path) -> None:
    """The whole file into the page cache, where both programs then find it."""
    with open(path, "rb", buffering=0) as file:
        while file.readinto(_buffer):
            pass


_buffer = bytearray(1 << 24)


def _command(program: str, words: str, values: dict[str, str]) -> list[str]:
    return program.split() + [word.format(**values) for word in words.split()]


def _shown(program: str, words: str, row: Row, args: argparse.Namespace) -> str:
    return f"{program} {words}".format(m=row.model.replace(":", "-").lower() + ".gguf", t=args.threads)


def _figures(row: Row, command: list[str], read: Callable[[str, Run], Run], out: str, usage: Run) -> Run:
    """What a command said, with every figure of its row; anything else ends the run and is not kept."""
    try:
        found = read(out, usage)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _stop(
            f"{shlex.join(command)}: got output that cannot be read ({type(error).__name__}: {error}), "
            f"expected rows of figures. It begins: {out[:80]!r}. Run it by hand"
        )
    for figure in row.figures:
        value = found.get(figure.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value <= 0:
            _stop(
                f"{shlex.join(command)}: got {value!r} for {figure.name}, expected a number above 0. "
                "Run it by hand"
            )
    return found


def _run(command: list[str], prefix: Sequence[str]) -> tuple[str, Run]:
    """Standard output, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        usage = Path(folder) / "usage.json"
        timed = [sys.executable, str(Path(__file__).with_name("timed.py")), str(usage)]
        done = subprocess.run(
            [*prefix, *timed, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_environment(command),
        )
        if done.returncode:
            last = " ".join(done.stderr.strip().splitlines()[-1:])
            _stop(f"{shlex.join(command)}: status {done.returncode}: {last[:300]}. Run it by hand")
        return done.stdout, json.loads(usage.read_text())


def _environment(command: list[str]) -> dict[str, str]:
    """llama.cpp's libraries lie beside its programs; our packages in the root."""
    env = dict(os.environ)
    for name, folder in (("LD_LIBRARY_PATH", str(Path(command[0]).parent)), ("PYTHONPATH", str(ROOT))):
        env[name] = os.pathsep.join(filter(None, (folder, env.get(name))))
    return env


def _summary(row: Row, pair: Run) -> str:
    return "; ".join(
        f"{f.name} {pair['llama.cpp'][f.name]:.2f} and {pair['ours'][f.name]:.2f} {f.unit}"
        for f in row.figures
    )


def _load() -> Run:
    """The results so far, after a look at whether a page can be made of them."""
    if not RESULTS.exists():
        return {"rows": {}}
    try:
        results = json.loads(RESULTS.read_text())
        page(results)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        _stop(
            f"{RESULTS}: not the results of earlier runs ({type(error).__name__}: {error}). Take it from the "
            "repository again, or remove it and measure anew"
        )
    return results


def _save(results: Run) -> None:
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(RESULTS)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write_page(results: Run) -> None:
    """The part between the marks; what people wrote around it stays."""
    before, mark, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        _stop(
            f"{PAGE}: expected the lines {BEGIN.strip()} and {END.strip()} around the table. Put them there"
        )
    PAGE.write_text(before + BEGIN + page(results) + END + after)


def _describe(args: argparse.Namespace) -> Run:
    import datetime
    import platform

    import numba

    from fastpath.bench.report import cpu_name

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "threads": args.threads,
        "python": platform.python_version(),
        "numba": numba.__version__,
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
