"""Dispatch: a subcommand when the first word names one, inference otherwise. Faults are one line, exit 2."""

import importlib
import io
import os
import sys
from collections.abc import Sequence

from fastpath.cli.arguments import PROG, Parser

# name -> (module, what it does); modules are imported when chosen, so that --help waits for nothing
COMMANDS = {
    "inspect": ("fastpath.cli.inspect", "what a model file holds: layers, types, sizes, bytes of the cache"),
    "tokenize": ("fastpath.cli.text", "text to token ids, ids to text"),
    "render": ("fastpath.cli.text", "messages (JSON) to prompt text and token ids"),
    "logits": ("fastpath.cli.numbers", "logits of every token, into a .npy file"),
    "trace": ("fastpath.cli.numbers", "every named intermediate, into a .npz file"),
    "diff": ("fastpath.cli.diff", "two traces against the error budget; names the first that is over"),
}

OK, FAULT, INTERRUPTED = 0, 2, 130
STATUSES = (
    "0 done; 1 diff found a name over its budget; 2 wrong input; 130 Ctrl+C, after what was said so far"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; the process's exit status.

    0 done; 1 `diff` found a name over its budget; 2 wrong input, with one line on stderr; 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        return _fault("standard output is closed. Leave it open, or send it to a file.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a question mark
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except SystemExit as end:  # argparse: --help, or a fault that it has printed
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _fault(
            "the reader of this output went away before its end. Read it to the end, or ask for less."
        )
    except MemoryError:
        return _fault("out of memory. Ask for less: --context and --chunk bound the cache and a call.")
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _fault(f"{place}{error.strerror or error}. Check the path and the permissions.")
    except ValueError as error:
        return _fault(str(error))


def _run(words: list[str]) -> int:
    if words and words[0] in COMMANDS:
        name = words.pop(0)
        module = importlib.import_module(COMMANDS[name][0])
        parser = Parser(prog=f"{PROG} {name}", description=COMMANDS[name][1])
        getattr(module, f"add_{name}")(parser)
        return getattr(module, f"run_{name}")(parser.parse(words))
    from fastpath.cli import run

    others = "\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        prog=PROG,
        description="Runs Gemma 4. Without a subcommand it answers a prompt.",
        epilog=f"subcommands (each has its own --help):\n{others}\n\nexit status: {STATUSES}",
    )
    run.add_run(parser)
    return run.run_run(parser.parse(words))


def _fault(message: str) -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # nobody can read the rest: throw it away, or the exit's own flush fails once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)
    return FAULT


if __name__ == "__main__":
    sys.exit(main())
