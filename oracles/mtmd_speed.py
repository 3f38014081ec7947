"""Oracle: how long llama.cpp's encoders take, beside ours, on the same files with the same threads.

    python -m oracles.mtmd_speed --cli BUILD/bin/llama-mtmd-cli --model TEXT.gguf --mmproj MMPROJ.gguf

Both get an image whose canvas is 280 soft tokens, and 10 s of sound, made here.  They run in turn, each in a
fresh process.  llama.cpp's time is what llama-mtmd-cli says of an encoding; ours is a row of `bench --image
280 --audio 10`, on pixels and samples of the same number.  Weights of any values serve: those files that
`bench --image` writes, for instance.  llama.cpp's own default of attention is taken: the faster one.
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


def theirs(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Milliseconds of the image and of the sound, in the order in which they stand in the prompt."""
    words = [
        args.cli, "-m", args.model, "--mmproj", args.mmproj, "--image", folder / "image.png",
        "--audio", folder / "sound.wav", "-p", "x", "-n", "1", "-c", "2048", "-t", args.threads,
        "-tb", args.threads, "--chat-template", "gemma",
    ]  # fmt: skip
    env = os.environ | {"LD_LIBRARY_PATH": str(Path(args.cli).parent)}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, check=False)
    found = [float(ms) for ms in DONE.findall(done.stdout + done.stderr)]
    if done.returncode or len(found) != 2:
        raise SystemExit(f"{args.cli}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return {"image": found[0], "audio": found[1]}


def ours(args: argparse.Namespace) -> dict[str, float]:
    words = [
        sys.executable, "-m", "fastpath.cli", "bench", "--image", TOKENS, "--audio", SECONDS,
        "--mmproj", args.mmproj, "-t", args.threads, "-r", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench: ended with {done.returncode}\n{done.stderr[-2000:]}")
    rows = json.loads(done.stdout)
    return {row["test"].split()[0]: row["median_ns"] / 1e6 for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cli", required=True, help="llama-mtmd-cli")
    parser.add_argument("--model", required=True, help="a text model of the same width, a GGUF file")
    parser.add_argument("--mmproj", required=True, help="the encoders, a GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=3, help="times that both run (default: 3)")
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        write_image(Path(name) / "image.png")
        write_sound(Path(name) / "sound.wav")
        for _ in range(args.pairs):
            pairs.append((ours(args), theirs(args, Path(name))))
            print(json.dumps(pairs[-1]), file=sys.stderr)
    print("| test | ours, ms | llama.cpp, ms | times its speed |\n|---|---:|---:|---:|")
    for test, title in (("image", f"image of {TOKENS} soft tokens"), ("audio", f"{SECONDS} s of sound")):
        mine, other = (statistics.median(pair[side][test] for pair in pairs) for side in (0, 1))
        print(f"| {title} | {mine:.0f} | {other:.0f} | {other / mine:.2f} |")


if __name__ == "__main__":
    main()
