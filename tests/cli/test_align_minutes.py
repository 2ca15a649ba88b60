"""`--minutes` bounds all stages of an alignment together, on machines of any speed; each ends by its share."""

from pathlib import Path

import pytest
from align_machine import PROMPTS, Machine, prepared

from polydraft.bench.aligning import AlignPlan, run_alignment
from polydraft.bench.aligning import align_stages as stages
from polydraft.bench.aligning import distilling as runs
from polydraft.bench.aligning.work_folder import Pace
from polydraft.errors import InvalidParameter

MINUTES, OVER = 4.0, 0.1
ENDS = (1.0, stages.WRITTEN, runs.TRIED, runs.distilled_by(60 * MINUTES), 1.0)
"""The shares that are spent when the stages end; the first has none of its own."""
MACHINES = {
    "quick": Machine(0.03, 0.8, 0.05),
    "slow passes": Machine(0.12, 1.0, 1.0),
    "slow steps": Machine(0.03, 4.0, 1.0),
    "slow measurements": Machine(0.03, 1.0, 8.0),
    "slower when it writes": Machine(0.04, 1.0, 0.5, {2: 2.5, 3: 1.0}),
    "slower when it tries": Machine(0.03, 1.0, 0.5, {3: 3.0}),
    "slower when it distils": Machine(0.03, 0.8, 0.5, {4: 4.0}),
    "slower when it judges": Machine(0.03, 1.0, 0.5, {5: 3.0}),
}


@pytest.fixture
def here(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stages, "PASSES", 20)
    monkeypatch.setattr(stages, "REPEATS", 2)
    return prepared(folders, tmp_path, monkeypatch)


def overruns(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Align on a machine, and return by how much stages ended too late, in shares of the budget, and all together."""
    with monkeypatch.context() as patched:
        machine.patch(patched)
        plan = AlignPlan(out=Path("made"), minutes=MINUTES, max_new_tokens=16, losses=("jsd", "fkl"))
        found = run_alignment("target", "draft", PROMPTS, plan, clock=machine.clock, say=machine.say)
    ended = [*machine.began[1:], machine.now]
    late = {
        stage: (end - machine.began[0]) / (60 * MINUTES) - share
        for stage, (end, share) in enumerate(zip(ended, ENDS, strict=True), 1)
    }
    return {**late, 0: found.minutes / MINUTES - 1}


@pytest.mark.parametrize(
    "name", [one if one == "quick" else pytest.param(one, marks=pytest.mark.slow) for one in MACHINES]
)
def test_minutes_bound_all_stages_together_and_each_ends_by_its_share(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = overruns(MACHINES[name], monkeypatch)
    assert max(late.values()) <= OVER, late
    assert late[0] > -0.5 or name != "quick"


@pytest.mark.parametrize(
    ("stage", "name", "over"),
    [(2, "slower when it writes", 0), pytest.param(4, "slower when it distils", OVER, marks=pytest.mark.slow)],
)
def test_a_stage_that_does_not_look_at_its_pace_ends_too_late(
    stage: int, name: str, over: float, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing ends .05 before its share otherwise."""
    monkeypatch.setattr(Pace, "fits", lambda _: True)
    own = MACHINES[name]
    late = overruns(Machine(own.of_pass, own.step, own.reading, own.slower), monkeypatch)
    assert late[stage] > over


def test_judging_has_a_quarter_of_the_budget_but_ten_minutes_at_most() -> None:
    assert runs.distilled_by(1200) == 0.76 and runs.distilled_by(3600) == 1 - 600 / 3600


def test_what_cannot_fit_is_refused_before_anything_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(of_pass=1.0)
    with pytest.raises(InvalidParameter, match=r"--minutes 4 are too few: .*; give \d+ or more"):
        overruns(machine, monkeypatch)
    assert machine.now < 60 * MINUTES and not (here / "made-work" / "text").exists()
