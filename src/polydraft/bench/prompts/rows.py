"""One row of JSON as a prompt: the formats of Spec-Bench, HumanEval, GSM8K, OpenAI's messages, and own ones."""

from collections.abc import Sequence
from typing import Any

from polydraft.bench.prompts.prompt import Prompt
from polydraft.models import Message

NAME_FIELDS = ("question_id", "task_id", "id")
TEXT_FIELDS = ("prompt", "text", "question")
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
    if not place:
        raise ValueError("the row has no prompt: no messages, turns, prompt, text or question")
    _check_text(place, text)
    _, name = _first(row, NAME_FIELDS)
    _, category = _first(row, ("category",))
    for field, value in (("the name", name), ("category", category)):
        if value is not None and (not isinstance(value, str | int) or value == ""):
            raise ValueError(f"{field} is {value!r}, neither a text nor a number")
        _check_letters(field, str(value))
    named = str(number if name is None else name)
    return Prompt(named, str(task if category is None else category), text, messages=messages)


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
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{field} has half of a surrogate pair in it, which is no character")


def _first(row: dict[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    """Return the first of the fields that the row has, and its value."""
    return next(((field, row[field]) for field in fields if row.get(field) is not None), ("", None))
