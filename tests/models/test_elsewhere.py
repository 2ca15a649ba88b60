"""Draft models on a device of their own, shown without one by tensors that only say so (`on_device`)."""

from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from on_device import DEVICE, Waits, moved, on_device

import polydraft
from polydraft.drafters import ModelDrafter
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.choices import as_drafter, default_policy, default_verifier
from polydraft.engine.loop.step import begin, step
from polydraft.errors import InvalidParameter
from polydraft.models import HOME, ElsewhereModel, HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text


@pytest.fixture(autouse=True)
def no_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device whose memory could be asked for, or whose launches could be recorded."""
    monkeypatch.setattr("polydraft.models.memory.free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("polydraft.models.fused.fused_pass.Graphs", lambda _: None)


def texts(target: Any, drafter: Any, prompts: Text, temperature: float) -> list[list[int]]:
    params, rows = SamplingParams(temperature), len(prompts.counts)
    method = Method(drafter, default_verifier(drafter, params), default_policy(drafter, params))
    asked = Prompts(prompts, (TargetLaw(params),) * rows, (Ending(20),) * rows, Noise.from_seed(0, rows))
    batch, found = begin(target, method, asked), [list[int]() for _ in range(rows)]
    while batch.going:
        batch, block, _ = step(batch)
        for row, gained in block.rows.items():
            found[row] += gained.tokens
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_model_elsewhere_drafts_the_same_and_no_operation_mixes_devices(rows: int, temperature: float) -> None:
    torch.manual_seed(0)
    target = tiny_model()
    draft = perturbed(target, 0.3)
    tokens, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])[:rows], torch.full((rows,), 4)
    alone = texts(HuggingFaceModel(target), ModelDrafter(HuggingFaceModel(draft)), Text(tokens, lengths), temperature)
    draft.__dict__[HOME] = DEVICE
    with Waits():
        there = HuggingFaceModel(moved(target))
        drafter = as_drafter(draft)
        assert isinstance(drafter, ModelDrafter) and isinstance(drafter.model, ElsewhereModel)
        assert drafter.model.device.type == "cpu" and drafter.model.facts.device == DEVICE
        found = texts(there, drafter, Text(on_device(tokens), on_device(lengths)), temperature)
    assert found == alone


@pytest.mark.parametrize("draft", [None, "self:int8", "pair-head", "pair-draft < ngram"])
def test_a_device_is_for_a_draft_model(draft: str | None) -> None:
    with pytest.raises(InvalidParameter, match="draft_device='cpu' is for a draft model"):
        polydraft.load("pair", draft, draft_device="cpu")


def test_a_draft_model_elsewhere_is_not_compiled_and_one_beside_the_target_is_no_other() -> None:
    pair = polydraft.load("pair", "pair-draft", draft_device="cpu")
    assert HOME not in vars(pair.draft)
    pair.draft.__dict__[HOME] = DEVICE
    with pytest.raises(InvalidParameter, match="A draft model on a device of its own is not compiled"):
        as_drafter(pair.draft, compile=True)
