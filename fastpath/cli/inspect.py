"""`inspect`: what a model file, or a projector file, holds, without running it."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fastpath.cli.arguments import add_kv_type, model_path, whole
from fastpath.cli.media import add_mmproj
from fastpath.cli.output import tell

MB = 1e6


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", metavar="MODEL", help="a GGUF file, or a projector (default: the embedded demo)"
    )
    parser.add_argument("--model", dest="path_option", metavar="FILE", help="the same, as elsewhere")
    parser.add_argument("--context", type=whole(1), metavar="N", help="size the cache for N tokens")
    parser.add_argument(
        "--sequences", type=whole(1), metavar="M", default=1, help="and for M sequences at once (default: 1)"
    )
    parser.add_argument("--chunk", type=whole(1), metavar="N", help="prompt tokens per call")
    parser.add_argument("--device", action="store_true", help="which GPU there is, or why there is none")
    add_mmproj(parser)
    add_kv_type(parser)


def run_inspect(args: argparse.Namespace) -> int:
    from fastpath.load import load_model
    from refimpl.media_tensors import is_projector, load_media

    if args.device:
        _print_device()
    path = model_path(args.path if args.path_option is None else args.path_option)
    if args.mmproj is None and is_projector(path):
        _print_media(load_media(path))
        return 0
    model = load_model(path)
    media = None
    if args.mmproj is not None:
        from fastpath.media import load_projector

        media = load_projector(model, args.mmproj)
    context = args.context or model.config.context_len
    if context > model.config.context_len:
        most = model.config.context_len
        raise ValueError(f"context {context}: this model was made for {most} tokens. Ask for at most that.")
    _print_model(model)
    _print_layers(model)
    _print_types(model.file.tensors)
    _print_cache(model.config, args.sequences, context, args.chunk, args.kv_type)
    if args.device:
        _print_fit(args, model)
    _print_oddities(model)
    if media is not None:
        print()
        _print_media(media)
    return 0


def _print_device() -> None:
    """Which GPU --backend auto would take."""
    from fastpath.cuda import device, footprint

    if reason := device.missing():
        print(f"device   no GPU: {reason}")
        return
    free = footprint.free_bytes()
    print(f"device   {device.describe()}" + ("" if free is None else f", {free / 1e9:.2f} GB free"))


def _print_fit(args: argparse.Namespace, model) -> None:
    """What the model takes on a GPU, and whether there is as much."""
    from fastpath.cuda import device, footprint

    if device.missing():
        weights = footprint.weights_bytes(model.weights)
        print(f"on a GPU {weights / MB:.1f} MB ({weights} bytes) for weights, as they lie there")
        return
    needed = footprint.of_options(args, model)
    print(f"on a GPU {needed}: {footprint.misfit(needed) or 'it fits'}")


def _print_model(model) -> None:
    config, file = model.config, model.file
    name = " ".join(part for part in (config.name, config.size_label) if part) or "no name"
    parts = f" in {len(file.paths)} parts" if len(file.paths) > 1 else ""
    softcap = "none" if config.softcap is None else f"{config.softcap:g}"
    head = "tied" if model.weights.output is model.weights.token_embd else "its own matrix"
    template = "in the file" if "tokenizer.chat_template" in file.metadata else "built in"
    tell(f"file     {model.path}: GGUF version {file.version}, {file.nbytes / MB:.1f} MB{parts}")
    tell(f"model    {name}, architecture {config.architecture}")
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


def _print_types(tensors: Mapping[str, Any]) -> None:
    """Totals by type, of everything in the file."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for tensor in tensors.values():
        count[tensor.format.name] += 1
        nbytes[tensor.format.name] += tensor.nbytes
        values[tensor.format.name] += tensor.n_rows * tensor.row_len
    line = "{:8} {:>7} {:>14} {:>10}"
    print("\n" + line.format("type", "tensors", "values", "MB"))
    for name, size in nbytes.most_common():
        print(line.format(name, count[name], values[name], f"{size / MB:.2f}"))
    print(line.format("total", count.total(), values.total(), f"{nbytes.total() / MB:.2f}"))


