"""Settings of the main job."""

import dataclasses

from codec_jax import Options, Sampling
from codec_jax.models.config import DTypeName
from codec_jax.planning.policies import DEFAULT_POLICY

_BEGINNING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she"
)
DEMO_PROMPTS = (
    f"{_BEGINNING} saw a dog",
    f"{_BEGINNING} saw a cat",
    f"{_BEGINNING} found a box",
    f"{_BEGINNING} saw a dog and a bird",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to generate, from what, and where to put it. The defaults are the demonstration.

    Attributes:
      model: a name or path that `load_model` takes.
      chat: whether a prompt is what a user says, by the model's chat template.
      prompts: texts; without these and without a file, `DEMO_PROMPTS`.
      prompts_file: see `prompt_files.read_prompts`; its prompts follow `prompts`.
      num_samples, max_new_tokens, temperature, top_k, top_p, seed: see `Sampling`.
      page_size, policy, implementation: see `Options`.
      dtype: of parameters, keys and values; None takes the model's own.
      output: JSON lines file, see `generate_job.Job.rows`; None writes none.

    Raises `ValueError` for settings that cannot be, except those that depend on the model.
    """

    model: str = "stories260k"
    chat: bool = False
    prompts: tuple[str, ...] = ()
    prompts_file: str | None = None
    num_samples: int = 3
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    page_size: int = 64
    policy: str = DEFAULT_POLICY
    implementation: str | None = None
    dtype: DTypeName | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str):
            raise ValueError("`prompts` must be several texts; got one string. Write (text,).")
        _ = self.sampling, self.options  # each checks its own settings

    @property
    def sampling(self) -> Sampling:
        """How the completions of a prompt are drawn that has no settings of its own."""
        return Sampling(**self._fields_of(Sampling))

    @property
    def options(self) -> Options:
        """How the batch is run."""
        return Options(**self._fields_of(Options))

    def _fields_of(self, settings: type) -> dict:
        names = {field.name for field in dataclasses.fields(settings)}
        mine = {field.name for field in dataclasses.fields(self)}
        return {name: getattr(self, name) for name in names & mine}
