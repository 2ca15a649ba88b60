"""`polydraft bench` and `polydraft report`: tables, JSON lines, files, resuming, the page, and what is refused."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polydraft
import polydraft.bench.speed.measuring as measuring
from polydraft.bench.speed import SpeedSettings
from polydraft.cli import main
from polydraft.cli.benchmark.arm_spelling import build_arms, drafting_arms, spell_arm
from polydraft.drafters import SelfDrafter, View
from polydraft.errors import InvalidParameter

Call = Callable[..., int]
QUICK = ["--max-new-tokens", "5", "--temperature", "0"]
ARMS = ["--arm", "default", "--arm", "name=mine tree=2,1 verifier=naive"]


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"id": "a", "text": "def add"}\n{"id": "b", "text": "class Point"}\n')
    models = ["--target", str(folders[0]), "--draft", str(folders[1])]

    def run(*arguments: str, name: str = "bench", prompts: str = "one.jsonl") -> int:
        options = [*models, "--prompts", prompts, *QUICK] if name == "bench" else []
        monkeypatch.setattr(sys, "argv", ["polydraft", name, *options, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come in the round after so many."""
    original, calls = measuring.measure_round, []

    def measured(*arguments: Any) -> Any:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(arguments)
        return original(*arguments)

    patch.setattr(measuring, "measure_round", measured)


def lines_of(kind: str, text: str) -> list[dict[str, Any]]:
    return [row for line in text.splitlines() if (row := json.loads(line))["kind"] == kind]


