"""`logits` and `trace`: the model's numbers in files, for comparing engines."""

import argparse
import hashlib
from typing import Any

from fastpath.cli import arguments, output
from fastpath.cli.media import add_media

HASHED_BYTES = 1 << 27  # larger models are told apart by their size
LOGITS_BYTES = 1 << 28  # most bytes of logits at a time: with 262,144 tokens, 256 rows


def _add_tokens(parser: argparse.ArgumentParser, suffix: str) -> None:
    arguments.add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--tokens", type=arguments.token_ids, metavar="2,105,...", help="the ids, as they are"
    )
    source.add_argument(
        "--prompt", metavar="TEXT", type=arguments.text, help="a text, inside the chat template"
    )
    arguments.add_template(parser)
    add_media(parser)
    parser.add_argument(
        "--out", required=True, metavar=f"FILE{suffix}", help="where to write; - is standard output"
    )
    arguments.add_engine(parser)


def add_logits(parser: argparse.ArgumentParser) -> None:
    _add_tokens(parser, ".npy")


def run_logits(args: argparse.Namespace) -> int:
    """float32 [T, V], written chunk by chunk: memory does not grow with T."""
    import numpy as np

    from fastpath.cli.parts import Parts
    from fastpath.cli.setup import prepare

    engine, ids, starts, files = _open(args)
    V = engine.model.config.vocab_size
    with output.writing(args.out, engine.model.file.paths) as out:
        prepare(args, engine, len(ids), "all", Parts(), files)
        soft = files.encode(starts) if files else []
        np.lib.format.write_array_header_1_0(
            out, {"descr": "<f4", "fortran_order": False, "shape": (len(ids), V)}
        )
        for start, stop in engine.plan(len(ids), soft=soft):
            logits = engine.extend([(0, ids[start:stop])], "all", soft={0: soft})
            out.write(np.ascontiguousarray(logits, "<f4").tobytes())
    output.summarise(args.out, f"float32 [{len(ids)}, {V}]")
    return 0


def add_trace(parser: argparse.ArgumentParser) -> None:
    _add_tokens(parser, ".npz")


def run_trace(args: argparse.Namespace) -> int:
    from fastpath.cli.parts import Parts
    from fastpath.cli.setup import prepare
    from fastpath.trace import Recorder, TraceFile, record, write_trace

    engine, ids, starts, files = _open(args)
    with output.writing(args.out, engine.model.file.paths) as out:
        prepare(args, engine, len(ids), "all", Parts(), files)
        recorder = Recorder()
        soft = files.encode(starts, trace=recorder) if files else []
        arrays = record(engine, ids, soft, recorder)
        meta = _meta(args, engine, ids) | (files.meta() if files else {})
        write_trace(out, TraceFile(arrays, meta))
    output.summarise(args.out, f"{len(arrays)} arrays of {len(ids)} tokens")
    return 0


def _open(args: argparse.Namespace):
    """The engine, the ids, where soft tokens begin, and the files that these come from."""
    from fastpath.cli.media import open_files
    from fastpath.cli.setup import open_lanes, open_model, prompt_ids
    from refimpl.frontend.media_prompt import locate

    arguments.check_template(args)
    if args.tokens is None and args.prompt is None and not args.media:
        raise ValueError("one of the options --tokens --prompt is needed, or media to ask about. Give one.")
    model = open_model(args)
    files = open_files(args, model)
    if args.tokens is None:
        ids, starts = prompt_ids(model, args.prompt or "", args, files)
    else:
        model.check_ids(args.tokens)
        ids, starts = locate(args.tokens, model.tokenizer, files.parts) if files else (args.tokens, [])
    model.check_ids(ids)
    most = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    engine = open_lanes(args, model, max_chunk=most, files=files)
    engine.check_room(len(ids), advice=files.shorter if files else None)
    return engine, ids, starts, files


def _meta(args: argparse.Namespace, engine, ids: list[int]) -> dict[str, Any]:
    file = engine.model.file
    meta = {
        "engine": "twinpath",
        "backend": args.backend,
        "activations": args.activations,
        "dtype": str(engine.cache.dtype),
        "kv_type": engine.kv_type,
        "model": engine.model.path.name,
        "model_bytes": file.nbytes,
        "architecture": engine.model.config.architecture,
        "chunk": engine.chunk,
        "tokens": list(ids),
    }
    if file.nbytes <= HASHED_BYTES:
        meta["sha256"] = hashlib.sha256(engine.model.path.read_bytes()).hexdigest()
    return meta
