"""From parsed arguments to a model and an engine, with first-run progress."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastpath.backend import Choice, choose, ops_for
from fastpath.cli.arguments import model_path
from fastpath.cli.media import Files
from fastpath.cli.parts import Parts
from fastpath.engine import Engine
from fastpath.lanes import Lanes
from fastpath.load import Model, load_model
from fastpath.model.text import forward
from refimpl.batch import LogitRows, make_batch
from refimpl.frontend.media_prompt import expand, locate, placeholders, user_message
from refimpl.frontend.terminal import visible

MANY = 64  # tokens that stand for any longer prompt when kernels are chosen
SILENT_S = 1.0  # packing that ends sooner is not spoken of


def open_model(args) -> Model:
    """The model of --model, or the demo; `args.backend` becomes the one that will run it.

    Raises:
        ValueError: --backend cuda, and there is no device, or the model does not fit there. Nothing was
            brought there
    """
    model = load_model(model_path(args.model))
    if hasattr(args, "backend") and not hasattr(args, "backend_choice"):
        args.backend_choice = choose_backend(args, model)
        args.backend = args.backend_choice.name
    return model


def choose_backend(args, model: Model) -> Choice:
    def misfit() -> str | None:
        from fastpath.cuda import footprint

        return footprint.misfit(footprint.of_options(args, model))

    return choose(args.backend, misfit)


def open_engine(
    args, model: Model, *, files: Files | None = None, largest_image: int = 0, **options
) -> Engine:
    """An engine as the engine options say, and for these images, or for any up to a number of soft tokens;
    further options are those of Engine.
    """
    given = _options(args, None, files)
    given["largest_image"] = max(given["largest_image"], largest_image)
    given["prefix_cache"] = not getattr(args, "no_prefix_cache", False)
    return Engine(model, ops_for(args.backend), **(given | options))


def open_lanes(args, model: Model, *, max_chunk: int | None = None, files: Files | None = None) -> Lanes:
    """Lanes as the engine options say, and for these images. max_chunk bounds a chunk left open."""
    return Lanes(model, ops_for(args.backend), **_options(args, max_chunk, files))


def _options(args, max_chunk: int | None, files: Files | None) -> dict[str, Any]:
    return {
        "context_len": args.context,
        "chunk": args.chunk or max_chunk,
        "largest_image": files.largest_image if files else 0,
        "activations": args.activations,
        "kv_type": args.kv_type,
        "replay": not args.no_replay,
    }


def prepare(
    args, lanes: Lanes, n_tokens: int, rows: LogitRows, parts: Parts, files: Files | None = None
) -> int:
    """Threads, weights and kernels for a prompt of so many tokens; how many kernels had to be compiled.

    Comes after all checks of what the user gave: nobody waits for a compiler to be told of a typing error.
    """
    _say_oddities(lanes.model)
    for note in files.notes if files else ():
        say(f"note: {note}")
    if args.backend != "cpu":
        return 0
    from fastpath.cpu import threads

    if args.threads is not None:
        threads.set_num_threads(args.threads)
    with parts.measured("kernels"):
        calls = files.calls() if files else []
        n_compiled = warm_up(lanes, n_tokens, rows, repack=not args.no_repack, calls=calls)
    if not args.no_repack:
        with parts.measured("repack"):
            lanes.model = lanes.model.packed(PackingProgress())
    return n_compiled


def warm_up(
    lanes: Lanes,
    n_tokens: int = MANY,
    rows: LogitRows = "last",
    *,
    repack: bool = False,
    calls: Sequence[Callable[[], object]] = (),
) -> int:
    """The kernels for a prompt of so many tokens, and for what follows, a token of each lane; how many had to
    be compiled.

    repack  those that pack the weights as well, and those for packed weights instead of those that are there
    calls   of encoders that come before
    """
    from fastpath.cpu.warm import kernels_of, warm

    plan, models = [], [lanes.model]
    if repack:
        plan += kernels_of(lambda: models.append(lanes.model.packed()))
    model = models[-1]
    for n in {1, min(lanes.cache.n_seqs, lanes.chunk, MANY), min(n_tokens, lanes.chunk, MANY)}:
        batch = make_batch([(0, 0, [0] * n, rows)])
        call = partial(forward, lanes.ops, model.config, model.weights, lanes.cache, batch)
        plan += kernels_of(partial(call, activations=lanes.activations))
    lanes.cache.release(0)  # the pages that were reserved for nothing
    for encode in calls:
        plan += kernels_of(encode)
    return warm(list(dict.fromkeys(plan)), report=_report_kernel)


def warm_encoders(encoders: Any, opened: Any) -> None:
    """The kernels for a file that is about to be encoded, compiled with a word about it."""
    from fastpath.cpu.warm import kernels_of, warm

    plan: list[Any] = []
    for call in Files(encoders, [opened], say).calls():
        plan += kernels_of(call)
    warm(list(dict.fromkeys(plan)), report=_report_kernel)


def _say_oddities(model: Model) -> None:
    """What was corrected or ignored in the file is said: silence hides converters' mistakes."""
    for repair in model.config.repairs:
        say(f"note: {repair} (repaired from the weights)")
    if unused := model.weights.unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        say(f"note: tensors of this file that are not used: {', '.join(unused[:3])}{more}")


