"""Records what the oracles say about the tiny models into golden/: python -m oracles.record [MODEL ...].

Each model is made from its seed by `python -m tests.tiny` in a process of its own, and each oracle runs in
another, so nothing of ours is imported here.  Every golden says how it was made, from which bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]
FAMILIES = ["e2b", "e4b", "12b", "26b", "31b"]
QUANTISED = ["e2b-k", "26b-legacy"]
MAX_BYTES = 200_000
OUTPUTS = "l_out-*,result_output"
STATE = f"inp_scaled,inp_per_layer,attn_out-*,ffn_moe_topk-*,ffn_moe_weights_scaled-*,result_norm,{OUTPUTS}"


def jobs(name: str, n_tokens: int) -> dict[str, list[str]]:
    """{golden name: oracle and arguments}.  Of many rows every fourth is kept, the last one included."""
    outputs = ["--names", OUTPUTS]
    every_fourth = f"{(n_tokens - 1) % 4}::4"
    if name in QUANTISED:
        outputs += ["--rows", every_fourth]
        return {
            "transformers-f32": ["hf_transformers", *outputs],
            "llama_cpp": ["llama_cpp", *outputs],
        }
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


def record(model_name: str, seed: int, only: str, folder: Path) -> None:
    model = folder / f"tiny-{model_name}.gguf"
    command = [sys.executable, "-m", "tests.tiny", model_name, model, "--seed", str(seed)]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    tokens = json.loads(made.stdout)["tokens"]
    for name, (oracle, *arguments) in jobs(model_name, len(tokens)).items():
        if only not in name:
            continue
        if oracle == "llama_cpp" and importlib.util.find_spec("llama_cpp") is None:
            print(f"{model_name}.{name}: not recorded, the package llama_cpp is not here (oracles/README.md)")
            continue
        out = GOLDEN / f"{model_name}.{name}.npz"
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
        subprocess.run([*command, "--seed", str(seed)], check=True, cwd=ROOT)
        if out.stat().st_size > MAX_BYTES:
            sys.exit(
                f"{out}: {out.stat().st_size} bytes; goldens stay under {MAX_BYTES}: keep fewer names or rows"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {' '.join(FAMILIES + QUANTISED)} (all)"
    )
    parser.add_argument(
        "--only", default="", help="record the goldens with this in their name: f32, f64, llama_cpp"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models or FAMILIES + QUANTISED:
            record(name, args.seed, args.only, Path(folder))


if __name__ == "__main__":
    main()
