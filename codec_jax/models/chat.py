"""Chat templates: a prompt becomes a user's message, in the words that a model was trained on."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from codec_jax.models.tokenizer import Tokenizer


class ChatTemplate:
    """A Jinja template of a checkpoint, rendered in a sandbox that lets it change nothing.

    The date function that some templates ask for is not there, so the same prompt gives the same
    tokens on any day. `special_tokens` are the template's `bos_token` and so on.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], place: str):
        """Raises `ValueError` for a template that is not one.

        `place`, as in "`chat_template` in x.json", says in messages where it came from.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._special_tokens = dict(special_tokens)
        self._place = place
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{place} must be a Jinja template; got {reason}.") from error

    def render(self, text: str) -> str:
        """The conversation in which a user says `text` and the model is about to answer.

        Raises `ValueError` if the template refuses it, fails on it or does what a sandbox does not
        allow.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": text}],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # whatever the program that a template is may raise
            reason = str(error).rstrip(".")
            raise ValueError(f"{self._place} must render one user message; {reason}.") from error


class ChatTokenizer:
    """A tokenizer whose prompts are what a user says; all else is the model's tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer = tokenizer
        self._template = template

    @property
    def bos_id(self) -> int | None:
        """Id that starts a sequence, if there is one."""
        return self._tokenizer.bos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self._tokenizer.stop_ids

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of the conversation that `text` opens, or of the bare text without `bos`.

        The template writes the BOS token itself. Control tokens that `text` spells out are tokens
        too, as everywhere.
        """
        return self._tokenizer.encode(self._template.render(text) if bos else text, bos=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter would escape HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)
