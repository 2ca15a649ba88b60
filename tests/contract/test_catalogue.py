"""One line in the catalogue, and everything knows the rule: commands, Python, conformance, limits, and these tests."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from new_rule import LINE, FirstOnly

import polydraft
import polydraft.catalogue.tables as tables
from polydraft.catalogue import DrafterLine, PolicyLine, drafter_words, parse_policy, verifier_by_name
from polydraft.cli import main
from polydraft.cli.benchmark.arm_spelling import spell_arm
from polydraft.cli.option_words import KINDS, rules_in_help, trees_in_help
from polydraft.conformance import matrix, tree_matrix
from polydraft.drafters import NgramDrafter
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.schemes import IID, TopK
from polydraft.trees import Chain, GrowingPolicy
from polydraft.verifiers import TopDown
from polydraft_lab.limits import node_cases, tree_cases

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/contract/test_verifiers.py",
    "tests/contract/test_tree_verifiers.py",
    "tests/exact/test_node_rules.py",
    "tests/exact/test_every_pairing.py",
    "tests/exact/test_bad_rows.py",
)
PROMPT = "def add(a, b):"


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the new rule's line."""
    monkeypatch.setattr(tables, "RULES", (*tables.RULES, LINE))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command and gives its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


def generated(command: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = command("generate", PROMPT, "--json", "--max-new-tokens", "8", *arguments)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.usefixtures("added")
def test_a_new_rule_generates_text_by_its_word(command: Any) -> None:
    found = generated(command, "--verifier", "first-only", "--tree", "2,1", "--temperature", "1", "--seed", "3")
    assert (found["settings"]["verifier"], found["settings"]["scheme"]) == ("first only", "iid")
    assert found["statistics"]["new_tokens"] == 8
    pair = polydraft.load_pair()
    ids = torch.tensor(pair.tokenizer(PROMPT)["input_ids"]).unsqueeze(0)
    settings: dict[str, Any] = {"policy": "2,1", "temperature": 1.0, "top_k": 0, "seed": 3, "max_new_tokens": 8}
    output = polydraft.generate(pair.target, ids, drafter=pair.draft, verifier="first-only", **settings)
    assert isinstance(output, polydraft.GenerationOutput)
    assert output.sequences[0, ids.shape[1] :].tolist() == found["tokens"]


@pytest.mark.usefixtures("added")
def test_a_new_rule_is_listed_wherever_rules_are(command: Any) -> None:
    assert "shared-noise, first-only; LOSSY: typical" in rules_in_help()
    code, _, err = command("generate", PROMPT, "--verifier", "magic")
    assert code == 2 and "'magic' is not one of 'auto', 'naive'," in err and "'first-only'" in err
    with pytest.raises(InvalidParameter, match=r"There is no verifier 'magic'; choose from auto, naive, .*first-only"):
        verifier_by_name("magic", "model")
    assert spell_arm("verifier=first-only tree=2,1").settings["verifier"] == "first-only"


@pytest.mark.usefixtures("added")
def test_a_new_rule_is_proved_by_conformance(command: Any) -> None:
    code, out, _ = command("conformance", "--rule", "first only", "--quick", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"]
    assert [(one["rule"], one["scheme"], one["exact"]) for one in report["node_rules"]] == [("first only", "iid", True)]
    assert [(one["rule"], one["exact"]) for one in report["tree_rules"]] == [("first only, top down", True)]


def test_matrices_cover_the_catalogue_as_it_is_when_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RULES", (LINE,))
    assert [one.rule for one in matrix(k=1)] == ["first only"]
    assert [one.rule for one in tree_matrix()] == ["first only, top down"]


@pytest.mark.usefixtures("added")
def test_a_new_rule_is_measured_beside_its_optimum() -> None:
    (at_nodes,) = [case for case in node_cases() if case.rule == FirstOnly()]
    (on_trees,) = [case for case in tree_cases() if case.verifier == TopDown(FirstOnly())]
    assert (at_nodes.label, at_nodes.most, on_trees.label, on_trees.chain) == (
        "first only",
        64,
        "top-down first only",
        False,
    )


@pytest.mark.usefixtures("added")
def test_what_a_new_rule_costs_is_measured(command: Any) -> None:
    settings = ("--part", "laws", "--limit", "1", "--max-tokens", "2", "--shortlist", "8", "--json")
    code, out, err = command("bench", "rules", "--verifier", "first-only", *settings)
    assert code == 0, err
    _, *laws = map(json.loads, out.splitlines())
    assert [(one["rule"], one["scheme"], one["drafts"]) for one in laws] == [
        ("first only", "iid", 2),
        ("first only", "iid", 4),
    ]
    assert all(0 < one["acceptance"] <= one["optimum"] for one in laws)


def outcomes_of(rule: str, files: Sequence[str]) -> dict[str, list[str]]:
    """Run the tests of files that name a rule, with its line in the catalogue; return by file what became of each."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-m", "pytest", "-p", "with_new_rule", "-p", "no:cacheprovider", "-vv", *files]
    done = subprocess.run(
        [*command, "-k", rule, "-m", "not slow"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "400"},
        capture_output=True,
        text=True,
    )
    found: dict[str, list[str]] = {file: [] for file in files}
    for file, outcome in re.findall(r"^(tests/[\w/]+\.py)::.* (PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE):
        found[file].append(outcome)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return found


@pytest.mark.slow
def test_a_new_rule_is_in_the_suites_of_exactness_and_contract() -> None:
    found = outcomes_of("first and only", FILES)
    assert all(found.values()), {file: len(outcomes) for file, outcomes in found.items()}
    assert {outcome for outcomes in found.values() for outcome in outcomes} == {"PASSED"}
    assert len(found["tests/exact/test_node_rules.py"]) > 20


def test_a_line_refuses_what_it_does_not_name_even_if_its_rule_would_not() -> None:
    class Careless(FirstOnly):
        def __post_init__(self) -> None:
            return

    careless = replace(LINE, source=Careless, schemes=(IID(),))
    with pytest.raises(UnpairedScheme, match="The verifier first-only works with drafts that are iid, not top-k"):
        careless.of(TopK())


@dataclass(frozen=True)
class Brief(NgramDrafter):
    """Prompt lookup of short suffixes."""

    longest: int = 2
    name = "brief lookup"


def test_a_new_drafter_is_known_by_its_word(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setattr(tables, "DRAFTERS", (DrafterLine("brief", Brief), *tables.DRAFTERS))
    assert "brief" in drafter_words(0) and KINDS["drafter"].listed() == (
        "brief, model, ngram[:N], suffix[:FOLDER], rest:FOLDER, lookup-first, recycling, route, route-first, merge, "
        "merge-beside, jacobi, lookahead[:N,W,G], ouroboros or none"
    )
    found = generated(command, "--drafter", "brief", "--verifier", "naive", "--scheme", "given")
    assert found["settings"]["drafter"] == "brief lookup"
    assert spell_arm("drafter=brief").settings == {"drafter": "brief"}
    told = "is one of brief, model, ngram[:N], suffix[:FOLDER], rest:FOLDER, lookup-first, recycling, route"
    with pytest.raises(InvalidParameter, match=re.escape(told)):
        spell_arm("drafter=none")


def test_a_new_kind_of_tree_is_known_by_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    line = PolicyLine("pole", lambda numbers: Chain(2 * int(numbers)), ("pole:3",))
    monkeypatch.setattr(tables, "POLICIES", (*tables.POLICIES, line))
    assert parse_policy("pole:3") == Chain(6) and '"pole:3"' in trees_in_help()
    with pytest.raises(InvalidParameter, match="adaptive, pole with their numbers"):
        parse_policy("pole:x")


@pytest.mark.parametrize("text", [text for line in tables.POLICIES for text in line.examples])
def test_examples_of_trees_can_be_read(text: str) -> None:
    assert parse_policy(text).shape.size > 1


def test_what_a_line_says_in_words_is_what_its_member_says() -> None:
    for line in tables.SCHEMES:
        assert line.name == line.scheme.name
    for line in tables.RULES:
        usual = line.usual
        assert (line.name, line.lossless, line.class_name) == (usual.name, usual.lossless, type(usual).__name__)
    for line in tables.POLICIES:
        assert line.grows == isinstance(parse_policy(line.examples[0]), GrowingPolicy)
    for line in tables.DRAFTERS:
        assert line.kind is not None and line.class_name == line.kind.__name__


@pytest.mark.parametrize("table", ["RULES", "SCHEMES", "POLICIES", "DRAFTERS"])
def test_a_word_names_one_thing(table: str) -> None:
    words = [line.word for line in getattr(tables, table)]
    assert len({*words}) == len(words) > 4
