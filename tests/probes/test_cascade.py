"""A drafter whose draft is another decode loop: a small model drafts for a middle one, whose text is the draft."""

from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2
from transformers import PreTrainedModel

import polydraft
from polydraft import BlockVerification, Chain, HuggingFaceModel, ModelDrafter, NestedDrafter

VOCAB, SAMPLES, FALSE_ALARM = 6, 1500, 1e-6


def cascade(target: PreTrainedModel) -> NestedDrafter:
    middle, small = HuggingFaceModel(perturbed(target, 0.1)), HuggingFaceModel(perturbed(target, 0.2))
    return NestedDrafter(middle, ModelDrafter(small), BlockVerification(), Chain(2))


def test_its_text_is_the_targets(target: PreTrainedModel, beside: Any) -> None:
    assert beside(cascade(target), 4).statistics.accepted > 0


@pytest.mark.slow
def test_its_law_is_the_targets() -> None:
    target = tiny_model("llama", VOCAB)
    ids = torch.tensor([[2, 3, 5, 2]]).repeat(SAMPLES, 1)
    options = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
    found = polydraft.generate(target, ids, drafter=cascade(target), verifier="block", policy=3, seed=1, **options)
    assert found.statistics.acceptance_rate > 0.3 and not found.statistics.fallback
    texts = found.sequences[:, 4:] @ torch.tensor([VOCAB**2, VOCAB, 1])
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    logits = target(torch.cat([ids[:1].repeat(len(every), 1), every], dim=1)).logits[:, 3:6]
    law = logits.softmax(dim=-1).gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(dim=-1).detach()
    expected, seen = SAMPLES * law, torch.bincount(texts, minlength=VOCAB**3)
    rare = expected < 5
    pooled = [torch.cat([one[~rare], one[rare].sum().unsqueeze(0)]) for one in (expected, seen.double())]
    statistic = float(((pooled[1] - pooled[0]) ** 2 / pooled[0]).sum())
    assert chi2.sf(statistic, len(pooled[0]) - 1) > FALSE_ALARM