def _report_kernel(i: int, n: int, name: str) -> None:
    if i == 1:
        say(f"compiling {n} kernels for this processor, once: later runs find them")
    say(f"compiling kernels {i}/{n}: {name}")


class PackingProgress:
    """What is said while weights are packed: nothing at first, then a line that a terminal shows in place,
    and elsewhere a line per quarter.
    """

    def __init__(self, stream=None, clock=time.perf_counter):
        self.stream, self.clock = stream or sys.stderr, clock
        self.begin, self.shown = clock(), 0
        self.is_tty = self.stream.isatty()

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        is_due = self.clock() - self.begin >= SILENT_S and percent >= self.shown + (1 if self.is_tty else 25)
        if not is_due and not (done == total and self.shown):
            return
        self.shown = percent
        text = f"packing weights: {percent} % of {total / 1e9:.1f} GB"
        if self.is_tty:
            end = "\r\x1b[K" if done == total else ""  # what was shown in place goes
            self.stream.write(f"\r{text}{end}")
        elif done < total:
            self.stream.write(f"{text}\n")
        self.stream.flush()


def prompt_ids(model: Model, text: str, args, files: Files | None = None) -> tuple[list[int], list[int]]:
    """A text as the ids that the model expects: inside its chat template, or raw after exactly one BOS.

    args   those of `arguments.add_template`
    files  images, sounds and videos in front of the text; of a raw text, in the places of its <|image|>,
           <|audio|> and <|video|>
    Returns the ids, and where the soft tokens of each image, sound and frame begin.
    """
    parts = files.parts if files else []
    if not text.strip() and not (parts and not args.raw):
        raise ValueError("the prompt is empty. Give some text with --prompt, --input or on standard input.")
    if args.raw:
        _check_places(text, [part.kind for part in parts])
        text = expand(text, parts)
        ids = model.tokenizer.encode(text, add_bos=True, parse_special=True)
    else:
        messages = [{"role": "system", "content": args.system}] if args.system else []
        messages.append(user_message(text, parts))
        ids = model.template.render_ids(model.tokenizer, messages, thinking=args.think, media=parts)
    return locate(ids, model.tokenizer, parts) if parts else (ids, [])


def _check_places(text: str, kinds: list[str]) -> None:
    """A raw text has one place for each file, in order."""
    places = placeholders(text)
    if places != kinds:
        found, asked = (" ".join(f"<|{kind}|>" for kind in listed) for listed in (places, kinds))
        given = " ".join(f"--{kind}" for kind in kinds) or "no file"
        advice = f"Write {asked} where the files stand" if kinds else "Give one file for each, in this order"
        raise ValueError(f"the raw prompt has {found or 'no place for a file'}, given: {given}. {advice}.")


def say(text: str) -> None:
    """A line on standard error."""
    print(visible(text), file=sys.stderr, flush=True)
