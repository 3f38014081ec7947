"""python -m refimpl MODEL.gguf "Why is the sky blue?": the answer of the reference, slowly."""

import argparse
import sys

from refimpl.generate import generate, load


def main():
    parser = argparse.ArgumentParser(
        prog="python -m refimpl", description="Answer a prompt with the reference."
    )
    parser.add_argument("model", help="a Gemma 4 GGUF file")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--think", action="store_true", help="let the model think before it answers")
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    args = parser.parse_args()
    try:
        model = load(args.model)
        if args.raw:
            ids = model.tokenizer.encode(args.prompt, add_bos=True)
        else:
            messages = [{"role": "user", "content": args.prompt}]
            ids = model.template.render_ids(model.tokenizer, messages, thinking=args.think)
        stream = model.tokenizer.stream()
        for token_id in generate(model, ids, max_tokens=args.max_tokens):
            print(stream.push(token_id), end="", flush=True)
        print(stream.flush())
    except (ValueError, OSError) as fault:
        print(f"refimpl: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
