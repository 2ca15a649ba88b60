"""Drafters that run the target's first layers over the target's own keys; verification may go on from their states."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from doubles import passes_of
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft.drafters import Drafter, DraftRequest, Needs, Session
from polydraft.models import LayerSet
from polydraft.probs import SamplingParams, whole_row
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Frontier, Resume, grow

LAYERS = 2


@dataclass(frozen=True, eq=False)
class EarlyExit(Drafter):
    """Drafts with the first layers and the target's own head."""

    resumes: bool
    name = "early exit"
    needs = Needs(target=True)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> None: ...

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        assert request.target is not None
        model = request.target.model.variant(layers=LayerSet(exit=LAYERS))
        view = replace(request.target.viewed(model), layers=(LAYERS,)).at(text)

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            return whole_row(view.grow(text, frontier), SamplingParams())

        draft = grow(text.last(), policy, scheme, propose, noise)
        if self.resumes:
            scored, _ = view.score(text, draft.tree)
            draft = replace(draft, resume=Resume(LAYERS, scored.nodes[LAYERS]))
        return draft, state

    def commit(self, state: None, step: Step) -> None: ...


@pytest.mark.long(2)
@pytest.mark.parametrize("policy", [4, "2,2,1"])
@pytest.mark.parametrize("resumes", [False, True])
def test_the_targets_own_keys_serve_its_first_layers(
    resumes: bool, policy: object, target: PreTrainedModel, beside: Any
) -> None:
    assert beside(EarlyExit(resumes), policy).statistics.accepted > 0
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with passes_of(target) as passes:  # cut models are others
        steps = polydraft.generate(
            target, ids, drafter=EarlyExit(resumes), policy=policy, max_new_tokens=16
        ).statistics.steps
    assert len(passes) == 1 + (0 if resumes else steps), "after the prompt, verification runs the last layers alone"


def test_it_drafts_for_some_rows_of_a_running_batch(target: PreTrainedModel) -> None:
    prompts, options = {"a": [3, 1, 4, 1, 5], "b": [2, 7, 1], "c": [4, 4]}, {"max_new_tokens": 12, "do_sample": False}
    plain = {one.name: one.tokens for one in polydraft.generate_many(target, prompts, drafter="none", **options)}
    own = {name: {"drafter": EarlyExit(resumes=False), "policy": 3} for name in ("a", "c")}
    for common in ({"drafter": "none"}, {"drafter": EarlyExit(resumes=True), "policy": 3}):
        run = polydraft.generate_many(target, prompts, batch_size=2, per_prompt=own, **common, **options)
        texts = {one.name: one for one in run}
        assert {name: text.tokens for name, text in texts.items()} == plain and not run.statistics.fallback
        assert all(texts[name].accepted for name in own)
