"""`see`: what the model sees or hears of a file, as a picture for people."""

import argparse
from pathlib import Path

from fastpath.cli import output
from fastpath.cli.media import BUDGETS, add_sampling, sampling_of


def add_see(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="an image, a sound or a video")
    parser.add_argument(
        "--out", metavar="FILE.png", help="where to write; - is standard output (default: FILE-seen.png here)"
    )
    parser.add_argument(
        "--image-tokens", type=int, choices=BUDGETS, default=280, help="most soft tokens of an image"
    )
    add_sampling(parser)


def run_see(args: argparse.Namespace) -> int:
    """An image on its canvas, with numbered soft tokens; mel energies of a sound; the frames of a video."""
    from refimpl.frontend.picture import picture_of, png_bytes

    picture = picture_of(args.file, budget=args.image_tokens, sampling=sampling_of(args))
    out = args.out if args.out is not None else f"{Path(args.file).stem}-seen.png"
    with output.writing(out, [Path(args.file)], what="the file") as stream:
        stream.write(png_bytes(picture))
    output.summarise(out, f"PNG, {picture.shape[1]} x {picture.shape[0]} pixels")
    return 0
