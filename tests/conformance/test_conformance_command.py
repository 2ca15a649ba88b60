"""`polydraft conformance` as a user runs it: the table, the JSON, the exit code and the culprit's name."""

import io
import json
import sys
import time
from dataclasses import dataclass

import pytest
from rich.console import Console
from torch import Tensor

from polydraft.cli import conformance as command
from polydraft.cli import main
from polydraft.conformance import proved_rules, tree_rules
from polydraft.verifiers import (
    BlockVerification,
    NaiveMatch,
    OutcomeLaw,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    TopDown,
    TypicalAcceptance,
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polydraft", "conformance", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover a handful of rules only: the others are checked in test_rule_matrix.py."""
    rules = (NaiveMatch(), RecursiveRejection(), RecursiveRejectionWithoutReplacement(), TypicalAcceptance())
    monkeypatch.setattr(proved_rules, "node_rules", lambda: rules)
    monkeypatch.setattr(proved_rules, "tree_rules", lambda: (TopDown(RecursiveRejection()), BlockVerification()))


@dataclass(frozen=True)
class Generous(RecursiveRejection):
    """A biased rule that calls itself lossless: it accepts the first draft a little too often."""

    name = "generous"

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        honest = super().law(drafts, draft_probs, target_probs)
        more = 0.01 * honest.rest.sum(dim=-1, keepdim=True) * (drafts[..., :1] >= 0)
        child = honest.child.clone()
        child[..., :1] += more
        return OutcomeLaw(child, honest.rest * (1 - 0.01 * (drafts[..., :1] >= 0)))


@pytest.mark.usefixtures("few")
def test_the_table_shows_deviations_acceptance_and_trees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--quick") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for words in (
        "Largest deviation of the output law",
        "typical acceptance (lossy)",
        "Acceptance rate on random rows",
        "optimal",
        "block verification",
        "All 5 lossless rules keep the target's law",
    ):
        assert words in shown, words
    line = next(line for line in shown.splitlines() if line.startswith("recursive rejection "))
    assert "e-16" in line and line.count(" - ") + line.endswith("-") >= 1, "pairs that are not meant for each other"
    assert "0.31" not in shown
    assert run(monkeypatch, "--quick", "--all-pairs", "--rule", "recursive rejection") == 0
    shown = capsys.readouterr().out
    assert "0.31" in shown and "naive" not in shown and "spechub" in shown


@pytest.mark.usefixtures("few")
def test_json_is_one_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--quick", "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == "" and captured.out.count("\n") == 1
    assert report["passed"] is True and report["tolerance"] == 1e-9
    assert [one["rule"] for one in report["node_rules"]] == [rule.name for rule in proved_rules.node_rules()]
    assert report["node_rules"][1]["exact"] and report["node_rules"][1]["deviation"] < 1e-9
    assert report["node_rules"][3]["lossless"] is False
    assert [one["widths"] for one in report["tree_rules"]] == [[2, 2], [1, 1]]


@pytest.mark.usefixtures("few")
def test_a_biased_rule_ends_it_with_code_1_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = (*proved_rules.node_rules(), Generous())
    monkeypatch.setattr(proved_rules, "node_rules", lambda: rules)
    assert run(monkeypatch, "--quick") == 1
    shown = capsys.readouterr().out
    assert "Not lossless: generous with iid drafts (" in shown and "row '" in shown
    assert run(monkeypatch, "--quick", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and [one["rule"] for one in report["node_rules"] if one["failed"]] == ["generous"]
    monkeypatch.setattr(proved_rules, "tree_rules", lambda: (TopDown(Generous()),))
    assert run(monkeypatch, "--quick", "--rule", "generous, top down") == 1
    assert "Not lossless: generous, top down on trees (" in capsys.readouterr().out


@pytest.mark.usefixtures("few")
def test_a_rule_that_does_not_exist_is_refused_with_the_names_of_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--rule", "magic") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = "There is no rule with 'magic' in its name; there are "
    assert f'{said}"naive match"; "recursive rejection";' in captured.err
    assert '"recursive rejection, top down"; "block verification".' in captured.err
    assert run(monkeypatch, "--quick", "--rule", "Block VERIFICATION") == 0


def test_a_sampled_tree_rule_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(proved_rules, "node_rules", lambda: ())
    monkeypatch.setattr(proved_rules, "tree_rules", lambda: (SharedNoise(),))
    monkeypatch.setattr(tree_rules, "SAMPLES", 200)
    assert run(monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "e-value" in shown and "*  sampled" in shown and "Acceptance rate" not in shown


@pytest.mark.usefixtures("few")
def test_ctrl_c_ends_it_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "tree_matrix", interrupted)
    assert run(monkeypatch, "--quick") == 130
    assert capsys.readouterr().err == "polydraft: Interrupted: nothing was kept.\n"


def test_a_bar_is_shown_on_a_terminal_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shown = {terminal: io.StringIO() for terminal in (True, False)}
    for terminal, page in shown.items():
        clock[0] = 0.0
        with command.progress(Console(file=page, force_terminal=terminal)) as step:
            step("node rules", 1, 10)
            assert page.getvalue() == ""
            clock[0] = 2.5
            step("node rules", 2, 10)
    assert "node rules" in shown[True].getvalue() and shown[False].getvalue() == ""
