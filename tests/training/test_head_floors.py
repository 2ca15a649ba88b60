"""What heads of the embedded target draft like after minutes of one fixed recipe: floors, and the order of the kinds.

The figures are those of docs/log.md, less what another machine's rounding may cost.
"""

from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.prompts.prompt import encode
from polydraft.training import HeadPlan, HeadRecipe, HeadSize, MadeHead, WritingPlan, make_head

pytestmark = pytest.mark.slow
STEPS, TOKENS = 60, 120_000
FLOORS = {
    ("medusa", "published"): 1.09,
    ("eagle", "published"): 1.38,
    ("mixing", "published"): 1.35,
    ("dspark", "published"): 1.36,
    ("eagle-3", "acceptance"): 1.30,
}
"""Tokens per target call of a chain, if overlaps on a path were independent."""
SMALLER = {"eagle-3": (3, 2048)}
"""Drafts and rows of kinds that pay a pass over all rows for each draft: so a step takes two seconds, and not eight."""


@cache
def pair() -> polydraft.Pair:
    return polydraft.load_pair()


@cache
def prompts() -> list[Tensor]:
    return [encode(pair(), one, 64)[0] for one in read_prompt_sets(("humaneval", "python"), 40)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


MADE: dict[tuple[str, str], MadeHead] = {}


def made(kind: str, loss: str, work: Path) -> MadeHead:
    """Return a head that learnt by the recipe; the target's text is written once for all of them."""
    if (kind, loss) not in MADE:
        drafts, rows = SMALLER.get(kind, (HeadSize.drafts, None))
        size = HeadSize(drafts=drafts, loss=loss)
        plan = HeadPlan(kind, size, WritingPlan(tokens=TOKENS), HeadRecipe(steps=STEPS), rows)
        MADE[kind, loss] = make_head(pair().target, prompts(), work, work / f"{kind}-{loss}-head", plan)
    return MADE[kind, loss]


@pytest.mark.parametrize(("kind", "loss"), FLOORS, ids=[" ".join(one) for one in FLOORS])
def test_a_head_drafts_as_well_as_it_did(kind: str, loss: str, work: Path) -> None:
    assert made(kind, loss, work).drafting.efficiency > FLOORS[kind, loss]


def test_heads_that_know_the_path_draft_better_than_those_that_do_not(work: Path) -> None:
    medusa = made("medusa", "published", work).drafting.efficiency
    assert made("eagle", "published", work).drafting.efficiency > medusa
    assert made("mixing", "published", work).drafting.efficiency > medusa


def test_learning_what_is_accepted_beats_cross_entropy(work: Path) -> None:
    published = made("mixing", "published", work).drafting.efficiency
    assert published > made("mixing", "entropy", work).drafting.efficiency
