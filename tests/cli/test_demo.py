import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import polydraft
from polydraft.cli import main
from polydraft.cli.benchmark import demo


@pytest.fixture
def tiny_pair(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "load_pair", lambda: polydraft.load(*folders))
    monkeypatch.setattr(demo, "demo_prompts", lambda: ["def add(", "class Point:"])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polydraft", "demo", "--max-new-tokens", "8", "--repeats", "1", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.usefixtures("tiny_pair")
def test_the_demo_shows_text_tree_statistics_speed_and_identity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "--svg", str(tmp_path / "tree.svg")) == 0
    shown = capsys.readouterr().out
    for words in ("one token tree", "drafts scored in one pass", "speed-up", "temperature 0.8", "token for token"):
        assert words in shown
    assert ElementTree.parse(tmp_path / "tree.svg").getroot().tag.endswith("svg")


@pytest.mark.usefixtures("tiny_pair")
def test_json_holds_both_temperatures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["temperatures"]) == {"0.0", "0.8"}
    assert all(result["temperatures"]["0.0"]["same_text"])


@pytest.mark.usefixtures("tiny_pair")
def test_a_text_that_differs_from_plain_decoding_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = demo.compare

    def differing(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)  # type: ignore[arg-type]
        return type(result)(result.plain, result.drafted, result.speedups, (False,) * len(result.same_text))

    monkeypatch.setattr(demo, "compare", differing)
    assert run(monkeypatch) == 1
    assert "differs from plain decoding" in capsys.readouterr().out


def test_the_shipped_prompts_are_code() -> None:
    prompts = demo.demo_prompts()
    assert len(prompts) >= 6 and all("\n" in prompt for prompt in prompts)
