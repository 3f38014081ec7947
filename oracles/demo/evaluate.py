"""Scores of the shipped file on held-out examples: `python -m oracles.demo.evaluate --model FILE.gguf`.

The weights are the file's own, dequantised, in transformers' classes in float32. An answer counts when
every token of it, the closing mark included, is the greedy choice; checked by teacher forcing, which for a
wholly right answer is what greedy decoding gives. With `--write docs/demo.md` the table between the two
marks of that file is replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import re

from oracles.needs import need

need("torch", "transformers")

import torch

from . import convert, data, model, train

TITLES = {
    "add": "two-digit sums, at once",
    "subtract": "two-digit differences, at once",
    "think-2": "two digits, thinking on",
    "think-3": "up to three digits, thinking on",
    "defer": "three digits, thinking off: asks for thinking",
    "spell": "spelling a word",
    "reverse": "reversing a word",
    "extract": "fields to JSON",
    "tool": "tool call, then the sentence",
    "no-tool": "weather without a tool: says so",
    "chat": "chat about itself",
    "out-of-scope": "out of scope: says so",
    "turns": "two or three turns (every answer right)",
    "think-chat": "chat, thinking on",
    "think-out-of-scope": "out of scope, thinking on",
    "think-spell": "spelling, thinking on",
    "think-reverse": "reversing, thinking on",
    "think-extract": "fields to JSON, thinking on",
}


def held_out(count: int, seed: int):
    """At least `count` held-out examples of each skill."""
    per: dict[str, list] = {k: [] for k in TITLES}
    for maker in data.SKILLS:
        for ex in _some(maker, count, seed):
            if len(per[ex.skill]) < count:
                per[ex.skill].append(ex)
    return [ex for group in per.values() for ex in group]


def _some(maker, count, seed):
    mixture = {f.__name__: float(f is maker) for f in data.SKILLS}
    for i, ex in enumerate(data.stream(seed, mixture, held=True)):
        if i == count * 12:
            return
        yield ex


def table(scores) -> str:
    """The scores as Markdown."""
    rows = [
        f"| {TITLES[k]} | `{k}` | {right} of {n} | {100 * right / n:.1f} % |"
        for k, (right, n) in sorted(scores.items(), key=lambda t: list(TITLES).index(t[0]))
    ]
    return "\n".join(["| Skill | Name in data.py | Exact | Share |", "|---|---|---|---|", *rows])


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--count", type=int, default=200, help="held-out examples per skill")
    ap.add_argument("--seed", type=int, default=77)
    ap.add_argument("--write", help="Markdown file whose score table is replaced")
    ap.add_argument("--wrong", type=int, default=0, help="print so many wrong answers of each skill")
    args = ap.parse_args()
    torch.set_num_threads(2)
    trainer = model.Trainer(convert.read(args.model))
    wrong: dict[str, list] = {}
    scores = train.evaluate(trainer, held_out(args.count, args.seed), wrong=wrong)
    digest = hashlib.sha256(open(args.model, "rb").read()).hexdigest()
    text = (
        table(scores)
        + f"\n\nFile: sha256 `{digest}`, {args.count} held-out examples a skill, seed {args.seed}."
    )
    print(text)
    for skill, items in wrong.items():
        for prompt, expected, got in items[: args.wrong]:
            print(f"{skill}: {prompt!r} expected {expected!r} got {got!r}")
    if args.write:
        page = open(args.write, encoding="utf-8").read()
        page = re.sub(
            r"(<!-- scores -->\n).*?(<!-- end of scores -->)",
            lambda m: m[1] + text + "\n" + m[2],
            page,
            flags=re.S,
        )
        open(args.write, "w", encoding="utf-8").write(page)


if __name__ == "__main__":
    main()
