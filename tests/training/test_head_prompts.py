"""Prompts to train a head behind: what the script makes of texts, and that commands on pages are right."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import typer

from polydraft.bench import read_prompt_sets
from polydraft.cli.commands import app

ROOT = Path(__file__).parents[2]
PROSE = "\n\n".join(f"Chapter {number}\n\n" + f"word{number} and so on, " * 40 for number in range(5))
PAGES = ("docs/heads.md", "src/polydraft/data/pair/head/README.md", "src/polydraft/data/smollm2/head/README.md")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_prompts", ROOT / "docs" / "heads" / "make_prompts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(script, "library", lambda: ["\n".join(f"line_{number} = {number}" for number in range(200))])
    (tmp_path / "novel.txt").write_text(PROSE)
    return tmp_path


def test_prompts_of_every_kind_are_read_and_none_is_there_twice(script: ModuleType, files: Path) -> None:
    script.main([str(files / "prompts.jsonl"), str(files / "novel.txt"), "--count", "12"])
    found = [json.loads(line) for line in (files / "prompts.jsonl").read_text().splitlines()]
    assert {row["category"] for row in found} == {*script.KINDS}
    assert len({json.dumps([row.get("text"), row.get("messages")]) for row in found}) == len(found) > 90
    prompts = read_prompt_sets((str(files / "prompts.jsonl"),), 1000)
    assert len(prompts) == len(found)
    asked = {one.task for one in prompts if one.messages}
    assert asked == {"translations", "summaries", "readings", "coding", "general", "sums"}
    assert all("{" not in one.text for one in prompts if one.task != "coding")
    assert prompts[0].task == "prose"


def test_the_same_seed_gives_the_same_prompts(script: ModuleType, files: Path) -> None:
    def made(*more: str) -> str:
        script.main([str(files / "prompts.jsonl"), str(files / "novel.txt"), "--count", "5", *more])
        return (files / "prompts.jsonl").read_text()

    assert made() == made("--seed", "1") != made("--seed", "2")
    assert {json.loads(line)["category"] for line in made("--kinds", "code", "sums").splitlines()} == {"code", "sums"}


def test_what_cannot_be_made_is_said(script: ModuleType, files: Path) -> None:
    out = str(files / "prompts.jsonl")
    with pytest.raises(SystemExit, match=r"The kinds prose, .* need prose: give text files"):
        script.main([out])
    with pytest.raises(SystemExit, match="A text cannot be read"):
        script.main([out, str(files / "absent.txt")])
    with pytest.raises(SystemExit, match="--count must be at least 1, but is 0"):
        script.main([out, "--kinds", "sums", "--count", "0"])
    assert not (files / "prompts.jsonl").exists()


@pytest.mark.slow
def test_the_library_is_pythons_own_without_tests(script: ModuleType) -> None:
    found = script.library()
    assert len(found) > 100 and any("class JSONEncoder" in one for one in found)
    assert not any("import pytest" in one for one in found)


def commands(first: str) -> list[list[str]]:
    """Return the commands of pages and cards that begin with these words."""
    lines = (line.strip() for page in PAGES for line in (ROOT / page).read_text().splitlines())
    return [shlex.split(line) for line in lines if line.startswith(first)]


def test_the_commands_of_pages_and_cards_are_taken(script: ModuleType, files: Path) -> None:
    """Their options exist, and values are in their range; nothing is trained."""
    head = typer.main.get_command(app).commands["train"].commands["head"]  # type: ignore[attr-defined]
    found = commands("polydraft train head mixing")
    assert len(found) == 4
    for words in found:
        assert head.make_context("head", words[3:]).params["kind"] == "mixing"
    making = commands("python docs/heads/make_prompts.py")
    assert len(making) == 4
    for words in making:
        own = [str(files / word) if re.search(r"\.(jsonl|txt)$", word) else word for word in words[2:]]
        (files / "another.txt").write_text(PROSE)
        script.main([*own, "--count", "2"])
