"""The model that a worker serves, and what it can be asked without writing text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polydraft.catalogue as catalogue
from polydraft.drafters import Drafter
from polydraft.engine import as_drafter, load
from polydraft.engine.defaults import target_model
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel, conversation_ids, load_pair, read_size, text_of
from polydraft.server.settings import Settings
from polydraft.server.worker.asks import Prompt

MOST_LENGTH = 4096


@dataclass(frozen=True, eq=False)
class Served:
    """A target with what drafts for it.

    Args:
        settings: the server's.
        target: the model.
        tokenizer: its tokenizer.
        draft: the drafter of its draft model or head; None if there is neither.
    """

    settings: Settings
    target: HuggingFaceModel
    tokenizer: Any
    draft: Drafter | None
    spellings: dict[int, str] = field(default_factory=dict[int, str], init=False, repr=False)

    @property
    def max_length(self) -> int:
        """The most tokens of a text with its prompt."""
        asked = self.settings.max_length or min(self.target.context, MOST_LENGTH)
        return min(asked, self.target.context)

    @property
    def max_prompt(self) -> int:
        """The most tokens of a prompt."""
        return min(self.settings.max_prompt_tokens or self.max_length - 1, self.max_length - 1)

    @property
    def vocab_size(self) -> int:
        """How many tokens a prompt may be made of."""
        return read_size(self.target.model)

    def ids(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None, *, special: bool = True
    ) -> list[int]:
        """Return a prompt's tokens.

        Raises:
            InvalidParameter: there is no chat template, or it refuses the messages; tokens that there are not.
        """
        if isinstance(prompt, str):
            found = self.tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"]
            return [int(token) for token in found]
        if prompt and isinstance(prompt[0], Mapping):
            if not self.tokenizer.chat_template:
                raise InvalidParameter("This model has no chat template, so it takes no messages: ask /v1/completions.")
            return conversation_ids(self.tokenizer, [one for one in prompt if isinstance(one, Mapping)], tools)
        tokens = [token for token in prompt if isinstance(token, int)]
        self.check_tokens(tokens, "prompt")
        return tokens

    def check_tokens(self, tokens: Sequence[int], name: str) -> None:
        """Check that these are tokens of the model.

        Raises:
            InvalidParameter: one is not.
        """
        strange = [token for token in tokens if not 0 <= token < self.vocab_size]
        if strange:
            raise InvalidParameter(
                f"{name} has the token {strange[0]}, but the model's tokens are 0 to {self.vocab_size - 1}."
            )

    def text(self, tokens: Sequence[int], *, skip: bool = False) -> str:
        """Return the text of tokens, with special ones unless these are to be skipped."""
        return text_of(self.tokenizer, tokens, skip)

    def spelling(self, token: int) -> str:
        """Return the text of a single token, which is looked for once."""
        if token not in self.spellings:
            self.spellings[token] = self.text([token])
        return self.spellings[token]

    def told(self) -> dict[str, Any]:
        """Return what clients may know of it."""
        return {
            "target": self.settings.target or "embedded pair",
            "chat": bool(self.tokenizer.chat_template),
            "context": self.max_length,
            "vocab_size": self.vocab_size,
            "drafters": [word for word in catalogue.drafter_words(0 if self.draft is None else 1) if word != "model"]
            + ([] if self.draft is None else ["model"]),
            "draft": None if self.draft is None else self.draft.name,
        }


def load_served(settings: Settings) -> Served:
    """Load the models that are named.

    Raises:
        PolydraftError: they cannot be loaded or served.
    """
    if settings.target is None:
        pair = load_pair(dtype=settings.dtype, device=settings.device)
    else:
        pair = load(settings.target, settings.draft, dtype=settings.dtype, device=settings.device)
    target = target_model(pair.target)
    if target.encodes:
        raise UnsupportedModel("The server takes decoders; this model has an encoder, so use polydraft.generate.")
    if pair.tokenizer is None:
        raise InvalidParameter("The server needs the target's tokenizer, which its folder does not have.")
    return Served(settings, target, pair.tokenizer, None if pair.draft is None else as_drafter(pair.draft))
