"""What the user asked for, checked before any work: prompts as token ids, rows as arrays."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array

from codec_jax.models import LoadedModel
from codec_jax.sampling import RowSampling, Sampling

Prompt = str | Sequence[int]
MAX_REQUESTS = 2**17
"""Completions of one batch: beyond, the host's work would take minutes before anything happens."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to make: a prompt, its number in the user's list, and the sample's number."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    prompt_index: int
    sample_index: int
    sampling: Sampling


def read_requests(
    model: LoadedModel, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling]
) -> list[Request]:
    """The requests in batch order: prompt by prompt, sample by sample.

    Raises:
      ValueError: a prompt is empty, holds an id outside the vocabulary, or does not fit the model's
        context together with its new tokens; or `sampling` does not match `prompts`.
    """
    if isinstance(prompts, str):
        raise ValueError("`prompts` must be a list of prompts; got one string. Wrap it in a list.")
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"`prompts` must be a list of prompts; got {type(prompts).__name__}.")
    settings = _one_each(sampling, len(prompts))
    num_requests = sum(setting.num_samples for setting in settings)
    if num_requests > MAX_REQUESTS:
        raise ValueError(
            f"`num_samples` over all prompts must be at most {MAX_REQUESTS:,} completions; got"
            f" {num_requests:,}."
        )
    requests = []
    for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        ids = _prompt_ids(model, prompt, index)
        _check_context(model, len(ids), index, setting)
        requests.extend(
            Request(prompt, ids, index, sample, setting) for sample in range(setting.num_samples)
        )
    return requests


def row_sampling(requests: Sequence[Request], batch_size: int) -> RowSampling:
    """The requests' settings as arrays, padded with greedy rows."""

    def column(values: Sequence[float], dtype: npt.DTypeLike, fill: int = 0) -> Array:
        padded = np.full(batch_size, fill, dtype)
        padded[: len(requests)] = values
        return jax.device_put(padded)

    return RowSampling(
        temperature=column([r.sampling.temperature for r in requests], np.float32),
        top_k=column([min(r.sampling.top_k, 2**31 - 1) for r in requests], np.int32),
        top_p=column([r.sampling.top_p for r in requests], np.float32, fill=1),
        seed=column([r.sampling.seed for r in requests], np.uint32),
        prompt_index=column([r.prompt_index for r in requests], np.int32),
        sample_index=column([r.sample_index for r in requests], np.int32),
    )


def _one_each(sampling: Sampling | Sequence[Sampling], num_prompts: int) -> Sequence[Sampling]:
    if isinstance(sampling, Sampling):
        return [sampling] * num_prompts
    if not isinstance(sampling, Sequence):
        raise ValueError(
            f"`sampling` must be a Sampling or a list of them; got {type(sampling).__name__}."
        )
    if len(sampling) != num_prompts:
        raise ValueError(
            f"`sampling` must be one setting, or one for each of the {num_prompts} prompts; got"
            f" {len(sampling)}."
        )
    for index, setting in enumerate(sampling):
        if not isinstance(setting, Sampling):
            raise ValueError(
                f"`sampling[{index}]` must be a Sampling; got {type(setting).__name__}."
            )
    return sampling


def _prompt_ids(model: LoadedModel, prompt: Prompt, index: int) -> tuple[int, ...]:
    ids = _encode(model, prompt, index) if isinstance(prompt, str) else _as_ids(prompt, index)
    if not ids:
        raise ValueError(
            f"`prompts[{index}]` must hold at least one token; got none, and no BOS token."
        )
    vocab_size = model.decoder.config.vocab_size
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"`prompts[{index}]` must hold ids in [0, {vocab_size}); got {outside[0]}."
        )
    return ids


def _encode(model: LoadedModel, prompt: str, index: int) -> tuple[int, ...]:
    try:
        return tuple(model.tokenizer.encode(prompt))
    except ValueError as error:
        raise ValueError(f"`prompts[{index}]` must be tokenizable: {error}") from error


def _as_ids(prompt: Sequence[int], index: int) -> tuple[int, ...]:
    rule = f"`prompts[{index}]` must be a string or one flat list of token ids"
    try:
        array = np.asarray(prompt)
    except ValueError as error:
        raise ValueError(f"{rule}; got nested lists.") from error
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{rule}; got {array.dtype} of shape {array.shape}.")
    return tuple(array.tolist())


def _check_context(model: LoadedModel, prompt_len: int, index: int, sampling: Sampling) -> None:
    limit = model.decoder.config.max_context
    length = prompt_len + sampling.max_new_tokens
    if length > limit:
        raise ValueError(
            f"`prompts[{index}]` must fit the model's context of {limit} tokens with its new ones;"
            f" got {prompt_len} prompt tokens + {sampling.max_new_tokens} `max_new_tokens` ="
            f" {length}."
        )
