"""`polydraft generate --input`: texts, formats, bad rows, resuming, Ctrl-C, and what is refused."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polydraft.cli import main
from polydraft.cli.generation.text_file import Row, read_rows
from polydraft.drafters import ModelDrafter
from polydraft.errors import PromptFileError
from polydraft.models import Message

Folders = tuple[Path, Path]
Call = Callable[..., int]
PROMPTS = {"a": "def add", "b": "class Point", 7: "    def ", "d": "x = "}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in PROMPTS.items()))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "texts" / "out.jsonl"


@pytest.fixture
def call(folders: Folders, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str, source: Path = prompts, to: Path = out) -> int:
        models = ["--target", str(folders[0]), "--draft", str(folders[1]), "--dtype", "float64"]
        files = ["--input", str(source), "--output", str(to)]
        tokens = [] if "--max-new-tokens" in arguments else ["--max-new-tokens", "8"]
        monkeypatch.setattr(sys, "argv", ["polydraft", "generate", *files, *models, *tokens, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> dict[Any, str]:
    return {line["id"]: line["text"] for line in lines(path) if "text" in line}


@pytest.mark.long(1)
@pytest.mark.parametrize("heat", ["0", "0.8"])
def test_every_text_is_what_its_prompt_gets_alone(
    heat: str,
    call: Call,
    folders: Folders,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--temperature", heat, "--seed", "3", "--quiet"]
    assert call("--batch-size", "1", *arguments) == 0
    three = out.with_name("three.jsonl")
    assert call("--batch-size", "3", *arguments, to=three) == 0
    assert capsys.readouterr() == ("", "")
    assert texts(out) == texts(three) and {*texts(out)} == {*PROMPTS}
    models = ["--target", str(folders[0]), "--draft", str(folders[1]), "--dtype", "float64", "--max-new-tokens", "8"]
    for line in lines(three):
        alone = [line["prompt"], *models, "--temperature", heat, "--seed", str(line["seed"]), "--json"]
        monkeypatch.setattr(sys, "argv", ["polydraft", "generate", *alone])
        with pytest.raises(SystemExit):
            main()
        result = json.loads(capsys.readouterr().out)
        assert (result["text"], result["finish"]) == (line["text"], line["finish"])
        assert result["statistics"]["block_efficiency"] == line["block_efficiency"]


def test_a_line_has_what_people_need_and_the_first_one_the_settings(call: Call, out: Path) -> None:
    assert call("--batch-size", "2", "--temperature", "0.5") == 0
    first, *rest = lines(out)
    keys = [
        "id",
        "line",
        "prompt",
        "text",
        "finish",
        "new_tokens",
        "target_calls",
        "block_efficiency",
        "accepted",
        "verifier",
        "lossless",
        "seed",
    ]
    assert [*first] == [*keys, "settings"] and all([*line] == keys for line in rest)
    assert first["settings"]["temperature"] == 0.5 and first["settings"]["seed"] == 0
    for line in (first, *rest):
        assert line["prompt"] == PROMPTS[line["id"]] and [*PROMPTS].index(line["id"]) == line["line"] - 1
        assert line["block_efficiency"] == round(line["new_tokens"] / line["target_calls"], 4)
        assert line["lossless"] is True and line["verifier"]


def test_a_piped_run_is_one_line_and_json_one_object(call: Call, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    shown = capsys.readouterr()
    assert shown.err == "" and len(shown.out.splitlines()) == 1 and "\x1b" not in shown.out
    assert "4 new texts" in shown.out and "tokens/s" in shown.out and str(out) in shown.out
    assert call("--json", to=out.with_name("json.jsonl")) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert shown.err == "" and (summary["new"], summary["before"], summary["left"]) == (4, 0, 0)
    assert summary["failed"] == [] and summary["interrupted"] is False
    assert summary["statistics"]["new_tokens"] == sum(line["new_tokens"] for line in lines(out))


def test_rows_may_have_options_of_their_own(call: Call, prompts: Path, out: Path, tmp_path: Path) -> None:
    assert call("--quiet") == 0
    rows = [{"id": "a", "prompt": PROMPTS["a"], "max_new_tokens": 3}, {"id": "b", "prompt": PROMPTS["b"]}]
    rows += [{"id": "warm", "prompt": PROMPTS["a"], "temperature": 1.5, "seed": 4}]
    rows += [{"id": "again", "prompt": PROMPTS["a"], "temperature": 1.5, "seed": 4}]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = out.with_name("own.jsonl")
    assert call("--quiet", source=path, to=other) == 0
    own = {line["id"]: line for line in lines(other)}
    assert own["a"]["new_tokens"] == 3 and texts(out)["a"].startswith(own["a"]["text"])
    assert own["a"]["options"] == {"max_new_tokens": 3} and "options" not in own["b"]
    assert own["b"]["text"] == texts(out)["b"]
    assert own["warm"]["text"] == own["again"]["text"] != texts(out)["a"] and own["warm"]["seed"] == 4
    rows[0]["max_new_tokens"] = 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("--quiet", source=path, to=other) == 2


BAD_ROWS = (
    ('{"prompt": "x', "not JSON"),
    ('{"text_": "x"}', "the row has no prompt"),
    ('{"id": "e", "prompt": "  "}', "prompt is empty"),
    ('{"id": "a", "prompt": "twin"}', "'a' is already the name of line 1"),
    ('{"prompt": "x", "max_new_tokens": 0}', "max_new_tokens is 0, not a number from 1"),
    ('{"prompt": "x", "seed": -1}', "seed is -1, not a number from 0"),
    ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot', not a number"),
    ('{"prompt": "x", "temperature": -2}', "temperature must be a finite number"),
    ('{"id": "\\ud800", "prompt": "x"}', "half of a surrogate pair"),
    (json.dumps({"id": "long", "prompt": "x = 1\n" * 200}), "at most 128 fit"),
)


def test_bad_rows_are_skipped_and_reported_never_lost(
    call: Call, prompts: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = prompts.read_text()
    prompts.write_text(good + "".join(line + "\n" for line, _ in BAD_ROWS))
    assert call() == 1
    shown = capsys.readouterr()
    assert "4 new texts, 10 rows failed" in shown.out
    assert {*texts(out)} == {*PROMPTS}
    errors = {line["line"]: line["error"] for line in lines(out) if "error" in line}
    for number, (_, reason) in enumerate(BAD_ROWS, start=len(PROMPTS) + 1):
        assert reason in errors[number]
        assert f"{prompts}, line {number}: " in shown.err and reason in shown.err
    before = out.read_bytes()
    assert call("--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert out.read_bytes() == before and len(summary["failed"]) == 10 and summary["before"] == 4
    mended = json.dumps({"id": "mended", "prompt": "mended"}) + "\n"
    prompts.write_text(good + "".join(line + "\n" for line, _ in BAD_ROWS[:1]) + mended)
    assert call("--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["new"], summary["before"], len(summary["failed"])) == (1, 4, 1)
    assert out.read_bytes().startswith(before) and "mended" in texts(out)


def test_a_run_goes_on_where_it_was_cut_off(call: Call, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--temperature", "0.8", "--json", "--batch-size", "2") == 0
    whole = texts(out)
    content = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(content[:2]) + content[2][: len(content[2]) // 2])
    capsys.readouterr()
    assert call("--temperature", "0.8", "--json", "--batch-size", "3") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["before"], summary["new"]) == (2, 2)
    assert texts(out) == whole and len(lines(out)) == len(PROMPTS)
    assert out.read_bytes().startswith(b"".join(content[:2]))
    out.write_bytes(content[0][:20])
    assert call("--temperature", "0.8", "--quiet") == 0
    assert texts(out) == whole and "settings" in lines(out)[0]


def test_a_finished_file_needs_no_models(
    call: Call, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--quiet") == 0
    monkeypatch.setattr("polydraft.cli.generation.row_texts.load_pair_of", None)
    assert call() == 0
    assert "0 new texts, 4 from before" in capsys.readouterr().out


def test_rows_added_to_the_input_are_added_to_the_output(call: Call, prompts: Path, out: Path) -> None:
    assert call("--quiet") == 0
    before = out.read_bytes()
    with prompts.open("a") as file:
        file.write('{"id": "e", "prompt": "new"}\n')
    assert call("--quiet") == 0
    assert out.read_bytes().startswith(before) and {*texts(out)} == {*PROMPTS, "e"}


OTHERS = {
    "temperature": (["--temperature", "0.7"], "temperature is 0.0 there and 0.7 here"),
    "tokens": (["--max-new-tokens", "9"], "max_new_tokens is 8 there and 9 here"),
    "seed": (["--seed", "1"], "seed is 0 there and 1 here"),
    "tree": (["--tree", "2,1"], "tree is None there and 2,1 here"),
    "drafter": (["--drafter", "lookup-first"], "drafter is model there and lookup-first here"),
    "stop": (["--stop", "x"], "stop is None there and ['x'] here"),
}


def test_a_file_of_other_settings_or_prompts_is_refused_and_left_alone(
    call: Call, prompts: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--quiet") == 0
    before = out.read_bytes()
    for arguments, sentence in OTHERS.values():
        assert call(*arguments) == 2
        assert sentence in capsys.readouterr().err
    prompts.write_text('{"id": "a", "prompt": "another"}\n')
    assert call() == 2
    assert "the text 'a' there has another prompt" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["not ours", "not ours\n", '{"a": 1}\n', '[{"id": 1}]\n', '{"id": 1, "text": "x"}\n']
)
def test_a_file_of_something_else_is_never_touched(
    content: str, call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(content)
    assert call(to=notes) == 2
    assert f"{notes}, line 1: " in capsys.readouterr().err
    assert notes.read_text() == content


def interrupt_at(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the midst of a step."""
    original, calls = ModelDrafter.draft, []

    def draft(self: ModelDrafter, *arguments: Any) -> object:
        calls.append(1)
        if len(calls) == drafts:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(ModelDrafter, "draft", draft)


