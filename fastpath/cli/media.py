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
    parser.add_argument("--fps", type=arguments.real(0, 100, open_below=True), default=1.0, metavar="X",
                        help="frames of a video that are shown of each second (default: 1)")  # fmt: skip
    parser.add_argument(
        "--max-frames",
        type=arguments.whole(1, 10_000),
        default=60,
        metavar="N",
        help="of a video that has more, so many, evenly spread (default: 60)",
    )
    parser.add_argument(
        "--frames",
        choices=("time", "uniform"),
        default="time",
        help="which frames of a video: by --fps, or 32 from beginning to end, whatever its length, as "
        "transformers takes them (default: time)",
    )


def sampling_of(args: argparse.Namespace) -> Any:
    from refimpl.frontend.media_input import Sampling

    return Sampling(args.fps, args.max_frames, args.frames)


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

    def __init__(self, encoders, opened: Sequence[Any], say: Callable[[str], None]):
        self.encoders, self.opened, self.say = encoders, opened, say
        self.lines: list[str] = []  # for --stats

    @property
    def parts(self) -> list:
        return [each.input.part for each in self.opened]

    @property
    def largest_image(self) -> int:
        counts = [n for each in self.opened if each.kind != "audio" for n in each.input.part.counts]
        return max(counts, default=0)

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

    media = load_projector(model, args.mmproj)
    for note in media.notes:
        say(f"note: {note}")
    if not args.media:
        return None
    encoders = Encoders(media, ops_for(args.backend), activations=args.activations)
    options = {"budget": args.image_tokens, "sampling": sampling_of(args)}
    opened = [encoders.open(kind, path, **options) for kind, path in args.media]
    for note in (note for each in opened for note in each.input.notes):
        say(f"note: {note}")
    return Files(encoders, opened, say)
