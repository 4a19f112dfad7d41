"""A model as the rest of the library takes it."""

from dataclasses import dataclass, replace

from codec_jax.models.chat import ChatTemplate, ChatTokenizer
from codec_jax.models.llama import Decoder
from codec_jax.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, the tokenizer of its vocabulary, and the name that it was loaded by.

    `chat_template` is there where the checkpoint has one.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    name: str
    chat_template: ChatTemplate | None = None

    def as_chat(self) -> "LoadedModel":
        """The same model, whose prompts are what a user says to it.

        Raises `ValueError` if it has no chat template.
        """
        if self.chat_template is None:
            raise ValueError(f"`chat` needs a model with a chat template; {self.name} has none.")
        return replace(self, tokenizer=ChatTokenizer(self.tokenizer, self.chat_template))
