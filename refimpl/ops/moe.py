"""Mixture of experts: which experts a token uses, and the sum of what they say."""

import numpy as np


def route(router_logits, n_active, expert_scale):
    """Choose the experts of each token, and their weights.

        p = softmax(router_logits[t])  over all E experts
        expert_ids[t] = the n_active experts of largest p, largest first; of equal ones the lower number first
        expert_weights[t, a] = p_a / (sum of the chosen p) * expert_scale[expert_ids[t, a]]

    Shapes:
        router_logits  f[T, E]
        n_active       int, A
        expert_scale   f[E] | None  learnt, one factor per expert, after the weights were made to sum to 1
    Returns:
        expert_ids i32[T, A], expert_weights f[T, A]
    """
    probs = np.exp(router_logits - router_logits.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    expert_ids = np.argsort(-probs, axis=-1, kind="stable")[:, :n_active]
    chosen = np.take_along_axis(probs, expert_ids, axis=-1)
    expert_weights = chosen / chosen.sum(axis=-1, keepdims=True)
    if expert_scale is not None:
        expert_weights = expert_weights * expert_scale[expert_ids]
    return expert_ids.astype(np.int32), expert_weights


def expert_sum(y, expert_weights):
    """Weighted sum of the outputs of a token's experts, in the order in which they were chosen.

        out[t] = sum_a expert_weights[t, a] * y[t, a]

    Shapes:
        y               f[T, A, D]
        expert_weights  f[T, A]
    Returns:
        f[T, D]
    """
    out = y[:, 0] * expert_weights[:, :1]
    for a in range(1, y.shape[1]):
        out = out + y[:, a] * expert_weights[:, a : a + 1]
    return out
