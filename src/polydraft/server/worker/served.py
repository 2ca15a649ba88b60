"""The model that a worker serves, and what it can be asked without writing text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polydraft.catalogue as catalogue
from polydraft.drafters import Drafter
from polydraft.engine import as_drafter, load
from polydraft.engine.generate import target_model
from polydraft.errors import ContextOverflow, InvalidParameter, UnsupportedModel
from polydraft.models import (
    AnswerForm,
    Grammar,
    HuggingFaceModel,
    Tool,
    answer_form,
    bytes_of,
    check_shown,
    conversation_ids,
    format_named,
    read_size,
    text_of,
)
from polydraft.models.checks.supported import TUNED_FROM
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Ask, Prompt, nested
from polydraft.server.worker.served_versions import ServedVersions, bytes_to_learn

MOST_LENGTH = 4096
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that says nothing of arguments."""
TAIL = 16
"""So many tokens at the end of a prompt tell whether an answer begins within reasoning."""
LEAST_LONGEST = 16
"""Characters that are allowed for each token at least, where a vocabulary has none that is longer."""


@dataclass(frozen=True, eq=False)
class LoadedModels:
    """A target with its tokenizer and the drafter of its draft model or head, if there is one.

    `learnt` has the versions of the draft's weights where these are learnt.
    """

    settings: Settings
    target: HuggingFaceModel
    tokenizer: Any
    draft: Drafter | None
    learnt: ServedVersions | None = None
    spellings: dict[int, str] = field(default_factory=dict[int, str], init=False, repr=False)
    pieces: dict[int, list[int]] = field(default_factory=dict[int, list[int]], init=False, repr=False)

    @property
    def max_length(self) -> int:
        """The most tokens of a text with its prompt."""
        return min(self.settings.max_length or MOST_LENGTH, self.target.context)

    @property
    def max_prompt(self) -> int:
        """The most tokens of a prompt."""
        return min(self.settings.max_prompt_tokens or self.max_length - 1, self.max_length - 1)

    @property
    def vocab_size(self) -> int:
        """How many tokens a prompt may be made of."""
        return read_size(self.target.model)

    @cached_property
    def eos(self) -> frozenset[int]:
        """The tokens that end a text by the model's own account."""
        config: Any = self.target.model.generation_config
        told = None if config is None else config.eos_token_id
        return frozenset(() if told is None else [told] if isinstance(told, int) else told)

    @cached_property
    def longest(self) -> int:
        """The most characters of a token, or somewhat more."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_size(self, prompt: object, name: str) -> None:
        """Check that a text can be as few tokens as a text may have, before it is made into tokens, which takes time.

        Raises:
            ContextOverflow: it cannot.
        """
        count = sum(len(one) for one in nested(prompt) if isinstance(one, str))
        most = self.max_length * max(self.longest, LEAST_LONGEST)
        if count > most:
            raise ContextOverflow(
                f"{name} has {count} characters, which are more than {self.max_length} tokens, the most of a text."
            )

    def ids(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        special: bool = True,
        effort: str | None = None,
    ) -> list[int]:
        """Return a prompt's tokens.

        Args:
            prompt: the prompt.
            tools: what the chat template is to tell of tools.
            special: whether special tokens are added to a text.
            effort: how much the model is to think; dropped where the chat template does not take it.

        Raises:
            InvalidParameter: there is no chat template, or it refuses the messages or leaves something of them out;
                tokens that there are not.
        """
        if isinstance(prompt, str):
            found = self.tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"]
            return [int(token) for token in found]
        if prompt and isinstance(prompt[0], Mapping):
            if not self.tokenizer.chat_template:
                raise InvalidParameter("This model has no chat template, so it takes no messages: ask /v1/completions.")
            messages = [one for one in prompt if isinstance(one, Mapping)]
            found = conversation_ids(self.tokenizer, messages, tools, effort=effort)
            check_shown(self.tokenizer, messages, tools)
            return found
        tokens = [token for token in prompt if isinstance(token, int)]
        self.check_tokens(tokens, "prompt")
        return tokens

    def form(self, ask: Ask, response: Grammar | None, tokens: Sequence[int]) -> AnswerForm | None:
        """Return what answers of a chat look like; None where they are texts and nothing else.

        Args:
            ask: the request.
            response: what the answer must match.
            tokens: the prompt's.

        Raises:
            InvalidParameter: calls or reasoning cannot be as it asks.
            MissingExtra: it needs grammars, and llguidance is not installed.
        """
        if ask.calls is None:
            return None
        only = ask.calls.only
        named = [one["function"] for one in ask.tools or ()]
        tools = [
            Tool(one["name"], one.get("parameters") or NO_ARGUMENTS, strict=bool(one.get("strict")))
            for one in named
            if only is None or one["name"] in only
        ]
        form = answer_form(
            self.tokenizer,
            tools,
            choice=ask.calls.choice,
            held=only is not None,
            parallel=ask.calls.parallel,
            tool_format=self.settings.tool_format,
            response=response,
            most_reasoning=ask.most_reasoning,
            prompt=self.text(tokens[-TAIL:]),
        )
        return None if form.tool_format is None and form.thinking is None else form

    def check_tokens(self, tokens: Sequence[int], name: str) -> None:
        """Check that these are tokens of the model.

        Raises:
            InvalidParameter: one is not.
        """
        size = self.vocab_size
        strange = next((token for token in tokens if not 0 <= token < size), None)
        if strange is not None:
            raise InvalidParameter(f"{name} has the token {strange}, but the model's tokens are 0 to {size - 1}.")

    def text(self, tokens: Sequence[int], *, skip: bool = False) -> str:
        """Return the text of tokens, with special ones unless these are to be skipped."""
        return text_of(self.tokenizer, tokens, skip)

    def spelling(self, token: int) -> str:
        """Return the text of a single token, which is looked for once."""
        if token not in self.spellings:
            self.spellings[token] = self.text([token])
        return self.spellings[token]

    def bytes(self, token: int) -> list[int]:
        """Return the bytes of a single token, also where they are a part of a character; looked for once."""
        if token not in self.pieces:
            self.pieces[token] = [*bytes_of(self.tokenizer, token)]
        return self.pieces[token]

    def told(self) -> dict[str, Any]:
        """Return what clients may know of it."""
        return {
            "chat": bool(self.tokenizer.chat_template),
            "context": self.max_length,
            "vocab_size": self.vocab_size,
            "drafters": [word for word in catalogue.drafter_words(0 if self.draft is None else 1) if word != "model"]
            + ([] if self.draft is None else ["model"]),
            "draft": None if self.draft is None else self.draft.name,
            "tuned_from": getattr(self.target.model.config, TUNED_FROM, None),
        }


def load_served(settings: Settings) -> LoadedModels:
    """Load the models that are named.

    Raises:
        PolydraftError: they cannot be loaded or served.
    """
    if settings.learn is not None and settings.drafter is not None and catalogue.is_drafter_word(settings.drafter, 0):
        raise InvalidParameter(
            f"--drafter {settings.drafter} drafts without weights, so that texts would not use what is learnt: leave "
            "it or --learn out; a request may name it."
        )
    named = (settings.target, settings.draft) if settings.target else ("pair", "pair-draft")
    kept = {"dtype": settings.dtype, "device": settings.device, "weights": settings.weights}
    pair = load(*named, **kept, parallel=settings.parallel, draft_device=settings.draft_device)
    target = target_model(pair.target)
    if target.encodes:
        raise UnsupportedModel("The server takes decoders; this model has an encoder, so use polydraft.generate.")
    if target.crowded is not None:
        raise UnsupportedModel(
            f"{type(target.model).__name__} {target.crowded}, so texts that are written side by side would change each "
            'other; use polydraft.generate with drafter="none".'
        )
    if pair.tokenizer is None:
        raise InvalidParameter("The server needs the target's tokenizer, which its folder does not have.")
    if settings.tool_format is not None:
        format_named(settings.tool_format)
    draft = None if pair.draft is None else as_drafter(pair.draft)
    learnt = None
    if settings.learn is not None:
        bytes_to_learn(settings, draft, target.width)
        learnt = ServedVersions(Path(settings.learn), draft, target)
    return LoadedModels(settings, target, pair.tokenizer, draft, learnt)
