"""Training Medusa's heads: what is asked of which head, that it is learnt, and that the drafter drafts the same."""

from functools import cache

import pytest
import torch
from doubles import tiny_model
from heads import of_medusa
from torch import Tensor, nn

from polydraft.drafters import DraftRequest, Session
from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.schemes import IID
from polydraft.training.heads.losses.last_state_training import MedusaTraining, asked_for, new_heads
from polydraft.training.heads.losses.row_losses import (
    TargetEnds,
    agreement,
    lk_alpha,
    lk_lambda,
    soft_cross_entropy,
    total_variation,
)
from polydraft.trees import Chain

VOCAB, WIDTH, LENGTH, DRAFTS = 24, 16, 14, 3


@cache
def batch() -> dict[str, Tensor]:
    """Return texts that a target has read, of which it wrote the later part."""
    ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    model = tiny_model("llama", VOCAB, dtype=torch.float32)
    with torch.no_grad():
        found = model(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[:, :4] = 0
    valid[1, 9:] = 0
    final = found.hidden_states[-1]
    return {"ids": ids, "valid": valid, "features": final, "final": final, "lse": found.logits.logsumexp(-1)}


def ends(tokens: Tensor | None = None) -> TargetEnds:
    return TargetEnds.of(tiny_model("llama", VOCAB, dtype=torch.float32), tokens)


def changed(heads: MedusaHeads) -> MedusaHeads:
    """Return heads whose blocks do something."""
    stream = torch.Generator().manual_seed(2)
    for weights in heads.parameters():
        weights.data += 0.2 * torch.randn(weights.shape, generator=stream)
    return heads


def law(head: MedusaHead, state: Tensor, target: TargetEnds) -> Tensor:
    for linear in head.linears:
        turned = linear.weight @ state + linear.bias
        state = state + turned * torch.sigmoid(turned)
    rows = target.rows if head.lm_head is None else head.lm_head.weight
    return (rows @ state).softmax(-1)


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("tokens", [None, torch.tensor([*range(0, VOCAB, 2)])], ids=["all", "fewer"])
def test_losses_and_overlaps_are_those_of_each_place_by_itself(own_rows: bool, tokens: Tensor | None) -> None:
    target, given = ends(tokens), batch()
    heads = changed(new_heads(target, DRAFTS, 2, own_rows=own_rows))
    found = MedusaTraining(heads, target)(**given)
    model = tiny_model("llama", VOCAB, dtype=torch.float32)
    with torch.no_grad():
        true = model(given["ids"]).logits.softmax(-1)
    every = [*range(VOCAB)] if tokens is None else tokens.tolist()
    total = 0.0
    for draft in range(DRAFTS):
        losses, overlaps = [], []
        for row in range(4):
            for place in range(LENGTH - draft - 2):
                if not given["valid"][row, place + draft + 2]:
                    continue
                q = law(heads.head(draft), given["final"][row, place], target)
                label = int(given["ids"][row, place + draft + 2])
                losses.append(-q[every.index(label)].log() if label in every else torch.tensor(0.0))
                overlaps.append(torch.minimum(q, true[row, place + draft + 1, every]).sum())
        assert int(found["count"][draft]) == len(losses)
        torch.testing.assert_close(found["overlap"][draft], torch.stack(overlaps).mean().detach(), rtol=1e-4, atol=1e-5)
        total += 0.8**draft * float(torch.stack(losses).mean().detach())
    assert float(found["loss"].detach()) == pytest.approx(total, rel=1e-4)


def test_what_is_asked_for() -> None:
    valid = torch.tensor([[False, False, True, True, True], [True, False, False, True, False]])
    asked = asked_for(valid, 2)
    assert asked[..., 0].tolist() == [[True, True, True, False, False], [False, True, False, False, False]]
    assert asked[..., 1].tolist() == [[True, True, False, False, False], [True, False, False, False, False]]
    given = {**batch(), "valid": torch.zeros_like(batch()["valid"])}
    found = MedusaTraining(new_heads(ends(), 2), ends())(**given)
    assert float(found["loss"].detach()) == 0 and found["count"].tolist() == [0, 0] == found["overlap"].tolist()


def test_what_is_not_asked_for_does_not_count() -> None:
    target, given = ends(), batch()
    training = MedusaTraining(changed(new_heads(target, DRAFTS)), target)
    strange = {**given, "ids": given["ids"].clone()}
    strange["ids"][1, 9:] = 0  # labels that are not valid
    torch.testing.assert_close(training(**strange)["loss"], training(**given)["loss"])
    few = MedusaTraining(training.heads, target, places=2)(**given)
    assert 0 < int(few["count"].max()) <= 8 and bool(torch.isfinite(few["loss"]))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own_rows", [False, True])
def test_new_heads_predict_what_the_target_does(layers: int, own_rows: bool) -> None:
    target, states = ends(), batch()["final"]
    training = MedusaTraining(new_heads(target, DRAFTS, layers, own_rows=own_rows), target)
    for draft in range(DRAFTS):
        assert torch.equal(training.logits(draft, states), target.output(states))


@pytest.mark.parametrize(
    "row_loss",
    [None, soft_cross_entropy, total_variation, lk_alpha, lk_lambda],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_steps_lower_the_loss_and_reach_all_weights(row_loss: object) -> None:
    target, given = ends(), batch()
    training = MedusaTraining(new_heads(target, DRAFTS, 2, own_rows=True), target, row_loss=row_loss)
    optimiser = torch.optim.Adam(training.parameters(), lr=1e-2)
    first = training(**given)
    first["loss"].backward()
    assert all(weights.grad is not None and bool(weights.grad.abs().sum() > 0) for weights in training.parameters())
    for _ in range(60):
        optimiser.zero_grad()
        training(**given)["loss"].backward()
        optimiser.step()
    last = training(**given)
    assert float(last["loss"].detach()) < 0.8 * float(first["loss"].detach())
    if row_loss is not None:
        assert bool((last["overlap"] > first["overlap"]).all())
    assert not any("rows" in name for name, _ in training.named_parameters())


@pytest.mark.parametrize("own_rows", [False, True])
def test_the_drafter_drafts_what_was_trained(own_rows: bool) -> None:
    """The row of draft i below the last token is that of head i at the token before, in training's own words."""
    target, given = ends(), batch()
    heads = changed(new_heads(target, DRAFTS, own_rows=own_rows))
    training, drafter = MedusaTraining(heads, target), of_medusa(heads, shortlist_size=VOCAB)
    text = Text(given["ids"], torch.full((4,), LENGTH))
    reader = Reader.new(HuggingFaceModel(tiny_model("llama", VOCAB, dtype=torch.float32)), 4, 40, ("final",))
    state = drafter.start(text, Session(SamplingParams(), 40, VOCAB, reader))
    state = drafter.read(state, text, reader.catch_up(text)[1])
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Chain(DRAFTS), Noise.from_seed(0, 4)))
    for depth in range(DRAFTS):
        wanted = training.logits(depth, given["final"][:, LENGTH - 2]).softmax(-1)
        torch.testing.assert_close(
            draft.probs[:, depth].float(),
            wanted.gather(-1, draft.shortlist[:, depth]).detach(),
            rtol=1e-3,
            atol=1e-5,
        )


