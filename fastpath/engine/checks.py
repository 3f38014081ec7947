"""check_request: what can never be computed is refused when it comes, not when its turn has come."""

from itertools import pairwise

import numpy as np

from fastpath.engine.request import Request
from fastpath.kv.geometry import GLOBAL, Geometry
from fastpath.lanes import Lanes
from refimpl.frontend.sampling import SamplingParams


def check_request(request: Request, lanes: Lanes) -> None:
    """
    Raises:
        ValueError: one line, with what to do
    """
    n = len(request.prompt_ids)
    if n == 0:
        raise ValueError("the prompt has no tokens. Give at least one.")
    if n > lanes.context_len:
        raise ValueError(lanes.too_long(n))
    if not isinstance(request.max_tokens, int | np.integer) or request.max_tokens < 0:
        raise ValueError(
            f"max_tokens {request.max_tokens!r}, expected a whole number of at least 0: the prompt alone is "
            "computed"
        )
    if not isinstance(request.params, SamplingParams):
        raise ValueError(
            f"params {request.params!r}, expected SamplingParams. Leave it out for greedy answers"
        )
    for name in ("n_logprobs", "n_prompt_logprobs"):
        n_likeliest = getattr(request, name)
        if n_likeliest is not None and (not isinstance(n_likeliest, int | np.integer) or n_likeliest < 0):
            raise ValueError(f"{name} {n_likeliest!r}, expected None or a whole number of at least 0")
    if request.n_prompt_logprobs is not None and request.soft:
        raise ValueError(
            "log-probabilities of a prompt with images or sounds, expected one of words alone: nothing says "
            "how likely a picture is. Leave them out"
        )
    lanes.model.check_ids(request.prompt_ids)
    _check_soft(request, lanes)
    lanes.check_cuts(n, request.soft)
    _check_memory(n, lanes)


def check_pages(geometry: Geometry) -> None:
    """A lone sequence can use the whole chunk, or ValueError."""
    for name, kind in geometry.kinds.items():
        least = 1 if kind.window is None else kind.n_entries
        if kind.n_pages < least:
            raise ValueError(
                f"{kind.n_pages} pages of {name} layers, expected at least {least}: the window and the "
                "chunk of one sequence. Give the cache more, or make the chunk smaller"
            )


def _check_soft(request: Request, lanes: Lanes) -> None:
    n, width = len(request.prompt_ids), lanes.model.config.model_dim
    for item in request.soft:
        if item.rows.ndim != 2 or item.rows.shape[1] != width:
            raise ValueError(
                f"soft tokens of shape {item.rows.shape} at position {item.start}, expected rows of {width} "
                "numbers. Encode with the projector of this model"
            )
        if not 0 <= item.start <= item.stop <= n:
            raise ValueError(
                f"soft tokens {item.start} .. {item.stop - 1}, expected them inside the prompt's {n} tokens. "
                "Number the placeholders again"
            )
    for before, item in pairwise(request.soft):
        if before.stop > item.start:
            raise ValueError(
                f"soft tokens {before.start} .. {before.stop - 1} and from {item.start} on, expected them in "
                "order and apart. Number the placeholders again"
            )


def _check_memory(n: int, lanes: Lanes) -> None:
    pools, page = lanes.cache.pools, lanes.cache.page
    if GLOBAL in pools and n > pools[GLOBAL].n * page:
        raise ValueError(
            f"the prompt has {n} tokens, the memory for keys and values holds {pools[GLOBAL].n * page}. "
            "Shorten it, or give the engine more (kv_bytes; --kv-memory)"
        )
