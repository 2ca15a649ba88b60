"""`polydraft align --measure`: a table or JSON of what a draft is worth; what cannot be is refused in a sentence."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polydraft.cli import main

Call = Callable[..., int]


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").symlink_to(folders[0])
    (tmp_path / "draft").symlink_to(folders[1])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "def add"}\n{"prompt": "class"}\n')

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["polydraft", "align", "target", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


MEASURE = ("--draft", "draft", "--measure", "--prompts", "rows.jsonl", "--max-new-tokens", "6", "--length", "2")


def test_a_draft_is_measured_by_temperature_and_length_of_chain(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*MEASURE, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["temperature"] for one in told["temperatures"]] == [0, 1]
    for one in told["temperatures"]:
        token, block = (one["tokens_per_call"][rule] for rule in ("token by token", "as a block"))
        assert len(token) == len(block) == len(one["overlap"]) == 2
        assert 1 <= token[0]["mean"] <= 2 and token[0]["mean"] == pytest.approx(block[0]["mean"])
        assert token[1]["mean"] <= block[1]["mean"] + 1e-9 and one["texts"] == 2
        assert len(one["predicted_speed"]) <= 2 and all(0 < speed < 10 for speed in one["predicted_speed"])
    assert call(*MEASURE, "--temperature", "1") == 0
    assert "Temperature 1: tokens per target call" in capsys.readouterr().out


@pytest.mark.parametrize("draft", ["ngram", "draft < ngram", "draft@1 ngram@2", "self:int8"])
def test_other_drafters_are_measured_too(call: Call, capsys: pytest.CaptureFixture[str], draft: str) -> None:
    assert call("--draft", draft, *MEASURE[2:], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    worth = [one["tokens_per_call"]["as a block"][-1]["mean"] for one in found["temperatures"]]
    assert found["draft"] == draft and min(worth) >= 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--measure",), "--draft is missing"),
        ((*MEASURE, "--temperature", "1", "--temperature", "1"), "A temperature is given twice"),
        ((*MEASURE, "--temperature", "-1"), "temperature"),
        ((*MEASURE[:-4], "--max-new-tokens", "500"), "No prompt leaves room for 500 new tokens"),
        ((*MEASURE, "--length", "65"), "length"),
        ((*MEASURE, "--temperature", "0", "--top-k", "5"), "top_k would do nothing at temperature 0"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    call: Call, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert call(*arguments) == 2
    said = capsys.readouterr().err
    assert told in said and said.splitlines()[-1].startswith("polydraft: ")
