"""Command-line flags of the main job."""

import dataclasses
from typing import Any, get_args

from absl import flags

from codec_jax.attention import IMPLEMENTATIONS
from codec_jax.models.config import DTypeName
from codec_jax.models.registry import model_names
from codec_jax.planning.policies import POLICIES
from experiments.generate_config import GenerateConfig


def define_flags(flag_values: flags.FlagValues) -> None:
    """Adds the flags to `flag_values`; their defaults are those of `GenerateConfig`."""
    _define_input_flags(flag_values)
    _define_sampling_flags(flag_values)
    _define_run_flags(flag_values)
    flags.DEFINE_bool(
        "version",
        False,
        "Prints the versions, the device and the implementation that would run, and ends.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool("help", False, "Prints this and ends.", flag_values=flag_values)
    if "verbosity" in flag_values:  # absl's own
        flags.declare_key_flag("verbosity", flag_values)


def config_from_flags(flag_values: flags.FlagValues) -> GenerateConfig:
    """The settings that the parsed flags give.

    Raises `ValueError` for settings that cannot be.
    """
    names = {field.name for field in dataclasses.fields(GenerateConfig)} - {"prompts"}
    settings: dict[str, Any] = {name: flag_values[name].value for name in names}
    return GenerateConfig(prompts=tuple(flag_values["prompt"].value or ()), **settings)


def flags_help(flag_values: flags.FlagValues) -> str:
    """What every flag does, with its default."""
    return flag_values.module_help(__name__)


def _define_input_flags(flag_values: flags.FlagValues) -> None:
    default = GenerateConfig()
    flags.DEFINE_string(
        "model",
        default.model,
        "The model: a folder with config.json, safetensors and tokenizer.json; a GGUF file"
        f" (*.gguf); or one of {', '.join(model_names())}.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool(
        "chat",
        default.chat,
        "Makes each prompt what a user says, by the chat template of the model.",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "dtype",
        default.dtype,
        get_args(DTypeName),
        "Type of parameters, keys and values. By default the model's own.",
        flag_values=flag_values,
    )
    flags.DEFINE_multi_string(
        "prompt",
        None,
        "A prompt. Without this and --prompts_file: a demonstration of several.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "prompts_file",
        default.prompts_file,
        'File with a prompt a line; *.jsonl: a JSON string a line, or an object with "prompt" and'
        " sampling settings of its own; -: standard input. They follow those of --prompt.",
        flag_values=flag_values,
    )


def _define_sampling_flags(flag_values: flags.FlagValues) -> None:
    default = GenerateConfig()
    flags.DEFINE_integer(
        "num_samples", default.num_samples, "Samples of each prompt.", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "max_new_tokens",
        default.max_new_tokens,
        "Most new tokens of a sample.",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "temperature",
        default.temperature,
        "Divides the logits (no unit); 0 takes the most likely token.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "top_k",
        default.top_k,
        "Draws among this many most likely tokens; 0: among all.",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "top_p",
        default.top_p,
        "Draws among the fewest tokens whose probabilities sum to this; 1: among all.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "seed",
        default.seed,
        "Seed of the draws; the same seed gives the same texts.",
        flag_values=flag_values,
    )


def _define_run_flags(flag_values: flags.FlagValues) -> None:
    default = GenerateConfig()
    flags.DEFINE_integer(
        "page_size", default.page_size, "Tokens of a KV page.", flag_values=flag_values
    )
    flags.DEFINE_enum(
        "policy",
        default.policy,
        tuple(POLICIES),
        "Which prefixes are read once for all requests that share them.",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "implementation",
        default.implementation,
        IMPLEMENTATIONS,
        "What computes attention. By default the first that can.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "output",
        default.output,
        "File for the results, one JSON object a sample and line; it is replaced as a whole. By"
        " default none is written.",
        flag_values=flag_values,
    )