KIND_LINE = "{:8} {:>6} {:>8} {:>5} {:>10} {:>8} {:>12} {:>10}"


def _print_cache(
    config, n_seqs: int, context: int, chunk: int | None, kv_type: str | tuple[str, str]
) -> None:
    """Pages of full sequences, and what an engine asks for: by the formulas that the cache allocates by."""
    from fastpath.kv.budget import full_and_spare
    from fastpath.kv.geometry import plan
    from fastpath.lanes import default_chunk

    chunk = min(chunk or default_chunk(config), context)
    geometry = plan(config, n_seqs, context, chunk, kv_type)
    types = kv_type if isinstance(kv_type, str) else " and ".join(kv_type)
    sequences = "1 sequence" if n_seqs == 1 else f"{n_seqs} sequences"
    n_shared = sum(not layer.owns_kv for layer in config.layers)
    print(
        f"\ncache    {geometry.nbytes / MB:.1f} MB ({geometry.nbytes} bytes) {types} for {sequences} of "
        f"{context} tokens in chunks of {chunk}:"
    )
    print(f"         pages of {geometry.page} positions; {n_shared} layers read another's keys and values")
    most = plan(config, n_seqs, context, chunk, kv_type, n_pages=full_and_spare(geometry))
    print(
        f"         an engine asks for {most.nbytes / MB:.1f} MB ({most.nbytes} bytes), with pages for "
        "prefixes that nobody is using; what is not written to costs nothing"
    )
    print(
        "\n" + KIND_LINE.format("pages", "layers", "KV heads", "dim", "a sequence", "all", "page bytes", "MB")
    )
    for kind in geometry.kinds.values():
        heads, sizes = ({getattr(layer, of) for layer in kind.layers} for of in ("n_kv_heads", "head_dim"))
        print(KIND_LINE.format(
            kind.name, len(kind.layers), "/".join(map(str, sorted(heads))), "/".join(map(str, sorted(sizes))),
            kind.n_entries, kind.n_pages, kind.page_bytes, f"{kind.nbytes / MB:.2f}",
        ))  # fmt: skip


def _print_oddities(model) -> None:
    for repair in model.config.repairs:
        tell(f"repaired {repair}")
    unused = model.weights.unused
    if unused:
        more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
        tell(f"unused   {len(unused)} tensors: {', '.join(unused[:6])}{more}")


def _print_media(media) -> None:
    """The encoders of a projector file."""
    size = sum(tensor.nbytes for tensor in media.tensors.values())
    tell(f"file     {media.path}: encoders, {size / MB:.1f} MB")
    print(f"vision   {_tower(media.vision[0]) if media.vision else 'none: it sees no images and videos'}")
    if media.vision:
        vision = media.vision[0]
        extras = [name for name, there in (("clipped matrices", _clipped(media.vision[1])),
                                           ("standardised", vision.standardize)) if there]  # fmt: skip
        print(
            f"         patches of {vision.patch} pixels, {vision.pool} x {vision.pool} to a soft token; "
            f"{vision.n_positions} positions a side; {', '.join(extras) or 'no extras'}"
        )
    print(f"audio    {_tower(media.audio[0]) if media.audio else 'none: it hears nothing'}")
    _print_types(media.tensors)
    for note in media.notes:
        tell(f"note     {note}")


def _tower(config) -> str:
    """In words: the sizes of an encoder."""
    if not config.n_layers:
        return f"{config.kind}, one projection to width {config.out_dim}"
    return (
        f"{config.kind}, {config.n_layers} layers, width {config.dim}, {config.n_heads} heads of "
        f"{config.head_dim}, FFN {config.ffn_dim}, to width {config.out_dim}"
    )


def _clipped(weights) -> bool:
    layers = getattr(weights, "layers", ())
    return any(getattr(matrix, "bounds", None) is not None for layer in layers for matrix in layer.values())
