"""Tiny Llama3 and Qwen3 of google-tunix with random weights, and their own attention as oracle."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lifting import inside, lifted

with lifted():
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3

VOCAB, MAX_CONTEXT = 512, 256
SIZES = {
    "num_layers": 2,
    "vocab_size": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 6,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 1_000_000,
    "norm_eps": 1e-6,
}
KINDS = {
    "llama3": (llama3, llama3.Llama3, {}),
    "llama3-tied": (llama3, llama3.Llama3, {"weight_tying": True}),
    "qwen3": (qwen3, qwen3.Qwen3, {}),
    "qwen3-tied": (qwen3, qwen3.Qwen3, {"use_tied_embedding": True}),
    "qwen3-experts": (qwen3, qwen3.Qwen3, {"num_experts": 4, "num_experts_per_tok": 2}),
}


def tunix_model(kind, **settings):
    """A model with every parameter random (their own start leaves the feed-forward zero)."""
    module, model_class, fixed = KINDS[kind]
    with lifted():
        model = model_class(module.ModelConfig(**SIZES, **fixed, **settings), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(len(kind))

    def draw(x):
        if x.ndim == 1:
            return jnp.asarray(1 + 0.1 * rng.standard_normal(x.shape), x.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


def empty_cache(size=MAX_CONTEXT):
    """The models' own dense cache for one request."""
    shape = (1, size, SIZES["num_kv_heads"], SIZES["head_dim"])

    def layer():
        end_index = jnp.zeros(1, jnp.int32)
        return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "end_index": end_index}

    return {f"layer_{i}": layer() for i in range(SIZES["num_layers"])}


class OwnAttention:
    """A model with its own attention, each request by itself."""

    def __init__(self, model):
        graphdef, self._params = nnx.split(model)

        def call(params, cache, tokens, start):
            width = tokens.shape[1]
            query = start + jnp.arange(width)
            length = width if cache is None else MAX_CONTEXT
            mask = jnp.arange(length)[None, None, :] <= query[None, :, None]
            positions = jnp.broadcast_to(query, tokens.shape)
            return nnx.merge(graphdef, params)(tokens, positions, cache, mask)

        self._call = inside(lifted, jax.jit(call))

    def logits(self, prompts, continuations):
        """[num_tokens, vocab] of each continuation, without a cache: one call, padded rows."""
        texts = [[*prompt, *new] for prompt, new in zip(prompts, continuations, strict=True)]
        tokens = np.zeros((len(texts), 64), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        logits, _ = self._call(self._params, None, tokens, np.int32(0))
        ends = [
            (len(prompt) - 1, len(text) - 1) for prompt, text in zip(prompts, texts, strict=True)
        ]
        rows = np.asarray(logits, np.float32)
        return [rows[row, start:end] for row, (start, end) in enumerate(ends)]

    def cached_logits(self, prompt, continuation):
        """The same of one continuation, with its cache: the prompt at once, then a step a token."""
        rows, cache, start, tokens = [], empty_cache(), 0, prompt
        for token in continuation:
            ids = np.array([tokens], np.int32)
            logits, cache = self._call(self._params, cache, ids, np.int32(start))
            rows.append(logits[0, -1])
            start, tokens = start + len(tokens), [token]
        return np.asarray(jnp.stack(rows), np.float32)
