"""Results that something has happened to are refused with the line and the reason, never with a traceback."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bad_calls import changed, damaged

from polydraft.bench import Prompt
from polydraft.bench.result_lines import check_regular
from polydraft.bench.speed import read_speed_results, verdicts, write_report
from polydraft.bench.speed.summary import summarise_speed
from polydraft.errors import PolydraftError, ResultsError
from polydraft.options.value_checks import odd_kind
from polydraft.verifiers import RecursiveRejectionWithoutReplacement
from polydraft_lab.limits import (
    LimitsSettings,
    Models,
    Record,
    Results,
    all_tables,
    conditions_of,
    footnotes,
    measure,
    node_cases,
    summarise,
)
from polydraft_lab.limits.cases import TOO_DEAR, UNDEFINED
from polydraft_lab.limits.measuring import acceptance_at_nodes

CONDITIONS: dict[str, Any] = {
    "target": {"name": "t", "parameters": 1, "dtype": "float32", "device": "cpu", "weights": "00"},
    "draft": None,
    "arms": {name: {"lossless": True, "description": ""} for name in ("plain", "$a^[/]")},
    "max_new_tokens": 2,
    "excerpt_tokens": 64,
    "warm_up_tokens": 8,
    "seed": 0,
    "machine": {"processor": "p", "cores": 1, "threads": 1, "accelerator": None, "system": "s"},
    "versions": {"polydraft": "0"},
}
STATISTICS = {
    "new_tokens": 2,
    "target_calls": 1,
    "steps": 1,
    "drafted": 1,
    "accepted": 1,
    "offered_at": [1],
    "accepted_at": [1],
    "seconds": {"target": 0.1, "total": 0.2},
    "fallback": "",
}
RUN: dict[str, Any] = {
    "kind": "run",
    "arm": "plain",
    "task": "t|\n$x^漢",
    "prompts": ["a"],
    "temperature": 0.0,
    "repeat": 0,
    "turn": 0,
    "seconds": 0.5,
    "tokens": [[1, 2]],
    "statistics": STATISTICS,
    "setup": {"drafter": "none"},
    "memory": 1.0,
    "load": 0.1,
    "same_text": True,
    "differences": [],
}
ROWS = [{"conditions": CONDITIONS}, RUN, {**RUN, "arm": "$a^[/]", "turn": 1}]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def reported(path: Path) -> None:
    conditions, records = read_speed_results(path)
    write_report(conditions, records, path.parent / "page")
    verdicts(summarise_speed(records, list(conditions["arms"]), conditions["seed"]))


def test_names_with_signs_of_formulas_and_tables_are_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(CONTENT)
    reported(tmp_path / "runs")
    page = (tmp_path / "page" / "report.md").read_text()
    assert r"t\| $x^漢" in page and "$a^[/]" in page


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"seconds": 0}, "seconds is 0, which no run has"),
    "too much time": ({"seconds": 1e300}, "seconds is 1e+300, which no run has"),
    "a huge number": ({"seconds": 10**400}, "seconds is a number of too many digits"),
    "not a number": ({"load": float("nan")}, "load is nan, which is no"),
    "before the first": ({"repeat": -1}, "repeat is -1, which no run has"),
    "no text": ({"tokens": [[]]}, "or an empty text"),
    "too many texts": ({"tokens": [[1], [2]]}, "tokens of 2 texts for 1 prompts"),
    "no prompts": ({"prompts": [], "tokens": []}, "tokens of 0 texts for 0 prompts"),
    "nested": ({"tokens": [[[1]]]}, "tokens is a list of 1, which is no int"),
    "half a letter": ({"task": "\ud800"}, "task is "),
    "more kept than drafted": ({"statistics": {**STATISTICS, "accepted_at": [2]}}, "more drafts were accepted"),
    "kept where none was": ({"statistics": {**STATISTICS, "offered_at": [0], "accepted_at": [0]}}, "more drafts were"),
    "no calls": ({"statistics": {**STATISTICS, "target_calls": 0}}, "target_calls is 0, which no run has"),
    "negative part": ({"statistics": {**STATISTICS, "seconds": {"target": -1}}}, "a part of the time is negative"),
    "unknown field": ({"colour": 1}, "'colour' is not known"),
    "no such row": (
        {"differences": [{"row": 3, "position": 0, "expected": 1, "found": 2, "margin": None, "rounding": True}]},
        "a difference is in a row that there is not",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_run_that_cannot_have_been_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    change, reason = WRONG[case]
    rows = [ROWS[0], ROWS[1], {**ROWS[2], **change}]
    (tmp_path / "runs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ResultsError) as caught:
        read_speed_results(tmp_path / "runs")
    assert "line 3: this is no line of results" in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(
    "line", ["5", "[]", '"x"', "null", "[" * 100_000, "\x00", '{"conditions": 5}', '{"a": ' + "9" * 5000 + "}"]
)
def test_a_line_of_something_else_is_refused(line: str, tmp_path: Path) -> None:
    for content in (f"{line}\n", CONTENT.decode() + f"{line}\n"):
        (tmp_path / "runs").write_text(content)
        with pytest.raises(ResultsError):
            read_speed_results(tmp_path / "runs")


def test_any_damage_is_a_report_or_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.bench.speed.page.draw_speed_figures", lambda *_: [])
    draw, refused = random.Random(7), 0
    for _ in range(400):
        (tmp_path / "runs").write_bytes(damaged(CONTENT, draw))
        try:
            reported(tmp_path / "runs")
        except PolydraftError as error:
            refused += 1
            assert str(error).endswith(".")
    assert refused > 200


@pytest.mark.slow
def test_any_damage_to_limits_is_a_summary_or_a_sentence(
    models: Models, settings: LimitsSettings, records: list[Record], tmp_path: Path
) -> None:
    conditions = json.loads(json.dumps(conditions_of(models, settings, ("t", "d"))))
    draw, refused, good = random.Random(7), 0, [asdict(one) for one in records]
    for _ in range(120):
        rows = [*good]
        rows[0] = changed(rows[0], draw)
        lines = [{"conditions": conditions}, *rows]
        (tmp_path / "limits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        try:
            kept = Results(conditions, tmp_path, settings)
            all_tables(*summarise([*kept.records.values()]), brief=True)
        except ResultsError as error:
            refused += 1
            assert "line 2: this is no line of results" in str(error)
    assert refused > 60


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    check_regular(tmp_path / "file")
    check_regular(tmp_path / "nothing")
    for path, kind in ((tmp_path, "a folder"), (Path("/dev/null"), "a device")):
        assert odd_kind(path) == kind
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            check_regular(path)


def test_recursive_rejection_of_four_drafts_is_what_its_definition_says(models: Models, prompts: list[Prompt]) -> None:
    """Cells that were blank have numbers: those of the rule's own enumeration."""
    (case,) = [one for one in node_cases() if isinstance(one.rule, RecursiveRejectionWithoutReplacement)]
    import torch

    torch.manual_seed(0)
    draft, target = (torch.randn(3, 8, dtype=torch.float64).softmax(-1) for _ in range(2))
    counts = torch.full((3,), 4)
    torch.testing.assert_close(case.acceptance(draft, target, counts), case.rule.acceptance(draft, target, counts))
    found = acceptance_at_nodes(draft, target, (4, 8), node_cases())
    assert "recursive rejection" in found["without replacement"]["4"]
    assert "importance weighted" in found["iid"]["8"]


def test_a_cell_without_a_number_says_why(models: Models, prompts: list[Prompt]) -> None:
    settings = LimitsSettings((0.7,), drafts=(1, 2, 6), max_tokens=3, shortlist=32, tree_every=0)
    nodes, trees = summarise(list(measure(models, prompts[:1], settings)))
    tables = [one for one in all_tables(nodes, trees, brief=True) if "number of drafts" in one.title]
    rows = {}
    for row in tables[0].rows:
        scheme = row[0] if row and not row[0].startswith(" ") else scheme if row else ""
        rows[scheme, row[0].strip() if row else ""] = row[1:]
    assert rows["without replacement", "recursive rejection"][2] == TOO_DEAR
    assert rows["spechub", "spechub"][2] == rows["spechub", "spechub"][2] == UNDEFINED
    assert all(cell for row in tables[0].rows for cell in row)
    assert [note.split(":")[0] for note in footnotes(tables)] == [UNDEFINED, TOO_DEAR]
