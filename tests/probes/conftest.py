"""What the probes share: small models, prompts of several lengths, and a run beside plain decoding."""

from collections.abc import Callable, Sequence

import pytest
import torch
from doubles import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft.drafters import Drafter
from polydraft.engine import GenerationOutput

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [4]]
Beside = Callable[..., GenerationOutput]


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=3)


@pytest.fixture
def beside(target: PreTrainedModel) -> Beside:
    """Generate greedily with a drafter, alone and in a batch, and require plain decoding's text; return the batch."""

    def run(
        drafter: Drafter,
        policy: object = 3,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        model: PreTrainedModel = target,
    ) -> GenerationOutput:
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        for part in ([prompts[0]], prompts):
            ids, mask = padded(part)
            plain = polydraft.generate(model, ids, attention_mask=mask, drafter="none", **options)
            found = polydraft.generate(model, ids, attention_mask=mask, drafter=drafter, policy=policy, **options)
            assert isinstance(found, GenerationOutput) and isinstance(plain, GenerationOutput)
            assert torch.equal(found.sequences, plain.sequences) and not found.statistics.fallback
            assert found.statistics.drafted > 0
        return found

    return run


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as left-padded rows, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask
