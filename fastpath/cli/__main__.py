"""Dispatch: a subcommand when the first word names one, inference otherwise. Faults are one line, exit 2."""

import sys  # and nothing that takes time: before `main` a Ctrl+C would be a traceback

PROG = "twinpath"

# name -> (module, what it does); modules are imported when chosen, so that --help waits for nothing
COMMANDS = {
    "chat": ("fastpath.cli.chat", "a conversation in the terminal; requests from files of JSON lines"),
    "serve": ("fastpath.cli.serve", "a server for browsers and for OpenAI, Anthropic and Ollama clients"),
    "models": ("fastpath.cli.models", "published models: sizes, what fits this machine, downloads"),
    "inspect": ("fastpath.cli.inspect", "what a model file holds: layers, types, sizes, bytes of the cache"),
    "tokenize": ("fastpath.cli.text", "text to token ids, ids to text"),
    "render": ("fastpath.cli.text", "messages (JSON) to prompt text and token ids"),
    "logits": ("fastpath.cli.numbers", "logits of every token, into a .npy file"),
    "trace": ("fastpath.cli.numbers", "every named intermediate, into a .npz file"),
    "see": ("fastpath.cli.see", "what the model sees of an image, a sound or a video, into a .png file"),
    "bench": ("fastpath.cli.bench", "speed, against what the machine can read and multiply"),
    "device-check": (
        "fastpath.cli.device_check",
        "every op on the GPU of this machine against its definition",
    ),
    "diff": ("fastpath.cli.diff", "two traces against the error budget; names the first that is over"),
}

_CACHE = "Ask for less: --context and --chunk bound the cache and a call"
# what bounds the memory of a command; "" is inference
LESS = {
    "": _CACHE,
    "chat": _CACHE,
    "logits": _CACHE,
    "trace": _CACHE,
    "serve": "Ask for less: --context, --parallel and --kv-bytes bound the cache",
    "bench": "Ask for less: --batch, -p, -n, -d and -b bound the cache and a call",
}
ENOMEM = 12

OK, FAULT, INTERRUPTED, NO_READER = 0, 2, 130, 141  # the last two as shells count SIGINT and SIGPIPE
STATUSES = """
  0    done
  1    diff found a name over its budget; device-check an op that differs;
       --batch-file had a line that got an error
  2    wrong input, or output that cannot be written: one line says which
  130  Ctrl+C, after what was said so far
  141  the reader of the output went away, as `head` does: no message"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; the process's exit status, one of STATUSES."""
    words, ctrl_c = list(sys.argv[1:] if argv is None else argv), None
    try:
        if sys.stdout is None:
            return _fault("standard output is closed. Leave it open, or send it to a file.")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a question mark
        from fastpath.interrupts import Noticed

        with Noticed() as ctrl_c:
            status = _run([*words])
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        _flush_or_drop()
        return NO_READER
    except MemoryError as error:
        return _out_of_memory(words, str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        if refused := _refused_memory(error):
            return _out_of_memory(words, f"{place}{refused}")
        return _fault(f"{place}{error.strerror or error}. Check the path and the permissions.")
    except ValueError as error:
        return _fault(str(error))
    except Exception as error:
        if ctrl_c is not None and ctrl_c.came:
            return _interrupted()  # which an import has made something else of
        if refused := _refused_memory(error):
            return _out_of_memory(words, refused)
        raise


def _interrupted() -> int:
    _say(f"{PROG}: interrupted")
    return INTERRUPTED


def _refused_memory(error: BaseException | None) -> str:
    """What an error, or one behind it, says of refused memory, also to threads and libraries, or ""."""
    while error is not None:
        says = str(error)
        if isinstance(error, OSError) and error.errno == ENOMEM:
            return str(error.strerror)
        if any(
            sign in says for sign in ("can't start new thread", "Cannot allocate memory", "failed to map")
        ):
            return says
        error = error.__cause__ or error.__context__
    return ""


def _out_of_memory(words: list[str], what: str) -> int:
    from fastpath.memory import in_words

    command = words[0] if words and words[0] in COMMANDS else ""
    advice = f"{LESS[command]}, or free memory" if command in LESS else "Free memory"
    what = f": {what.rstrip('.')}" if what else ""
    return _fault(f"out of memory{what}. {in_words()}. {advice}, or raise the limit.")


def _run(words: list[str]) -> int:
    """Like `main`, but faults are exceptions."""
    try:
        return _dispatch(words)
    except SystemExit as end:  # argparse: --help, or a fault that it has printed
        return end.code if isinstance(end.code, int) else OK


def _dispatch(words: list[str]) -> int:
    import importlib

    from fastpath.cli.arguments import Parser

    if words and words[0] in COMMANDS:
        name = words.pop(0)
        module = importlib.import_module(COMMANDS[name][0])
        parser = Parser(prog=f"{PROG} {name}", description=COMMANDS[name][1])
        function = name.replace("-", "_")
        getattr(module, f"add_{function}")(parser)
        return getattr(module, f"run_{function}")(parser.parse(words))
    from fastpath.cli import run

    others = "\n".join(f"  {name:14}{what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        prog=PROG,
        description="Runs Gemma 4. Without a subcommand it answers a prompt.",
        epilog=f"subcommands (each has its own --help):\n{others}\n\nexit status:{STATUSES}",
    )
    run.add_run(parser)
    return run.run_run(parser.parse(words))


def _fault(message: str) -> int:
    from fastpath.cli.arguments import one_line

    _say(f"{PROG}: {one_line(message)}")
    return FAULT


def _say(line: str) -> None:
    """On standard error, behind what was said before; to nobody, if nobody takes it."""
    _flush_or_drop()
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _flush_or_drop()


def _flush_or_drop() -> None:
    """What a stream does not take is thrown away: the exit would stumble over it, and change the status."""
    import os

    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