def test_training_overlap_is_what_drafts_are_worth() -> None:
    """Where the head's row is the target's own law, all of it overlaps."""
    target, given = ends(), batch()
    head = MedusaHead(WIDTH, 1, nn.Linear(WIDTH, VOCAB, bias=False))
    head.lm_head.weight.data = target.rows.clone()
    training = MedusaTraining(MedusaHeads([head], WIDTH), target)
    shifted = {
        **given,
        "final": given["final"][:, :1].expand(-1, LENGTH, -1),
        "lse": given["lse"][:, :1].expand(-1, LENGTH),
    }
    assert float(training(**shifted)["overlap"][0]) == pytest.approx(1, abs=1e-5)
    rows = torch.tensor([[0.5, 0.5, 0.0]])
    assert float(agreement(rows.log(), torch.tensor([[0.2, 0.5, 0.3]]))) == pytest.approx(0.7)


def test_other_tokens_are_refused() -> None:
    tokens = torch.tensor([1, 2, 3])
    with pytest.raises(InvalidParameter, match="The heads draft other tokens than the 24 of the target's rows"):
        MedusaTraining(new_heads(ends(tokens), 2), ends())
    with pytest.raises(InvalidParameter, match="other tokens than the 3 of the target's rows"):
        MedusaTraining(new_heads(ends(), 2), ends(tokens))
