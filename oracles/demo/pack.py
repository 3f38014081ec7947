"""From conversations to fixed-size rows: several conversations in a row, kept apart by segment ids."""

from __future__ import annotations

import numpy as np

from . import vocab


def encode(examples) -> list[tuple[list[int], list[float]]]:
    """Token ids and per-token weights of each example; pieces meet only where no merge can cross."""
    texts = [text for ex in examples for text, _ in ex.pieces]
    encodings = iter(vocab.tokenizer().encode_batch(texts, add_special_tokens=False))
    out = []
    for ex in examples:
        ids: list[int] = []
        weights: list[float] = []
        for _, weight in ex.pieces:
            piece = next(encodings).ids
            ids += piece
            weights += [weight] * len(piece)
        out.append((ids, weights))
    return out


class Packer:
    """First-fit packing into `rows` rows of `length` tokens and at most `slots` predicted tokens."""

    def __init__(self, rows: int, length: int, slots: int):
        self.rows, self.length, self.slots = rows, length, slots
        self.clear()

    def clear(self):
        self.free = [(self.length, self.slots)] * self.rows
        self.items: list[list] = [[] for _ in range(self.rows)]
        self.first = 0

    def add(self, ids, weights) -> bool:
        """Place one conversation; False if no row has room."""
        n, m = len(ids), sum(w > 0 for w in weights)
        for r in range(self.first, self.rows):
            if self.free[r][0] >= n and self.free[r][1] >= m:
                self.free[r] = (self.free[r][0] - n, self.free[r][1] - m)
                self.items[r].append((ids, weights))
                return True
        return False

    def batch(self):
        """ids, segs, pos [B, T]; cols, targets [B, M]; weights [B, M] (0 where a slot is empty)."""
        B, T, M = self.rows, self.length, self.slots
        ids, pos = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64)
        segs = np.full((B, T), -1, np.int64)
        cols, targets, weights = (
            np.zeros((B, M), np.int64),
            np.zeros((B, M), np.int64),
            np.zeros((B, M), np.float32),
        )
        for r, row in enumerate(self.items):
            t = m = 0
            for s, (tokens, ws) in enumerate(row):
                n = len(tokens)
                ids[r, t : t + n], segs[r, t : t + n], pos[r, t : t + n] = tokens, s, range(n)
                for i, w in enumerate(ws):
                    if w > 0:
                        cols[r, m], targets[r, m], weights[r, m] = t + i - 1, tokens[i], w
                        m += 1
                t += n
        self.clear()
        return ids, segs, pos, cols, targets, weights
