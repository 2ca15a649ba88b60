"""A conversation in progress, and its turns on the screen: what was said, what it took, and what goes wrong."""

import os
import secrets
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from polydraft.cli.generation.one_text import DRAFTED, OWN, write_text
from polydraft.cli.generation.summaries import add_statistics
from polydraft.cli.printing import counted, named_values
from polydraft.cli.process import DEBUG, noted_interruption
from polydraft.engine import Emission, Past, Run, Statistics, stream, summed
from polydraft.errors import PolydraftError
from polydraft.models import (
    Conversation,
    HuggingFaceModel,
    Message,
    Pair,
    StreamDecoder,
    asked_within,
    check_template,
    text_of,
)

LARGEST_SEED = 2**63
SHARE = 4
"""An answer should have room for --max-new-tokens, or for this part of the context if that is less."""


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer as it comes, an iterator of what every step brings; `dropped` exchanges made room for it."""

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


CUTS = {
    "length": "cut by --max-new-tokens",
    "context": "cut by the model's context",
    "interrupted": "interrupted",
}
"""Why an answer is not whole."""


def summary(answer: Answer) -> str:
    """Return the line below an answer."""
    found = answer.statistics
    prompt = found.prompt_read + found.prompt_known
    parts = [
        counted(found.new_tokens, "token"),
        f"{found.tokens_per_second:.1f} tokens/s",
        f"{found.block_efficiency:.2f} tokens per call",
        f"read {found.prompt_read} of {counted(prompt, 'prompt token')}",
    ]
    parts += [] if found.lossless else [f"LOSSY ({found.verifier})"]
    cut = CUTS.get(answer.finish)
    return ", ".join([*parts, cut] if cut else parts)


def dropping(answer: Answer, context: int) -> str:
    """Return the sentence that says what was dropped; empty if nothing was."""
    if not answer.dropped:
        return ""
    were = "oldest exchange was" if answer.dropped == 1 else f"{answer.dropped} oldest exchanges were"
    return f"The context of {context} tokens is full: the {were} dropped."


def table(chat: Chat) -> Table:
    """Return the table of the conversation so far."""
    told = chat.statistics
    found = named_values()
    found.add_row("answers", str(len(chat.told)))
    if chat.dropped:
        found.add_row("exchanges dropped", str(chat.dropped))
    found.add_row("conversation", f"{len(chat.conversation.ids)} of {chat.context} tokens")
    found.add_row("prompt tokens", f"{told.prompt_read} read, {told.prompt_known} known from before")
    if chat.told:
        add_statistics(found, told)
    if not told.lossless:
        found.add_row("law", f"NOT the target's: {told.verifier} is lossy")
    if told.fallback:
        found.add_row("drafter failed", told.fallback, style="red")
    return found


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer for JSON."""
    found = answer.statistics
    return {
        "role": "assistant",
        "content": answer.content,
        "finish": answer.finish,
        "tokens": found.new_tokens,
        "accepted": found.accepted,
        "target_calls": found.target_calls,
        "prompt_read": found.prompt_read,
        "prompt_known": found.prompt_known,
        "dropped": answer.dropped,
        "verifier": found.verifier,
        "lossless": found.lossless,
        "seconds": round(found.seconds.get("total", 0.0), 4),
    }


def speak(console: Console, answer: Answer) -> bool:
    """Print an answer as it comes, to its end or to Ctrl-C; all that it has then is printed, and once.

    Returns:
        whether Ctrl-C was pressed, which may be as the last words were printed.
    """
    decoder, shown, left = StreamDecoder(answer.tokenizer), 0, False
    try:
        for gained in answer:
            with noted_interruption() as pressed:  # Ctrl-C ends a pass of the model at once, but no printing
                for place, token in enumerate(gained.tokens):
                    write_text(console, decoder.add(token), DRAFTED if place < gained.accepted else OWN)
                shown += len(gained.tokens)
            left = pressed()
            if left:
                break
    except KeyboardInterrupt:
        left = True
        for token in answer.tokens[shown:]:  # of a step that was complete, but not handed over yet
            write_text(console, decoder.add(token), OWN)
    finally:
        write_text(console, decoder.rest() + "\n", OWN)
        if not console.quiet:
            console.file.flush()
    return left


def attempted(turn: Callable[[], None]) -> str:
    """Take a turn; return what went wrong in a sentence, or nothing. The end of input or output passes through."""
    try:
        turn()
    except PolydraftError as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _of_memory(error)
    except (OSError, EOFError):  # nobody reads any more, or nobody types
        raise
    except Exception as error:  # noqa: BLE001  it costs the turn, not the conversation
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's on a CPU
            return _of_memory(error)
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        return f"Unexpected error, please report ({DEBUG}=1 shows more): {type(error).__name__}: {error}."
    return ""


def _of_memory(_: BaseException) -> str:
    return "The memory did not suffice for this turn, which is not kept: send a shorter message, or begin anew."
