"""Record the demo's greedy answers: `python -m oracles.demo.record --model FILE.gguf --out demo.json`.

Prompts are rendered by the file's own template and tokenized by the vocabulary's rules; answers come from
transformers (float32, weights dequantised) and from llama.cpp (`--lib`, as in oracles/llama_cpp.py; left
out if its package is missing). Each step's margin is the logit of the chosen token minus the next best
one's; steps below NEAR_TIE are listed, because there two engines may differ and both be right.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json

from oracles.needs import need

need("torch", "transformers")

import numpy as np
import torch

from . import convert, vocab
from .prompts import CASES

LIMIT, NEAR_TIE = 96, 0.25


def render(path: str, case: dict) -> str:
    """The prompt by the template that stands in the file."""
    from gguf import GGUFReader
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = GGUFReader(path).fields["tokenizer.chat_template"].contents()
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return env.from_string(template).render(
        messages=case["messages"],
        tools=case["tools"],
        enable_thinking=case["thinking"],
        add_generation_prompt=True,
        bos_token="<bos>",
        preserve_thinking=False,
    )


def margin(logits) -> tuple[int, float]:
    """The greedy token and its lead over the second."""
    second, first = np.argsort(logits)[-2:]
    return int(first), float(logits[first] - logits[second])


def greedy_transformers(net, ids: list[int], stops: set[int]):
    """Tokens and margins, one full forward pass a token: nothing of a cache is trusted here."""
    out, margins = list(ids), []
    with torch.no_grad():
        while len(margins) < LIMIT:
            token, lead = margin(net(torch.tensor([out]), use_cache=False).logits[0, -1].numpy())
            out.append(token), margins.append(round(lead, 3))
            if token in stops:
                break
    return out[len(ids) :], margins


def greedy_llama_cpp(path: str, prompts: list[list[int]], stops: set[int], lib: str | None):
    """Tokens and margins for each prompt, with llama.cpp's cache in use; its version too."""
    from oracles import llama_cpp as oracle

    api = oracle.bindings(lib)
    silence = api.llama_log_callback(lambda level, text, user: None)
    api.llama_log_set(silence, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = (
        1024,
        512,
        512,
        1,
        1,
    )
    params.type_k = params.type_v = oracle.F32
    params.flash_attn_type = oracle.FLASH_ATTENTION_OFF
    answers = []
    for ids in prompts:
        ctx = api.llama_init_from_model(model, params)
        oracle._decode(api, ctx, ids, 0)
        out, margins = [], []
        while len(margins) < LIMIT:
            row = np.ctypeslib.as_array(api.llama_get_logits_ith(ctx, -1), (vocab.SIZE,))
            token, lead = margin(row)
            out.append(token), margins.append(round(lead, 3))
            if token in stops:
                break
            oracle._decode(api, ctx, [token], len(ids) + len(out) - 1)
        answers.append((out, margins))
        api.llama_free(ctx)
    api.llama_model_free(model)
    return answers, oracle.version_of(api)


def main():
    import transformers

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--lib", help="folder of libllama")
    args = ap.parse_args()
    torch.set_num_threads(1)
    tok, stops = vocab.tokenizer(), {vocab.ids()[t] for t in ("<eos>", "<turn|>", "<|tool_response>")}
    texts = [render(args.model, case) for case in CASES]
    prompts = [tok.encode(text, add_special_tokens=False).ids for text in texts]
    net = convert.read(args.model)
    mine = [greedy_transformers(net, ids, stops) for ids in prompts]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    theirs = [(None, None)] * len(prompts)
    if importlib.util.find_spec("llama_cpp"):
        theirs, versions["llama_cpp"] = greedy_llama_cpp(args.model, prompts, stops, args.lib)

    cases, ties = [], []
    for case, text, ids, (answer, margins), (other, other_margins) in zip(
        CASES, texts, prompts, mine, theirs
    ):
        cases.append(
            {
                **case,
                "prompt": text,
                "ids": ids,
                "answer": tok.decode(answer, skip_special_tokens=False),
                "answer_ids": answer,
                "margins": margins,
                "llama_cpp_ids": other,
                "llama_cpp_margins": other_margins,
            }
        )
        ties += [
            {"name": case["name"], "step": i, "margin": m} for i, m in enumerate(margins) if m < NEAR_TIE
        ]
        same = (
            "same in llama.cpp" if other == answer else "llama.cpp DIFFERS" if other else "llama.cpp not run"
        )
        print(f"{case['name']:20s} least margin {min(margins):7.3f}  {same}  {cases[-1]['answer']!r}")
    blob = open(args.model, "rb").read()
    golden = {
        "versions": versions,
        "command": "python -m oracles.demo.record --model twinpath-demo.gguf --out demo.json",
        "seed": "none: greedy",
        "model": "twinpath-demo.gguf",
        "sha256": hashlib.sha256(blob).hexdigest(),
        "near_tie": NEAR_TIE,
        "near_ties": ties,
        "cases": cases,
    }
    with open(args.out, "w", encoding="utf-8") as f:
        f.write(
            "{\n"
            + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items() if k != "cases")
        )
        f.write(',\n "cases": [\n  ' + ",\n  ".join(json.dumps(c) for c in cases) + "\n ]\n}\n")
    print(f"{args.out}: {len(cases)} cases, {len(ties)} near ties")


if __name__ == "__main__":
    main()
