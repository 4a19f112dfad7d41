"""Teacher forcing on the host: given continuations through the decode loop, step by step."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from codec_jax.decode import DecodeState, Decoding
from codec_jax.decode_forced import force_first, forced_steps
from codec_jax.generate import Generation, Options
from codec_jax.generate_requests import Prompt
from codec_jax.models import LoadedModel
from codec_jax.sampling import Sampling


def forced_logits(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    continuations: Sequence[Sequence[int]],
    *,
    options: Options | None = None,
    steps: Callable[..., tuple] = forced_steps,
) -> list[np.ndarray]:
    """Float32 logits `[num_tokens, vocab]` of each continuation, of its token i in row i.

    Row 0 comes from prefill, every other from a step of the decode loop, with the same forest,
    plans and pages as a generation that draws these tokens. Stop tokens stop nothing here.

    Args:
      model: decoder and tokenizer.
      prompts: as for `Generation`, one for each continuation; the same one may come again.
      continuations: new token ids of each prompt, at least one.
      options: how to run.
      steps: called as `forced_steps`; for a program that was compiled ahead of time.

    Raises:
      ValueError: bad prompts or options; `continuations` are not one for each prompt, or one is
        empty or holds an id outside the vocabulary.
    """
    _check(continuations, len(prompts), model.decoder.config.vocab_size)
    forcing = _Forcing(continuations, steps)
    Generation(
        model,
        prompts,
        sampling=[Sampling(max_new_tokens=len(ids)) for ids in continuations],
        options=options,
        decoding=Decoding(forcing.first, forcing.steps),
    ).finish()
    return forcing.logits()


class _Forcing:
    """The programs of a forced run, and the logits that they have returned."""

    def __init__(self, continuations: Sequence[Sequence[int]], steps: Callable[..., tuple]):
        self._continuations, self._steps = continuations, steps
        self._forced = jax.device_put(np.zeros((0, 0), np.int32))
        self._logits: list[np.ndarray] = []  # of one visit each, [steps, batch, vocab]

    def first(self, params, state: DecodeState, last_hidden, **statics) -> DecodeState:
        forced = np.zeros(state.new_tokens.shape, np.int32)
        for row, ids in enumerate(self._continuations):
            forced[row, : len(ids)] = ids
        self._forced = jax.device_put(forced)
        state, logits = force_first(params, state, last_hidden, self._forced, **statics)
        self._logits.append(np.asarray(logits)[None])
        return state

    def steps(self, params, state: DecodeState, plan, **statics) -> DecodeState:
        state, logits = self._steps(params, state, plan, self._forced, **statics)
        self._logits.append(np.asarray(logits))
        return state

    def logits(self) -> list[np.ndarray]:
        """Of each row, its own steps only."""
        if not self._logits:
            return []
        logits = np.concatenate(self._logits)
        return [logits[: len(ids), row] for row, ids in enumerate(self._continuations)]


def _check(continuations: Sequence[Sequence[int]], num_prompts: int, vocab_size: int) -> None:
    if len(continuations) != num_prompts:
        raise ValueError(
            f"`continuations` must be one for each of the {num_prompts} prompts; got"
            f" {len(continuations)}."
        )
    for index, ids in enumerate(continuations):
        if not len(ids):
            raise ValueError(f"`continuations[{index}]` must hold at least one token; got none.")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"`continuations[{index}]` must hold ids in [0, {vocab_size}); got {outside[0]}."
            )
