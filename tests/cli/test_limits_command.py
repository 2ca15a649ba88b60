"""`polydraft limits`: tables, JSON lines, files, resuming, interruption, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polydraft_lab.limits.measuring as measuring
from polydraft.cli import main

Folders = tuple[Path, Path]
Call = Callable[..., int]
QUICK = ["--max-tokens", "5", "--k", "1-2", "--tree-every", "4", "--shortlist", "8"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "a", "text": "def add"}\n{"id": "b", "text": "class Point"}\n')
    return path


@pytest.fixture
def call(folders: Folders, prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str, prompts: Path | None = prompt_file) -> int:
        models = ["--target", str(folders[0]), "--draft", str(folders[1])]
        chosen = ["--prompts", str(prompts)] if prompts else []
        monkeypatch.setattr(sys, "argv", ["polydraft", "limits", *models, *chosen, *QUICK, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come while the next text after `count` is measured."""
    original, calls = measuring.measure_one, []

    def measured(*arguments: Any) -> Any:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(measuring, "measure_one", measured)


def test_json_is_lines_and_nothing_else(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--temperature", "0.7") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    head, *rows = [json.loads(line) for line in captured.out.splitlines()]
    assert head["kind"] == "conditions" and head["prompts"] == {"mine": 2} and head["interrupted"] is False
    assert {row["kind"] for row in rows} == {"node", "tree"}
    nodes = [row for row in rows if row["kind"] == "node"]
    assert {row["k"] for row in nodes} == {1, 2} and {row["temperature"] for row in nodes} == {0.7}
    for row in nodes:
        assert row["gap"]["mean"] == pytest.approx(row["optimum"]["mean"] - row["acceptance"]["mean"], abs=3e-6)
        assert row["gap"]["mean"] >= -1e-6 and row["positions"] == 10


@pytest.mark.slow
def test_tables_fit_80_columns_and_files_are_written(
    call: Call,
    folders: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "out"
    assert call("--temperature", "0", "--temperature", "0.7", "--out", str(out), "--figures") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "Acceptance by temperature, 2 drafts" in shown
    tables = shown.split("texts of prompts")[0].splitlines()[:-1]
    assert max(map(len, tables)) <= 80 and not any("…" in line for line in tables)
    for rule in ("recursive rejection", "k-seq", "top-down recursive", "traversal", "block verification"):
        assert any(line.startswith(f"  {rule} ") for line in tables), rule
    files = {path.name for path in out.iterdir()}
    figures = {f"{name}.svg" for name in ("acceptance_by_temperature", "acceptance_by_drafts", "gap_by_rule")}
    assert files == {"limits.jsonl", "summary.jsonl", "tables.md"} | figures
    assert len((out / "limits.jsonl").read_text().splitlines()) == 1 + 2 * 2
    assert "target" in (out / "tables.md").read_text().split("Target: ")[1].splitlines()[0]  # its folder, as given


def test_ctrl_c_keeps_what_is_done_and_the_same_call_goes_on(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--temperature", "0.7", "--out", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(1, patch)
        assert call(*out) == 130
    shown = capsys.readouterr()
    there = f"the finished texts are in {tmp_path / 'out'}; the same command goes on from there"
    assert f"polydraft: Interrupted: {there}.\n" in shown.err and "1 texts of prompts: 1 mine" in shown.out
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(1, patch)
        assert call(*out, "--json") == 0  # one text was left
    resumed = capsys.readouterr().out
    assert call("--temperature", "0.7", "--json") == 0
    assert capsys.readouterr().out == resumed
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(0, patch)
        assert call(*out, "--json") == 0  # nothing is left


def test_ctrl_c_before_anything_is_done(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(0, monkeypatch)
    assert call("--json") == 130
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert json.loads(line)["interrupted"] is True and shown.err == "polydraft: Interrupted: nothing was finished.\n"
    assert call() == 130
    shown = capsys.readouterr()
    assert shown.out.strip() == "" and "polydraft: Interrupted: nothing was finished.\n" in shown.err


def test_a_folder_of_another_run_is_refused(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--temperature", "0.7", "--out", str(tmp_path / "out")]
    assert call(*out) == 0
    capsys.readouterr()
    assert call(*out, "--seed", "5") == 2
    captured = capsys.readouterr()
    assert "is of a run with other settings: seed is 0 there and 5 here." in captured.err and captured.out == ""
    assert call(*out, "--temperature", "0") == 0  # another temperature is not another run


def test_prompts_that_do_not_fit_are_left_out_and_said(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("short\n\n" + "x = 1 + y\n" * 99)
    assert call("--temperature", "0.7", "--excerpt-tokens", "300", "--json", prompts=path) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[0])["prompts"] == {"long": 1} and captured.err == ""
    assert call("--temperature", "0.7", "--excerpt-tokens", "300", prompts=path) == 0
    assert "1 of 2 prompts do not fit into the context; left out." in capsys.readouterr().err


BAD = {
    "no such file": (["--prompts", "nothing.jsonl"], "nothing.jsonl: there is no such file"),
    "numbers": (["--k", "1,x"], 'Numbers of drafts are written as "1,2,4" or "1-8"'),
    "descending": (["--k", "4-2"], "Numbers of drafts must lie between 1 and 1000 and ascend"),
    "more than the shortlist": (["--k", "9"], "Numbers of drafts must lie between 1 and shortlist, 8: 9"),
    "temperature": (["--temperature", "-1"], "temperature must be a finite number >= 0, but is -1.0"),
    "figures without a folder": (["--figures"], "--figures needs --out"),
    "a model for lookups": (["--drafter", "ngram"], "--drafter ngram takes no draft model: leave --draft out."),
    "two temperatures": (["--drafter", "model", "--draft-temperature", "1"], "leave one out"),
    "a word like a drafter": (["--drafter", "ngrm"], "did you mean ngram?"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_a_target_without_draft_model_is_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft", "limits", "--target", str(folders[0])])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and "--target and --draft go together" in capsys.readouterr().err


def test_a_drafters_own_drafts_are_measured(
    folders: Folders, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["--target", str(folders[0]), "--prompts", str(prompt_file), "--out", str(tmp_path / "out"), *QUICK]
    monkeypatch.setattr(sys, "argv", ["polydraft", "limits", *words, "--temperature", "0", "--drafter", "merge"])
    with pytest.raises(SystemExit) as exit_:
        main()
    shown = capsys.readouterr()
    assert exit_.value.code == 0 and "naive match" in shown.out and "Accepted drafts per tree" in shown.out
    page = (tmp_path / "out" / "tables.md").read_text()
    assert "Drafter: merge. " in page and "At every position it is told that none was kept" in page
    head = json.loads((tmp_path / "out" / "limits.jsonl").read_text().splitlines()[0])["conditions"]
    assert head["drafter"] == "merge" and head["draft"] is None