STOPPING = "polydraft: Stopping after this step; Ctrl-C again stops at once."


def test_ctrl_c_loses_no_finished_text_and_the_same_command_goes_on(
    call: Call, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--temperature", "0.8", "--batch-size", "2"]
    other = out.with_name("whole.jsonl")
    assert call(*arguments, "--quiet", to=other) == 0
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        steps = sum(line["target_calls"] for line in lines(other)) // 2
        interrupt_at(steps - 2, patched)
        assert call(*arguments) == 130
    shown = capsys.readouterr()
    kept = f"polydraft: Interrupted: the same command goes on from {out}.\n"
    assert f"{STOPPING}\n{kept}" in shown.err and "left" in shown.out
    some = texts(out)
    assert 0 < len(some) < len(PROMPTS) and signal.getsignal(signal.SIGINT) == before
    assert call(*arguments, "--quiet") == 0
    assert texts(out) == texts(other) and len(lines(out)) == len(PROMPTS)


def test_ctrl_c_while_models_load(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polydraft.cli.generation.row_texts.load_pair_of", interrupted)
    assert call("--json") == 130
    assert json.loads(capsys.readouterr().out)["interrupted"] is True


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--compare"], "--compare is for one prompt"),
        (["a prompt"], "Give either a prompt or --input"),
        (["--verifier", "magic"], "magic"),
        (["--temperature", "-1"], "temperature must be a finite number"),
        (["--plan", "no-such-plan.json"], "the plan cannot be read"),
        (["--seed", "-3"], "greater than or equal to 0"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], sentence: str, call: Call, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--output", "y"], "--output needs --input"),
        (["x", "--batch-size", "2"], "--batch-size needs --input"),
        (["--input", "humaneval"], "--input needs --output"),
        ([], "Give a prompt, or --input"),
    ],
)
def test_options_of_files_without_files(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft", "generate", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and sentence in capsys.readouterr().err


def test_files_that_cannot_be_used(
    call: Call, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(source=tmp_path / "none.jsonl") == 2
    assert "there is no such file" in capsys.readouterr().err
    assert call(to=prompts) == 2
    assert "--output is the file of the prompts" in capsys.readouterr().err
    assert call(to=tmp_path) == 2
    assert f"{tmp_path} is a folder, not a regular file" in capsys.readouterr().err
    prompts.write_text("{}\n[]\n")
    assert call() == 2
    assert f"{prompts}, line 1: the row has no prompt" in capsys.readouterr().err


def test_a_batch_too_large_for_the_memory_says_what_fits(
    call: Call, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polydraft.models.checks.room.free_bytes", lambda _: 60_000)
    assert call("--batch-size", "4") == 2
    assert "A batch of 4 texts of up to" in (error := capsys.readouterr().err) and "would fit" in error
    assert not out.exists()


SAID = (Message("user", "p"),)
FORMATS = {
    "prompt": ({"prompt": "p", "id": 3}, Row(1, 3, "p")),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "p"}, Row(1, "HumanEval/0", "p")),
    "spec-bench": ({"question_id": 81, "category": "writing", "turns": ["p", "q"]}, Row(1, 81, "p", messages=SAID)),
    "messages": ({"messages": [{"role": "user", "content": "p"}]}, Row(1, 1, "p", messages=SAID)),
    "a text alone": ("p", Row(1, 1, "p")),
    "no name": ({"text": "p"}, Row(1, 1, "p")),
    "own options": (
        {"prompt": "p", "seed": 1, "temperature": 0, "max_new_tokens": None},
        Row(1, 1, "p", {"seed": 1, "temperature": 0}),
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_row_of_each_format(case: str, tmp_path: Path) -> None:
    row, expected = FORMATS[case]
    (tmp_path / "x.jsonl").write_text("\n" + json.dumps(row))
    line = replace(expected, line=2, id=2 if expected.id == 1 else expected.id)
    assert read_rows(tmp_path / "x.jsonl") == [line]


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b'one \r\n\r\n  two\n{"prompt": 3}')
    assert read_rows(path) == [Row(1, 1, "one "), Row(3, 3, "  two"), Row(4, 4, '{"prompt": 3}')]
    path.write_bytes(b"\n \n")
    with pytest.raises(PromptFileError, match="no prompt in it"):
        read_rows(path)
