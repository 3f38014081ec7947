"""From arguments to an exchange and a conversation."""

from __future__ import annotations

import argparse
from typing import Any

from fastpath.cli.chat import MAX_TOKENS
from fastpath.cli.chat.conversation import (
    GREEDY,
    RECOMMENDED,
    SAMPLING,
    Conversation,
    read_schema,
    read_tools,
    sampling_of,
)
from fastpath.cli.media import sampling_of as frames_of
from fastpath.cli.parts import Parts
from fastpath.cli.setup import MANY, open_engine, open_model, prepare, say
from fastpath.talk.exchange import Exchange
from fastpath.talk.worker import Worker


def begin(args: argparse.Namespace, *, is_script: bool) -> Conversation:
    """The conversation before its first message. Comes before the model: faults are cheap here."""
    talk = Conversation() if args.load is None else Conversation.load(args.load)
    if args.system is not None:
        talk.system = args.system
    talk.thinking |= args.think
    if args.tools is not None:
        talk.tools = read_tools(args.tools)
    if args.json_schema is not None:
        talk.schema = read_schema(args.json_schema)
    given = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    base = talk.sampling if args.load is not None else GREEDY if is_script else RECOMMENDED
    talk.sampling = sampling_of(given, base)
    talk.max_tokens = args.max_tokens or talk.max_tokens or MAX_TOKENS
    return talk


def open_exchange(args: argparse.Namespace, *, n_seqs: int = 1) -> tuple[Exchange, str]:
    """The model behind an exchange, with its encoders where there are any: kernels compiled, weights packed.

    Returns:
        the exchange; why it has no encoders, or ""
    """
    model = open_model(args)
    _ = model.tokenizer
    encoders, why_blind = _encoders(args, model)
    largest = args.image_tokens if encoders is not None else 0
    engine = open_engine(args, model, largest_image=largest, n_seqs=n_seqs)
    del model  # the engine's will be another one, with packed weights
    prepare(args, engine.lanes, MANY, "last", Parts())
    exchange = Exchange(
        Worker(engine),
        encoders=encoders,
        budget=args.thinking_budget,
        image_budget=args.image_tokens,
        sampling=frames_of(args),
    )
    return exchange, why_blind


def _encoders(args: argparse.Namespace, model: Any) -> tuple[Any, str]:
    """Those of --mmproj, or of the only projector beside the model; None, and why."""
    from fastpath.backend import ops_for
    from fastpath.media import Encoders, load_projector

    try:
        media = load_projector(model, args.mmproj)
    except ValueError as error:
        if args.mmproj is not None:
            raise
        return None, str(error)
    for note in media.notes:
        say(f"note: {note}")
    return Encoders(media, ops_for(args.backend), activations=args.activations), ""
