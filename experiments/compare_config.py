"""Settings and flags of the comparison of implementations."""

import dataclasses
from typing import Any

from absl import flags

from codec_jax import Options, Sampling
from codec_jax.attention import IMPLEMENTATIONS
from codec_jax.models.config import DTypeName
from codec_jax.models.registry import model_names
from codec_jax.planning.policies import DEFAULT_POLICY

_STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she went to the park with her mom and her dog. The sun was warm and the sky was "
    "blue. Lily saw a big tree with many red apples. She wanted to pick one, but the tree was too "
    "tall. "
)
PROMPTS = (
    f"{_STORY}Her mom said,",
    f"{_STORY}Her dog ran to",
    f"{_STORY}Her dog ran to the tree and",
    f"{_STORY}A boy named Tim",
)
"""A prefix of more than a page, a fork inside a page, a prompt that ends at an inner node."""
DTYPES = ("bfloat16", "float16")
_SMOKE = {"models": ("stories260k",), "implementations": ("xla", "reference")}
_SMOKE_SIZES = {"num_samples": 2, "max_new_tokens": 12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """What to compare.

    Attributes:
      models: names that `load_model` takes.
      implementations: the first one generates; the logits of each pair are compared.
      dtype: of parameters, keys and values; float32 would leave no rounding to measure by.
      num_samples, max_new_tokens, temperature, seed: see `Sampling`; for each of `PROMPTS`.
      page_size, policy: see `Options`.
      smoke: takes a small model, few tokens and what runs everywhere.
      commit: of the sources, where no repository travels along.
      output: JSON lines file; None writes none.

    Raises `ValueError` for settings that cannot be.
    """

    models: tuple[str, ...] = ("stories260k", "random-4l-128")
    implementations: tuple[str, ...] = ("mosaic_gpu", "xla")
    dtype: DTypeName = "bfloat16"
    num_samples: int = 4
    max_new_tokens: int = 128
    temperature: float = 0.8
    seed: int = 0
    page_size: int = 64
    policy: str = DEFAULT_POLICY
    smoke: bool = False
    commit: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        _check_names("models", self.models, model_names(), at_least=1)
        _check_names("implementations", self.implementations, IMPLEMENTATIONS, at_least=2)
        _check_names("dtype", (self.dtype,), DTYPES, at_least=1)
        _ = self.sampling, self.options(self.implementations[0])  # each checks its own settings
        if self.max_new_tokens < 2:
            raise ValueError(
                "`max_new_tokens` must be at least 2, since the first one takes no decode step; got"
                f" {self.max_new_tokens}."
            )

    @property
    def sampling(self) -> Sampling:
        """How the tokens are drawn that all runs are then forced to."""
        return Sampling(
            num_samples=self.num_samples,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )

    def options(self, implementation: str) -> Options:
        """How an implementation is run."""
        return Options(page_size=self.page_size, policy=self.policy, implementation=implementation)

    def sized(self) -> "ComparisonConfig":
        """The settings to run: these, or the small ones of a smoke test."""
        return dataclasses.replace(self, **_SMOKE, **_SMOKE_SIZES) if self.smoke else self


def define_flags(flag_values: flags.FlagValues) -> None:
    """Adds the flags to `flag_values`; their defaults are those of `ComparisonConfig`."""
    default = ComparisonConfig()

    def define(kind: Any, name: str, text: str) -> None:
        value = getattr(default, name)
        value = list(value) if isinstance(value, tuple) else value
        kind(name, value, text, flag_values=flag_values)

    define(flags.DEFINE_list, "models", "models to run, one after the other")
    define(flags.DEFINE_list, "implementations", "the first generates, all pairs are compared")
    define(flags.DEFINE_string, "dtype", "of parameters, keys and values")
    define(flags.DEFINE_integer, "num_samples", "samples of each prompt")
    define(flags.DEFINE_integer, "max_new_tokens", "most new tokens of a sample")
    define(flags.DEFINE_float, "temperature", "of the draws; 0 takes the most likely token")
    define(flags.DEFINE_integer, "seed", "of the draws")
    define(flags.DEFINE_integer, "page_size", "tokens of a page")
    define(flags.DEFINE_string, "policy", "which prefixes are read once for all sharers")
    define(flags.DEFINE_bool, "smoke", "a small model, few tokens, xla and reference, any device")
    define(flags.DEFINE_string, "commit", "of a tree without its repository")
    define(flags.DEFINE_string, "output", "JSON lines file")


def config_from_flags(flag_values: flags.FlagValues) -> ComparisonConfig:
    """The settings that the parsed flags give; `ValueError` for settings that cannot be."""
    names = [field.name for field in dataclasses.fields(ComparisonConfig)]
    settings: dict[str, Any] = {name: flag_values[name].value for name in names}
    settings |= {name: tuple(settings[name] or ()) for name in ("models", "implementations")}
    return ComparisonConfig(**settings)


def _check_names(
    name: str, values: tuple[str, ...], known: tuple[str, ...], *, at_least: int
) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ValueError(f"`{name}` must be among {', '.join(known)}; got {unknown[0]!r}.")
    if len(set(values)) < len(values) or len(values) < at_least:
        raise ValueError(f"`{name}` must be {at_least} or more different names; got {values}.")
