"""From parsed arguments to a model and an engine, with first-run progress."""

import sys

from fastpath.backend import ops_for
from fastpath.cli.arguments import model_path
from fastpath.engine import Engine
from fastpath.load import Model, load_model


def open_model(args) -> Model:
    """The model of --model, or the demo."""
    return load_model(model_path(args.model))


def open_engine(args, model: Model, *, max_chunk: int | None = None) -> Engine:
    """An engine as the engine options say. max_chunk bounds a chunk that the user left open."""
    chunk = args.chunk or max_chunk
    options = {"context_len": args.context, "chunk": chunk, "activations": args.activations}
    return Engine(model, ops_for(args.backend), **options)


def _say_oddities(model: Model) -> None:
    """What was corrected or ignored in the file is said: silence hides converters' mistakes."""
    for repair in model.config.repairs:
        say(f"note: {repair} (repaired from the weights)")
    if unused := model.weights.unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        say(f"note: tensors of this file that are not used: {', '.join(unused[:3])}{more}")


def warm_up(args, engine: Engine) -> None:
    """Threads, and the kernels this model needs: compiled with progress at the first run, loaded later.

    Comes after all checks of what the user gave: nobody waits for a compiler to be told of a typing error.
    """
    _say_oddities(engine.model)
    if args.backend != "cpu":
        return
    from fastpath.cpu import threads
    from fastpath.cpu.warm import compile_plan, warm

    if args.threads is not None:
        threads.set_num_threads(args.threads)
    warm(compile_plan(engine.model.weights, engine.activations), report=_report_kernel)


def _report_kernel(i: int, n: int, name: str) -> None:
    if i == 1:
        say(f"compiling {n} kernels for this processor, once: later runs find them")
    say(f"compiling kernels {i}/{n}: {name}")


def prompt_ids(model: Model, text: str, args) -> list[int]:
    """A text as the ids that the model expects: inside its chat template, or raw after exactly one BOS.

    args: those of `arguments.add_template`
    """
    if not text.strip():
        raise ValueError("the prompt is empty. Give some text with --prompt, --input or on standard input.")
    if args.raw:
        return model.tokenizer.encode(text, add_bos=True, parse_special=True)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": text})
    return model.template.render_ids(model.tokenizer, messages, thinking=args.think)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
