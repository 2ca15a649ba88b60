"""Prompt files: every format is read, and everything that can be wrong with one is said with its line."""

import ast
import gzip
import json
from collections.abc import Callable
from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path

import pytest

import polydraft.bench.prompts.prompt as row_reading
import polydraft.bench.prompts.sets as reading
from polydraft.bench import SHIPPED, Prompt, read_prompt_sets, read_prompts
from polydraft.bench.prompts import as_asked, prompt_from_row
from polydraft.bench.prompts.sets import MT_BENCH, OTHERS
from polydraft.errors import PolydraftError, PromptFileError
from polydraft.models import Message

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
}
USER, ANSWER = Message("user", "Hi."), Message("assistant", "Well")
CONVERSATIONS = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        Prompt("81", "writing", "Write.", messages=(Message("user", "Write."),)),
    ),
    "turns before prompt": (
        {"turns": ["first"], "prompt": "other"},
        Prompt("1", "set", "first", messages=(Message("user", "first"),)),
    ),
    "messages": (
        {"id": "x", "prompt": "other", "messages": [{"role": "user", "content": "Hi.", "name": None}]},
        Prompt("x", "set", "Hi.", messages=(USER,)),
    ),
    "several messages": (
        {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Well"}]},
        Prompt("1", "set", "Hi.\n\nWell", messages=(USER, ANSWER)),
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_row_of_each_format(case: str, write: Write) -> None:
    row, (name, task, text) = FORMATS[case]
    assert read_prompts(write("set.jsonl", json.dumps(row))) == [Prompt(name, task, text)]


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_conversation_of_each_format(case: str, write: Write) -> None:
    row, prompt = CONVERSATIONS[case]
    assert read_prompts(write("set.jsonl", json.dumps(row))) == [prompt]


def test_an_option_makes_conversations_of_texts_and_texts_of_conversations(write: Write) -> None:
    rows = [{"text": "a"}, {"turns": ["b"]}, {"messages": [{"role": "user", "content": "c"}]}]
    source, tale = write("set.jsonl", "\n".join(map(json.dumps, rows))), write("tale.txt", "once")
    said = {
        choice: [
            [message.content for message in one.messages] for one in read_prompt_sets([source, tale], None, choice)
        ]
        for choice in (None, True, False)
    }
    assert said == {None: [[], ["b"], ["c"], []], True: [["a"], ["b"], ["c"], []], False: [[]] * 4}
    assert [one.text for one in read_prompt_sets([source], None, False)] == ["a", "b", "c"]
    two = write("two.jsonl", json.dumps(CONVERSATIONS["several messages"][0]))
    with pytest.raises(
        PromptFileError, match=r"two.jsonl: the prompt '1': --no-chat-template .* of user, assistant\.$"
    ):
        read_prompt_sets([two], None, False)
    assert len(read_prompt_sets([two], None, True)[0].messages) == 2


def spec_bench_rows() -> list[dict[str, object]]:
    names = [*MT_BENCH, *OTHERS]
    return [
        {"question_id": f"{name} {number}", "category": name, "turns": ["x"]} for name in names for number in range(3)
    ]


def test_spec_bench_has_six_kinds_and_its_first_is_mixed(write: Write) -> None:
    path = write("question.jsonl", "\n".join(map(json.dumps, spec_bench_rows())))
    prompts = read_prompts(path)
    assert {one.task for one in prompts} == {"mt-bench", *OTHERS} and len(prompts) == 39
    chosen = read_prompt_sets([path], limit=8)
    assert [one.name for one in chosen if one.task == "mt-bench"] == [f"{name} 0" for name in MT_BENCH]
    assert [one.name for one in chosen if one.task == "qa"] == ["qa 0", "qa 1", "qa 2"]
    part = write("part.jsonl", "\n".join(map(json.dumps, spec_bench_rows()[:-3])))
    assert {one.task for one in read_prompts(part)} == {*MT_BENCH, *OTHERS} - {"rag"}


def test_spec_bench_is_read_from_where_it_is_fetched_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    with pytest.raises(
        PromptFileError, match=r"run `polydraft fetch spec-bench` once, give .* or take spec-bench-mini"
    ):
        read_prompts("spec-bench")
    (tmp_path / "spec-bench.jsonl").write_text("\n".join(map(json.dumps, spec_bench_rows())))
    assert len(read_prompts("spec-bench")) == 39


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
    "messages not a list": ("set.jsonl", '{"messages": {}}', "line 1: messages is not a list with at least one"),
    "no messages": ("set.jsonl", '{"messages": []}', "line 1: messages is not a list with at least one message"),
    "message not an object": ("set.jsonl", '{"messages": ["a"]}', "line 1: messages[0] is a str, not an object"),
    "no role": ("set.jsonl", '{"messages": [{"content": "a"}]}', "line 1: role of messages[0] is not a text"),
    "no content": ("set.jsonl", '{"messages": [{"role": "user"}]}', "line 1: content of messages[0] is not a text"),
    "parts": (
        "set.jsonl",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        "line 1: content of messages[0] is not a text",
    ),
    "empty message": (
        "set.jsonl",
        '{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": " "}]}',
        "line 1: content of messages[1] is empty",
    ),
    "more than text": (
        "set.jsonl",
        '{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}',
        "line 1: messages[0] has 'tool_calls', but only role and content are read",
    ),
    "both": ("set.jsonl", '{"turns": ["a"], "messages": []}', "line 1: the row has both messages and turns"),
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
    monkeypatch.setattr(row_reading, "LONGEST", 98)
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
    assert len((folder / f"{name}.jsonl").read_bytes()) <= 80_000
    assert f"\n{name}.jsonl\n" in (folder / "LICENCES").read_text()
    prompts = read_prompts(name)
    assert not any(one.excerpt for one in prompts)
    if name == "spec-bench-mini":
        assert {one.task for one in prompts} == {"mt-bench", *OTHERS}
        assert all(len([one for one in prompts if one.task == task]) == 8 for task in ("mt-bench", *OTHERS))
        assert all([message.role for message in one.messages] == ["user"] for one in prompts)
        return
    assert {one.task for one in prompts} == {name} and not any(one.messages for one in prompts)
    if name != "python":
        assert len(prompts) == (24 if name == "edits" else 32)


def test_edits_are_real_and_say_where_they_are_from() -> None:
    text = (files("polydraft") / "data" / "prompts" / "edits.jsonl").read_text()
    licences = (files("polydraft") / "data" / "prompts" / "LICENCES").read_text()
    for row, prompt in zip(map(json.loads, text.splitlines()), read_prompts("edits"), strict=True):
        before, after = ast.parse(row["file"]), ast.parse(row["edited"])
        assert 0.5 < SequenceMatcher(None, row["file"].split(), row["edited"].split(), autojunk=False).ratio() < 1
        assert ast.dump(before) != ast.dump(after), row["id"]
        assert 25 <= row["file"].count("\n") <= 90 and row["source"].split(":")[0].split(".")[-1] in row["id"]
        assert row["licence"] in ("PSF-2.0", "MIT", "BSD-3-Clause") and row["version"].split()[0] in licences
        assert (prompt.file, prompt.edited) == (row["file"], row["edited"])
        assert prompt.text.startswith(row["file"]) and f"# {row['instruction']}\n" in prompt.text
        (asked,) = as_asked(prompt, True).messages
        assert asked.content.startswith(row["instruction"]) and row["file"] in asked.content
        assert as_asked(prompt, None).messages == ()


def test_rows_with_other_things_as_reference_are_read() -> None:
    row = {"turns": ["What is 1 + 1?"], "reference": ["2"], "file": 3}
    assert (prompt_from_row(row, "task", 1).edited, prompt_from_row(row, "task", 1).file) == ("", "")
    assert prompt_from_row({"text": "1 + 1 =", "reference": " 2"}, "task", 1).edited == " 2"
    with pytest.raises(ValueError, match="instruction is empty"):
        prompt_from_row({"instruction": " ", "file": "x"}, "task", 1)


def test_a_file_of_a_shipped_sets_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text("My own text.")
    assert [one.text for one in read_prompts("gsm8k")] == ["My own text."]
