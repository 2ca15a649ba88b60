"""A conversation in progress: what was said, what the models know of it, and what it took."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from polydraft.engine import Emission, Past, Run, Statistics, stream, summed
from polydraft.models import Conversation, HuggingFaceModel, Message, Pair, asked_within, check_template, text_of

LARGEST_SEED = 2**63
SHARE = 4
"""An answer should have room for --max-new-tokens, or for this part of the context if that is less."""


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer as it comes: an iterator of what every step brings.

    Args:
        conversation: what was said, with the message that is answered.
        dropped: how many exchanges were dropped to make room.
        run: the generation.
        tokenizer: the model's.
    """

    conversation: Conversation
    dropped: int
    run: Run
    tokenizer: Any

    def __iter__(self) -> Iterator[Emission]:
        return (block.rows[0] for block in self.run)

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return [*self.run.new_tokens[0]]

    @property
    def content(self) -> str:
        """The text so far, without special tokens."""
        return text_of(self.tokenizer, self.tokens)

    @property
    def finish(self) -> str:
        """Why it ended: "eos", "stop", "length" or "context"; "interrupted" if it was left before."""
        return self.run.finish[0] or "interrupted"

    @property
    def statistics(self) -> Statistics:
        """Its counts and times."""
        return self.run.statistics


@dataclass
class Chat:
    """A conversation and the models that hold it. A turn counts when it is kept; before, nothing has changed.

    Args:
        pair: the models.
        options: what is told to `stream` for every turn.
        seed: of the first turn; those of the next follow it. None draws one.
        system: the system message; None leaves it to the template.

    Raises:
        InvalidParameter: the tokenizer has no chat template, or it takes no such system message.
    """

    pair: Pair
    options: dict[str, Any]
    seed: int | None = None
    system: str | None = None
    conversation: Conversation = field(init=False)
    past: Past | None = field(init=False, default=None)
    dropped: int = field(init=False, default=0)
    told: list[Statistics] = field(init=False, default_factory=list)
    turns: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.seed = secrets.randbelow(2**53) if self.seed is None else self.seed
        self.context = HuggingFaceModel(self.pair.target).context
        self.restart(self.system)

    def restart(self, system: str | None) -> None:
        """Forget what was said, and begin with a system message.

        Raises:
            InvalidParameter: the template takes none; then nothing is forgotten.
        """
        check_template(self.pair.tokenizer, system)
        self.system = system
        self.conversation = Conversation(() if system is None else (Message("system", system),))
        self.past, self.dropped, self.told = None, 0, []

    def ask(self, content: str) -> Answer:
        """Begin to answer a message.

        Raises:
            ContextOverflow: the message does not fit into the model's context.
            InvalidParameter: the template refuses it.
        """
        room = min(self.options["max_new_tokens"], self.context // SHARE)
        asked, dropped = asked_within(self.conversation, self.pair.tokenizer, content, self.context, room)
        ids = torch.tensor([asked.ids], device=self.pair.target.device)
        # with a mask of its own: without one Hugging Face leaves padding tokens out, which the model may have written
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        seed = ((self.seed or 0) + self.turns) % LARGEST_SEED
        run = stream(self.pair.target, prompt, **{**self.options, "seed": seed}, past=self.past, keep_past=True)
        return Answer(asked, dropped, run, self.pair.tokenizer)

    def keep(self, answer: Answer) -> bool:
        """Keep a message and what was answered; tell whether there was anything to keep."""
        tokens, finish = answer.tokens, answer.finish
        self.turns += 1
        if not tokens:
            return False
        after = answer.conversation.answered(answer.content, tokens, ended=finish == "eos")
        self.conversation, self.past = after, answer.run.past
        self.dropped += answer.dropped
        self.told.append(answer.statistics)
        return True

    @property
    def statistics(self) -> Statistics:
        """All answers' counts and times."""
        return summed(self.told)
