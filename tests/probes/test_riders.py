"""A drafter whose riders are scored beside its tree, and whose next draft comes from their logits."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft.drafters import Drafter, DraftRequest, Needs, Session, given_chain
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Riders

COUNT = 3


@dataclass(eq=False)
class Guessing(Drafter):
    """Rides guesses behind the text, each as a learnt embedding that is a token's own; drafts what they lead to."""

    target: PreTrainedModel
    name = "guessing"
    needs = Needs(riders=COUNT)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Tensor:
        return torch.arange(COUNT).repeat(len(text.counts), 1)

    def draft(self, state: Tensor, request: DraftRequest) -> tuple[Draft, Tensor]:
        text = request.text
        draft = given_chain(text, [row.numpy() for row in state])
        batch, nodes = draft.tree.tokens.shape
        sees = torch.zeros(batch, COUNT, nodes + COUNT, dtype=torch.bool)
        sees[..., 0] = True
        sees[..., nodes:] = torch.ones(COUNT, COUNT).tril().bool()
        places = torch.arange(1, COUNT + 1).repeat(batch, 1)
        table = self.target.get_input_embeddings().weight.detach()
        riders = Riders(state + self.target.config.vocab_size, places, sees, torch.ones_like(state).bool())
        return Draft(**{**vars(draft), "riders": riders, "embeddings": table}), state

    def commit(self, state: Tensor, step: Step) -> Tensor:
        assert step.scored.riders is not None
        for row, count in enumerate(step.text.counts):
            tokens = torch.cat([step.text.tokens[row, :count], state[row]])
            plain = self.target(tokens.unsqueeze(0)).logits[0, count:]
            torch.testing.assert_close(step.scored.riders[row], plain)
        return step.scored.riders.argmax(dim=-1)


def test_riders_are_scored_as_text_and_change_nothing(target: PreTrainedModel, beside: Any) -> None:
    beside(Guessing(target), COUNT)


def test_more_riders_than_were_announced_cost_the_drafts_and_not_the_text(target: PreTrainedModel) -> None:
    drafter, ids = Guessing(target), torch.tensor([[3, 1, 4]])
    plain = polydraft.generate(target, ids, drafter="none", max_new_tokens=6)
    drafter.needs = Needs(riders=COUNT - 1)
    with pytest.warns(RuntimeWarning, match="has 3 riders, but its drafter says that it brings 2 at most"):
        found = polydraft.generate(target, ids, drafter=drafter, policy=COUNT, max_new_tokens=6)
    assert torch.equal(found.sequences, plain.sequences)
