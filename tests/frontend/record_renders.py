"""Writes published_renders.json again: `python -m tests.frontend.record_renders SMALL.jinja LARGE.jinja`.

The two files are the chat templates that Google published on 2026-07-09 for E2B/E4B and for the larger
models.  They run in Jinja's own sandbox, without our normalisation and bounds, on the conversations of
         conversations.py.
"""

import hashlib
import json
import sys
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.frontend.conversations import CASES

TARGET = Path(__file__).parent / "published_renders.json"


def main(small_path: str, large_path: str) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    recorded = {
        "origin": "Google's Gemma 4 chat templates of 2026-07-09, E2B and 31B (test data of ollama)",
        "command": "python -m tests.frontend.record_renders E2B.jinja2 31B.jinja2",
        "jinja2": jinja2.__version__,
    }
    for family, path in (("small", small_path), ("large", large_path)):
        source = Path(path).read_text(encoding="utf-8")
        template = environment.from_string(source)
        recorded[f"{family} sha256"] = hashlib.sha256(source.encode()).hexdigest()
        recorded[family] = {
            name: template.render(
                messages=messages,
                tools=switches.get("tools"),
                enable_thinking=switches.get("thinking", False),
                add_generation_prompt=switches.get("add_generation_prompt", True),
                bos_token="<bos>",
                **switches.get("extra", {}),
            )
            for name, (messages, switches) in CASES.items()
        }
    TARGET.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
