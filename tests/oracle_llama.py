"""Llama forward in NumPy float64, written token by token and head by head, for tests only.

Independent of the library: it has its own reader of llama2.c files, keeps matrices as
[outputs, inputs], one dict per layer, and rotates pairs as complex numbers.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class OracleLlama:
    """Weights and hyperparameters; `layers` holds wq, wk, wv, wo, w1, w2, w3, norm1, norm2."""

    embedding: np.ndarray
    layers: list[dict[str, np.ndarray]]
    final_norm: np.ndarray
    head: np.ndarray
    num_q_heads: int
    num_kv_heads: int
    interleaved: bool
    theta: float = 10000.0
    eps: float = 1e-5

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Float64 logits [tokens, vocab] of one sequence that starts at position 0."""
        x = self.embedding[tokens].astype(np.float64)
        for layer in self.layers:
            x = x + self._attend(self._norm(x, layer["norm1"]), layer)
            normed = self._norm(x, layer["norm2"])
            gate = normed @ layer["w1"].T
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["w3"].T)) @ layer["w2"].T
        return self._norm(x, self.final_norm) @ self.head.T

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * weight

    def _attend(self, normed: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
        q = np.split(normed @ layer["wq"].T, self.num_q_heads, axis=-1)
        k = np.split(normed @ layer["wk"].T, self.num_kv_heads, axis=-1)
        v = np.split(normed @ layer["wv"].T, self.num_kv_heads, axis=-1)
        outs = []
        for head in range(self.num_q_heads):
            kv_head = head * self.num_kv_heads // self.num_q_heads
            scores = self._rotate(q[head]) @ self._rotate(k[kv_head]).T / q[head].shape[-1] ** 0.5
            scores[np.triu_indices(len(normed), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(weights / weights.sum(-1, keepdims=True) @ v[kv_head])
        return np.concatenate(outs, -1) @ layer["wo"].T

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        num_tokens, head_dim = x.shape
        half = head_dim // 2
        first = np.arange(half) * 2 if self.interleaved else np.arange(half)
        second = first + (1 if self.interleaved else half)
        speed = self.theta ** (-np.arange(half) / half)
        turned = (x[:, first] + 1j * x[:, second]) * np.exp(
            1j * np.arange(num_tokens)[:, None] * speed
        )
        out = np.empty_like(x)
        out[:, first], out[:, second] = turned.real, turned.imag
        return out


def read_llama2c(path: Path) -> OracleLlama:
    """The oracle for a llama2.c checkpoint whose head is tied to the embedding."""
    content = path.read_bytes()
    dim, hidden, num_layers, num_q, num_kv, vocab, _ = struct.unpack_from("<7i", content)
    values = np.frombuffer(content, "<f4", offset=28).astype(np.float64)
    cursor = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal cursor
        cursor += int(np.prod(shape))
        return values[cursor - int(np.prod(shape)) : cursor].reshape(shape)

    kv_dim = dim // num_q * num_kv
    embedding = take(vocab, dim)
    stacks = {
        "norm1": take(num_layers, dim),
        "wq": take(num_layers, dim, dim),
        "wk": take(num_layers, kv_dim, dim),
        "wv": take(num_layers, kv_dim, dim),
        "wo": take(num_layers, dim, dim),
        "norm2": take(num_layers, dim),
        "w1": take(num_layers, hidden, dim),
        "w2": take(num_layers, dim, hidden),
        "w3": take(num_layers, hidden, dim),
    }
    layers = [{name: stack[i] for name, stack in stacks.items()} for i in range(num_layers)]
    return OracleLlama(embedding, layers, take(dim), embedding, num_q, num_kv, interleaved=True)
