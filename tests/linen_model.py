"""A small Linen decoder, written as strangers write them: its own causal attention, an `nn.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from codec_jax.flax import LinenHook
from codec_jax.models import ModelConfig

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 31, 24, 4, 2, 8
SCALE = 0.5


class Attention(nn.Module):
    """Grouped-query attention over [batch, length], of a scale of its own, without a cache."""

    def setup(self):
        self.query = nn.DenseGeneral((HEADS, HEAD_DIM), use_bias=False)
        self.key = nn.DenseGeneral((KV_HEADS, HEAD_DIM), use_bias=False)
        self.value = nn.DenseGeneral((KV_HEADS, HEAD_DIM), use_bias=False)
        self.out = nn.DenseGeneral(HIDDEN, axis=(-2, -1), use_bias=False)

    def __call__(self, x, mask):
        q, k, v = self.query(x), self.key(x), self.value(x)
        k, v = (jnp.repeat(heads, HEADS // KV_HEADS, axis=2) for heads in (k, v))
        scores = SCALE * jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e30))
        return self.out(jnp.einsum("bnts,bsnh->btnh", weights, v))


class Model(nn.Module):
    """Scores of [batch, length] tokens, and the hidden states before the head.

    Args:
      num_layers: layers.
      block: the class of the attention, or a transformation of it.
      salt: anything; models that differ in it share no trace.
    """

    num_layers: int = 2
    block: type[nn.Module] = Attention
    salt: str = ""

    def setup(self):
        self.embedding = self.param("embedding", nn.initializers.normal(0.3), (VOCAB, HIDDEN))
        self.places = self.param("places", nn.initializers.normal(0.3), (256, HIDDEN))
        self.layers = [self.block() for _ in range(self.num_layers)]

    @nn.jit
    def __call__(self, token_ids, positions):
        x = self.embedding[token_ids] + self.places[positions]
        mask = jnp.tril(jnp.ones((token_ids.shape[1],) * 2, bool))
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.head(x), x

    def head(self, hidden):
        return hidden @ self.embedding.T


def forward(attn, attend, x, mask):
    """A call of `Attention`, with `attend` inside."""
    del mask
    return attn.out(attend(attn.query(x), attn.key(x), attn.value(x), logits_scale=SCALE))


HOOK = LinenHook(Attention, forward)


def causal(layer, q, k, v, cache):
    """The attention of one request's tokens in order, for `linen_attending`; counts its calls."""
    del layer
    k, v = (jnp.repeat(heads, q.shape[1] // k.shape[1], axis=1) for heads in (k, v))
    scores = q.shape[-1] ** -0.5 * jnp.einsum("tnh,snh->nts", q, k)
    mask = jnp.tril(jnp.ones((q.shape[0],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e30))
    return jnp.einsum("nts,snh->tnh", weights, v), cache + 1


def own_keys(layer, q, k, v, cache):
    """An attention that none of the models has: each token sees itself only."""
    del layer
    return jnp.repeat(v, q.shape[1] // k.shape[1], axis=1), cache + 1


def config(**changes):
    """The model's sizes."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_layers": 2,
        "num_q_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_context": 200,
    }
    return ModelConfig(**sizes | changes)


def tokens(length=7, seed=0):
    """One request's tokens and positions, both [1, length]."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (1, length), np.int32)
    return ids, np.arange(length, dtype=np.int32)[None]
