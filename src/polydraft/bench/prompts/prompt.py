"""A prompt: a text to continue, or a conversation that a chat template makes into one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from polydraft.models import Message

ALL = "all"
"""The name of all tasks together."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer.

    Args:
        name: what it is called in results; no two prompts of a task share a name.
        task: the kind of text, by which results are grouped: the file's name, or a row's own category.
        text: the prompt, at least one character; of a conversation what its messages say, without a template.
        excerpt: whether it is a passage of a longer text, of which only the beginning is meant to be the prompt.
        messages: the conversation, which goes through the tokenizer's chat template; empty for raw text.
        message: what a user asks in place of the text, if that goes through a chat template; empty for the text itself.
        file: what is to be edited; empty where nothing is.
        edited: what comes of it, or another text that is known to be right; empty where none is known.
    """

    name: str
    task: str
    text: str
    excerpt: bool = False
    messages: tuple[Message, ...] = ()
    message: str = ""
    file: str = ""
    edited: str = ""


def as_asked(prompt: Prompt, chat_template: bool | None) -> Prompt:
    """Return a prompt with the messages that go through a chat template, which are none if it goes as raw text.

    Args:
        prompt: the prompt as it was read.
        chat_template: None leaves it so; True makes a user's message of a raw text that is no excerpt; False makes raw
            text of a conversation of one user's message.

    Raises:
        ValueError: the conversation has other messages too, which only a template can join.
    """
    if chat_template and not prompt.messages and not prompt.excerpt:
        return replace(prompt, messages=(Message("user", prompt.message or prompt.text),))
    if chat_template is not False or not prompt.messages:
        return prompt
    roles = [one.role for one in prompt.messages]
    if roles != ["user"]:
        raise ValueError(
            f"--no-chat-template makes raw text of one user's message, but the messages are of {', '.join(roles)}"
        )
    return replace(prompt, text=prompt.messages[0].content, messages=())


def template_in_words(chat_template: bool | None) -> str:
    """Say which prompts went through the target's chat template."""
    if chat_template is None:
        return "Prompts with messages or turns went through the target's chat template; all others are raw text."
    return (
        "Prompts went through the target's chat template, plain ones as a user's message; excerpts are raw text."
        if chat_template
        else "No chat template was used: every prompt is raw text."
    )


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with tasks taking turns, so that a part of a run has something of each."""
    tasks = [[one for one in prompts if one.task == task] for task in dict.fromkeys(one.task for one in prompts)]
    return [one for turn in zip_longest(*tasks) for one in turn if one is not None]
