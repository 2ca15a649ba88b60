"""Few frames lie between a drafter and the pass that it asks for: what happens between can be read in one go."""

import inspect

import pytest
import torch
from doubles import perturbed
from transformers import PreTrainedModel

import polydraft
from polydraft import HuggingFaceModel, ModelDrafter

MOST = 5


def test_few_frames_lie_between_a_draft_and_its_pass(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    own, distances = HuggingFaceModel.forward, set[int]()

    def forward(self: HuggingFaceModel, *inputs: object, **named: object) -> object:
        names = [frame.function for frame in inspect.stack(0)[1:] if "/polydraft/" in frame.filename]
        if self.model is not target and "draft" in names:
            distances.add(names.index("draft"))
        return own(self, *inputs, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(HuggingFaceModel, "forward", forward)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.1)))
    for policy in (3, "2,2", "best-first:6"):
        polydraft.generate(target, torch.tensor([[3, 1, 4]]), drafter=drafter, policy=policy, max_new_tokens=6)
    assert distances and max(distances) <= MOST, distances
