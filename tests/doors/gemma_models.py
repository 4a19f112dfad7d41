"""Tiny Transformers of google-deepmind's gemma with random weights, and their own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from lifting import inside, lifted

with lifted():
    from gemma.gm.nn import LoRA as LoRA
    from gemma.gm.nn import _config, _modules, _transformer

GLOBAL, LOCAL = _modules.AttentionType.GLOBAL, _modules.AttentionType.LOCAL_SLIDING
SCALES = _config.QueryPreAttentionNormalisation
VOCAB, MAX_CONTEXT, NUM_LAYERS = 512, 256, 2
SIZES = {
    "num_embed": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 6,
    "head_dim": 8,
    "num_kv_heads": 2,
    "final_logit_softcap": None,
    "use_post_attn_norm": False,
    "use_post_ffw_norm": False,
    "attention_types": (GLOBAL,) * NUM_LAYERS,
}
KINDS = {
    "gemma1": {},
    "one-kv-head": {"num_kv_heads": 1},
    "all-heads": {"num_kv_heads": 6},
    "gemma3": {
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "use_qk_norm": True,
        "transpose_gating_einsum": True,
        "global_base_frequency": 1_000_000,
        "global_scale_factor": 8.0,
    },
    "scaled": {
        "query_pre_attn_norm": SCALES.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        "final_logit_softcap": 3.0,
        "sliding_window_size": 4,  # of local layers, which it has not
    },
    "scaled-up": {"query_pre_attn_norm": SCALES.BY_EMBED_DIM_DIV_NUM_HEADS, "use_qk_norm": True},
}


def gemma_model(kind="gemma3", *, dtype=jnp.float32, **changes):
    """A model of gemma."""
    config = _config.TransformerConfig(**SIZES | KINDS[kind] | changes)
    return _transformer.Transformer(config=config, dtype=dtype)


@functools.cache
def gemma_variables(model, seed=0):
    """Random values for every parameter (its own start leaves the norms' scales zero)."""
    with lifted():
        shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((1, 3), np.int32))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), shapes)


class OwnAttention:
    """A model with its own attention and cache, one request at a time."""

    def __init__(self, model, variables):
        self._model, self._variables = model, variables

        def call(variables, cache, tokens, start):
            positions = start + jnp.arange(tokens.shape[1])
            mask = jnp.arange(MAX_CONTEXT)[None, None, :] <= positions[None, :, None]
            return model.apply(
                variables, tokens, positions=positions[None], cache=cache, attention_mask=mask
            )

        self._call = inside(lifted, jax.jit(call))

    def logits(self, prompt, continuation):
        """[num_tokens, vocab] of a continuation: the prompt at once, then a step a token."""
        with lifted():
            cache = self._model.config.init_cache(1, jnp.float32, cache_length=MAX_CONTEXT)
        rows, start, tokens = [], 0, prompt
        for token in continuation:
            ids = np.array([tokens], np.int32)
            output = self._call(self._variables, cache, ids, np.int32(start))
            rows.append(output.logits[0, -1])
            cache, start, tokens = output.cache, start + len(tokens), [token]
        return np.asarray(jnp.stack(rows), np.float32)
