"""Records what the oracles say about the tiny models into golden/: python -m oracles.record [FAMILY ...].

Each model is made from its seed by `python -m tests.tiny` in a process of its own, and each oracle runs in
another, so nothing of ours is imported here.  Every golden says how it was made, from which bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["e2b", "e4b", "12b", "26b", "31b"]
MAX_BYTES = 200_000
OUTPUTS = "l_out-*,result_output"
STATE = f"inp_scaled,inp_per_layer,attn_out-*,ffn_moe_topk-*,ffn_moe_weights_scaled-*,result_norm,{OUTPUTS}"


def jobs(n_tokens: int) -> dict[str, list[str]]:
    """{golden name: oracle and arguments}.  float64 keeps every fourth row, the last one included."""
    outputs = ["--names", OUTPUTS]
    every_fourth = f"{(n_tokens - 1) % 4}::4"
    return {
        "transformers-f32": ["hf_transformers", *outputs],
        "transformers-f64": [
            "hf_transformers",
            "--dtype",
            "float64",
            "--names",
            STATE,
            "--rows",
            every_fourth,
        ],
        "llama_cpp": ["llama_cpp", *outputs],
    }


def record(family: str, seed: int, only: str, folder: Path) -> None:
    model = folder / f"tiny-{family}.gguf"
    made = subprocess.run(
        [sys.executable, "-m", "tests.tiny", family, model, "--seed", str(seed)],
        check=True,
        capture_output=True,
        text=True,
    )
    tokens = json.loads(made.stdout)["tokens"]
    for name, (oracle, *arguments) in jobs(len(tokens)).items():
        if only and only not in name:
            continue
        out = GOLDEN / f"{family}.{name}.npz"
        ids = ",".join(map(str, tokens))
        command = [
            sys.executable,
            "-m",
            f"oracles.{oracle}",
            model,
            "--tokens",
            ids,
            "--out",
            out,
            *arguments,
        ]
        subprocess.run([*command, "--seed", str(seed)], check=True)
        if out.stat().st_size > MAX_BYTES:
            sys.exit(
                f"{out}: {out.stat().st_size} bytes; goldens stay under {MAX_BYTES}: keep fewer names or rows"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"of {' '.join(FAMILIES)} (default: all)"
    )
    parser.add_argument(
        "--only", default="", help="record the goldens with this in their name: f32, f64, llama_cpp"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families or FAMILIES:
            record(family, args.seed, args.only, Path(folder))


if __name__ == "__main__":
    main()
