"""From settings to a checked generation, and from its completions to result rows."""

import dataclasses
from typing import Any, NamedTuple

from codec_jax import Generation, load_model
from codec_jax.models import LoadedModel
from codec_jax.models.registry import check_model_name
from experiments.generate_config import DEMO_PROMPTS, GenerateConfig
from experiments.json_lines import check_writable
from experiments.prompt_files import PromptRequest, check_unicode, read_prompts


class Job(NamedTuple):
    """A generation that is checked and planned, but not begun."""

    config: GenerateConfig
    model: LoadedModel
    requests: list[PromptRequest]
    generation: Generation

    def rows(self) -> list[dict[str, Any]]:
        """One object for each sample that has ended, by prompt and by sample.

        Keys: prompt_index, sample_index, seed, prompt, text (without the prompt and without a stop
        token), token_ids (the new ones, a stop token included), finish_reason ("stop" or "length")
        and stats: num_prompt_tokens, num_shared_tokens (of these, how many another request uses
        too), reads_saved (KV token reads that the policy spares the request in each decode step),
        policy, implementation.
        """
        run = self.generation.statistics
        ended = sorted(
            map(dataclasses.asdict, self.generation.completions()),
            key=lambda row: (row["prompt_index"], row["sample_index"]),
        )
        return [
            {
                "prompt_index": row["prompt_index"],
                "sample_index": row["sample_index"],
                "seed": self.requests[row["prompt_index"]].sampling.seed,
                "prompt": row["prompt"],
                "text": row["text"],
                "token_ids": list(row["token_ids"]),
                "finish_reason": row["finish_reason"],
                "stats": {
                    "num_prompt_tokens": row["num_prompt_tokens"],
                    "num_shared_tokens": row["num_shared_tokens"],
                    "reads_saved": row["reads_saved"],
                    "policy": run.policy,
                    "implementation": run.implementation,
                },
            }
            for row in ended
        ]


def prepare(config: GenerateConfig) -> Job:
    """The job of these settings; everything that can be refused is refused here.

    Raises:
      OSError: the prompts cannot be read, or the output file cannot be written.
      ValueError: prompts or settings that cannot be.
      NotImplementedError: the implementation cannot run the model.
    """
    if config.output is not None:
        check_writable(config.output)
    check_model_name(config.model, argument="model")
    requests = _requests(config)
    model = load_model(config.model, dtype=config.dtype)
    model = model.as_chat() if config.chat else model
    generation = Generation(
        model,
        [request.prompt for request in requests],
        sampling=[request.sampling for request in requests],
        options=config.options,
    )
    return Job(config, model, requests, generation)


def _requests(config: GenerateConfig) -> list[PromptRequest]:
    """The prompts of the settings, then those of the file."""
    prompts = config.prompts
    if not prompts and config.prompts_file is None:
        prompts = DEMO_PROMPTS
    for index, prompt in enumerate(prompts):
        check_unicode(prompt, f"`prompts[{index}]`")
    requests = [PromptRequest(prompt, config.sampling) for prompt in prompts]
    if config.prompts_file is not None:
        requests += read_prompts(config.prompts_file, config.sampling)
    return requests
