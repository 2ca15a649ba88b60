"""Options that would have no effect beside others are refused by name; what is in force is shown."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polydraft.cli import main

Folders = tuple[Path, Path]
Call = Callable[..., int]


@pytest.fixture
def call(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").symlink_to(folders[0])
    (tmp_path / "draft").symlink_to(folders[1])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "def add"}\n{"prompt": "class", "id": "b"}\n')

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


MODELS = ("--target", "target", "--draft", "draft")
FILE = ("--input", "rows.jsonl", "--output", "texts.jsonl", *MODELS)
CLASHES: dict[str, tuple[tuple[str, ...], str]] = {
    "a tree for nothing": (("generate", "x", "--drafter", "none", "--tree", "3"), "leave --tree out"),
    "an empty tree": (("generate", "x", "--tree", ""), "A tree"),
    "a rule for nothing": (("generate", "x", "--drafter", "none", "--verifier", "naive"), "leave --verifier out"),
    "a greedy rule that samples": (
        ("generate", "x", "--target", "nowhere", "--verifier", "rollback:2", "--temperature", "1"),
        "The verifier rollback:2 is for temperature 0 alone, but the temperature is 1",
    ),
    "a greedy rule that samples texts": (
        ("generate", *FILE, "--verifier", "rollback", "--temperature", "0.5"),
        "The verifier rollback:3 is for temperature 0 alone, but the temperature is 0.5",
    ),
    "a greedy rule that samples arms": (
        ("bench", "--target", "nowhere", "--arm", "verifier=rollback:2.5 tree=chain:4"),
        "The verifier rollback:2.5 is for temperature 0 alone, but the temperature is 1",
    ),
    "a greedy rule whose cost is sampled": (
        ("bench", "rules", "--target", "nowhere", "--draft", "nowhere", "--verifier", "rollback:2"),
        "The verifier rollback:2 is for temperature 0 alone, but the temperature is 1",
    ),
    "a rule with a word for a number": (
        ("generate", "x", "--verifier", "rollback:much"),
        "takes a number behind its colon, its threshold, not 'much'",
    ),
    "a rule with a number that takes none": (("generate", "x", "--verifier", "naive:3"), "'naive:3' is not known"),
    "a scheme for nothing": (
        ("generate", "x", "--drafter", "none", "--scheme", "iid"),
        "--drafter none drafts nothing; leave --scheme out",
    ),
    "bottom up for nothing": (("generate", "x", "--drafter", "none", "--bottom-up"), "leave --bottom-up out"),
    "a model that no one asks": (("generate", "x", *MODELS, "--drafter", "ngram"), "leave --draft out"),
    "nothing to compare": (
        ("generate", "x", "--drafter", "none", "--compare"),
        "nothing to compare with --drafter none",
    ),
    "unprinted comparison": (("generate", "x", "--compare", "--quiet"), "what --quiet does not print"),
    "two ways to print": (("generate", "x", "--json", "--quiet"), "--json and --quiet each print one thing"),
    "two ways to print texts": (("generate", *FILE, "--json", "-q"), "--json and --quiet each print one thing"),
    "two ways to print results": (("bench", "--json", "--quiet"), "--json and --quiet each print one thing"),
    "top-k of the likeliest": (
        ("generate", "x", "--top-k", "5"),
        "--top-k would do nothing: give --temperature too, or leave it out.",
    ),
    "filters of the likeliest": (
        ("generate", "x", "--top-p", "0.5", "--min-p", "0.1"),
        "--top-p and --min-p would do nothing: give --temperature too, or leave them out.",
    ),
    "filters without a warm row": (
        ("generate", *FILE, "--top-p", "0.5"),
        "--top-p would do nothing, and no row has a temperature of its own:",
    ),
    "penalty of nothing": (("generate", "x", "--repetition-penalty", "0"), "must be a finite number > 0, but is 0.0"),
    "penalty that is no number": (("generate", "x", "--repetition-penalty", "nan"), "> 0, but is nan"),
    "stopping nowhere": (("generate", "x", "--stop", "a", "--stop", ""), '--stop "" stops nowhere'),
    "no name": (("generate", "x", "--target", ""), "The name of a model is empty"),
    "no set": (("bench", "--prompts", ""), "leave the option out"),
    "every rule": (("conformance", "--rule", ""), "--rule is empty"),
    "pairs of tree rules": (
        ("conformance", "--rule", "block verification", "--all-pairs"),
        "--all-pairs is for node rules",
    ),
    "excerpts of rows": (
        ("bench", "--prompts", "rows.jsonl", "--excerpt-tokens", "5"),
        "--excerpt-tokens is for plain",
    ),
    "excerpts of limits": (
        ("limits", "--prompts", "rows.jsonl", "--excerpt-tokens", "5"),
        "--excerpt-tokens is for plain text",
    ),
    "a draft model for no arm": (
        ("bench", *MODELS, "--arm", "drafter=ngram"),
        "None of the arms uses the draft of --draft",
    ),
    "one temperature twice": (("tune", "--temperature", "0", "--temperature", "0"), "A temperature is given twice"),
    "one folder twice for a head": (
        ("train", "head", "eagle", "--prompts", "rows.jsonl", "--out", "a", "--work", "./a"),
        "--out and --work are the same folder",
    ),
    "a head without prompts": (("train", "head", "eagle"), "--prompts is missing"),
    "a head of no kind": (("train", "head", "lattice", "--prompts", "rows.jsonl"), "not 'lattice'"),
    "a form that a head has not": (("train", "head", "medusa", "--form", "speculators"), "official or vllm"),
    "a cluster for one prompt": (("generate", "x", "--ray"), "--ray needs --input: a file of prompts."),
    "copies without a cluster": (("generate", *FILE, "--replicas", "2"), "--replicas is about a Ray cluster"),
    "an address without a cluster": (("serve", "--address", "head:6379"), "--address is about a Ray cluster"),
    "no number of copies": (("serve", "--ray", "--replicas", "3:1"), "--replicas must be a number such as 2"),
    "a plan for a cluster": (("generate", *FILE, "--ray", "--plan", "auto"), "with --ray leave it out"),
    "ranks in a cluster": (("generate", *FILE, "--ray", "--parallel", "2"), "leave --parallel out"),
    "passes compiled in a cluster": (("generate", *FILE, "--ray", "--compile"), "in every copy anew"),
    "a GPU of a cluster": (("generate", *FILE, "--ray", "--device", "cuda:1"), "not --device cuda:1: write cuda"),
    "threads without a cluster": (("bench", "--threads", "2"), "--threads is about a Ray cluster: give --ray too"),
    "an address without a cluster of limits": (("limits", "--address", "head:6379"), "--address is about a Ray"),
    "a GPU of a cluster that measures": (("bench", "--ray", "--device", "cuda:0"), "not --device cuda:0: write cuda"),
    "a GPU of a cluster for limits": (("limits", "--ray", "--device", "cuda:0"), "not --device cuda:0: write cuda"),
    "a store that actors change": (
        ("bench", "--ray", "--arm", "drafter=suffix:store"),
        "suffix:store writes to its store, by which actors would change what others measure",
    ),
    "a store that actors change for limits": (
        ("limits", "--ray", "--drafter", "suffix:store"),
        "suffix:store writes to its store, by which actors would change what others measure",
    ),
    "one folder twice": (("train", "pair", "--out", "a", "--work", "./a"), "--out and --work are the same folder"),
}


@pytest.mark.parametrize("case", CLASHES)
def test_what_would_have_no_effect_is_refused_by_name(
    case: str, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = CLASHES[case]
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert captured.err.startswith("polydraft: ") and not Path("texts.jsonl").exists()


def test_filters_that_are_off_and_filters_for_a_warm_row_are_taken(call: Call) -> None:
    common = ("--max-new-tokens", "2", *MODELS)
    assert call("generate", "def add", *common, "--top-k", "0", "--top-p", "1", "--min-p", "0") == 0
    Path("rows.jsonl").write_text('{"prompt": "def add"}\n{"prompt": "class", "id": "b", "temperature": 0.7}\n')
    assert call("generate", "--input", "rows.jsonl", "--output", "texts.jsonl", *common, "--top-p", "0.5") == 0


def test_what_is_in_force_is_shown(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("generate", "def add", *MODELS, "--max-new-tokens", "3", "--temperature", "0.8")
    given = ("--top-k", "7", "--min-p", "0.1", "--repetition-penalty", "1.2")
    assert call(*common, *given, "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["temperature"], settings["top_k"], settings["min_p"]) == (0.8, 7, 0.1)
    assert settings["processors"] == ["RepetitionPenaltyLogitsProcessor"] and "top_p" not in settings
    assert call(*common, *given) == 0
    shown = capsys.readouterr().out
    for name, value in (("top_k", "7"), ("min_p", "0.1"), ("processors", "RepetitionPenaltyLogitsProcessor")):
        assert [name, value] in [line.split() for line in shown.splitlines()]
    assert call(*common) == 0
    assert "top_k" not in capsys.readouterr().out  # the whole distribution, unlike in Python


def test_help_groups_the_options_and_says_where_python_differs(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("generate", "--help") == 0
    shown = capsys.readouterr().out
    for heading in ("Models", "Drafting", "Sampling", "Output", "Files of prompts"):
        assert f"─ {heading} ─" in shown
    assert "in Python top_k is 50" in " ".join(shown.replace("│", " ").split())
    for name in ("limits", "tune", "bench"):
        assert call(name, "--help") == 0
        assert "─ Measuring ─" in capsys.readouterr().out
