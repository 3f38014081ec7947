"""Pages that an engine has: for full lanes and unused prefixes, or as many as so many bytes give."""

from collections.abc import Mapping

from fastpath.kv.geometry import Geometry, pages_of

MIN_WINDOWS = 4  # checkpoints that there is room for besides full lanes, at least


def full_and_spare(full: Geometry) -> Mapping[str, int]:
    """kind -> pages for full lanes, and for prefixes that nobody is using: a quarter of their bytes more, and
    at least a few windows. Pages that nobody writes to cost no memory.
    """
    windows = [
        pages_of(kind.window, full.page) * kind.page_bytes for kind in full.kinds.values() if kind.window
    ]
    spare = max(full.nbytes // 4, MIN_WINDOWS * sum(windows))
    return {name: kind.n_pages + spare // kind.page_bytes for name, kind in full.kinds.items()}


def share_out(kv_bytes: int, full: Geometry, n_seqs: int) -> Mapping[str, int]:
    """kind -> pages of a cache of so many bytes.

    Args:
        full: the geometry of `n_seqs` full lanes
    Raises:
        ValueError: too little for one full ring, the windows of the other lanes, and some pages of each
    """
    kinds, page = full.kinds, full.page
    least = {}
    for name, kind in kinds.items():
        each = 1 if kind.window is None else min(kind.n_entries, pages_of(kind.window, page) + 1)
        least[name] = each * n_seqs if kind.window is None else kind.n_entries + each * (n_seqs - 1)
    needed = sum(n * kinds[name].page_bytes for name, n in least.items())
    if kv_bytes < needed:
        raise ValueError(
            f"{kv_bytes} bytes for keys and values, but {n_seqs} sequences need at least {needed}. "
            "Allow more, fewer sequences at once, a smaller chunk, or a smaller type"
        )
    # Three quarters of the rest to global layers, which are what grows; the other quarter to windows that are
    # kept, which the tree makes no more of than its global pages are worth.
    rest = kv_bytes - needed
    shares = {name: 1 if len(kinds) == 1 else (1 if kind.window else 3) / 4 for name, kind in kinds.items()}
    return {name: least[name] + int(rest * shares[name]) // kinds[name].page_bytes for name in kinds}
