"""`polydraft bench heads`: every kind is trained once, measured beside plain decoding, and shown in one table."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polydraft.bench.head_table import head_page
from polydraft.bench.speed import read_speed_results
from polydraft.cli.benchmark import heads
from polydraft.cli.benchmark.heads import run_heads
from polydraft.drafters import RiderDrafter
from polydraft.drafters.heads.formats.rider_folders import masks_inside
from polydraft.errors import InvalidParameter
from polydraft.models import embedded_head
from polydraft.options.commands.bench_options import BenchHeadsOptions
from polydraft.training import Drafting, HeadPlan, MadeHead
from polydraft.training.heads.head_making import run_name
from polydraft.training.heads.losses.tuned_target import Drift


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[HeadPlan]:
    """Let heads be trained at once: each is the one that ships. What was asked for is noted."""
    plans, clock = list[HeadPlan](), [0.0]
    monkeypatch.setattr(heads, "perf_counter", lambda: clock[0])

    def made(target: Any, prompts: Any, work: Path, out: Path, plan: HeadPlan, noting: Any) -> MadeHead:
        assert len(prompts) > 20, "those that are measured are not among them"
        plans.append(plan)
        with noting() as interrupted:
            for _ in range(plan.recipe.steps if plan.recipe.steps == heads.FIRST_STEPS else 0):
                clock[0] += 16.75
                assert not interrupted()
        drafting = Drafting((0.5, 0.25), 1.625)
        if plan.kind != "space":
            shutil.copytree(embedded_head(), out, dirs_exist_ok=True)
            return MadeHead(out, drafting, 2_000_000, 12_345, 67.0)
        shutil.copytree(embedded_head().parent / "target", out, dirs_exist_ok=True)
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | masks_inside(RiderDrafter((7,) * 5))))
        return MadeHead(out, drafting, 0, 12_345, 67.0, Drift(0.125, 0.75, 10))

    monkeypatch.setattr(heads, "make_head", made)
    return plans


def asked(folder: Path, **given: Any) -> BenchHeadsOptions:
    short = {"kinds": ("mixing", "medusa"), "limit": 1, "max_new_tokens": 4, "device": "cpu", **given}
    return BenchHeadsOptions(work=folder / "work", out=folder / "pair.jsonl", **short)


def test_heads_are_trained_once_measured_and_shown(
    trained: list[HeadPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "no record"}\n')
    assert run_heads(asked(tmp_path)) == 0
    assert [plan.kind for plan in trained] == ["mixing", "medusa", "mixing"]
    assert [plan.recipe.matrix_rate for plan in trained][2] == 0.0, "untrained"
    page, shown = (tmp_path / "table.md").read_text(), capsys.readouterr().out
    assert page == head_page([tmp_path / "pair.jsonl"])
    for name in ("draft-model", "mixing", "medusa", "untrained"):
        assert f"| {name} |" in page and name in shown
    assert "| 2.00 | 67 | 12,345 | 0.50 0.25 | path |" in page and "| 0.50 0.25 | slot |" in page
    assert run_heads(asked(tmp_path)) == 0 and len(trained) == 3, "nothing is trained or measured twice"
    assert page == (tmp_path / "table.md").read_text()


def test_rows_are_cut_in_the_first_form_that_has_so_few(trained: list[HeadPlan], tmp_path: Path) -> None:
    run_heads(asked(tmp_path, kinds=("mixing", "hydra", "eagle"), rows=2048))
    found = {plan.kind: (plan.rows, plan.form) for plan in trained}
    assert found == {"mixing": (2048, "official"), "hydra": (2048, "polydraft"), "eagle": (None, "official")}


def test_heads_learn_for_equal_seconds_by_what_their_first_steps_take(trained: list[HeadPlan], tmp_path: Path) -> None:
    run_heads(asked(tmp_path, seconds=670))
    steps = [(plan.kind, plan.recipe.steps) for plan in trained]
    assert steps == [("mixing", 4), ("mixing", 40), ("medusa", 4), ("medusa", 40), ("mixing", 1)]
    run_heads(replace(asked(tmp_path, seconds=67), out=tmp_path / "shorter.jsonl"))
    assert [plan.recipe.steps for plan in trained[5:]] == [4, 4, 4, 4, 1], "heads of other seconds are others"


def test_a_head_that_was_interrupted_goes_on_for_as_many_steps_as_it_was_to_learn(
    trained: list[HeadPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, waiting = heads.make_head, [True]

    def interrupted(*given: Any, plan: HeadPlan, **named: Any) -> MadeHead:
        if plan.recipe.steps == 40 and waiting:
            waiting.clear()
            raise KeyboardInterrupt
        return making(*given, plan=plan, **named)

    monkeypatch.setattr(heads, "make_head", interrupted)
    assert run_heads(asked(tmp_path, kinds=("medusa",), seconds=670)) == 130
    assert [plan.recipe.steps for plan in trained] == [4]
    assert run_heads(asked(tmp_path, kinds=("medusa",), seconds=670)) == 0
    assert [plan.recipe.steps for plan in trained] == [4, 40, 1], "the first steps were taken once"


def test_first_steps_are_taken_anew_where_a_run_has_some(trained: list[HeadPlan], tmp_path: Path) -> None:
    run_heads(asked(tmp_path, kinds=("medusa",), seconds=670))
    run = tmp_path / "work" / run_name(trained[0])
    run.mkdir(parents=True)
    for one in (tmp_path / "work" / "heads").glob("medusa-*/*.json"):
        one.unlink()
    run_heads(asked(tmp_path, kinds=("medusa",), seconds=670))
    assert trained[0].recipe.steps == 4 and not run.exists()


def test_lines_for_machines_have_what_was_learnt(
    trained: list[HeadPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_heads(asked(tmp_path, target="pair", kinds=("mixing",), as_json=True)) == 0
    first, *rest = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["heads"]["mixing"]["tokens"] == 12_345
    assert {row["arm"] for row in rest if row["kind"] == "run"} == {"plain", "draft-model", "mixing", "untrained"}
    assert not (tmp_path / "table.md").exists()


def test_a_tuned_target_runs_itself_and_is_compared_with_the_one_that_it_was(
    trained: list[HeadPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_heads(asked(tmp_path, kinds=("mixing", "space"))) == 0
    conditions, records = read_speed_results(tmp_path / "pair.jsonl")
    assert [*conditions["arms"]] == ["plain", "draft-model", "mixing", "space", "untrained"]
    assert [name for name, arm in conditions["arms"].items() if not arm["lossless"]] == ["space"]
    assert {one.setup["drafter"] for one in records if one.arm == "space"} == {"riders"}
    page, shown = (tmp_path / "table.md").read_text(), capsys.readouterr().out
    assert "| law of a row | KL per token | same choice |" in page and "same choice" in shown
    assert "| space | 0.00 | 67 | 12,345 | 0.50 0.25 | slot | 0.1250 | 75.0% |" in page
    assert "| mixing | 2.00 | 67 | 12,345 | 0.50 0.25 | path | - | - |" in page
    assert run_heads(asked(tmp_path, kinds=("mixing", "space"))) == 0 and len(trained) == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kinds": ("mixin",)}, "not 'mixin' .did you mean mixing"),
        ({"limit": 1_000_000}, "none is left to learn behind; lower --limit, or name others by --learn"),
    ],
)
def test_what_cannot_be_measured_is_said_first(
    trained: list[HeadPlan], tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidParameter, match=told):
        run_heads(asked(tmp_path, **given))
    assert not trained


def test_the_table_is_that_of_the_records() -> None:
    folder = Path(__file__).parents[2] / "docs" / "heads"
    records = sorted(folder.glob("*.jsonl"))
    tuned = [path.name for path in records if "KL per token |" in head_page([path])]
    assert tuned == ["pair-cpu-2.jsonl", "pair-cpu.jsonl"], "only there did a target learn with its head"
    assert records and (folder / "table.md").read_text() == head_page(records)
