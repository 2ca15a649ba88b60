"""A machine of a given speed for alignments: its clock goes on by what passes and steps take there, and no more."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from polydraft.bench.aligning import align_stages as stages
from polydraft.bench.aligning.form_costs import FormCost
from polydraft.models import HuggingFaceModel
from polydraft.training.alignment.draft_training import DraftTraining

PAYS, LOSES = FormCost((1.1, 1.15, 1.2, 1.25, 1.3), 0.05), FormCost((2.1, 3.1, 4.1, 5.1, 6.1), 1.0)
PROMPTS = [f"def f{number}(a):\n    return" for number in range(12)]


@dataclass
class Machine:
    """Seconds of a pass over one token, of a step's pass forth and back, and of one over held-out text.

    Args:
        slower: how many times slower it is from a stage on, by the stage's number.
    """

    of_pass: float = 0.001
    step: float = 0.01
    reading: float = 0.01
    slower: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    speed: float = 1.0
    began: list[float] = field(default_factory=list)

    def clock(self) -> float:
        """Return the time; a look at it takes a little too."""
        self.now += 1e-6
        return self.now

    def spend(self, seconds: float) -> None:
        """Let work be done that takes so long where nothing is slower."""
        self.now += seconds * self.speed

    def say(self, text: str) -> None:
        """Note when a stage begins."""
        if text.startswith("Stage"):
            self.began.append(self.now)
            self.speed = self.slower.get(len(self.began), self.speed)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let passes and steps be this machine's."""
        ways: list[tuple[type, str, Callable[[tuple[Any, ...]], float]]] = [
            (HuggingFaceModel, "forward", self._pass),
            (DraftTraining, "forward", lambda _: self.step),
            (DraftTraining, "chains", lambda _: self.reading),
        ]
        for owner, name, cost in ways:
            monkeypatch.setattr(owner, name, self._timed(getattr(owner, name), cost))

    def _pass(self, given: tuple[Any, ...]) -> float:
        """Return what a pass takes; the draft model, which has one layer, is ten times as fast."""
        model, tokens = given[:2]
        return self.of_pass * (1 + tokens.numel() / 64) * (0.1 if model.layers == 1 else 1)

    def _timed(self, own: Callable[..., Any], cost: Callable[[tuple[Any, ...]], float]) -> Callable[..., Any]:
        @wraps(own)
        def timed(*given: Any, **named: Any) -> Any:
            self.spend(cost(given))
            return own(*given, **named)

        return timed


def prepared(folders: tuple[Path, Path], here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a target and a draft, where everything pays and no arm times its passes."""
    monkeypatch.chdir(here)
    (here / "target").symlink_to(folders[0])
    (here / "draft").symlink_to(folders[1])
    rows = [json.dumps({"prompt": one}) for one in PROMPTS]
    (here / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv("POLYDRAFT_MEASURE", "no")
    monkeypatch.setattr(stages, "cost_of", lambda *_: PAYS)
    monkeypatch.setattr(stages, "ROWS", (4, 8))  # what is written here takes real time
    return here
