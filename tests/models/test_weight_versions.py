"""Versions of weights on disk: what is there after whoever wrote them was killed in the middle."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polydraft.errors import CheckpointError
from polydraft.models.checkpoints.weight_versions import VersionFolder, put_weights, rough_digest, weights_digest

KILLS, SHAPE = 50, (16, 16)


def write_for_ever(path: Path, seed: int) -> None:
    """Write version after version, with a delay before everything that the disk is told."""
    chance = random.Random(seed)

    def late(done: Callable[..., Any]) -> Callable[..., Any]:
        def doing(*given: Any) -> Any:
            time.sleep(0.01 * chance.random())
            return done(*given)

        return doing

    os.replace, os.fsync = late(os.replace), late(os.fsync)
    folder = VersionFolder(path)
    folder.sweep()
    while True:
        look = folder.in_use().look + 1
        version = folder.add({"weights": torch.full(SHAPE, float(look))}, {"look": look})
        folder.use(version.name, look, folder.mark())
        folder.prune()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_is_killed_at_any_moment_leaves_the_last_whole_version(tmp_path: Path) -> None:
    chance, folder, before = random.Random(0), VersionFolder(tmp_path), 0
    for number in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(tmp_path, number))
        process.start()
        time.sleep(0.02 + 0.3 * chance.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        own = folder.in_use()
        assert own.look >= before, "what was used once is not lost"
        before = own.look
        for version in folder.versions():
            weights = folder.read(version)["weights"]
            assert bool((weights == version.facts["look"]).all())
        if own.version:
            assert folder.version(own.version).facts["look"] == own.look
    folder.sweep()
    assert before > KILLS // 2 and not [*tmp_path.rglob(".part-*/*")]


def test_digests_tell_names_shapes_and_numbers_apart() -> None:
    some = {"a": torch.ones(2, 3), "b": torch.zeros(2)}
    others = [
        {"a": torch.ones(3, 2), "b": torch.zeros(2)},
        {"a": torch.ones(2, 3), "c": torch.zeros(2)},
        {"a": torch.ones(2, 3), "b": torch.full((2,), 1e-30)},
        {"a": torch.ones(2, 3)},
    ]
    assert weights_digest(some) == weights_digest({"b": some["b"], "a": some["a"].double()})
    assert len({weights_digest(one) for one in (some, *others)}) == 5
    one, other = (torch.nn.Linear(3, 2) for _ in range(2))
    assert rough_digest(one) == rough_digest(one) != rough_digest(other)


def test_weights_of_another_model_are_refused() -> None:
    network = torch.nn.Linear(3, 2)
    own = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    put_weights(network, own)
    assert float(network(torch.ones(3)).sum().detach()) == 8
    for wrong in ({"weight": own["weight"]}, {**own, "bias": torch.ones(3)}, {**own, "bias": own["bias"] * torch.nan}):
        with pytest.raises(CheckpointError):
            put_weights(network, wrong)
    assert float(network(torch.ones(3)).sum().detach()) == 8, "and nothing was changed"


def test_a_folder_that_is_not_there_has_nothing_in_use(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path / "none")
    own = folder.in_use()
    assert (own.version, own.look, own.pinned, own.forgotten) == ("", 0, False, "") and not folder.versions()
    with pytest.raises(CheckpointError, match="has no version"):
        folder.version("1-00000000")
