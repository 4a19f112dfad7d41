"""What a run will hold on the device, known before anything is allocated."""

import dataclasses

from codec_jax.attention_xla import ChunkConfig
from codec_jax.models import ModelConfig
from codec_jax.models.memory import as_gib
from codec_jax.planning.spec import TILE_ROWS

_ROW_COPIES = 6
"""Copies of a row's activations, and of its packed query or result, that live at once."""
_LOGIT_COPIES = 8
"""Arrays of the logits' size that a filtered draw holds: sorted, ranks, noise, ..."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device.

    Attributes:
      weights_bytes: parameters, there already.
      pool_bytes: keys and values of all layers.
      workspace_bytes: an upper estimate of the temporaries of prefill and of a decode step.
      available_bytes: what the device has for all three; None when it does not say.
    """

    weights_bytes: int
    pool_bytes: int
    workspace_bytes: int
    available_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """All three together."""
        return self.weights_bytes + self.pool_bytes + self.workspace_bytes

    def check(self) -> None:
        """Raises ValueError when the device cannot hold it, and says what to lower."""
        if self.available_bytes is None or self.needed_bytes <= self.available_bytes:
            return
        largest = max(
            (self.pool_bytes, "`num_samples`, `max_new_tokens` or the number of prompts"),
            (self.workspace_bytes, "`num_samples` or the number of prompts"),
            (self.weights_bytes, "the size of the model, or take `dtype` bfloat16"),
        )
        raise ValueError(
            f"`prompts` need {as_gib(self.needed_bytes)} ({self}), the device has"
            f" {as_gib(self.available_bytes)}. Lower {largest[1]}."
        )

    def __str__(self) -> str:
        return (
            f"weights {as_gib(self.weights_bytes)}, KV pool {as_gib(self.pool_bytes)}, workspace"
            f" {as_gib(self.workspace_bytes)}"
        )


def workspace_bytes(
    config: ModelConfig, *, batch_size: int, prefill_chunk: int, num_tiles: int, page_size: int
) -> int:
    """An upper estimate of the largest program's temporaries; grows neither with pool nor length.

    Args:
      config: the model's sizes.
      batch_size: rows of the decode loop.
      prefill_chunk: rows of prefill.
      num_tiles: most 64-row tiles of a plan.
      page_size: tokens of a page.
    """
    rows = max(batch_size, prefill_chunk)
    width = config.intermediate_size + 4 * config.hidden_size
    packed = config.num_kv_heads * num_tiles * TILE_ROWS * config.head_dim
    chunk = ChunkConfig.for_pages(page_size, config.head_dim)
    unit = page_size * (2 * config.head_dim + 4 * chunk.row_block)
    logits = batch_size * config.vocab_size
    elements = _ROW_COPIES * (rows * width + packed) + _LOGIT_COPIES * logits
    return 4 * (elements + 4 * chunk.chunk_units * unit) + 2**20
