"""`polydraft tune`: the plan file, JSON, what is refused, interruption, and that `generate --plan` takes it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polydraft.cli.benchmark.tune as command
from polydraft.cli import main
from polydraft.cli.benchmark.tune import draw_counts
from polydraft.planning import load_plan
from polydraft.trees import TreeShape

Call = Callable[..., int]
QUICK = ["--max-tokens", "6", "--max-nodes", "5", "--max-depth", "2"]


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"text": "def add"}\n{"text": "class Point"}\n')

    def run(*arguments: str, name: str = "tune", options: tuple[str, ...] = ("--prompts", "mine.jsonl", *QUICK)) -> int:
        models = ["--target", str(folders[0])]
        models += [] if "none" in options else ["--draft", str(folders[1])]
        monkeypatch.setattr(sys, "argv", ["polydraft", name, *models, *options, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def test_the_plan_is_written_shown_and_used(
    call: Call, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--temperature", "0") == 0
    shown = capsys.readouterr().out
    plan = load_plan("plan.json")
    assert [tree.temperature for tree in plan.trees] == [0.0] and (plan.max_nodes, plan.max_depth) == (5, 2)
    assert plan.pair.target.name == str(folders[0]) and "Tuned on 2 prompt(s), up to 6 tokens each" in shown
    assert "Written to plan.json. Use it: polydraft generate --target " in shown and "--plan plan.json" in shown
    assert "naive match" in shown and "speed-up, predicted" in shown and "--check measures them" in shown
    drafted = ("--plan", "plan.json", "--max-new-tokens", "6", "--json")
    assert call("def add", name="generate", options=drafted) == 0
    planned = json.loads(capsys.readouterr().out)
    assert call("def add", name="generate", options=("--drafter", "none", *drafted[2:])) == 0
    assert planned["text"] == json.loads(capsys.readouterr().out)["text"]


def test_json_is_one_object_and_nothing_else(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--check", "--out", "mine.plan", "--temperature", "0.7") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (line,) = captured.out.splitlines()
    row = json.loads(line)
    measured = row.pop("measured")
    assert row.pop("path") == "mine.plan"
    assert row == json.loads(Path("mine.plan").read_text()) == json.loads(json.dumps(load_plan("mine.plan").as_dict()))
    assert "default tree" in measured["0.7"] and measured["0.7"]["default tree"]["speedup"] > 0
    assert call("--json", "--out", "mine.plan", "--temperature", "0") == 0  # a plan may be replaced
    assert [tree.temperature for tree in load_plan("mine.plan").trees] == [0.0]


def test_ctrl_c_writes_nothing(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "tune", interrupted)
    assert call() == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "polydraft: Interrupted: nothing was written.\n"
    assert not Path("plan.json").exists()


BAD: dict[str, tuple[list[str], str]] = {
    "no such prompts": (["--prompts", "nothing.jsonl"], "nothing.jsonl: there is no such file"),
    "a bad line": (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: not JSON"),
    "temperature": (["--temperature", "-1"], "temperature must be a finite number >= 0, but is -1.0"),
    "no folder": (["--out", "nowhere/plan.json"], "--out nowhere/plan.json: there is no folder nowhere"),
    "another file": (["--out", "bad.jsonl"], "--out bad.jsonl exists and is no plan that can be read"),
    "no room": (["--max-tokens", "128"], "No prompt leaves room for 128 new tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    content = '{"text": "fine"}\n{"text": \n'
    Path("bad.jsonl").write_text(content)
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.rstrip().count("\n") == 0 or case == "no room"  # there a note may come before
    assert not Path("plan.json").exists() and Path("bad.jsonl").read_text() == content


def test_a_target_without_draft_model_is_refused(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft", "tune", "--target", str(folders[0])])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and "--target and --draft go together" in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_left_out_and_said(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.jsonl").write_text('{"text": "def add"}\n' + json.dumps({"text": "x = 1 + y\n" * 99}) + "\n")
    assert call("--temperature", "0") == 0
    captured = capsys.readouterr()
    assert "1 of 2 prompts do not fit into the context; left out." in captured.err
    assert "Tuned on 1 prompt(s)" in captured.out


def test_a_tree_is_drawn_by_the_children_of_its_nodes() -> None:
    assert draw_counts(TreeShape(((3,), (2, 0, 1)))) == "3\n2 · 1"
    assert draw_counts(TreeShape(((2,), (1,)))) == "2\n1 ·"
    assert draw_counts(TreeShape(())) == "plain decoding"
