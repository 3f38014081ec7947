"""Oracle: how long llama.cpp's encoders take, beside ours, on the same files with the same threads.

    python -m oracles.mtmd_speed --cli BUILD/bin/llama-mtmd-cli --model TEXT.gguf --mmproj FILE... --write

Both get an image whose canvas is 280 soft tokens, and 10 s of sound, made here.  They run in turn, each in a
fresh process.  llama.cpp's time is what llama-mtmd-cli says of an encoding; ours is a row of `bench --image
280 --audio 10`, on pixels and samples of the same number.  Weights of any values serve: those files that
`bench --image` writes, for instance.  llama.cpp's own default of attention is taken: the faster one.
With --write the table goes into docs/performance.md, between marks of its own.
"""

from __future__ import annotations

import argparse
import array
import json
import math
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import wave
import zlib
from pathlib import Path

WIDTH, HEIGHT, TOKENS = 960, 672, 280  # 20 x 14 soft tokens of 48 pixels
SECONDS, RATE = 10, 16_000
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- written by oracles.mtmd_speed -->\n", "<!-- end of oracles.mtmd_speed -->\n"
TITLES = {"image": f"image of {TOKENS} soft tokens", "audio": f"{SECONDS} s of sound"}
GOAL = 1.2  # times its speed
DONE = re.compile(r"(?:mtmd batch encoding done|slice encoded) in (\d+) ms")


def write_image(path: Path) -> None:
    """A PNG of gradients and noise."""
    noise = random.Random(0)
    lines = bytearray()
    for y in range(HEIGHT):
        lines.append(0)
        for x in range(WIDTH):
            lines += bytes(3 * v // 4 + noise.randrange(64) for v in (x % 256, y % 256, x * y // 1000 % 256))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(lines), 1)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def write_sound(path: Path) -> None:
    """A WAV file with a tone that rises from 100 Hz to 4 kHz."""
    times = (i / RATE for i in range(SECONDS * RATE))
    tone = (round(12000 * math.sin(2 * math.pi * (100 * t + 195 * t * t))) for t in times)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(array.array("h", tone).tobytes())


def theirs(args: argparse.Namespace, mmproj: str, folder: Path) -> dict[str, float]:
    """Milliseconds of the image and of the sound, in the order in which they stand in the prompt."""
    words = [
        args.cli, "-m", args.model, "--mmproj", mmproj, "--image", folder / "image.png",
        "--audio", folder / "sound.wav", "-p", "x", "-n", "1", "-c", "2048", "-t", args.threads,
        "-tb", args.threads, "--chat-template", "gemma",
    ]  # fmt: skip
    env = os.environ | {"LD_LIBRARY_PATH": str(Path(args.cli).parent)}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, check=False)
    found = [float(ms) for ms in DONE.findall(done.stdout + done.stderr)]
    if done.returncode or len(found) != 2:
        raise SystemExit(f"{args.cli}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return {"image": found[0], "audio": found[1]}


def ours(args: argparse.Namespace, mmproj: str) -> dict[str, float]:
    words = [
        sys.executable, "-m", "fastpath.cli", "bench", "--image", TOKENS, "--audio", SECONDS,
        "--mmproj", mmproj, "-t", args.threads, "-r", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench: ended with {done.returncode}\n{done.stderr[-2000:]}")
    rows = json.loads(done.stdout)
    args.machine = f"{rows[0]['cpu_info']}; {rows[0]['backends']}; {rows[0]['n_threads']} threads"
    return {row["test"].split()[0]: row["median_ns"] / 1e6 for row in rows}


def measure(args: argparse.Namespace, mmproj: str, folder: Path) -> list[str]:
    """Two rows of the table: of the image and of the sound."""
    pairs = []
    for _ in range(args.pairs):
        pairs.append((ours(args, mmproj), theirs(args, mmproj, folder)))
        print(mmproj, json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    rows = []
    for test, title in TITLES.items():
        mine, other = (statistics.median(pair[side][test] for pair in pairs) for side in (0, 1))
        ratios = sorted(pair[1][test] / pair[0][test] for pair in pairs)
        spread = f"{ratios[0]:.2f} .. {ratios[-1]:.2f}"
        met = "yes" if other / mine >= GOAL else "no"
        cells = (Path(mmproj).name, title, f"{mine:.0f}", f"{other:.0f}", f"{other / mine:.2f}", spread, met)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def table(args: argparse.Namespace, rows: list[str]) -> str:
    head = (
        f"| encoders | test | ours, ms | llama.cpp, ms | times its speed | of single pairs | {GOAL} or more |"
    )
    lines = [head, "|---|---|---:|---:|---:|---:|---|", *rows, ""]
    names = " ".join(Path(mmproj).name for mmproj in args.mmproj)
    command = (
        f"python -m oracles.mtmd_speed --cli llama-mtmd-cli --model {Path(args.model).name} --mmproj {names}"
    )
    lines.append(f"{args.machine}; medians of {args.pairs} pairs, in turn: `{command} --pairs {args.pairs}`.")
    return "\n".join(lines) + "\n"


def write(page: Path, text: str) -> None:
    """The part between the marks; what people wrote around it stays."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"{page}: the lines {BEGIN.strip()} and {END.strip()} are not both there. Write them again"
        )
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cli", required=True, help="llama-mtmd-cli")
    parser.add_argument("--model", required=True, help="a text model of the same width, a GGUF file")
    parser.add_argument(
        "--mmproj", required=True, nargs="+", help="the encoders: GGUF files, one after another"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=3, help="times that both run (default: 3)")
    parser.add_argument("--write", action="store_true", help="the table goes into docs/performance.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_image(Path(name) / "image.png")
        write_sound(Path(name) / "sound.wav")
        rows = [row for mmproj in args.mmproj for row in measure(args, mmproj, Path(name))]
    print(table(args, rows), end="")
    if args.write:
        write(PAGE, table(args, rows))


if __name__ == "__main__":
    main()
