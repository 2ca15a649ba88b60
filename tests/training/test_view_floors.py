"""What trained views of the embedded target draft like after minutes of a small recipe: floors, above their beginning.

An adapter and exits are compared with what they were before a step, SPIRe's head with one that begins with new weights.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.prompts.prompt import encode
from polydraft.models import HuggingFaceModel
from polydraft.training import MAKERS, Drafting, HeadRecipe, HeadSize, WritingPlan
from polydraft.training.exits.exit_loss import ExitQuality, ExitTraining
from polydraft.training.heads.loop import measured, train_head
from polydraft.training.heads.losses.eagles import EagleLoss, MtpTraining
from polydraft.training.heads.losses.row_losses import HeadTraining, TargetEnds
from polydraft.training.heads.pruning import pruned
from polydraft.training.heads.shards import Shards, write_shards

pytestmark = pytest.mark.slow
READS = (2,)
"""What an adapter behind two layers reads; the others read the last states, which the text has in any case."""


@cache
def pair() -> polydraft.Pair:
    return polydraft.load_pair()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shards, Shards]:
    return written(tmp_path_factory.mktemp("text"))


def written(folder: Path) -> tuple[Shards, Shards]:
    """Return what is learnt from, and what is held out."""
    prompts = [encode(pair(), one, 64)[0] for one in read_prompt_sets(("humaneval", "python"), 40)]
    plan = WritingPlan(tokens=16_384, length=128, rows=32)
    found = write_shards(HuggingFaceModel(pair().target), prompts, folder, READS, plan)
    return Shards(found.learnt), Shards(found.held_out)


def ends() -> TargetEnds:
    return TargetEnds.of(pair().target)


def learnt(training: HeadTraining, text: tuple[Shards, Shards], folder: Path, rate: float, steps: int) -> Drafting:
    recipe = HeadRecipe(steps=steps, texts=4, matrix_rate=rate, other_rate=rate / 2, measure_every=10**6)
    return train_head(training, *text, folder, recipe)


def adapter() -> HeadTraining:
    torch.manual_seed(1)
    return MAKERS["adapter"].make(pair().target, ends(), READS, HeadSize(drafts=1), None).training


def spire(**changes: Any) -> HeadTraining:
    torch.manual_seed(1)
    return MtpTraining(pruned(pair().target, **changes), ends(), 2, EagleLoss("entropy"))


def test_an_adapter_drafts_better_than_it_began(text: tuple[Shards, Shards], tmp_path: Path) -> None:
    new = adapter()
    before = measured(new, text[1]).overlap[0]
    found = learnt(new, text, tmp_path, 0.01, 60).overlap[0]
    assert found > max(before + 0.03, 0.28)


def test_spires_head_begins_better_than_new_layers_and_learns(text: tuple[Shards, Shards], tmp_path: Path) -> None:
    new = spire()
    before, other = measured(new, text[1]).overlap, measured(spire(begun=False), text[1]).overlap
    found = learnt(new, text, tmp_path, 0.004, 30).overlap
    assert before[0] > other[0] + 0.1 and found[0] > before[0] and found[1] > before[1]


def test_exits_draft_better_and_the_model_is_nearly_as_good(text: tuple[Shards, Shards], tmp_path: Path) -> None:
    training = ExitTraining(pair().target)
    before = ExitQuality.of(training, text[1], 32)
    learnt(training, text, tmp_path, 0.002, 40)
    after = ExitQuality.of(ExitTraining(training.tuned()), text[1], 32)
    assert all(new > old + 0.02 for new, old in zip(after.overlap[3:10], before.overlap[3:10], strict=True))
    assert after.perplexity < 1.2 * before.perplexity
