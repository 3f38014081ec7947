"""Prompts with media for the tiny models: python -m tests.media.tiny_prompts FAMILY FOLDER

Tokens are random words with placeholders where media stand; a media part is the name of a canvas or a clip
of tiny_mmproj, or of a picture of tests.media.files, which the processors resize. The program writes all
files that the oracle needs, and cases.json.
"""

import argparse
import json
from pathlib import Path

from refimpl.frontend.image import count_image_tokens
from tests import tiny
from tests.media import files, tiny_mmproj
from tests.tiny import _SPECIAL, _uniform

FILE_BUDGET = 70  # soft tokens of a picture that is resized
IDS = {name: i for i, (name, _) in enumerate(_SPECIAL)}
IMAGE, AUDIO, VIDEO = IDS["<|image|>"], IDS["<|audio|>"], IDS["<|video|>"]
BRACKETS = {
    IMAGE: (IDS["<|image>"], IDS["<image|>"]),
    VIDEO: (IDS["<|image>"], IDS["<image|>"]),
    AUDIO: (IDS["<|audio>"], IDS["<audio|>"]),
}

# case: words before, then (placeholder, canvas or clip, words after) ...
CASES = {
    "image": (5, (IMAGE, "odd", 12)),  # 15 soft tokens, more than the windows of 7 and 8
    "image-first": (0, (IMAGE, "tall", 7)),
    "two-images": (9, (IMAGE, "wide", 0), (IMAGE, "square", 11)),
    "image-audio": (4, (IMAGE, "tall", 3), (AUDIO, "ragged", 6)),
    "video": (3, (VIDEO, "square", 2), (VIDEO, "square", 2), (VIDEO, "square", 5)),
    "image-last": (20, (IMAGE, "wide", 0)),
    "file": (6, (IMAGE, "photo-small", 8)),  # 75 x 100 pixels, resized to 63 soft tokens
}


def n_soft(family: str, name: str) -> int:
    if name in tiny_mmproj.CANVASES:
        rows, columns = tiny_mmproj.CANVASES[name]
        return rows * columns
    if name in files.PICTURES:
        return count_image_tokens(*files.PICTURES[name][:2], FILE_BUDGET)
    return -(-len(tiny_mmproj.clip(name)) // 640) if family == "12b" else -(-tiny_mmproj.CLIPS[name] // 4)


def cases(family: str) -> dict[str, dict]:
    """{case: {"tokens": ids with placeholders, "media": names in order, "starts": positions of the first}}"""
    out = {}
    for case, (n_words, *parts) in CASES.items():
        if any(kind == AUDIO for kind, _, _ in parts) and tiny_mmproj.ENCODERS[family][1] is None:
            continue
        words = iter(_words(f"{family}/{case}", 100))
        tokens, media, starts = [2, *(next(words) for _ in range(n_words))], [], []
        for kind, name, n_after in parts:
            begin, end = BRACKETS[kind]
            media.append(name)
            starts.append(len(tokens) + 1)
            tokens += [begin, *[kind] * n_soft(family, name), end, *(next(words) for _ in range(n_after))]
        out[case] = {"tokens": tokens, "media": media, "starts": starts}
        if media[0] in files.PICTURES:
            out[case]["budget"] = FILE_BUDGET
    return out


def _words(key: str, n: int) -> list[int]:
    return [int(x) for x in _uniform(f"words/{key}", n, len(_SPECIAL), tiny._V)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model with its encoders, media and prompts.")
    parser.add_argument("family", choices=tiny_mmproj.ENCODERS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tiny.make(args.folder / "model.gguf", args.family)
    tiny_mmproj.make(args.folder / "mmproj.gguf", args.family)
    for name in tiny_mmproj.CANVASES:
        (args.folder / f"{name}.png").write_bytes(files.png(tiny_mmproj.canvas(name)))
    for name in tiny_mmproj.CLIPS:
        (args.folder / f"{name}.wav").write_bytes(files.wav(tiny_mmproj.clip(name)))
    (args.folder / "photo-small.png").write_bytes(files.png(files.picture("photo-small")))
    ids = {"image": IMAGE, "audio": AUDIO, "video": VIDEO}
    (args.folder / "cases.json").write_text(json.dumps({"ids": ids, "cases": cases(args.family)}))


if __name__ == "__main__":
    main()