def test_json_is_lines_and_nothing_else(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", *ARMS, "--arm", "hf-assisted tokens=2", "--temperature", "0.7") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (head,) = lines_of("conditions", captured.out)
    assert list(head["arms"]) == ["plain", "default", "mine", "hf-assisted tokens=2"] and head["max_new_tokens"] == 5
    assert head["interrupted"] is False and head["arms"]["mine"]["description"] == "tree=2,1 verifier=naive"
    runs = lines_of("run", captured.out)
    assert len(runs) == 2 * 2 * 4 and all(len(run["tokens"][0]) == 5 for run in runs)
    assert {run["same_text"] for run in runs} == {True, None}
    assert {run["turn"] for run in runs} == {0, 1, 2, 3}
    results = lines_of("result", captured.out)
    assert len(results) == 2 * 4 and len(captured.out.splitlines()) == 1 + len(runs) + len(results)
    for one in results:
        own, plain = (
            [run for run in runs if (run["arm"], run["temperature"]) == (arm, one["temperature"])]
            for arm in (one["arm"], "plain")
        )
        ratio = sum(run["seconds"] for run in plain) / sum(run["seconds"] for run in own)
        assert one["speed_up"]["total"]["mean"] == pytest.approx(ratio, rel=1e-5)
        assert one["tokens_per_second"] == pytest.approx(10 / sum(run["seconds"] for run in own), rel=1e-5)


def test_ctrl_c_keeps_finished_rounds_and_the_same_call_goes_on(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    out = [*ARMS, "--out", "new/runs.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(1, patch)
        assert call(*out) == 130
    shown = capsys.readouterr()
    assert "1 prompts, 5 new tokens" in shown.out and "Interrupted" not in shown.out
    there = "the finished rounds are in new/runs.jsonl; the same command goes on from there"
    assert f"polydraft: Interrupted: {there}.\n" in shown.err
    path = Path("new/runs.jsonl")
    before = path.read_bytes()
    assert len(before.splitlines()) == 1 + 3
    path.write_bytes(before + b'{"kind": "run", "arm": "def')  # as a crash would leave it
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(1, patch)
        assert call(*out, "--quiet") == 0  # one round was left
    assert path.read_bytes().startswith(before) and len(path.read_bytes().splitlines()) == 1 + 6
    assert "Every run is in" not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(0, patch)
        assert call(*out, "--json") == 0  # nothing is left
    captured = capsys.readouterr()
    runs = lines_of("run", captured.out)
    assert runs == [json.loads(line) for line in path.read_text().splitlines()[1:]] and captured.err == ""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(0, patch)
        assert call(*ARMS, "--json") == 130
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["interrupted"] is True


def test_the_report_is_a_page_with_tables_and_figures(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(*ARMS, "--out", "runs [1].jsonl") == 0
    shown = capsys.readouterr().out
    assert "At temperature 0 all 4 runs gave the text of plain decoding, token for token." in shown
    assert 'Every run is in runs [1].jsonl: the same call goes on from there; "polydraft report runs [1]' in shown
    assert call("runs [1].jsonl", "--out", "page", name="report") == 0
    shown = capsys.readouterr().out
    assert "times plain decoding" in shown and "page/report.md, with 3 figures beside it." in shown
    page = Path("page/report.md").read_text()
    for heading in ("## Speed", "## Where the time goes", "## What bounds the speed-up", "## How it was measured"):
        assert heading in page
    assert page.count("| mine |") + page.count("|  mine |") >= 4 and "Prompts: one 2." in page
    figures = ["speed_up.svg", "block_efficiency.svg", "time.svg"]
    assert sorted(figures) == sorted(one.name for one in Path("page").iterdir() if one.suffix == ".svg")
    assert all(f"]({name})" in page and "<svg" in (Path("page") / name).read_text() for name in figures)


def test_replayed_texts_are_the_rows_own_and_every_surface_says_so(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = {"id": "e", "instruction": "Rename a.", "file": "a = 1\n", "edited": "b = 1\n"}
    Path("own.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--replay", "--arm", "prediction", "--arm", "hf-lookup", "--out", "runs.jsonl"]
    assert call(*options, "--max-new-tokens", "64", prompts="own.jsonl") == 0
    assert "Replayed: every arm wrote the edited file that stands in the row" in capsys.readouterr().out
    head, *runs = map(json.loads, Path("runs.jsonl").read_text().splitlines())
    assert head["conditions"]["replay"] is True and len(runs) == 3
    assert all(run["tokens"] == runs[0]["tokens"] and run["tokens"][0][-1] == 0 for run in runs)
    assert call("runs.jsonl", "--out", "page", name="report") == 0
    assert "The texts are **replayed**" in Path("page/report.md").read_text()
    capsys.readouterr()
    assert call("--arm", "prediction", "--arm", "hf-lookup", "--out", "runs.jsonl", prompts="own.jsonl") == 2
    assert "is of a run with other settings" in capsys.readouterr().err


def test_a_lossless_arm_with_another_text_is_exit_code_1(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = measuring.measure_run

    def wrong(arm: Any, *arguments: Any) -> Any:
        run = original(arm, *arguments)
        changed = tuple((*row[:-1], (row[-1] + 7) % 320) for row in run.tokens)
        return replace(run, tokens=changed) if arm.name == "mine" else run

    monkeypatch.setattr(measuring, "measure_run", wrong)
    assert call(*ARMS) == 1
    shown = capsys.readouterr().out
    assert "2 text(s) of 4 runs differ from plain decoding, 2 of them by more than rounding explains." in shown


BAD: dict[str, tuple[list[str], str]] = {
    "no such arm": (["--arm", "warp"], "The arm 'warp': 'warp' is not known; an arm is one of plain, default"),
    "no such key": (["--arm", "hf tokens=3"], "'tokens=3' is not known; hf takes name=..."),
    "no number": (["--arm", "hf-lookup tokens=few"], "tokens is not a number: 'few'"),
    "no drafts": (["--arm", "hf-assisted tokens=0"], "tokens start at 1"),
    "no threshold": (["--arm", "hf-assisted threshold=nan"], "the threshold lies between 0 and 1"),
    "no such drafter": (["--arm", "drafter=oracle"], "the drafter is one of model, ngram"),
    "no draft": (["--arm", "draft=./absent"], "There is no model folder './absent'"),
    "a word as a draft": (["--arm", "draft=ngram:4"], "draft= names a draft model or head; write drafter=ngram:4."),
    "no value": (["--arm", "draft="], "The arm 'draft=': draft= has no value."),
    "two values": (["--arm", "draft=x draft=y"], "The arm 'draft=x draft=y': draft is given twice."),
    "no head of this target": (["--arm", "default", "--arm", "name=mine draft=pair-head"], "The arm 'mine': "),
    "a draft for nobody": (["--arm", "drafter=ngram draft=x"], "the drafter ngram takes no draft model"),
    "no such rule": (["--arm", "verifier=luck"], "luck"),
    "no such tree": (["--arm", "tree=2,x"], "2,x"),
    "empty": (["--arm", ""], "An arm is empty"),
    "open quote": (["--arm", "name='x"], "cannot be read: No closing quotation"),
    "plain is taken": (["--arm", "name=plain tree=2"], "the name plain is that of decoding without drafts"),
    "twice": (["--arm", "default", "--arm", "default"], "Two arms have the same name: plain, default, default"),
    "one row only": (["--arm", "hf-assisted", "--batch-size", "2"], "hf-assisted does batches of at most 1"),
    "no such file": (["--prompts", "nothing.jsonl"], "nothing.jsonl: there is no such file"),
    "a bad line": (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: not JSON"),
    "not UTF-8": (["--prompts", "latin.txt"], "latin.txt, line 3: the text is not UTF-8"),
    "temperature": (["--temperature", "-1"], "temperature must be a finite number >= 0, but is -1.0"),
    "batch": (["--batch-size", "3"], "Batches of 3 need as many prompts of a task; the largest has 2"),
    "no room": (["--max-new-tokens", "128"], "None of the 2 prompts leaves room for 128 new tokens"),
    "no known text": (
        ["--replay"],
        "--replay writes the text that a row has as edited or reference, but the prompt 'a'",
    ),
    "no file": (["--arm", "prediction"], "The arm prediction drafts from the file that a row has, but the prompt 'a'"),
    "another file": (["--out", "latin.txt"], "latin.txt, line 1: this is no line of results"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("latin.txt").write_bytes(b"one\n\n\xe9t\xe9")
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.startswith("polydraft: ") and captured.err.count("\n") == 1
    assert Path("latin.txt").read_bytes() == b"one\n\n\xe9t\xe9"


def test_a_file_that_is_no_results_is_left_as_it_is(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b"my notes, without an end of line", b"two\nlines"):
        Path("notes").write_bytes(content)
        assert call(*ARMS, "--out", "notes") == 2
        assert "notes, line 1: this is no line of results." in capsys.readouterr().err
        assert Path("notes").read_bytes() == content


def test_a_file_of_other_settings_is_refused_and_named(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*ARMS, "--out", "runs.jsonl", "--quiet") == 0
    before = Path("runs.jsonl").read_bytes()
    capsys.readouterr()
    assert call(*ARMS, "--out", "runs.jsonl", "--seed", "3") == 2
    assert "is of a run with other settings: seed is 0 there and 3 here." in capsys.readouterr().err
    assert Path("runs.jsonl").read_bytes() == before
    assert call("--arm", "default", "--out", "runs.jsonl") == 2
    assert "arms mine is {" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "runs.jsonl: the results cannot be read: No such file"),
        (b"", "there are no results in this file"),
        (b"[]\n", "runs.jsonl, line 1: this is no line of results"),
        (b'{"conditions": {"seed": 0}}\n', "these are no runs of `polydraft bench`"),
        (b'{"conditions": {"seed": 0, "arms": {}}}\n{"kind": "run"}\n', "line 2: this is no line of results"),
        (b'{"conditions": {"seed": 0, "arms": {}}}\n', "line 1: these are no settings of `polydraft bench`: target is"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    content: bytes | None, sentence: str, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("runs.jsonl").write_bytes(content)
    assert call("runs.jsonl", name="report") == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert not Path("report").exists()


def test_a_run_with_a_field_of_another_type_is_named(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*ARMS, "--out", "runs.jsonl", "--quiet") == 0
    head, first, *others = Path("runs.jsonl").read_text().splitlines()
    row = json.loads(first)
    wrong: dict[str, Any] = {
        "seconds": "1",
        "tokens": "abc",
        "load": [],
        "arm": 3,
        "statistics": {**row["statistics"], "steps": ""},
    }
    for field, value in (*wrong.items(), ("seconds", 0), ("seconds", float("nan")), ("temperature", True)):
        Path("runs.jsonl").write_text("\n".join([head, json.dumps({**row, field: value}), *others]) + "\n")
        capsys.readouterr()
        assert call("runs.jsonl", name="report") == 2
        named = "steps" if field == "statistics" else field
        assert f"runs.jsonl, line 2: this is no line of results: {named} is " in capsys.readouterr().err


def test_arms_are_named_by_what_they_are() -> None:
    assert spell_arm("hf-assisted tokens=5").name == "hf-assisted tokens=5"
    named = spell_arm("name=mine verifier=optimal bottom-up")
    assert (named.name, named.kind, named.text) == ("mine", "", "verifier=optimal bottom-up")
    assert named.settings == {"verifier": "optimal", "bottom-up": ""}
    with pytest.raises(InvalidParameter, match="'bottom-up=yes' is not known"):
        spell_arm("bottom-up=yes")


def test_what_assists_beside_a_view_is_the_model_that_its_word_means() -> None:
    """Hugging Face's loop needs a model; some views are one, too."""
    models, settings = polydraft.load_pair(), SpeedSettings()
    view, exit = (replace(models, draft=SelfDrafter(View.named(word))) for word in ("self:int8", "self:exit=2"))
    assert "hf-assisted" in [arm.name for arm in build_arms(view, [], settings)]
    assert "hf-assisted" not in [arm.name for arm in build_arms(exit, [], settings)]
    with pytest.raises(InvalidParameter, match="needs a draft model, and what drafts here is none"):
        build_arms(exit, [spell_arm("hf-assisted")], settings)


def test_arms_with_drafts_of_their_own(
    call: Call, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts of their own draft: the target itself has every token right, and a file tells other weights from them."""
    target, draft = folders
    arms = ["--arm", f"name=itself draft={target} tree=chain:2", "--arm", "name=given tree=chain:2"]
    assert call("--json", *arms, "--out", "runs.jsonl") == 0
    (head,) = lines_of("conditions", (text := capsys.readouterr().out))
    assert head["arms"]["itself"]["description"].startswith(f"draft={target} tree=chain:2 (weights ")
    counts = {one["arm"]: one["statistics"] for one in lines_of("run", text)}
    assert counts["itself"]["accepted"] == counts["itself"]["drafted"] > 0
    assert counts["given"]["accepted"] < counts["given"]["drafted"]
    assert call(f"--arm=name=itself draft={draft} tree=chain:2", arms[2], arms[3], "--out", "runs.jsonl") == 2
    assert "arms itself description is draft=" in capsys.readouterr().err


def test_arms_with_drafts_of_their_own_use_none_of_the_runs(folders: tuple[Path, Path]) -> None:
    spelt = [spell_arm(f"draft={folders[1]} tree=chain:2")]
    assert not drafting_arms(spelt) and drafting_arms([*spelt, spell_arm("tree=chain:2")])
