"""Subjects of `polydraft bench`, such as `bench passes`: tables, JSON lines, Ctrl-C, and what is refused."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polydraft_lab.commands.run_lattice as lattice
import polydraft_lab.commands.run_passes as passes
import polydraft_lab.commands.run_planner as planner
import polydraft_lab.commands.run_rules as rules
import polydraft_lab.subjects.lattice as measuring
import polydraft_lab.subjects.planner as planning
from polydraft.cli import main
from polydraft.cli.benchmark.bench import say_busy
from polydraft.cli.printing import console
from polydraft_lab.commands.options import PARTS
from polydraft_lab.commands.results import KINDS

Call = Callable[..., int]
QUICK = {
    "passes": ("--known", "4", "--known", "9", "--width", "1", "--width", "3", "--repeats", "2"),
    "rules": (
        *("--prompts", "one.jsonl", "--limit", "1", "--max-tokens", "3", "--shortlist", "8", "--vocabulary", "50"),
        *("--verifier", "optimal", "--verifier", "typical", "--scheme", "iid", "--tree", "2,1"),
    ),
    "planner": ("--prompts", "one.jsonl", "--limit", "1", "--repeats", "1", "--max-new-tokens", "2"),
    "pipelines": ("--prompts", "one.jsonl", "--limit", "1", "--max-new-tokens", "3", "--exit", "1"),
}


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"id": "a", "text": "def add"}\n{"id": "b", "text": "class Point"}\n')
    (tmp_path / "target").symlink_to(folders[0])
    (tmp_path / "draft").symlink_to(folders[1])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(planning, "WARM_UP", 1)
    monkeypatch.setattr(measuring, "WARM_UP", 1)

    def run(*arguments: str, models: bool = True, draft: bool = True) -> int:
        subject = arguments[0] if arguments else ""
        named = ("--target", "target", *(("--draft", "draft") if draft else ())) if models else ()
        given = ("bench", subject, *named, *QUICK.get(subject, ()), *arguments[1:])
        monkeypatch.setattr(sys, "argv", ["polydraft", *(given if models else ("bench", *arguments))])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def lines_of(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *rows = map(json.loads, text.splitlines())
    assert head["kind"] == "conditions" and not {row["kind"] for row in rows} - {*KINDS.values()}
    return head, rows


def test_passes_are_a_table_by_known_tokens_and_widths(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("passes", "--draft", "self:skip=0") == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["model", "1", "3"] in rows and ["after", "4", "tokens"] in rows and ["after", "9", "tokens"] in rows
    timed = [row[0] for row in rows if len(row) == 3 and re.fullmatch(r"\d+\.\d", row[1])]
    assert timed == ["target", "draft", "self:skip=0"] * 2
    assert "medians of 2" in captured.out and captured.err == ""


def test_json_of_passes_is_lines_and_nothing_else(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("passes", "--json", "--seed", "3") == 0
    captured = capsys.readouterr()
    head, rows = lines_of(captured.out)
    assert captured.err == "" and head["subject"] == "passes" and head["interrupted"] is False
    assert (head["known"], head["widths"], head["repeats"], head["seed"]) == ([4, 9], [1, 3], 2, 3)
    assert {*head["models"]} == {"target", "draft"} and head["models"]["target"]["dtype"] == "float32"
    assert len(rows) == 2 * 2 * 2 and {(row["model"], row["passes"]) for row in rows} == {("target", 2), ("draft", 2)}


def test_rules_are_three_tables_and_each_part_is_one(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("rules") == 0
    captured = capsys.readouterr()
    shown = captured.out
    assert captured.err == "" and "typical acceptance (LOSSY)" in shown
    for words in ("iid, k = 2, T = 1", "iid, k = 4, T = 1", "iid, tree 2,1, T = 1", "1 node, 50 tokens", "64 nodes"):
        assert words in shown
    assert "Acceptance is computed, the mean over 3 positions" in shown
    assert call("rules", "--part", "shares", "--part", "optimum") == 0
    shown = capsys.readouterr().out
    assert "Shares: " in shown and "The optimum on random rows" in shown and "Laws: " not in shown


def test_json_of_rules_has_a_line_for_every_number(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("rules", "--json", "--k", "1-2", "--temperature", "0", "--temperature", "0.7") == 0
    captured = capsys.readouterr()
    head, rows = lines_of(captured.out)
    assert captured.err == "" and head["temperatures"] == [0.0, 0.7] and head["drafts"] == [1, 2]
    laws, shares, optima = ([row for row in rows if row["kind"] == kind] for kind in ("law", "share", "optimum"))
    assert {(row["rule"], row["scheme"], row["drafts"], row["temperature"]) for row in laws} == {
        (rule, "iid", k, heat) for rule in ("optimal", "typical acceptance") for k in (1, 2) for heat in (0.0, 0.7)
    }
    assert all(row["acceptance"] == pytest.approx(row["optimum"], abs=1e-7) for row in laws if row["lossless"])
    assert [(row["rule"], row["tree"], row["nodes"]) for row in shares] == [
        (rule, "2,1", [2, 2]) for rule in ("optimal", "typical acceptance") for _ in range(2)
    ]
    assert [(row["rows"], row["tokens"], row["drafts"]) for row in optima] == [
        (1, 50, 1),
        (1, 50, 2),
        (64, 9, 1),
        (64, 9, 2),
    ]


def test_bottom_up_lifts_from_the_leaves(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("rules", "--bottom-up", "--part", "shares", "--part", "optimum", "--verifier", "block", "--json") == 0
    _, rows = lines_of(capsys.readouterr().out)
    assert [row["rule"] for row in rows if row["kind"] == "share"] == ["block verification", "optimal, bottom up"]


def test_the_planner_is_beside_plain_decoding_and_trees(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("planner", "--setting", "useless", "--setting", "good", "--fresh", "--quiet") == 0
    captured = capsys.readouterr()
    shown = captured.out
    assert captured.err == "" and "batch 16" not in shown and "a new planner for every text" in shown
    for words in ("useless draft, temperature 0", "good pair, temperature 1", "plain decoding", "tree 1+1+1+1+1"):
        assert words in shown
    assert call("planner", "--setting", "temperature 1.5", "--json") == 0
    head, rows = lines_of(capsys.readouterr().out)
    assert (head["fresh"], head["max_new_tokens"], head["prompts"]) == (False, 2, 1)
    assert [(row["arm"], len(row["against_plain"])) for row in rows] == [("plain decoding", 1), ("planner", 1)]


LATTICE = ("lattice", "--prompts", "one.jsonl", "--limit", "1", "--max-new-tokens", "4", "--drafts", "4")


@pytest.mark.slow
def test_rules_of_one_head_are_compared_on_its_own_trees(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "GROUPS", (*measuring.GROUPS[:3], measuring.GROUPS[-2]))
    assert call(*LATTICE, "--temperature", "1", "--json", models=False) == 0
    head, rows = lines_of(capsys.readouterr().out)
    assert (head["head"], head["drafts"], head["prompts"]) == ("shipped", [4], 1)
    by_rule = {(row["trees"], row["rule"]): row for row in rows}
    chain = by_rule["chain", "speculative sampling"]
    assert chain["nodes"] == 4 and chain["first"] == pytest.approx(chain["optimum"])
    assert ("chain, whole rows", "block verification") in by_rule
    assert all(row["nodes"] <= 4 and row["speed"] > 0 and 1 <= row["tokens_per_call"] <= 5 for row in rows)
    lifted = [row for row in rows if row["rule"].endswith((", top down", ", bottom up"))]
    assert len(lifted) > 8 and all(0 < row["first"] <= row["optimum"] + 1e-6 for row in lifted)
    assert call(*LATTICE, "--temperature", "0.8", "--repeats", "0", "--quiet", models=False) == 0
    shown = capsys.readouterr().out
    assert "T = 0.8, at most 4 drafts" in shown and "branches, top then sample (4.0 drafts)" in shown
    assert call(*LATTICE, "--temperature", "0.8", "--repeats", "0", "--page", models=False) == 0
    shown = capsys.readouterr().out
    assert "**T = 0.8, at most 4 drafts**" in shown and "| *chain (4.0 drafts)* |  |  | at most 0." in shown
    assert call(*LATTICE, "--temperature", "0.8", "--page", "--json", models=False) == 2
    assert "--page and --json are two ways to print" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tables_of_a_lattice_are_put_into_their_place_in_a_page(
    call: Call, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    other = "<!-- table: lattice of smollm2 -->\nother\n<!-- end of table -->\n"
    page.write_text(f"# Title\n\n<!-- table: lattice -->\nold\n<!-- end of table -->\n\n{other}")
    into = (*LATTICE, "--temperature", "0.8", "--repeats", "0", "--quiet", "--into", "page.md")
    assert call(*into, models=False) == 0
    assert capsys.readouterr().out == ""
    written = page.read_text()
    assert written.startswith("# Title\n\n<!-- table: lattice -->\n\nA target of ") and written.endswith(other)
    assert "| *branches, iid (4.0 drafts)* |" in written and "old" not in written
    assert call(*into, models=False) == 0
    assert page.read_text().count("**T = 0.8, at most 4 drafts**") == 1


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("# Title\n", (), "has no place for these tables: write <!-- table: lattice -->"),
        ("<!-- table: lattice -->\n", (), "has no place for these tables"),
        (2 * "<!-- table: lattice -->\n<!-- end of table -->\n", (), "has no place for these tables"),
        (None, (), "The page page.md cannot be read"),
        ("", ("--json",), "--into writes the tables into a page: leave --page and --json out"),
    ],
)
def test_a_page_without_a_place_is_refused_before_anything_is_measured(
    text: str | None,
    more: tuple[str, ...],
    said: str,
    call: Call,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(lattice, "load_source", None)
    if text is not None:
        (tmp_path / "page.md").write_text(text)
    assert call(*LATTICE, "--into", "page.md", *more, models=False) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_interrupted_lattice_is_printed_and_its_page_left_as_it_was(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = lattice.measure_lattice

    def some(*arguments: Any) -> Iterator[Any]:
        yield next(iter(original(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(lattice, "measure_lattice", some)
    page = "<!-- table: lattice -->\nold\n<!-- end of table -->\n"
    (tmp_path / "page.md").write_text(page)
    assert call(*LATTICE, "--repeats", "0", "--into", "page.md", models=False) == 130
    shown = capsys.readouterr().out
    assert "Interrupted; this is what was finished." in shown and "| *chain, whole rows (4.0 drafts)* |" in shown
    assert (tmp_path / "page.md").read_text() == page


def test_a_lattice_is_sampled_from_a_head(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*LATTICE, "--temperature", "0", models=False) == 2
    assert "Sampled trees need temperatures above 0" in capsys.readouterr().err
    assert call(*LATTICE, "--target", "target", models=False) == 2
    assert "--target and --draft go together here" in capsys.readouterr().err


WORK = {"passes": (passes, "time_passes"), "rules": (rules, "measure_shares"), "planner": (planner, "measure_planner")}
"""What is interrupted: after the first result, and in `rules` after all laws too."""


@pytest.mark.parametrize("subject", WORK)
def test_ctrl_c_is_130_and_what_was_finished_is_shown(
    subject: str, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(*WORK[subject])

    def some(*arguments: Any) -> Iterator[Any]:
        yield next(iter(original(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(*WORK[subject], some)
    assert call(subject) == 130
    captured = capsys.readouterr()
    said = "polydraft: Interrupted: what was finished is printed, the rest is lost.\n"
    assert "Interrupted" not in captured.out and captured.err == said
    assert call(subject, "--json") == 130
    captured = capsys.readouterr()
    assert captured.err == said
    head, rows = lines_of(captured.out)
    assert head["interrupted"] is True and rows


def test_ctrl_c_before_the_first_result_is_130_too(
    call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for subject, (module, name) in {**WORK, "rules": (rules, "rows_of_texts")}.items():
        monkeypatch.setattr(module, name, interrupted)
        assert call(subject) == 130
        assert capsys.readouterr().err == "polydraft: Interrupted: nothing was finished.\n"


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "two ways to print passes": (("passes", "--json", "--quiet"), "--json and --quiet each print one thing"),
    "two ways to print rules": (("rules", "--json", "-q"), "--json and --quiet each print one thing"),
    "two ways to print speeds": (("planner", "--json", "-q"), "--json and --quiet each print one thing"),
    "no room for a pass": (
        ("passes", "--known", "126"),
        "A pass over 3 tokens after 126 does not fit into the context",
    ),
    "one width twice": (("passes", "--width", "3"), "widths must be different numbers"),
    "no width": (("passes", "--width", "0"), "Invalid value for '--width'"),
    "one draft twice": (("passes", "--draft", "draft"), "Two models would have one name in the results"),
    "a draft called target": (("passes", "--draft", "target"), "Two models would have one name in the results"),
    "no such derived draft": (("passes", "--draft", "self:int9"), "The draft 'self:int9' is not known"),
    "no such draft": (("passes", "--draft", "./nothing"), "There is no model folder './nothing'"),
    "no such rule": (("rules", "--verifier", "luck"), "'luck' is not one of 'naive'"),
    "a rule to choose": (("rules", "--verifier", "auto"), "'auto' is not one of 'naive'"),
    "no such scheme": (("rules", "--scheme", "luck"), "'luck' is not one of 'iid'"),
    "no such part": (("rules", "--part", "luck"), "'luck' is not one of 'laws', 'shares', 'optimum'"),
    "no such tree": (("rules", "--tree", "2,x"), "2,x"),
    "temperature": (("rules", "--temperature", "nan"), "temperature must be a finite number >= 0, but is nan"),
    "too many drafts": (("rules", "--k", "9"), "Numbers of drafts must lie between 1 and shortlist, 8"),
    "no numbers": (("rules", "--k", "many"), "Numbers of drafts are written as"),
    "large vocabulary": (("rules", "--vocabulary", "2000000"), "Invalid value for '--vocabulary'"),
    "no such prompts": (("rules", "--prompts", "nothing.jsonl"), "nothing.jsonl: there is no such file"),
    "no room for a text": (("rules", "--max-tokens", "128"), "prompts leaves room for 128 new tokens"),
    "no such setting": (("planner", "--setting", "warp"), "There is no setting with 'warp' in its name; there are"),
    "an empty setting": (("planner", "--setting", ""), "leave the option out"),
    "no new tokens": (("planner", "--max-new-tokens", "0"), "Invalid value for '--max-new-tokens'"),
    "no temperature": (("planner", "--temperature", "1"), "No such option: --temperature"),
    "no such subject": (("warp",), "No such command 'warp'"),
}
ALONE: dict[str, tuple[tuple[str, ...], str]] = {
    "a draft for nothing": (("passes", "--draft", "draft"), "--draft needs --target"),
    "a target alone": (("rules", "--target", "target"), "--target and --draft go together"),
    "a draft alone": (("planner", "--draft", "draft"), "--target and --draft go together"),
    "no laws of it": (
        ("rules", "--target", "target", "--draft", "draft", "--verifier", "block", "--part", "laws"),
        "There is nothing to measure for laws",
    ),
    "no scheme of it": (
        ("rules", "--target", "target", "--draft", "draft", "--verifier", "naive", "--scheme", "given"),
        "There is nothing to measure for these rules",
    ),
    "a tree for nothing": (("rules", "--part", "laws", "--tree", "3"), "--tree is for the part shares"),
    "a lift for nothing": (("rules", "--part", "laws", "--bottom-up"), "--bottom-up is for the part shares"),
    "a vocabulary for nothing": (("rules", "--part", "laws", "--vocabulary", "9"), "--vocabulary is for the part"),
    "options before a subject": (("--limit", "3", "rules"), "--limit before rules would do nothing"),
    "a flag before a subject": (("-q", "passes", "--json"), "--quiet before passes would do nothing"),
}


@pytest.mark.parametrize("case", [*BAD, *ALONE])
def test_bad_input_is_one_sentence_and_exit_code_2(case: str, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD.get(case) or ALONE[case]
    assert call(*arguments, models=case in BAD) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.startswith("polydraft: ") and captured.err.count("\n") == 1 and captured.err.endswith(".\n")


def test_help_lists_the_subjects_and_groups_their_options(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help", models=False) == 0
    shown = capsys.readouterr().out
    assert "─ Subjects ─" in shown and "--arm" in shown and all(f"│ {name} " in shown for name in QUICK)
    for name in QUICK:
        assert call(name, "--help", models=False) == 0
        shown = capsys.readouterr().out
        for heading in ("Models", "Measuring", "Output"):
            assert f"─ {heading} ─" in shown
        assert name != "rules" or all(part in shown for part in PARTS)


def test_prompts_that_leave_no_room_are_left_out_and_said(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text('{"text": "def add"}\n' + json.dumps({"text": "x = 1 + y\n" * 99}) + "\n")
    assert call("rules", "--limit", "2", "--k", "1") == 0
    captured = capsys.readouterr()
    assert "1 of 2 prompts leave no room for the new tokens; left out." in captured.err


def test_a_busy_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    place = {"threads": 2, "accelerator": None}
    for busy, said in ((3.1, True), (3.0, False), (None, False)):
        say_busy(console(), busy, place)
        assert ("Load average 3.1 on 2 threads" in capsys.readouterr().out) is said
    say_busy(console(), 9.0, {**place, "accelerator": "a GPU"})
    assert capsys.readouterr().out == ""


PIPELINES = ("pipelines", "--temperature", "0", "--hand-over-ms", "0", "--repeats", "0")


def test_every_line_of_pipelines_says_that_it_is_simulated(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*PIPELINES, "--layer-ms", "2.5", draft=False) == 0
    captured = capsys.readouterr()
    rows = [line for line in captured.out.splitlines() if re.match(r" +\d+, ", line)]
    assert captured.err == "" and len(rows) >= 3 and all("simulated" in line for line in rows)
    assert "2 layers of 2.5 ms" in " ".join(captured.out.split()) and "not measured" in captured.out
    assert call(*PIPELINES, "--json", draft=False) == 0
    head, lines = lines_of(capsys.readouterr().out)
    assert head["subject"] == "pipelines" and head["simulated"] is True and head["layer_ms"] == 1.0
    assert [line["system"] for line in lines] == ["SPEED, simulated", "PPD, simulated", "PPD, simulated"]
    assert {line["kind"] for line in lines} == {"simulated pipeline"} and {line["tree"] for line in lines} == {None}


def test_pipelines_refuse_a_draft_and_a_strange_exit(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pipelines") == 2
    assert "leave --draft out" in capsys.readouterr().err
    assert call(*PIPELINES, "--exit", "9", draft=False) == 2
    assert "Exits lie behind 1 to 2 layers of this model, not behind 9" in capsys.readouterr().err
