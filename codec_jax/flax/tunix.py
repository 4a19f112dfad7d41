"""What the attention modules of google-tunix 0.1.7's Llama3 and Qwen3 do around their attention.

tunix is not imported: a module is known by the name of its class, and its rotary embedding and
sharding constraints are those that its own `block` calls.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx

_COMMON = {"config", "shd_config", "q_proj", "k_proj", "v_proj", "o_proj", "n_rep", "scale"}
_NORMS = {"q_norm", "k_norm"}
ATTRIBUTES = {
    "tunix.models.llama3.model.Attention": _COMMON,
    "tunix.models.qwen3.model.Attention": _COMMON | _NORMS,
}
"""Attributes of each known class; a module with another one does something that is not known."""


def tunix_forward(attn: nnx.Module) -> Callable[..., Any]:
    """The `forward` of `Shared` for an attention module of tunix.

    Raises:
      ValueError: it is of another class, or has an attribute that the class had not.
    """
    name = f"{type(attn).__module__}.{type(attn).__qualname__}"
    if name not in ATTRIBUTES:
        raise ValueError(
            f"`attn` must be one of {', '.join(ATTRIBUTES)}; got {name}. Give `forward` for it."
        )
    unknown = {key for key in vars(attn) if not key.startswith("_")} ^ ATTRIBUTES[name]
    if unknown:
        raise ValueError(
            f"`attn` must have the attributes of {name} in google-tunix 0.1.7; {sorted(unknown)}"
            " differ, which could change its mathematics. Give `forward` for it."
        )
    return _forward


def _forward(
    attn: Any,
    attend: Callable[..., Any],
    x: Any,
    segment_pos: Any,
    cache: None = None,
    attn_mask: None = None,
    segment_ids: None = None,
) -> tuple[None, Any]:
    """The module's call, x [B, T, D] and segment_pos [B, T], with `attend` inside."""
    given = {"cache": cache, "attn_mask": attn_mask, "segment_ids": segment_ids}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be None in a shared layer: the pool holds the keys and values, and"
                f" the plan says who sees which; got {type(value).__name__}."
            )
    own = type(attn).block.__globals__
    spec = attn.shd_config.act_btnh

    def rotate(heads):
        return own["apply_rope"](heads, segment_pos, head_dim=attn.head_dim)

    q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    q, k, v = (own["shard"](heads, spec) for heads in (q, k, v))
    out = attend(rotate(q), rotate(k), v, logits_scale=attn.scale)
    return None, own["shard"](attn.o_proj(out), attn.shd_config.act_btd)
