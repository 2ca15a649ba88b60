"""The law of the text is the target's with drafts that earlier steps found, summed over all verdicts of all steps."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from choices import Toy, distance, law_of

from polydraft import JacobiDrafter, LookaheadDrafter, OuroborosDrafter
from polydraft.drafters import Drafter, DraftRequest, Session
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.schemes import Given, Scheme
from polydraft.trees import Chain, Draft, TreePolicy
from polydraft.verifiers import NaiveMatch, TopDown

TARGET, SMALL = Toy(3, 0), Toy(2, 0)
RULE, NEAR = TopDown(NaiveMatch(Given())), 1e-12


@dataclass
class Noting(Drafter):
    """Passes everything on, and notes the sizes of trees, and that a step taken again has the same."""

    inner: Drafter
    most: int = 0
    branches: int = 0
    name = "noting"

    def __post_init__(self) -> None:
        self.needs = self.inner.needs

    def check(self, scheme: Scheme) -> None:
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        return self.inner.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        return self.inner.read(state, text, features)

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        draft, after = self.inner.draft(state, request)
        again, _ = self.inner.draft(state, request)
        assert isinstance(draft, Draft) and isinstance(again, Draft)
        assert draft.tree.tokens.tolist() == again.tree.tokens.tolist()
        self.most = max(self.most, int(draft.tree.valid[0].sum()) - 1)
        self.branches = max(self.branches, draft.tree.topology.width)
        return draft, after

    def commit(self, state: Any, step: Step) -> Any:
        return self.inner.commit(state, step)


DRAFTERS = {
    "jacobi": JacobiDrafter,
    "lookahead": partial(LookaheadDrafter, 3, 2, 3),
    "lookahead of pairs": partial(LookaheadDrafter, 2, 3, 2),
    "lookahead, prompt too": partial(LookaheadDrafter, 3, 2, 2, True),
    "ouroboros": lambda: OuroborosDrafter(Toy(2, 1), 1, 2, 3, 2, 2),
}


def policy_of(drafter: Drafter) -> TreePolicy:
    usual = drafter.defaults(SamplingParams())
    return Chain(3) if usual is None or usual.policy == Chain(8) else usual.policy


ALONE, BESIDE = [[1, 0, 1, 1, 0]], [[1, 0, 1, 0], [0, 0, 1, 1]]
LONG = ("jacobi", "lookahead, prompt too", "ouroboros")
"""Beside another text these take seconds each."""
CASES = [pytest.param(name, ALONE, id=f"{name}-alone") for name in DRAFTERS] + [
    pytest.param(name, BESIDE, id=f"{name}-beside another", marks=[pytest.mark.slow] if name in LONG else [])
    for name in DRAFTERS
]


@pytest.mark.long(2)
@pytest.mark.parametrize(("name", "prompts"), CASES)
def test_all_steps(name: str, prompts: list[list[int]]) -> None:
    noting, new = Noting(DRAFTERS[name]()), 6 if len(prompts) == 1 else 3
    law, failures = law_of(SMALL, noting, RULE, policy_of(noting.inner), prompts, new)
    assert not failures
    assert distance(law, SMALL.texts(prompts[0], new)) < NEAR
    assert noting.most > 0
    if name not in ("jacobi", "lookahead of pairs") and len(prompts) == 1:
        assert noting.branches > 1, "siblings are verified too"


@pytest.mark.long(1)
@pytest.mark.parametrize("name", ["jacobi", "lookahead, prompt too", "ouroboros"])
def test_three_tokens(name: str) -> None:
    drafter = OuroborosDrafter(Toy(3, 1), 1, 2, 2, 2, 3) if name == "ouroboros" else DRAFTERS[name]()
    law, failures = law_of(TARGET, drafter, RULE, policy_of(drafter), [[1, 0, 2, 1, 0]], 4)
    assert not failures and distance(law, TARGET.texts([1, 0, 2, 1, 0], 4)) < NEAR
