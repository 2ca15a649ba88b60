"""A server whose learner is in a hurry: looks come within seconds, and each step of a change on disk comes late.

`python -c "import hasty_server; hasty_server.main()" serve ...` takes what `polydraft serve` takes. With HASTY=all in
the environment all new weights pass, so that versions change without an end.
"""

import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LATEST = 0.1
"""Seconds that a step may be late by."""


def run_learner(settings: Any, pipe: Connection) -> None:
    """Be a learner's process."""
    from polydraft.server.worker import learning
    from polydraft.training.online import online_learning
    from polydraft.training.online.online_learning import LearningPlan
    from polydraft.training.online.version_gate import Saving

    plan = LearningPlan(rate=1e-3, texts=8, steps=4, least=8, held_texts=4, held_tokens=50, most_bytes=64 << 20)
    if os.environ.get("HASTY") == "all":
        Saving.is_worse, Saving.is_better = (lambda *_: False), (lambda *_: True)
        online_learning.OnlineLearner._is_slower = lambda *_: False
    chance = random.Random()

    def late(does: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            time.sleep(LATEST * chance.random())
            return does(*given, **named)

        return done

    os.replace, os.fsync, os.nice = late(os.replace), late(os.fsync), lambda _: 0
    learning.run_learner(settings, pipe, plan=plan)


def main() -> None:
    """Run the command."""
    from polydraft.server.front import learners
    from polydraft_command import main as command

    learners.run_learner = run_learner
    command()
