"""A small NNX model of nobody's making, for the tests of the NNX door without other packages."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from codec_jax.models import ModelConfig

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=24,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=128,
)


class Heads(nnx.Module):
    """A projection to or from heads."""

    def __init__(self, spec, shape, rng):
        self.spec = spec
        self.kernel = nnx.Param(jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32))

    def __call__(self, x):
        return jnp.einsum(self.spec, x, self.kernel[...])


class Attention(nnx.Module):
    """Causal attention over a whole text, [batch, tokens, hidden], without positions."""

    def __init__(self, rng):
        width, dim = CONFIG.hidden_size, CONFIG.head_dim
        q_shape = (width, CONFIG.num_q_heads, dim)
        kv_shape = (width, CONFIG.num_kv_heads, dim)
        self.query = Heads("btd,dnh->btnh", q_shape, rng)
        self.key = Heads("btd,dnh->btnh", kv_shape, rng)
        self.value = Heads("btd,dnh->btnh", kv_shape, rng)
        self.out = Heads("btnh,nhd->btd", (*q_shape[1:], width), rng)

    def __call__(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Layer(nnx.Module):
    def __init__(self, rng):
        self.attn = Attention(rng)

    def __call__(self, x):
        return jnp.tanh(x + self.attn(x))


class Model(nnx.Module):
    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        shape = (CONFIG.vocab_size, CONFIG.hidden_size)
        self.embedding = nnx.Param(jnp.asarray(rng.standard_normal(shape), jnp.float32))
        self.layers = nnx.List([Layer(rng) for _ in range(CONFIG.num_layers)])

    def hidden(self, token_ids):
        x = self.embedding[...][token_ids]
        for layer in self.layers:
            x = layer(x)
        return x

    def scores(self, hidden):
        return jnp.einsum("btd,vd->btv", hidden, self.embedding[...])

    def logits(self, text):
        """[tokens, vocab] of a text, with the model's own attention."""
        return np.asarray(self.scores(self.hidden(np.array([text], np.int32)))[0])
