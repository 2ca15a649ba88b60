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
from polydraft.training import HeadPlan, HeadRecipe, HeadSize, MadeHead, WritingPlan, make_head, usual_form

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
SHORT_FLOORS = {
    "hydra": 1.39,
    "hydra++": 1.48,
    "mlp": 1.16,
    "arctic-lstm": 1.18,
    "redrafter": 1.2,
    "joined-walk": 1.38,
    "hass": 1.48,
    "mtp": 1.58,
}
"""The same of four drafts after 60 steps on texts of 128 tokens; by the weights that they begin with 1.04 to 1.11."""
SHORT_ROWS = {"joined-walk": 512, "mtp": 512}
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


@pytest.mark.parametrize("kind", SHORT_FLOORS)
def test_a_head_drafts_as_well_as_it_did_after_short_texts(kind: str, work: Path) -> None:
    recipe, texts = HeadRecipe(steps=STEPS), WritingPlan(tokens=TOKENS // 2, length=128)
    plan = HeadPlan(
        kind, HeadSize(drafts=4), texts, recipe, SHORT_ROWS.get(kind), usual_form(kind, SHORT_ROWS.get(kind))
    )
    found = make_head(pair().target, prompts(), work / "short", work / f"{kind}-short", plan).drafting
    assert found.efficiency > SHORT_FLOORS[kind]


@pytest.mark.parametrize("kind", ["hydra", "joined-walk"])
def test_a_head_that_learnt_nothing_is_below_all_floors(kind: str, work: Path) -> None:
    nothing, texts = HeadRecipe(steps=1, matrix_rate=0.0, other_rate=0.0), WritingPlan(tokens=TOKENS // 2, length=128)
    plan = HeadPlan(
        kind, HeadSize(drafts=4), texts, nothing, SHORT_ROWS.get(kind), usual_form(kind, SHORT_ROWS.get(kind))
    )
    found = make_head(pair().target, prompts(), work / "short", work / f"{kind}-untrained", plan).drafting
    assert found.efficiency < min(SHORT_FLOORS.values())


def test_heads_that_know_the_path_draft_better_than_those_that_do_not(work: Path) -> None:
    medusa = made("medusa", "published", work).drafting.efficiency
    assert made("eagle", "published", work).drafting.efficiency > medusa
    assert made("mixing", "published", work).drafting.efficiency > medusa


def test_learning_what_is_accepted_beats_cross_entropy(work: Path) -> None:
    published = made("mixing", "published", work).drafting.efficiency
    assert published > made("mixing", "entropy", work).drafting.efficiency
