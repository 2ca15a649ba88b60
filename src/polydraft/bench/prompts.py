"""Prompt sets: the shipped ones by name, and files of JSON lines (Spec-Bench, HumanEval, GSM8K, own) or plain text."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any

from polydraft.bench.files import check_regular, home_expanded
from polydraft.errors import PromptFileError

SHIPPED = ("gsm8k", "humaneval", "python")
"""Names of the sets in the package's data/prompts; sources and licences are in the file LICENCES beside them."""
ALL = "all"
"""The name of all tasks together."""
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
NAME_FIELDS = ("question_id", "task_id", "id")
MOST_BYTES = 64 * 2**20
MOST_PROMPTS = 100_000
LONGEST = 1_000_000


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Args:
        name: what it is called in results; no two prompts of a task share a name.
        task: the kind of text, by which results are grouped: the file's name, or a row's own category.
        text: the prompt, at least one character.
        excerpt: whether it is a passage of a longer text, of which only the beginning is meant to be the prompt.
    """

    name: str
    task: str
    text: str
    excerpt: bool = False


def read_prompt_sets(sources: Sequence[str | Path], limit: int | None = None) -> list[Prompt]:
    """Read several sets, at most `limit` prompts of each task, the first ones.

    Raises:
        PromptFileError: a set cannot be read, or two of them name a prompt of one task alike.
    """
    found: dict[tuple[str, str], Prompt] = {}
    taken: dict[str, int] = {}
    for source in sources:
        for prompt in read_prompts(source):
            if limit is not None and taken.get(prompt.task, 0) >= limit:
                continue
            if (prompt.task, prompt.name) in found:
                raise PromptFileError(
                    f"{source}: another prompt set also has a prompt {prompt.name!r} of the task {prompt.task!r}; "
                    "give each set once, and rename one of two files with the same name."
                )
            found[prompt.task, prompt.name] = prompt
            taken[prompt.task] = taken.get(prompt.task, 0) + 1
    return list(found.values())


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with tasks taking turns, so that a part of a run has something of each."""
    tasks = [[one for one in prompts if one.task == task] for task in dict.fromkeys(one.task for one in prompts)]
    return [one for turn in zip_longest(*tasks) for one in turn if one is not None]


def read_prompts(source: str | Path) -> list[Prompt]:
    """Read one prompt set: a shipped one by its name, or a file.

    Files whose name ends in .jsonl, .ndjson or .json hold one JSON object a line. The prompt is the first of `turns`
    (Spec-Bench), or `prompt` (HumanEval), `text`, or `question` (GSM8K); `question_id`, `task_id` or `id` names it,
    else the line number; `category` is its task, else the file's name. Any other file is plain text, whose passages
    between blank lines are excerpts. Names may also end in .gz.

    Raises:
        PromptFileError: the file is missing, unreadable, too large, empty or malformed: which line, and why.
    """
    path, text = read_text(source)
    task = Path(path.name.removesuffix(".gz")).stem
    rows = _json_prompts(path, task, text) if has_json_lines(path) else _passages(task, text)
    prompts = list(islice(rows, MOST_PROMPTS + 1))
    if not prompts:
        raise PromptFileError(f"{path}: the file has no prompt in it.")
    if len(prompts) > MOST_PROMPTS:
        raise PromptFileError(f"{path}: the file has more than {MOST_PROMPTS} prompts; give a part of it.")
    return prompts


def read_text(source: str | Path) -> tuple[Path, str]:
    """Return a set's file, which is the shipped one if it is named so, and the text in it, decompressed.

    Raises:
        PromptFileError: the file is missing, unreadable, too large or not UTF-8, and in which line.
    """
    path = _located(source)
    return path, _decoded(path, _content(path))


def has_json_lines(path: Path) -> bool:
    """Tell by a file's name whether it holds JSON lines, and not plain text."""
    return Path(path.name.removesuffix(".gz")).suffix.lower() in JSON_ENDINGS


def _located(source: str | Path) -> Path:
    if str(source) in SHIPPED and not Path(source).exists():
        return Path(str(files("polydraft") / "data" / "prompts" / f"{source}.jsonl"))
    return home_expanded(source)


def _content(path: Path) -> bytes:
    """Return the file's bytes, decompressed, never more than allowed."""
    try:
        check_regular(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise PromptFileError(
            f"{path}: there is no such file; prompts are a file or one of {', '.join(SHIPPED)}."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PromptFileError(f"{path}: the file cannot be read: {reason}.") from error
    if len(content) > MOST_BYTES:
        raise PromptFileError(f"{path}: the file has more than {MOST_BYTES // 2**20} MiB; give a part of it.")
    return content


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PromptFileError(f"{path}, line {line}: the text is not UTF-8: {error.reason}.") from error


def _json_prompts(path: Path, task: str, text: str) -> Iterator[Prompt]:
    first_seen: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = prompt_from_row(json.loads(line), task, number)
        except (ValueError, RecursionError) as error:
            reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise PromptFileError(f"{path}, line {number}: {reason}.") from error
        earlier = first_seen.setdefault((prompt.task, prompt.name), number)
        if earlier != number:
            raise PromptFileError(f"{path}, line {number}: {prompt.name!r} is already the name of line {earlier}.")
        yield prompt


def prompt_from_row(row: Any, task: str, number: int) -> Prompt:
    """Read one JSON row; the task and the number are those of a row that has none of its own.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not an object")
    turns = row.get("turns")
    if turns is not None and not (isinstance(turns, list) and turns):
        raise ValueError("turns is not a list with at least one text")
    place, text = ("turns[0]", turns[0]) if turns else _first(row, ("prompt", "text", "question"))
    if not place:
        raise ValueError("the row has no prompt: no turns, prompt, text or question")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place} is {'empty' if isinstance(text, str) else 'not a text'}")
    _check_letters(place, text)
    if len(text) > LONGEST:
        raise ValueError(f"{place} has {len(text)} characters; at most {LONGEST} are read")
    _, name = _first(row, NAME_FIELDS)
    _, category = _first(row, ("category",))
    for field, value in (("the name", name), ("category", category)):
        if value is not None and (not isinstance(value, str | int) or value == ""):
            raise ValueError(f"{field} is {value!r}, neither a text nor a number")
        _check_letters(field, str(value))
    return Prompt(str(number if name is None else name), str(task if category is None else category), text)


def _check_letters(field: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{field} has half of a surrogate pair in it, which is no character")


def _first(row: dict[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    """Return the first of the fields that the row has, and its value."""
    return next(((field, row[field]) for field in fields if row.get(field) is not None), ("", None))


def _passages(task: str, text: str) -> Iterator[Prompt]:
    """Split at blank lines; a passage is named by the line on which it starts."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for there, group in groupby(enumerate(lines, start=1), key=lambda line: bool(line[1].strip())):
        if there:
            numbers, passage = zip(*group, strict=True)
            yield Prompt(f"line {numbers[0]}", task, "\n".join(passage)[:LONGEST].rstrip(), excerpt=True)
