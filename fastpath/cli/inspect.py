"""`inspect`: what a model file holds, without running it."""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fastpath.cli.arguments import add_kv_type, model_path, whole

MB = 1e6


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="MODEL", help="a GGUF file (default: the embedded demo)")
    parser.add_argument("--model", dest="path_option", metavar="FILE", help="the same, as elsewhere")
    parser.add_argument("--context", type=whole(1), metavar="N", help="size the cache for N tokens")
    parser.add_argument("--chunk", type=whole(1), metavar="N", help="prompt tokens per call")
    add_kv_type(parser)


def run_inspect(args: argparse.Namespace) -> int:
    from fastpath.load import load_model

    model = load_model(model_path(args.path if args.path_option is None else args.path_option))
    context = args.context or model.config.context_len
    if context > model.config.context_len:
        most = model.config.context_len
        raise ValueError(f"context {context}: this model was made for {most} tokens. Ask for at most that.")
    _print_model(model)
    _print_layers(model)
    _print_types(model)
    _print_cache(model.config, context, args.chunk, args.kv_type)
    _print_oddities(model)
    return 0


def _print_model(model) -> None:
    config, file = model.config, model.file
    name = " ".join(part for part in (config.name, config.size_label) if part) or "no name"
    parts = f" in {len(file.paths)} parts" if len(file.paths) > 1 else ""
    softcap = "none" if config.softcap is None else f"{config.softcap:g}"
    head = "tied" if model.weights.output is model.weights.token_embd else "its own matrix"
    template = "in the file" if "tokenizer.chat_template" in file.metadata else "built in"
    print(f"file     {model.path}: GGUF version {file.version}, {file.nbytes / MB:.1f} MB{parts}")
    print(f"model    {name}, architecture {config.architecture}")
    print(f"sizes    {config.n_layers} layers, width {config.model_dim}, vocabulary {config.vocab_size}")
    print(f"         context {config.context_len}, soft cap {softcap}, eps {config.rms_eps:g}, head {head}")
    print(f"         per-layer embeddings {config.per_layer_dim or 'none'}")
    print(f"other    media attention {config.media_attention}, chat template {template}")


LAYER_LINE = "{:>5} {:8} {:>6} {:>5} {:>8} {:>4} {:>9} {:>7}  {:9} {:19} {:15} {:>9}"


def _print_layers(model) -> None:
    titles = "layer,kind,window,heads,KV heads,dim,theta,rotated,K/V of,FFN,types,MB"
    print("\n" + LAYER_LINE.format(*titles.split(",")))
    for layer, weights in zip(model.config.layers, model.weights.layers, strict=True):
        tensors = list(_matrices(weights))
        print(LAYER_LINE.format(
            layer.index, "global" if layer.window is None else "sliding", layer.window or "-",
            layer.n_heads, layer.n_kv_heads, layer.head_dim, f"{layer.rope.theta:g}",
            2 * int((layer.rope.inv_freq > 0).sum()), _kv_source(layer), _ffn(layer),
            " ".join(sorted({tensor.format.name for tensor in tensors})),
            f"{sum(tensor.nbytes for tensor in tensors) / MB:.2f}",
        ))  # fmt: skip


def _kv_source(layer) -> str:
    if not layer.owns_kv:
        return f"layer {layer.kv_from}"
    return "own, v = k" if layer.k_is_v else "own"


def _ffn(layer) -> str:
    if layer.moe is None:
        return str(layer.ffn_dim)
    return f"{layer.ffn_dim} + {layer.moe.n_active}/{layer.moe.n_experts} of {layer.moe.ffn_dim}"


def _matrices(weights: Any) -> Iterator[Any]:
    """The QTensors of a weights record; vectors are plain arrays."""
    for each in fields(weights):
        value = getattr(weights, each.name)
        if hasattr(value, "format"):
            yield value


def _print_types(model) -> None:
    """Totals by type, of everything in the file."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for tensor in model.file.tensors.values():
        count[tensor.format.name] += 1
        nbytes[tensor.format.name] += tensor.nbytes
        values[tensor.format.name] += tensor.n_rows * tensor.row_len
    line = "{:8} {:>7} {:>14} {:>10}"
    print("\n" + line.format("type", "tensors", "values", "MB"))
    for name, size in nbytes.most_common():
        print(line.format(name, count[name], values[name], f"{size / MB:.2f}"))
    print(line.format("total", count.total(), values.total(), f"{nbytes.total() / MB:.2f}"))


def _print_cache(config, context: int, chunk: int | None, kv_type: str | tuple[str, str]) -> None:
    from fastpath.cache import cache_bytes
    from fastpath.engine import default_chunk

    chunk = min(chunk or default_chunk(config), context)
    owners = [layer for layer in config.layers if layer.owns_kv]
    n_rings = sum(layer.window is not None for layer in owners)
    n_lines, n_shared = len(owners) - n_rings, config.n_layers - len(owners)
    size = cache_bytes(config, 1, context, chunk, kv_type)
    kind = kv_type if isinstance(kv_type, str) else " and ".join(kv_type)
    print(f"\ncache    {size / MB:.1f} MB ({size} bytes) {kind} for {context} tokens in chunks of {chunk}:")
    print(f"         {n_rings} rings (sliding), {n_lines} lines (global); {n_shared} layers read another's")


def _print_oddities(model) -> None:
    for repair in model.config.repairs:
        print(f"repaired {repair}")
    unused = model.weights.unused
    if unused:
        more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
        print(f"unused   {len(unused)} tensors: {', '.join(unused[:6])}{more}")
