"""Records what transformers says about media, tiny encoders and models: python -m oracles.record_media.

Files are made from their seeds by programs of the tests in processes of their own; see record.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "media"
ROOT = Path(__file__).parents[1]
MAX_BYTES = 140_000
FAMILIES = ["e2b", "e4b", "12b", "26b", "31b"]
CANVASES = ["square", "wide", "tall", "odd"]
CLIPS = ["one", "short", "block", "ragged", "long"]
STATE = (
    "*/v.pos_embd,*/v.kqv_out-*,*/v.l_out-*,*/v.pooled,*/v.std_scaled,*/v.projected,"
    "*/a.conv-1,*/a.inp,*/a.kqv_out-*,*/a.conv_out-*,*/a.l_out-*,*/a.out,*/a.projected"
)


def run(module: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, cwd=ROOT)


def oracle(module: str, out: Path, *arguments: object) -> None:
    run(f"oracles.{module}", *arguments, "--out", out)
    if out.stat().st_size > MAX_BYTES:
        sys.exit(f"{out}: {out.stat().st_size} bytes; goldens of media stay under {MAX_BYTES}")


def processors(folder: Path) -> None:
    run("tests.media.files", folder)
    for kind in ("image", "audio"):
        oracle("hf_processors", GOLDEN / f"{kind}-processor.npz", folder, "--kind", kind)


def encoders(folder: Path) -> None:
    for family in FAMILIES:
        model = folder / f"mmproj-{family}.gguf"
        run("tests.media.tiny_mmproj", family, model)
        inputs = [folder / f"{name}.png" for name in CANVASES] + [folder / f"{name}.wav" for name in CLIPS]
        for dtype, names, rows in (("float64", STATE, 5), ("float32", "*.projected", 0)):
            out = GOLDEN / f"mmproj-{family}.transformers-f{dtype[-2:]}.npz"
            oracle("hf_media", out, model, *inputs, "--dtype", dtype, "--names", names, "--rows", rows)


def models(folder: Path) -> None:
    for family in FAMILIES:
        here = folder / family
        here.mkdir()
        run("tests.media.tiny_prompts", family, here)
        oracle("hf_media_model", GOLDEN / f"model-{family}.transformers-f64.npz", here, "--rows", 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"of {' '.join(KINDS)} (all)")
    args = parser.parse_args()
    for name in args.what or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            KINDS[name](Path(folder))


KINDS = {"processors": processors, "encoders": encoders, "models": models}


if __name__ == "__main__":
    main()
