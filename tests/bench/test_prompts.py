"""Prompt files: every format is read, and everything that can be wrong with one is said with its line."""

import gzip
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

import polydraft.bench.prompts as reading
from polydraft.bench import SHIPPED, Prompt, read_prompt_sets, read_prompts
from polydraft.errors import PolydraftError, PromptFileError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


FORMATS = {
    "text": ({"text": "a b"}, ("1", "set", "a b")),
    "prompt": ({"prompt": "a b", "id": "x"}, ("x", "set", "a b")),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "?"}, ("HumanEval/0", "set", "def f():")),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, ("1", "set", "How many?")),
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        ("81", "writing", "Write."),
    ),
    "turns before prompt": ({"turns": ["first"], "prompt": "other"}, ("1", "set", "first")),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_row_of_each_format(case: str, write: Write) -> None:
    row, (name, task, text) = FORMATS[case]
    assert read_prompts(write("set.jsonl", json.dumps(row))) == [Prompt(name, task, text)]


def test_blank_lines_windows_ends_a_mark_and_compression_do_not_matter(write: Write) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n'
    expected = [Prompt("1", "set", "a"), Prompt("3", "set", "b")]
    assert read_prompts(write("set.jsonl", content)) == expected
    assert read_prompts(write("set.jsonl.gz", gzip.compress(content))) == expected


def test_plain_text_is_split_at_blank_lines(write: Write) -> None:
    path = write("tale.txt", "\n\nOnce upon\na time.\n  \n\nThe end.\r\n\r\n")
    assert read_prompts(path) == [
        Prompt("line 3", "tale", "Once upon\na time.", excerpt=True),
        Prompt("line 7", "tale", "The end.", excerpt=True),
    ]


BAD = {
    "not json": ("set.jsonl", '{"text": "a"}\n{oops}', "line 2: not JSON: Expecting property name"),
    "not an object": ("set.jsonl", '["a"]', "line 1: the row is a list, not an object"),
    "no prompt": ("set.jsonl", '{"text": "a"}\n\n{"id": 1}', "line 3: the row has no prompt"),
    "empty prompt": ("set.jsonl", '{"prompt": " "}', "line 1: prompt is empty"),
    "number as prompt": ("set.jsonl", '{"question": 3}', "line 1: question is not a text"),
    "turns not a list": ("set.jsonl", '{"turns": "a"}', "line 1: turns is not a list with at least one text"),
    "no turns": ("set.jsonl", '{"turns": []}', "line 1: turns is not a list with at least one text"),
    "turn not a text": ("set.jsonl", '{"turns": [null]}', "line 1: turns[0] is not a text"),
    "name": ("set.jsonl", '{"id": [1], "text": "a"}', "line 1: the name is [1]"),
    "category": ("set.jsonl", '{"category": {}, "text": "a"}', "line 1: category is {}"),
    "same name": ("set.jsonl", '{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', "line 2: '1' is already the name"),
    "deep": ("set.jsonl", "[" * 100_000, "line 1: "),
    "surrogate": ("set.jsonl", '{"text": "\\ud800"}', "line 1: text has half of a surrogate pair"),
    "not utf-8": ("set.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: the text is not UTF-8: invalid start byte"),
    "not utf-8 text": ("tale.txt", b"one\n\ntwo \xe9\n", "line 3: the text is not UTF-8"),
    "empty": ("set.jsonl", "\n\n", "the file has no prompt in it"),
    "empty text": ("tale.txt", " \n", "the file has no prompt in it"),
    "not compressed": ("set.jsonl.gz", '{"text": "a"}', "the file cannot be read: Not a gzipped file"),
    "cut short": ("set.jsonl.gz", gzip.compress(b'{"text": "a"}')[:-9], "the file cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_line_and_reason(case: str, write: Write) -> None:
    name, content, reason = BAD[case]
    path = write(name, content)
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}") and reason in str(caught.value)
    assert isinstance(caught.value, PolydraftError) and str(caught.value).endswith(".")


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        PromptFileError, match=r"nothing\.jsonl: there is no such file; prompts are a file or one of gsm"
    ):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(PromptFileError, match="the file cannot be read: it is a folder, not a regular file"):
        read_prompts(tmp_path)


def test_sizes_are_bounded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    long, many = write("long.jsonl", json.dumps({"text": "a" * 99})), write("many.txt", "a\n\nb\n\nc\n")
    monkeypatch.setattr(reading, "LONGEST", 98)
    with pytest.raises(PromptFileError, match=r"line 1: text has 99 characters; at most 98 are read"):
        read_prompts(long)
    monkeypatch.setattr(reading, "MOST_PROMPTS", 2)
    with pytest.raises(PromptFileError, match="more than 2 prompts"):
        read_prompts(many)
    monkeypatch.setattr(reading, "MOST_BYTES", 2**20)
    bomb = write("bomb.jsonl.gz", gzip.compress(b" " * (2**20 + 1)))
    with pytest.raises(PromptFileError, match="more than 1 MiB"):
        read_prompts(bomb)


def test_several_sets_with_a_limit_for_each_task(write: Write) -> None:
    rows = [{"category": name, "question_id": n, "turns": ["x"]} for n, name in enumerate("aabab")]
    mixed = write("mixed.jsonl", "\n".join(map(json.dumps, rows)))
    tale = write("tale.txt", "one\n\ntwo\n\nthree")
    chosen = read_prompt_sets([mixed, tale], limit=2)
    assert [(one.task, one.name) for one in chosen] == [
        *(("a", "0"), ("a", "1"), ("b", "2"), ("b", "4")),
        *(("tale", "line 1"), ("tale", "line 3")),
    ]
    assert len(read_prompt_sets([mixed, tale])) == 8
    with pytest.raises(PromptFileError, match="another prompt set also has a prompt '0' of the task 'a'"):
        read_prompt_sets([mixed, mixed])


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_are_there_small_and_licensed(name: str) -> None:
    folder = files("polydraft") / "data" / "prompts"
    assert len((folder / f"{name}.jsonl").read_bytes()) <= 60_000
    assert f"\n{name}.jsonl\n" in (folder / "LICENCES").read_text()
    prompts = read_prompts(name)
    assert {one.task for one in prompts} == {name} and not any(one.excerpt for one in prompts)
    if name != "python":
        assert len(prompts) == 32


def test_a_file_of_a_shipped_sets_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text("My own text.")
    assert [one.text for one in read_prompts("gsm8k")] == ["My own text."]
