"""A drafter that reads the hidden states of two layers: over the prompt, and at accepted nodes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import Drafter, DraftRequest, Needs, Session, given_chain
from polydraft.models import Layer
from polydraft.reading import Features, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft

Seen = dict[tuple[int, int, Layer], Tensor]


@dataclass(eq=False)
class Reading(Drafter):
    """Drafts by the target's own head on the state of the last token that was read, and notes all states."""

    needs = Needs((1, "final"))
    name = "reading"
    seen: Seen = field(default_factory=dict)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Any:
        assert session.target is not None
        return session.target.model

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        return state if features is None else self.noted(state, features)

    def noted(self, state: Any, features: Features) -> Any:
        for row, column in (features.places >= 0).nonzero().tolist():
            for layer, states in features.states.items():
                self.seen[row, int(features.places[row, column]), layer] = states[row, column]
        return state

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        text, policy = request.text, request.policy
        last = [self.seen.get((row, count - 2, "final")) for row, count in enumerate(text.counts)]
        known = [torch.zeros(16, dtype=torch.float64) if one is None else one for one in last]
        following = state.unembedded(torch.stack(known).unsqueeze(1)).argmax(dim=-1)
        return given_chain(text, [row.repeat(policy.shape.depth).numpy() for row in following]), state

    def commit(self, state: Any, step: Step) -> Any:
        return self.noted(state, step.features)


def test_states_of_every_committed_token_are_handed_out(target: PreTrainedModel, beside: Any) -> None:
    drafter = Reading()
    found = beside(drafter)
    for row, (text, prompt) in enumerate(zip(found.sequences, (11, 3, 1), strict=True)):
        tokens = text[11 - prompt :]
        hidden = target(tokens.unsqueeze(0), output_hidden_states=True).hidden_states
        for layer, states in {1: hidden[1], "final": hidden[-1]}.items():
            ours = torch.stack([drafter.seen[row, place, layer] for place in range(len(tokens) - 1)])
            torch.testing.assert_close(ours, states[0, : len(tokens) - 1])
