"""Prompts in, completions out: the host loop around prefill and the decode loop.

The host admits the prompts, plans, lets the device run k steps, and reads back; nothing else of it
is on the path of a decode step.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from codec_jax.decode import Decoding
from codec_jax.generate_batch import Batch, Options
from codec_jax.generate_loop import Loop
from codec_jax.generate_memory import Memory
from codec_jax.generate_requests import Prompt, Request, read_requests
from codec_jax.models import LoadedModel
from codec_jax.planning.policies import policy_named
from codec_jax.sampling import Sampling

_log = logging.getLogger(__name__)

__all__ = ["Completion", "Delta", "Generation", "Options", "Statistics", "generate"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sample of a prompt.

    Attributes:
      prompt_index, sample_index: place in the user's list, and which sample of it.
      prompt: as the user gave it.
      text: the new text, without the prompt and without a stop token.
      token_ids: the new tokens, a stop token included.
      finish_reason: "stop" (a stop token) or "length" (max_new_tokens).
      num_prompt_tokens: tokens of the prompt.
      num_shared_tokens: of these, tokens whose keys and values another request uses too.
      reads_saved: KV token reads that the policy spares this request in each decode step: a node
        of n tokens that is read once for s requests costs each of them n / s reads instead of n.
    """

    prompt_index: int
    sample_index: int
    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_shared_tokens: int
    reads_saved: float


@dataclasses.dataclass(frozen=True)
class Delta:
    """Tokens that one row gained since the host's last visit; `finish_reason` with the last."""

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What sharing saves, and what was computed.

    Attributes:
      unique_kv_tokens: prompt tokens in the pool: what a decode step reads of them when shared.
      total_kv_tokens: what it reads of them when every request reads its own.
      num_prompt_pages: pages that hold the prompts.
      num_prefill_rows: token rows given to prefill, padding included.
      num_prefill_padding: of these, padding.
      policy, policy_rule: what ran, and which nodes it reads once.
      implementation, reason: what ran, and why.
    """

    unique_kv_tokens: int
    total_kv_tokens: int
    num_prompt_pages: int
    num_prefill_rows: int
    num_prefill_padding: int
    policy: str
    policy_rule: str
    implementation: str
    reason: str


class Generation:
    """One batch of prompts on its way to completions.

    Making it checks everything and plans on the host; nothing is on the device before the first
    visit. Iterate for the tokens as they come, or call `finish`.

    Args:
      model: decoder and tokenizer.
      prompts: strings (a BOS token is added where the tokenizer has one) or lists of token ids.
      sampling: how to draw, for all prompts or one for each.
      options: page size, policy, implementation and loop sizes.
      decoding: programs to run in place of the library's own, such as `generate_forced`'s.

    Raises:
      ValueError: bad prompts or settings, before any work.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        options: Options | None = None,
        decoding: Decoding | None = None,
    ):
        self.requests = read_requests(model, prompts, Sampling() if sampling is None else sampling)
        self._tokenizer = model.tokenizer
        self._batch = Batch(model, self.requests, options=options or Options())
        self._loop = Loop(model, self._batch, decoding=decoding)
        self._new_ids: list[tuple[int, ...]] = [() for _ in self.requests]
        self._reasons: list[str | None] = [None for _ in self.requests]
        self._visits = self._run()

    @property
    def forest(self):
        """The prompts' prefix forest."""
        return self._batch.forest

    @property
    def memory(self) -> Memory:
        """What the run will hold on the device; known before the first visit."""
        return self._batch.memory

    @property
    def statistics(self) -> Statistics:
        """What sharing saves; known before the first visit."""
        batch = self._batch
        num_rows = len(batch.chunks) * batch.options.prefill_chunk
        return Statistics(
            unique_kv_tokens=batch.forest.unique_tokens,
            total_kv_tokens=batch.forest.total_tokens,
            num_prompt_pages=batch.num_prompt_pages,
            num_prefill_rows=num_rows,
            num_prefill_padding=num_rows - batch.chunks.num_tokens,
            policy=batch.options.policy,
            policy_rule=policy_named(batch.options.policy).rule,
            implementation=batch.implementation,
            reason=batch.implementation_reason,
        )

    def __iter__(self) -> Iterator[list[Delta]]:
        """One list of deltas for each visit of the host, until every row has ended."""
        return self._visits

    def finish(self) -> list[Completion]:
        """All completions, prompt by prompt and sample by sample, after running to the end.

        Raises RuntimeError when an earlier error or interrupt ended the run before every row;
        `completions` has those that ended.
        """
        for _ in self._visits:
            pass
        num_open = self._reasons.count(None)
        if num_open:
            raise RuntimeError(
                f"`finish` must follow no failed run: {num_open} of {len(self._reasons)} rows have"
                " not ended, and cannot any more. `completions()` has the others."
            )
        return self.completions()

    def completions(self) -> list[Completion]:
        """The completions that have ended so far, in the user's order."""
        return [
            self._completion(request, row)
            for row, request in enumerate(self.requests)
            if self._reasons[row] is not None
        ]

    def _run(self) -> Iterator[list[Delta]]:
        if not self.requests:
            return
        for progress in self._loop.run():
            deltas = []
            for row, (ids, reason) in enumerate(progress):
                gained = ids[len(self._new_ids[row]) :]
                if gained:
                    self._new_ids[row], self._reasons[row] = ids, reason
                    request = self.requests[row]
                    delta = Delta(request.prompt_index, request.sample_index, gained, reason)
                    deltas.append(delta)
            _log.debug("visit: %d rows gained tokens", len(deltas))
            yield deltas

    def _completion(self, request: Request, row: int) -> Completion:
        ids, reason = self._new_ids[row], self._reasons[row]
        visible = ids[:-1] if reason == "stop" else ids
        shared = self._batch.sharing(row)
        return Completion(
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            prompt=request.prompt,
            text=self._continuation(request.prompt_ids, visible),
            token_ids=ids,
            finish_reason=str(reason),
            num_prompt_tokens=len(request.prompt_ids),
            num_shared_tokens=sum(node.tokens for node in shared),
            reads_saved=sum((node.reads_saved for node in shared), 0.0),
        )

    def _continuation(self, prompt_ids: tuple[int, ...], new_ids: tuple[int, ...]) -> str:
        """The new text. Decoded with the prompt: a token's text can depend on those before it."""
        before = self._tokenizer.decode(list(prompt_ids))
        full = self._tokenizer.decode([*prompt_ids, *new_ids])
        return full[len(before) :] if full.startswith(before) else self._tokenizer.decode(new_ids)


def generate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    options: Options | None = None,
) -> list[Completion]:
    """Completions of all prompts, prompt by prompt and sample by sample.

    Each prefix that prompts share is computed once and read once for each decode step (Hydragen,
    arXiv 2402.05099; CoDec, arXiv 2505.17694); the answers are those of unshared decoding. No
    prompts give no completions. Arguments and errors are those of `Generation`.
    """
    return Generation(model, prompts, sampling=sampling, options=options).finish()
