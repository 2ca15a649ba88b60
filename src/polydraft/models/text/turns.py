"""A conversation turn by turn: what was said, and the very tokens that the model read and wrote of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models.text.conversation import Message, conversation_ids

LETTER, OTHER = "a", "?"
SLACK = 0.25
"""The share of the context that is free once something was dropped, so that the next turns are not read anew too."""


@dataclass(frozen=True)
class Conversation:
    """Messages and their tokens, to the end of the last message.

    Problem: a template makes text of messages, and a tokenizer makes other tokens of an answer's text than the model
    wrote: what it wrote above temperature 0 is seldom what the tokenizer would write. Then the model would see other
    tokens than its own, and nothing behind them in its cache could be used.
    Rule: only the text that a new turn adds is made into tokens, and put behind the tokens that are there. That is
    possible where the template's text up to the end of the last answer begins the text with the new turn; where it is
    not, as with templates that take out an answer's reasoning later, the whole is made anew.

    Args:
        messages: a system message, if there is one; then user and assistant in turn.
        ids: the tokens of all messages, and after a user's message those that begin the answer. Empty if they are still
            to be made.
    """

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def exchanges(self) -> int:
        """How many messages the user sent."""
        return sum(one.role == "user" for one in self.messages)

    def asked(self, tokenizer: PreTrainedTokenizerBase, content: str) -> "Conversation":
        """Add a message of the user, and what begins the answer.

        Raises:
            InvalidParameter: there is no template, or it refuses the messages.
        """
        messages = (*self.messages, Message("user", content))
        new = _new_text(tokenizer, self.messages, messages) if self.ids else None
        tokens = None if new is None else _tokens_behind(tokenizer, new)
        if tokens is None:
            return Conversation(messages, tuple(conversation_ids(tokenizer, messages)))
        return Conversation(messages, (*self.ids, *tokens))

    def answered(self, content: str, tokens: Sequence[int], *, ended: bool) -> "Conversation":
        """Add the model's answer.

        Args:
            content: its text.
            tokens: its tokens.
            ended: whether the last of them ends the turn; the template writes that one itself.
        """
        own = tokens[:-1] if ended else tokens
        return Conversation((*self.messages, Message("assistant", content)), (*self.ids, *own))

    def without_oldest(self) -> "Conversation":
        """Drop the user's first message and its answer; a system message stays. The tokens are to be made anew."""
        system = [one for one in self.messages[:1] if one.role == "system"]
        return Conversation((*system, *self.messages[len(system) + 2 :]))


def asked_within(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, content: str, context: int, room: int
) -> tuple[Conversation, int]:
    """Add a message of the user to as much of a conversation as the model's context holds.

    Nothing is dropped while message and answer fit. If they do not, the oldest exchanges are dropped until a quarter of
    the context is free beside the answer: whatever is dropped, all that remains is read anew.

    Args:
        conversation: what was said before, to the end of an answer.
        tokenizer: the model's.
        content: the message.
        context: the most tokens of the model.
        room: tokens that an answer should have; fewer if nothing is left to be dropped.

    Returns:
        the conversation with the message, and how many exchanges were dropped.

    Raises:
        ContextOverflow: the message does not fit, whatever is dropped.
        InvalidParameter: there is no template, or it refuses the messages.
    """
    asked, dropped = conversation.asked(tokenizer, content), 0
    most = context - room
    while len(asked.ids) > most and conversation.exchanges:
        conversation, dropped = conversation.without_oldest(), dropped + 1
        asked, most = conversation.asked(tokenizer, content), context - room - int(SLACK * context)
    if len(asked.ids) >= context:
        raise ContextOverflow(
            f"The message makes {len(asked.ids)} tokens, but the model's context holds {context} with the answer: "
            "send a shorter one."
        )
    return asked, dropped


def check_template(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
    """Check that a tokenizer has a chat template, and that this takes a system message, if there is one.

    Raises:
        InvalidParameter: it does not.
    """
    if not tokenizer.chat_template:
        raise InvalidParameter("This model's tokenizer has no chat template: take a chat model, such as smollm2.")
    question = Message("user", "?")
    if system is None:
        conversation_ids(tokenizer, (question,))
        return
    two = [conversation_ids(tokenizer, (Message("system", said), question)) for said in (system, OTHER + system)]
    if two[0] == two[1]:
        raise InvalidParameter("This model's chat template leaves system messages out: say it in a message of yours.")


def _new_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], messages: Sequence[Message]) -> str | None:
    """Return what the last message adds to the template's text; None if that is not all that changes.

    Templates that trim answers also trim what is behind an empty one; such an answer is made anew.
    """
    if not before[-1].content.strip():
        return None
    try:
        known = _rendered(tokenizer, before, continue_final_message=True)
        whole = _rendered(tokenizer, messages, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  a template that refuses is asked again for the whole, and what it says is said
        return None
    return whole[len(known) :] if whole.startswith(known) else None


def _tokens_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    """Return the tokens of a text that stands behind another; None where the two cannot be told apart.

    Some tokenizers put a space before whatever they are given. So the text is given behind a letter.
    """
    letter, both = (
        cast(list[int], tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"])
        for one in (LETTER, LETTER + text)
    )
    return both[len(letter) :] if both[: len(letter)] == letter else None


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: Any) -> str:
    told = [{"role": one.role, "content": one.content} for one in messages]
    return str(tokenizer.apply_chat_template(told, tokenize=False, **how))
