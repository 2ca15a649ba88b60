"""`polydraft tune skips`: the file, JSON, what is refused, and that an interrupted search goes on from its study."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

import polydraft.cli.benchmark.tune_skips as command
from polydraft import extras
from polydraft.cli import main
from polydraft.drafters import View
from polydraft.engine.skips import skip_search
from polydraft.engine.skips.skip_search import CheckedSkips, FoundSkips
from polydraft.extras import Extra
from polydraft.models import skip_sets

Call = Callable[..., int]
QUICK = ("--max-tokens", "4", "--study", "s.db")


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"text": "def add"}\n{"text": "class Point"}\n')

    def run(*arguments: str, target: Path = folders[0], prompts: str = "mine.jsonl") -> int:
        given = ["--target", str(target), "--prompts", prompts, *QUICK, *arguments]
        monkeypatch.setattr(sys, "argv", ["polydraft", "tune", "skips", *given])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def test_the_file_is_written_and_drafted_by(
    call: Call, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("--trials", "2") == 0
    shown = capsys.readouterr().out
    sets = json.loads(Path("skips.json").read_text())
    assert {*sets} == {"layers", "attention", "mlp"} and sets["attention"] + sets["mlp"]
    assert "Overlap without one sub-layer" in shown and "greedy" in shown and "--draft self:skip=skips.json" in shown
    found = View.named("self:skip=skips.json").layers
    assert skip_sets(found) == sets and found.depth == sets["layers"]
    texts = list[str]()
    for draft in (("--draft", "self:skip=skips.json"), ("--drafter", "none")):
        given = ["--target", str(folders[0]), "def add", *draft, "--max-new-tokens", "6", "--json"]
        monkeypatch.setattr(sys, "argv", ["polydraft", "generate", *given])
        with pytest.raises(SystemExit):
            main()
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_ctrl_c_loses_nothing(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A search that is cut short and goes on measures every set once, and finds what an undisturbed one does."""
    overlap, measured, left = skip_search._SkipSearch._overlap, list[tuple[int, ...]](), [5]

    def counted(self: Any, skipped: tuple[int, ...]) -> float:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        measured.append(skipped)
        return overlap(self, skipped)

    monkeypatch.setattr(skip_search._SkipSearch, "_overlap", counted)
    assert call("--trials", "3", "--json") == 130
    assert "s.db has every set measured" in capsys.readouterr().err and not Path("skips.json").exists()
    left[0] = 1000
    assert call("--trials", "3", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found, before = json.loads(line), len(measured)
    by_hand = measured[: len(found["singles"])]
    assert len(by_hand) == len({*by_hand}) == len(found["singles"]) and found["trials"] == 3
    assert found["sets"] == json.loads(Path("skips.json").read_text())
    assert len(found["best"]) in (5, 6) and all(one["measured"] > 0 for one in found["best"])
    assert found["greedy"] in found["best"] and found["best"][0]["measured"] >= found["greedy"]["measured"]
    assert call("--trials", "3", "--json", "--sampler", "gp") == 0  # nothing is left to measure
    assert len(measured) == before
    assert json.loads(capsys.readouterr().out)["singles"] == found["singles"]


def test_gp_proposes_sets_too(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind ten sets that are measured it fits a process; what it proposes is measured and kept as TPE's is."""
    proposed, usual = list[dict[str, bool]](), optuna.samplers.GPSampler.sample_relative

    def noted(self: Any, *given: Any) -> dict[str, bool]:
        proposed.append(usual(self, *given))
        return proposed[-1]

    monkeypatch.setattr(optuna.samplers.GPSampler, "sample_relative", noted)
    assert call("--trials", "8", "--json", "--sampler", "gp") == 0
    found, by_model = json.loads(capsys.readouterr().out), [own for own in proposed if own]
    assert len(proposed) == found["trials"] == 8 and by_model and {*by_model[0]} == {*found["singles"]}
    study = optuna.load_study(study_name=skip_search.STUDY, storage="sqlite:///s.db")
    own = [one for one in study.trials if one.user_attrs.get("proposed")]
    assert [one.params for one in own][-len(by_model) :] == by_model and all(one.value > 0 for one in own)


def test_a_proposed_set_of_all_sub_layers_is_not_timed(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be left that drafts, however fast that is predicted to be."""
    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_independent", lambda *_: True)
    monkeypatch.setattr(skip_search.SkipCosts, "speed", lambda _, own, __: (float(len(own)), 1))
    assert call("--trials", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    study = optuna.load_study(study_name=skip_search.STUDY, storage="sqlite:///s.db")
    assert any(all(one.params.values()) for one in study.trials), "it was proposed"
    assert all(len(one["skipped"]) < len(found["singles"]) for one in found["best"])


def test_the_answer_is_no_slower_than_greedy_additions(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its set is timed too where others are predicted to be faster: here it is the worst of all by prediction."""
    search, greedy = skip_search._SkipSearch, list[tuple[int, ...]]()
    by_hand = search.by_hand

    def worst(self: Any) -> Any:
        singles, _ = by_hand(self)
        greedy.append(min(self.seen, key=lambda own: self.costs.speed(own, self.seen[own])[0]))
        return singles, greedy[0]

    monkeypatch.setattr(search, "by_hand", worst)
    monkeypatch.setattr(
        search, "_timed", lambda self, skipped, *_: self.described(skipped, 2.0 if skipped == greedy[0] else 0.5)
    )
    assert call("--trials", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"][0] == found["greedy"] and found["greedy"]["measured"] == 2.0 and len(found["best"]) == 6
    assert found["sets"] == json.loads(Path("skips.json").read_text())
    assert len(found["sets"]["attention"]) + len(found["sets"]["mlp"]) == len(greedy[0])


BAD: dict[str, tuple[list[str], str]] = {
    "trials": (["--trials", "0"], "--trials"),
    "sampler": (["--sampler", "cma"], "'cma' is not"),
    "no such prompts": (["--prompts", "nothing.jsonl"], "nothing.jsonl: there is no such file"),
    "unwritable file": (["--out", "nowhere/skips.json"], "there is no folder"),
    "no study": (["--study", "mine.jsonl"], "mine.jsonl is no study that can be read and written"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.rstrip().count("\n") == 0 and not Path("skips.json").exists()


def test_a_study_of_another_target_or_of_other_prompts_is_refused(
    call: Call, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--trials", "1") == 0
    capsys.readouterr()
    assert call("--trials", "1", target=folders[1]) == 2
    told = capsys.readouterr().err.replace("\n", "")
    assert "The study s.db is of another search (target" in told and told.count("parameters)") == 2
    assert all(repr(str(folder)) in told for folder in folders), "both are named"
    copied = folders[1].parent / "copied"
    shutil.copytree(folders[0], copied)
    assert call("--trials", "1", target=copied) == 0, "the same model by another name"
    Path("other.jsonl").write_text('{"text": "def sub"}\n')
    assert call("--trials", "1", prompts="other.jsonl") == 2
    assert "is of another search (prompts '" in capsys.readouterr().err


def test_without_optuna_it_is_said_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "TUNE", Extra(extras.TUNE.purpose, ("no-such-optuna>=4",)))
    assert call() == 2
    assert "Tuning skips needs no-such-optuna, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [0.93, 1.2])
def test_it_is_said_where_no_set_is_faster(measured: float, capsys: pytest.CaptureFixture[str]) -> None:
    one = CheckedSkips(("attention 0",), 0.9, 0.8, 1, measured)
    found = FoundSkips(1, {"attention 0": 0.9}, one, (one,), {"layers": 1, "attention": [0], "mlp": []}, 1)
    command.show(Console(), found, command.TuneSkipsOptions())
    assert ("None of them is faster than plain decoding here." in capsys.readouterr().out) is (measured < 1)
