"""Prompt sets: the shipped ones by name, and files of JSON lines (Spec-Bench, HumanEval, GSM8K, own) or plain text."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import groupby, islice
from pathlib import Path

from polydraft.bench.prompts.prompt import LONGEST, Prompt, as_asked, in_turn, prompt_from_row
from polydraft.bench.result_lines import check_regular, home_expanded
from polydraft.errors import PromptFileError
from polydraft.fetched import PROMPTS as FETCHED
from polydraft.fetched import is_there, place

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
KIND = "mt-bench"
"""The kind of the eight categories."""


def by_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of one set grouped by kind, if the set is Spec-Bench; else as they are.

    A set is Spec-Bench if it has prompts of all thirteen categories. The categories of MT-Bench take turns within their
    kind, so that its first eight prompts are of eight categories.
    """
    categories = {one.task for one in prompts}
    if not categories.issuperset((*MT_BENCH, *OTHERS)):
        return list(prompts)
    mixed = in_turn([one for one in prompts if one.task in MT_BENCH])
    ours = [replace(one, task=KIND) for one in mixed]
    return ours + [one for one in prompts if one.task not in MT_BENCH]


USUAL = ("gsm8k", "humaneval", "python")
"""The shipped sets of raw texts, which any model can continue."""
SHIPPED = (*USUAL, "spec-bench-mini", "edits")
"""Names of the sets in the package's data/prompts; sources and licences are in the file LICENCES beside them."""
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
MOST_BYTES = 64 * 2**20
MOST_PROMPTS = 100_000


def read_prompt_sets(
    sources: Sequence[str | Path], limit: int | None = None, chat_template: bool | None = None
) -> list[Prompt]:
    """Read several sets, at most `limit` prompts of each task, the first ones.

    Args:
        sources: names of shipped or fetched sets, and files.
        limit: prompts of each task; None for all.
        chat_template: which prompts go through a chat template: None for conversations, True for all but excerpts,
            False for none.

    Raises:
        PromptFileError: a set cannot be read, two of them name a prompt of one task alike, or a conversation that was
            chosen cannot be raw text and is to be.
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
            found[prompt.task, prompt.name] = _asked(source, prompt, chat_template)
            taken[prompt.task] = taken.get(prompt.task, 0) + 1
    return list(found.values())


def _asked(source: str | Path, prompt: Prompt, chat_template: bool | None) -> Prompt:
    try:
        return as_asked(prompt, chat_template)
    except ValueError as error:
        raise PromptFileError(f"{source}: the prompt {prompt.name!r}: {error}.") from error


def read_prompts(source: str | Path) -> list[Prompt]:
    """Read one prompt set: a shipped one by its name, or a file.

    Files whose name ends in .jsonl, .ndjson or .json hold one JSON object a line. The prompt is a conversation,
    `messages` (a role and a content each) or the first of `turns` (Spec-Bench), or a text, `prompt` (HumanEval),
    `text`, or `question` (GSM8K), or an edit, `instruction` and `file`; `question_id`, `task_id` or `id` names it, else
    the line number; `category` is its task, else the file's name; Spec-Bench's categories are grouped (`kinds`). Any
    other file is plain text, whose passages between blank lines are excerpts. Names may also end in .gz.

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
    return by_kind(prompts)


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
    if str(source) in FETCHED and not Path(source).exists():
        return _fetched(str(source))
    return home_expanded(source)


def _fetched(name: str) -> Path:
    if not is_there(name):
        raise PromptFileError(
            f"The prompts of {name} are not on this machine: run `polydraft fetch {name}` once, give the name of your "
            f"own copy of the file, or take {name}-mini, which comes with the package."
        )
    return place(name)


def _content(path: Path) -> bytes:
    """Return the file's bytes, decompressed, never more than allowed."""
    try:
        check_regular(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise PromptFileError(
            f"{path}: there is no such file; prompts are a file or one of {', '.join((*SHIPPED, *FETCHED))}."
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


def _passages(task: str, text: str) -> Iterator[Prompt]:
    """Split at blank lines; a passage is named by the line on which it starts."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for there, group in groupby(enumerate(lines, start=1), key=lambda line: bool(line[1].strip())):
        if there:
            numbers, passage = zip(*group, strict=True)
            yield Prompt(f"line {numbers[0]}", task, "\n".join(passage)[:LONGEST].rstrip(), excerpt=True)
