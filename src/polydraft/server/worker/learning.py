"""The learner: a process beside the workers, which learns from finished texts and writes versions into the folder."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from polydraft.models.checkpoints.weight_versions import VersionFolder
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Event, Stop
from polydraft.server.worker.served_versions import bytes_to_learn

LEARNING, LOOKED, READS, FAILED = "learning", "looked", "reads", "learning failed"
"""Events: what became of learning since the last one; what came of a comparison; somebody else learns in the folder;
why this one ends."""
NICE = 19
"""The learner waits for everybody else."""
REST = 9.0
"""While texts are written it rests so many times as long as it works: a tenth of the time is its own."""
TOGETHER = 2
"""Texts whose rows a head has in memory at once: it has rows for several drafts behind every place."""
LOOKS_UP = 1.0
"""After so many seconds at most it looks whether everything was forgotten, but for the time of a step or a look."""
TOLD = 1.0
"""Seconds between two events at least, but for those of looks."""
Say = Callable[[Event], None]


def run_learner(settings: Settings, pipe: Connection, plan: Any = None) -> None:
    """Learn until told to stop, or until nobody listens.

    Args:
        settings: the server's.
        pipe: brings lessons as a worker said them, whether texts are written, and the end; takes events.
        plan: how to learn; None for the usual way.
    """
    if settings.apart:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        os.nice(NICE)
        torch.set_num_threads(1)
    folder = VersionFolder(Path(settings.learn or ""))
    with contextlib.suppress(EOFError, OSError):
        try:
            with folder.written() as mine:
                if mine:
                    folder.sweep()
                    _learn(_learner(settings, folder, plan), pipe)
                else:
                    pipe.send(Event(READS))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001  serving goes on, and the log is the server's to write
            pipe.send(Event(FAILED, said={"message": f"{type(error).__name__}: {error}"}))
        finally:
            pipe.close()


def _learner(settings: Settings, folder: VersionFolder, plan: Any) -> Any:
    """Return the learner with a copy of the draft; of the target no more than its ends is kept."""
    from polydraft.server.worker.served import load_served
    from polydraft.training.online.online_learning import LearningPlan, OnlineLearner
    from polydraft.training.online.taught_drafts import taught

    served = load_served(
        replace(settings, learn=None, learn_bytes=None, unlearnt_keys=(), device="cpu", draft_device=None)
    )
    training, network = taught(served.draft, served.target.model)
    most = bytes_to_learn(settings, served.draft, served.target.width)
    is_head = served.draft is not None and bool(served.draft.needs.layers)
    plan = plan or LearningPlan(most_bytes=most, together=TOGETHER if is_head else None)
    return OnlineLearner(training, network, folder, plan)


def lesson_of(said: Mapping[str, Any]) -> Any:
    """Return a finished text as it was said."""
    from polydraft.training.online.lesson_buffer import TaughtText

    found = (
        torch.frombuffer(bytearray(said["states"]), dtype=torch.int16).view(torch.bfloat16).view(len(said["ids"]), -1)
    )
    width = said["width"]
    features = found[:, width:].contiguous() if found.shape[1] > width else None
    return TaughtText(tuple(said["ids"]), said["given"], said["heat"], found[:, :width].contiguous(), features=features)


def _learn(learner: Any, pipe: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
    busy, until, counts, told = False, 0.0, dict[str, float](), clock()
    _say(pipe, learner, counts)
    while True:
        if learner.folder.mark() != learner.mark:
            learner.forget()
            _say(pipe, learner, counts)
        learns = learner.learns
        rest = max(0.0, until - clock()) if learns else LOOKS_UP
        if pipe.poll(min(rest, LOOKS_UP)):
            given = pipe.recv()
            if isinstance(given, Stop):
                return
            if isinstance(given, bool):
                busy, until = given, until if given else 0.0
            elif given["mark"] == learner.mark:  # not what was begun before everything was forgotten
                learner.hear(lesson_of(given))
                _add(counts, "learn_texts")
            continue
        if not learns or clock() < until:
            if counts:
                _say(pipe, learner, counts)
            continue
        begun, looks = clock(), learner.looks
        learner.step()
        _add(counts, "learn_steps")
        if looks:
            found = learner.look()
            pipe.send(Event(LOOKED, said=told_of(found)))
            _add(counts, "learn_looks")
            _add(counts, {"swapped": "learn_swaps", "rolled back": "learn_roll_backs"}.get(found.outcome, ""))
        spent = clock() - begun
        _add(counts, "learn_seconds", spent)
        until = clock() + (REST * spent if busy else 0.0)
        if looks or clock() - told > TOLD:
            told = clock()
            _say(pipe, learner, counts)


def told_of(look: Any) -> dict[str, Any]:
    """Return what the log is told of a comparison."""
    saving = look.saving and {"saving": round(look.saving.share, 5), "error": round(look.saving.error, 5)}
    told = {
        "look": look.number,
        "outcome": look.outcome,
        "version": look.version or None,
        "reason": look.reason or None,
    }
    return {**told, **(saving or {})}


def _add(counts: dict[str, float], name: str, value: float = 1) -> None:
    if name:
        counts[name] = counts.get(name, 0) + value


def _say(pipe: Connection, learner: Any, counts: dict[str, float]) -> None:
    own = learner.folder.in_use()
    number = int(own.version.partition("-")[0] or 0)
    state = {"learn_version": number, "learn_look": own.look, "learn_bytes": learner.buffer.size}
    pipe.send(Event(LEARNING, said={"counts": dict(counts), "state": state}))
    counts.clear()
