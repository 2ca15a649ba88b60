"""`polydraft fetch`: what there is, where it is, and one sentence when it cannot be had."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polydraft.cli import fetch as command
from polydraft.cli.commands import app
from polydraft.errors import CheckpointError, FetchError, InvalidParameter
from polydraft.fetching.attempt import Report

Ended = tuple[int, str, str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def call(*arguments: str) -> Ended:
    ended = CliRunner().invoke(app, ["fetch", *arguments], catch_exceptions=False, standalone_mode=False)
    return ended.return_value or ended.exit_code, ended.stdout, ended.stderr


def refused(*arguments: str, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    return str(caught.value)


def test_it_lists_what_there_is(cache: Path) -> None:
    _, out, _ = call()
    assert "smollm2" in out and "spec-bench" in out and "92.9 MB" in out
    rows = json.loads(call("--json")[1])
    assert [(row["word"], row["here"]) for row in rows] == [("smollm2", False), ("spec-bench", False)]
    assert rows[0]["path"] == str(cache / "smollm2")


def test_it_says_what_it_does_and_where_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def brought(word: str, source: Path | None, report: Report) -> Path:
        for step in ("waiting", "downloading", "downloading", "checking", "making"):
            report(step, 5)
        cache.mkdir(exist_ok=True)
        (cache / "spec-bench.jsonl").write_text("{}\n")
        return cache / "spec-bench.jsonl"

    monkeypatch.setattr(command, "fetch", brought)
    _, out, err = call("spec-bench")
    assert "".join(out.split()).startswith(f"spec-benchisin{cache}/spec-bench.jsonl(0.0MB)")
    assert [line.split()[0] for line in err.splitlines()] == ["Another", "Downloading", "Checking", "Converting,"]
    row = json.loads(call("spec-bench", "--json")[1])
    assert row["here"] and row["path"] == str(cache / "spec-bench.jsonl")


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fetch", interrupted)
    code, out, err = call("smollm2")
    assert (code, out) == (130, "") and "`polydraft fetch smollm2` goes on" in err


def test_bad_calls_are_one_sentence(tmp_path: Path) -> None:
    assert "There is no 'llama' to fetch" in refused("llama", kind=InvalidParameter)
    (tmp_path / "file").write_text("x")
    given = ("--from", str(tmp_path / "file"))
    assert "--from needs the word" in refused(*given, kind=InvalidParameter)
    assert "has 698768 bytes, but" in refused("spec-bench", *given, kind=FetchError)
    assert "There is no file" in refused("smollm2", "--from", str(tmp_path / "no"), kind=FetchError)


def test_a_model_that_was_not_fetched_is_one_sentence() -> None:
    from polydraft.cli.generation.one_text import run_generate
    from polydraft.options.commands.generate_options import GenerateOptions

    with pytest.raises(CheckpointError, match="`polydraft fetch smollm2` brings it"):
        run_generate(GenerateOptions(prompt="x", target="smollm2", quiet=True))
