"""Exact attention in float64 NumPy, one request at a time, from its own keys and values.

Shares no code with what it judges: it never sees a forest, a page or a plan. Keys and values are a
function of a request's own token prefix, so that two requests have equal ones exactly where their
prefixes are equal.
"""

import numpy as np


def keys_and_values(tokens, num_kv_heads, head_dim):
    """K and V of one request's tokens, float32 `[len(tokens), num_kv_heads, head_dim]` each."""
    state = 7
    rows = []
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) % (2**61 - 1)
        rows.append(np.random.default_rng(state).standard_normal((2, num_kv_heads, head_dim)))
    if not rows:
        return np.zeros((2, 0, num_kv_heads, head_dim), np.float32)
    return np.stack(rows, axis=1).astype(np.float32)


def attention(q, k, v, scale=None):
    """One query over its keys: out `[num_q_heads, head_dim]`, natural lse `[num_q_heads]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    num_q_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    group = num_q_heads // k.shape[1]
    out, lse = np.zeros(q.shape), np.full(num_q_heads, -np.inf)
    for head in range(num_q_heads):
        scores = scale * k[:, head // group] @ q[head]
        if scores.size:
            top = scores.max()
            weights = np.exp(scores - top)
            out[head] = weights @ v[:, head // group] / weights.sum()
            lse[head] = top + np.log(weights.sum())
    return out, lse
