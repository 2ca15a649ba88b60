"""One batch whose rows have four drafters and two verifiers, of which one drafter fails midway."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from doubles import perturbed
from transformers import PreTrainedModel

import polydraft
from polydraft import BlockVerification, HuggingFaceModel, ModelDrafter, NgramDrafter, NoDraft
from polydraft.drafters import DraftRequest, LookupFirst

PROMPTS = {
    "plain": [3, 1, 4],
    "looked up": [2, 7, 2, 7, 2],
    "drafted": [5, 9, 2, 6],
    "both": [4, 4, 4, 1],
    "failing": [8, 1],
}


@dataclass(frozen=True, eq=False)
class Failing(ModelDrafter):
    """Fails when its text has so many tokens."""

    def draft(self, state: Any, request: DraftRequest) -> Any:
        if max(request.text.counts) > 12:
            raise RuntimeError("no more")
        return super().draft(state, request)


@pytest.mark.long(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_has_its_own_and_its_single_text(temperature: float, target: PreTrainedModel) -> None:
    draft = HuggingFaceModel(perturbed(target, 0.1))
    own: dict[str, dict[str, Any]] = {
        "plain": {"drafter": NoDraft()},
        "looked up": {"drafter": NgramDrafter()},
        "drafted": {"drafter": ModelDrafter(draft), "verifier": BlockVerification(), "policy": 3},
        "both": {"drafter": LookupFirst(ModelDrafter(draft)), "verifier": BlockVerification(), "policy": 3},
        "failing": {"drafter": Failing(draft), "verifier": BlockVerification(), "policy": 2},
    }
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "eos_token_id": None}
    options |= {"top_k": 0} if temperature else {}
    with pytest.warns(RuntimeWarning, match="no more"):
        run = polydraft.generate_many(target, PROMPTS, batch_size=5, seed=3, per_prompt=own, drafter="none", **options)
        texts = {one.name: one for one in run}
    assert "no more" in run.statistics.fallback
    for name, prompt in PROMPTS.items():
        mine = own[name] if name != "failing" else {"drafter": "none"}
        if name == "failing" and temperature:
            continue  # which uniforms are used depends on where it failed; the law is proved elsewhere
        alone = polydraft.generate(target, torch.tensor([prompt]), seed=texts[name].seed, **mine, **options)
        assert alone.sequences[0, len(prompt) :].tolist() == texts[name].tokens, name
    assert texts["drafted"].accepted and texts["both"].accepted and texts["failing"].accepted
    assert texts["failing"].target_calls > texts["failing"].accepted
