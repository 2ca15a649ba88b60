"""One row of JSON as a prompt: the formats of Spec-Bench, HumanEval, GSM8K, OpenAI's messages, edits, and own ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polydraft.bench.prompts.prompt import Prompt
from polydraft.models import Message

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
    """Return the prompt of an edit, for a model of code and as a message; empty if the row is none."""
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
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{field} has half of a surrogate pair in it, which is no character")


def _first(row: dict[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    """Return the first of the fields that the row has, and its value."""
    return next(((field, row[field]) for field in fields if row.get(field) is not None), ("", None))
