"""python -m refimpl MODEL.gguf "Why is the sky blue?": the answer of the reference, slowly."""

import argparse
import sys

from refimpl.frontend.terminal import visible
from refimpl.generate import generate, load


def main():
    parser = argparse.ArgumentParser(
        prog="python -m refimpl", description="Answer a prompt with the reference."
    )
    parser.add_argument("model", help="a Gemma 4 GGUF file")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--mmproj", help="the model's encoders of images and sounds")
    for kind in ("image", "audio", "video"):
        parser.add_argument(
            f"--{kind}",
            dest="media",
            nargs="+",
            action="extend",
            default=[],
            type=lambda file, kind=kind: (kind, file),
            metavar="FILE",
            help="in front of the text, in the order given",
        )
    parser.add_argument("--image-tokens", type=int, default=280, help="70, 140, 280, 560 or 1120")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--think", action="store_true", help="let the model think before it answers")
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    args = parser.parse_args()
    try:
        model = load(args.model)
        soft: list = []
        if args.media:
            ids, soft = _prompt_with_media(model, args)
        elif args.raw:
            ids = model.tokenizer.encode(args.prompt, add_bos=True)
        else:
            messages = [{"role": "user", "content": args.prompt}]
            ids = model.template.render_ids(model.tokenizer, messages, thinking=args.think)
        stream = model.tokenizer.stream()
        for token_id in generate(model, ids, max_tokens=args.max_tokens, soft=soft):
            print(stream.push(token_id), end="", flush=True)
        print(stream.flush())
    except (ValueError, OSError) as fault:
        print(visible(f"refimpl: {fault}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


def _prompt_with_media(model, args):
    from refimpl.media import encode, prompt
    from refimpl.media_tensors import load_media

    if not args.mmproj:
        raise ValueError(
            f"{args.model}: images, sounds and videos need the model's encoders, expected --mmproj FILE. "
            "They are published beside the model as mmproj-...gguf"
        )
    if args.raw:
        raise ValueError("--raw has no template, so it has no place for files. Leave one out")
    media = load_media(args.mmproj)
    media.check(model.config, args.model)
    encoded = [encode(media, kind, file, budget=args.image_tokens) for kind, file in args.media]
    for note in (*media.notes, *(note for item in encoded for note in item.notes)):
        print(visible(f"refimpl: {note}"), file=sys.stderr)
    return prompt(model, args.prompt, encoded, thinking=args.think)


if __name__ == "__main__":
    sys.exit(main())
