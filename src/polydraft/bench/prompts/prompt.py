"""A prompt: rows of JSON in many formats, texts, conversations and edits, and the token ids of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.bench.table import Item, grouped
from polydraft.errors import InvalidParameter
from polydraft.models import Message, Pair, conversation_ids
from polydraft.options.value_checks import has_half_character

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
    return taking_turns(grouped(prompts, lambda one: one.task).values())


def taking_turns(groups: Iterable[Sequence[Item]]) -> list[Item]:
    """Return what is in groups, the first of each, then the second of each, and so on."""
    return [one for turn in zip_longest(*groups) for one in turn if one is not None]


NAME_FIELDS = ("question_id", "task_id", "id")
TEXT_FIELDS = ("prompt", "text", "question")
KNOWN_FIELDS = ("edited", "reference")
LONGEST = 1_000_000


def prompt_from_row(row: Any, task: str, number: int) -> Prompt:
    """Read one JSON row; the task and the number are those of a row that has none of its own.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not an object")
    messages = _conversation(row)
    place, text = ("messages", _joined(messages)) if messages else _first(row, TEXT_FIELDS)
    edit = {} if place else _edit(row)
    if not (place or edit):
        raise ValueError("the row has no prompt: no messages, turns, prompt, text, question, or instruction and file")
    if place:
        _check_text(place, text)
    _, name = _first(row, NAME_FIELDS)
    _, category = _first(row, ("category",))
    for field, value in (("the name", name), ("category", category)):
        if value is not None and (not isinstance(value, str | int) or value == ""):
            raise ValueError(f"{field} is {value!r}, neither a text nor a number")
        _check_letters(field, str(value))
    named = str(number if name is None else name)
    found = Prompt(named, str(task if category is None else category), text or "", messages=messages)
    return replace(found, **edit, file=_optional(row, ("file",)), edited=_optional(row, KNOWN_FIELDS))


def _edit(row: dict[str, Any]) -> dict[str, str]:
    instruction, file = row.get("instruction"), row.get("file")
    if instruction is None or file is None:
        return {}
    _check_text("instruction", instruction)
    _check_text("file", file)
    own = file if file.endswith("\n") else f"{file}\n"
    comment = "\n# ".join(instruction.split("\n"))
    return {
        "text": f"{own}\n\n# {comment}\n# The edited file:\n\n",
        "message": f"{instruction}\nAnswer with the whole edited file and nothing else.\n\n```python\n{own}```",
    }


def _optional(row: dict[str, Any], fields: Sequence[str]) -> str:
    """Return the first text of the fields, empty if there is none: sets of others have other things in them."""
    for field in fields:
        text = row.get(field)
        if isinstance(text, str) and text.strip():
            _check_text(field, text)
            return text
    return ""


def _conversation(row: dict[str, Any]) -> tuple[Message, ...]:
    """Return the messages of a row: OpenAI's, or the first of Spec-Bench's turns; empty if it is no conversation."""
    messages, turns = row.get("messages"), row.get("turns")
    if messages is not None and turns is not None:
        raise ValueError("the row has both messages and turns: leave one of them out")
    if messages is not None:
        if not (isinstance(messages, list) and messages):
            raise ValueError("messages is not a list with at least one message")
        found = tuple(_message(f"messages[{place}]", one) for place, one in enumerate(messages))
        _check_text(f"content of messages[{len(found) - 1}]", found[-1].content)
        return found
    if turns is None:
        return ()
    if not (isinstance(turns, list) and turns):
        raise ValueError("turns is not a list with at least one text")
    _check_text("turns[0]", turns[0])
    return (Message("user", turns[0]),)


def _message(place: str, one: Any) -> Message:
    if not isinstance(one, dict):
        raise ValueError(f"{place} is a {type(one).__name__}, not an object with role and content")
    role, content = one.get("role"), one.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"role of {place} is not a text")
    if not isinstance(content, str):
        raise ValueError(f"content of {place} is not a text")
    others = sorted(str(name) for name, value in one.items() if name not in ("role", "content") and value is not None)
    if others:
        raise ValueError(f"{place} has {others[0]!r}, but only role and content are read")
    _check_letters(f"role of {place}", role)
    _check_letters(f"content of {place}", content)
    return Message(role, content)


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(one.content for one in messages)


def _check_text(place: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place} is {'empty' if isinstance(text, str) else 'not a text'}")
    _check_letters(place, text)
    if len(text) > LONGEST:
        raise ValueError(f"{place} has {len(text)} characters; at most {LONGEST} are read")


def _check_letters(field: str, text: str) -> None:
    if has_half_character(text):
        raise ValueError(f"{field} has half of a surrogate pair in it, which is no character")


def _first(row: dict[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    return next(((field, row[field]) for field in fields if row.get(field) is not None), ("", None))


def encode(pair: Pair, prompt: Prompt, excerpt_tokens: int | None = None) -> Int[Tensor, "1 t"]:
    """Return the prompt's token ids, on the target's device.

    A conversation goes through the tokenizer's chat template, raw text through the tokenizer alone; of an excerpt the
    first `excerpt_tokens` are returned.

    Raises:
        InvalidParameter: there is no chat template, or it refuses the conversation, which is named.
    """
    return tokens_of(pair.tokenizer, prompt, excerpt_tokens).to(pair.target.device)


def tokens_of(tokenizer: Any, prompt: Prompt, excerpt_tokens: int | None = None) -> Int[Tensor, "1 t"]:
    """Return the same by a tokenizer alone, on the host.

    Raises:
        InvalidParameter: there is no chat template, or it refuses the conversation, which is named.
    """
    if not prompt.messages:
        found = torch.as_tensor(tokenizer(prompt.text, return_tensors="pt", verbose=False)["input_ids"])
        return found[:, :excerpt_tokens] if prompt.excerpt else found
    try:
        tokens = conversation_ids(tokenizer, prompt.messages)
    except InvalidParameter as error:
        named = f"The prompt {prompt.name!r} of {prompt.task}: " if prompt.name and prompt.task else ""
        raise InvalidParameter(f"{named}{error}") from error
    return torch.tensor([tokens])


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return a seed of the prompt's own, the same whatever other prompts there are."""
    return seed + crc32(f"{prompt.task}\n{prompt.name}".encode())
