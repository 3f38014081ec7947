"""Images, sounds and videos of a command line: options, opened files, soft tokens."""

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastpath.cli import arguments

SILENT_S = 1.0  # encoding that ends sooner is not spoken of
KINDS = {"image": "an image", "audio": "a sound", "video": "a video"}
BUDGETS = (70, 140, 280, 560, 1120)  # as in refimpl/frontend/image.py, which a --help need not import


def add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("media (in front of the prompt's text, in the order given)")
    add_mmproj(group)
    for kind, what in KINDS.items():
        group.add_argument(
            f"--{kind}",
            dest="media",
            nargs="+",
            action="extend",
            default=[],
            type=partial(_of_kind, kind),
            metavar="FILE",
            help=f"{what}; several may be given",
        )
    group.add_argument(
        "--image-tokens",
        type=int,
        choices=BUDGETS,
        default=280,
        help="most soft tokens of an image (default: 280)",
    )
    add_sampling(group)


def add_sampling(parser: Any) -> None:
    parser.add_argument("--fps", type=arguments.real(0, 100, open_below=True), metavar="X",
                        help="frames of a video that are shown of each second (default: 1); "
                        "not with --frames uniform")  # fmt: skip
    parser.add_argument(
        "--max-frames",
        type=arguments.whole(1, 10_000),
        default=60,
        metavar="N",
        help="of a video that has more, so many, evenly spread (default: 60, or 32 with --frames uniform)",
    )
    parser.add_argument(
        "--frames",
        choices=("time", "uniform"),
        default="time",
        help="which frames of a video: by --fps, or 32 (fewer with --max-frames) from beginning to end, "
        "whatever its length, as transformers takes them (default: time)",
    )


def sampling_of(args: argparse.Namespace) -> Any:
    """Which frames, as the options say; ValueError if they contradict each other."""
    from refimpl.frontend.media_input import DEFAULT_FPS, Sampling

    if args.fps is not None and args.frames == "uniform":
        raise ValueError(
            f"--fps {args.fps:g} with --frames uniform, which asks for a number of frames, not for a rate. "
            "Leave one out, or bound the number: --max-frames N."
        )
    return Sampling(DEFAULT_FPS if args.fps is None else args.fps, args.max_frames, args.frames)


def add_mmproj(parser: Any) -> None:
    parser.add_argument(
        "--mmproj",
        metavar="FILE",
        help="the model's encoders: an mmproj GGUF or a safetensors shard (default: one beside the model)",
    )


def _of_kind(kind: str, path: str) -> tuple[str, str]:
    return kind, path


class Files:
    """The files of one command line, opened: counted, not yet encoded."""

    def __init__(self, encoders, opened: Sequence[Any], say: Callable[[str], None], image_tokens: int):
        self.encoders, self.opened, self.say, self.image_tokens = encoders, opened, say, image_tokens
        self.lines: list[str] = []  # for --stats

    @property
    def parts(self) -> list:
        return [each.input.part for each in self.opened]

    @property
    def largest_image(self) -> int:
        counts = [n for each in self.opened if each.kind != "audio" for n in each.input.part.counts]
        return max(counts, default=0)

    @property
    def notes(self) -> list[str]:
        """What the user should know, once it is clear that there will be an answer."""
        return [*self.encoders.media.notes, *(note for each in self.opened for note in each.input.notes)]

    @property
    def shorter(self) -> str:
        """How a prompt with these files gets shorter."""
        kinds = {each.kind for each in self.opened}
        ways = []
        if "image" in kinds and self.image_tokens > min(BUDGETS):
            ways.append(f"use fewer --image-tokens than {self.image_tokens}")
        if (frames := max((len(part.counts) for part in self.parts if part.kind == "video"), default=0)) > 1:
            ways.append(f"use fewer --max-frames than {frames}")
        if "audio" in kinds:
            ways.append("cut the sound")
        if len(self.opened) > 1:
            ways.append("give fewer files")
        text = " or ".join(ways or ["shorten the text"])
        return text[0].upper() + text[1:]

    def calls(self) -> list[Callable[[], object]]:
        """One for each shape that is encoded: what kernels have to be compiled for."""
        pieces = {(each.kind, piece.shape): piece for each in self.opened for piece in each.input.pieces}
        return [partial(self.encoders.run, kind, piece) for (kind, _), piece in pieces.items()]

    def encode(self, starts: Sequence[int], trace=None) -> list:
        """Soft tokens, at the places that they have in the prompt."""
        from refimpl.frontend.media_prompt import soft_tokens

        encoded = []
        for each in self.opened:
            begin = time.perf_counter()
            with self._spoken_of(each):
                encoded.append(self.encoders.encode(each, trace=trace, progress=self._progress(each, begin)))
            self.lines.append(self._line(each, time.perf_counter() - begin))
        return soft_tokens(starts, encoded)

    @contextmanager
    def _spoken_of(self, each) -> Iterator[None]:
        """Says what takes long, once it does."""
        text = f"encoding {each.input.name}: {sum(each.input.part.counts)} soft tokens"
        timer = threading.Timer(SILENT_S, self.say, [text])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _progress(self, each, begin: float) -> Callable[[int, int], None]:
        """Videos that take long say where they are, at every tenth frame."""

        def report(done: int, total: int) -> None:
            if done < total and done % 10 == 0 and time.perf_counter() - begin > SILENT_S:
                self.say(f"{each.input.name}: {done} of {total} frames encoded")

        return report

    def _line(self, each, seconds: float) -> str:
        counts = each.input.part.counts
        frames = f"{len(counts)} frames, " if each.kind == "video" else ""
        return (
            f"{each.input.name}: {frames}{sum(counts)} soft tokens, decoded in {each.decode_s:.2f} s, "
            f"encoded in {seconds:.2f} s"
        )

    def meta(self) -> dict[str, Any]:
        """What a trace says of its media."""
        return {
            "mmproj": self.encoders.media.path.name,
            "media": [
                {"kind": each.kind, "sha256": each.key[1].hex(), "soft_tokens": sum(each.input.part.counts)}
                for each in self.opened
            ],
        }


def open_files(args: argparse.Namespace, model) -> Files | None:
    """The files of --image, --audio and --video; None without any. A projector is checked in any case."""
    if not args.media and args.mmproj is None:
        return None
    from fastpath.backend import ops_for
    from fastpath.cli.setup import say
    from fastpath.media import Encoders, load_projector

    options = {"budget": args.image_tokens, "sampling": sampling_of(args)}
    media = load_projector(model, args.mmproj)
    if not args.media:
        for note in media.notes:
            say(f"note: {note}")
        return None
    encoders = Encoders(media, ops_for(args.backend), activations=args.activations)
    opened = [encoders.open(kind, path, **options) for kind, path in args.media]
    return Files(encoders, opened, say, args.image_tokens)
