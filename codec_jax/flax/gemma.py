"""What the attention module of google-deepmind's gemma 4.0.1 does around its attention.

gemma is not imported: the module is known by the name of its class, and its rotary embedding is
that of the file that defines it.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from codec_jax.flax.linen_attention import LinenHook

FIELDS = {
    "num_heads",
    "num_kv_heads",
    "features",
    "head_dim",
    "attn_type",
    "query_pre_attn_scalar",
    "rope_base_frequency",
    "rope_scale_factor",
    "attn_logits_soft_cap",
    "sliding_window_size",
    "use_qk_norm",
    "parent",
    "name",
}
"""Fields of the class; a module with another one does something that is not known."""


def gemma_forward(
    attn: Any,
    attend: Callable[..., Any],
    x: Any,
    segment_pos: Any,
    cache: None = None,
    attn_mask: Any = None,
) -> tuple[None, Any]:
    """The module's call, x [B, T, D] and segment_pos [B, T], with `attend` inside.

    `attn_mask` is not read: the plan says who sees which.

    Raises:
      NotImplementedError: the module has a soft cap or a window.
      ValueError: it is given a cache, or has other fields than in gemma 4.0.1.
    """
    del attn_mask
    _check(attn, cache)
    embeddings = vars(sys.modules[type(attn).__module__])["_positional_embeddings"]
    if attn.use_qkv_einsum:
        q, k, v = attn.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        q = attn.q_einsum("BTD,NDH->BTNH", x)
        k, v = attn.kv_einsum("BSD,CKDH->CBSKH", x)
    if attn.use_qk_norm:
        q, k = attn._query_norm(q), attn._key_norm(k)

    def rotate(heads):
        return embeddings.apply_rope(
            heads,
            segment_pos,
            base_frequency=attn.rope_base_frequency,
            scale_factor=attn.rope_scale_factor,
        )

    out = attend(rotate(q), rotate(k), v, logits_scale=attn.query_pre_attn_scalar)
    return None, attn.attn_vec_einsum("BTNH,NHD->BTD", out)


GEMMA_HOOK = LinenHook("gemma.gm.nn._modules.Attention", gemma_forward)
"""The attention class of `gemma.gm.nn.Transformer`."""


def _check(attn: Any, cache: Any) -> None:
    unknown = {field.name for field in dataclasses.fields(attn)} ^ FIELDS
    if unknown:
        raise ValueError(
            f"`model` must have the attention of gemma 4.0.1; fields {sorted(unknown)} differ, and"
            " could change its mathematics. Give a `LinenHook` of your own for it."
        )
    if attn.attn_logits_soft_cap is not None:
        raise NotImplementedError(
            "`attn_logits_soft_cap` must be None: scores are not capped here; got"
            f" {attn.attn_logits_soft_cap}."
        )
    if attn.attn_type.name != "GLOBAL":
        raise NotImplementedError(
            "`attention_types` must all be GLOBAL: attention has no window here; got"
            f" {attn.attn_type.name} with `sliding_window_size` {attn.sliding_window_size}."
        )
    if cache is not None:
        raise ValueError("`cache` must be None: the pool holds the keys and values.")
