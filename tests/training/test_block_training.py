"""Training block heads: what is learnt is what is drafted, anchors are well placed, and steps lower the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import TERMS, VOCAB, block_head, rows_of
from torch import Tensor, nn
from torch.utils.data import StackDataset
from transformers import PreTrainedModel

from polydraft.drafters import HeadDrafter, Session
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Reader, Text
from polydraft.training.heads.loop import HeadRecipe, run_steps
from polydraft.training.heads.losses.block_training import BlockLoss, BlockTraining, block_slots, drawn_anchors, forced
from polydraft.training.heads.losses.row_losses import MOST_HELD, Learner, TargetEnds, step_of, weighted
from polydraft.trees import Frontier

LENGTH = 14
FEWER = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


def texts(target: PreTrainedModel) -> dict[str, Tensor]:
    """Return two texts as shards give them; of the first, the target wrote tokens from place 4 on."""
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, :4] = 0
    features = torch.cat([found.hidden_states[layer] for layer in (0, 1, 2)], -1)
    lse = found.logits.logsumexp(-1)
    return {"ids": ids, "valid": valid, "features": features, "final": found.hidden_states[-1], "lse": lse}


def drafted(
    head: BlockHead, ends: HeadEnds, target: PreTrainedModel, ids: Tensor, anchor: int
) -> tuple[Tensor, Tensor | None]:
    """Return the rows and confidences of a block below the text's token at `anchor`, along the text, by the drafter."""
    model, drafter = HuggingFaceModel(target), HeadDrafter(head, ends)
    text = Text(ids, torch.tensor([anchor + 1]))
    reader = Reader.new(model, 1, 64, drafter.needs.layers)
    state = drafter.start(text, Session(SamplingParams(), 64, model.vocab_size, reader))
    _, features = reader.catch_up(text)
    state = drafter.read(state, text, features)
    growing, _ = drafter.network.root(state.memory, text, state.ends)
    rows, sure = list[Tensor](), list[Tensor]()
    for depth in range(head.shape.drafts):
        token = ids[:, anchor + depth : anchor + depth + 1]
        frontier = Frontier(range(depth, depth + 1), token, depth, torch.ones(1, 1, depth + 1, dtype=torch.bool))
        rows.append(rows_of(growing, state, frontier)[0, 0])
        if head.confidence is not None:
            sure.append(growing.overlap(frontier)[0, 0])
    return torch.stack(rows), torch.stack(sure) if sure else None


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("term", TERMS)
def test_what_is_learnt_is_what_is_drafted(term: str, shifted: bool, target: PreTrainedModel) -> None:
    """The rows of several blocks at once, given the text's tokens, are those that drafting along the text gives."""
    head, given = block_head(term, shifted=shifted).float(), texts(target)
    ends, anchors = TargetEnds.of(target), torch.tensor([[3, 5, 8], [0, 2, 9]])
    with torch.no_grad():
        block = block_slots(head, ends, given["ids"], given["features"], anchors)
        places = anchors.unsqueeze(-1) + torch.arange(head.shape.drafts)
        before = given["ids"].gather(1, places.flatten(1)).view(places.shape)
        logits, sure = forced(head, block, before)
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            rows, confidences = drafted(head, HeadEnds(), target, given["ids"][row : row + 1], anchor)
            torch.testing.assert_close(logits[row, place].softmax(-1), rows, rtol=1e-4, atol=1e-5)
            assert (sure is None) == (confidences is None)
            if sure is not None:
                torch.testing.assert_close(sure[row, place], confidences, rtol=1e-4, atol=1e-5)


def test_heads_of_fewer_tokens_learn_what_they_draft(target: PreTrainedModel) -> None:
    head, given = block_head("mixing").float(), texts(target)
    ends, anchors = TargetEnds.of(target, FEWER), torch.tensor([[6], [2]])
    with torch.no_grad():
        block = block_slots(head, ends, given["ids"], given["features"], anchors)
        places = anchors.unsqueeze(-1) + torch.arange(head.shape.drafts)
        logits, _ = forced(head, block, given["ids"].gather(1, places.flatten(1)).view(places.shape))
    rows, _ = drafted(head, HeadEnds(tokens=FEWER), target, given["ids"][:1], 6)
    assert logits.shape[-1] == len(FEWER)
    torch.testing.assert_close(logits[0, 0].softmax(-1), rows, rtol=1e-4, atol=1e-5)


def test_anchors_stand_where_the_target_wrote_what_follows() -> None:
    """Rows of 9 tokens: written from place 4 on; up to place 6; and nowhere."""
    valid = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9]).bool()
    torch.manual_seed(0)
    anchors, there = drawn_anchors(valid, 3, 4)
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            wanted = [anchor + 1 + draft < 9 and bool(valid[row, anchor + 1 + draft]) for draft in range(4)]
            assert wanted[0] and there[row, place].tolist() == torch.tensor(wanted).int().cumprod(0).bool().tolist()
        assert len({*anchors[row].tolist()}) == 3
    assert not bool(there[2].any())


def test_overlaps_are_those_of_the_rows(target: PreTrainedModel) -> None:
    """With as many anchors as places, the mean overlap of the first draft is that of all places, computed singly."""
    head, given = block_head("mixing").float(), texts(target)
    training = BlockTraining(head, TargetEnds.of(target), LENGTH).eval()
    with torch.no_grad():
        found = training(**given)
        laws = target(given["ids"]).logits.softmax(-1)
    wanted = list[Tensor]()
    for row in range(2):
        for anchor in range(LENGTH - head.shape.block):
            if given["valid"][row, anchor + 1]:
                rows, _ = drafted(head, HeadEnds(), target, given["ids"][row : row + 1], anchor)
                wanted.append(torch.minimum(rows[0], laws[row, anchor]).sum())
    assert found["count"][0] >= len(wanted) and found["count"].diff().le(0).all()
    assert 0 < float(found["overlap"][0]) < 1
    assert float(found["overlap"][0]) == pytest.approx(float(torch.stack(wanted).mean()), abs=0.1)


@pytest.mark.parametrize("decay", [4.0, None])
@pytest.mark.parametrize("term", ["markov", "mixing"])
def test_steps_lower_the_loss_and_reach_every_weight(term: str, decay: float | None, target: PreTrainedModel) -> None:
    given: dict[str, Any] = texts(target)
    head = block_head(term, spread=0.1).float().train().requires_grad_(True)
    training = BlockTraining(head, TargetEnds.of(target), 4, BlockLoss(decay=decay))
    optimiser = torch.optim.Adam(head.parameters(), 0.01)
    losses = list[float]()
    for step in range(30):
        torch.manual_seed(step % 3)
        loss = training(**given)["loss"]
        optimiser.zero_grad()
        loss.backward()
        if step == 0:
            unreached = [name for name, one in head.named_parameters() if one.grad is None or not one.grad.any()]
            assert unreached == []
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


class Sums(Learner):
    """Learns the mean of squares of texts that are three numbers."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.held, self.sizes, self.weight = held, list[int](), nn.Parameter(torch.eye(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        self.sizes.append(len(ids))
        counts = ids[:, 0] ** 2
        return {"loss": weighted((ids @ self.weight).square().sum(-1), counts), "weight": counts.sum()}


def test_a_step_whose_rows_are_many_takes_its_texts_in_parts_and_is_the_same_step(tmp_path: Path) -> None:
    found = list[Tensor]()
    texts: Any = StackDataset(ids=torch.randn(21, 3, generator=torch.Generator().manual_seed(1)))
    for held, size in ((0, 8), (MOST_HELD // 8, 8), (MOST_HELD // 4, 4), (MOST_HELD // 3, 2), (2 * MOST_HELD, 1)):
        training = Sums(held)
        run_steps(training, texts, tmp_path / str(held), HeadRecipe(steps=3, save_every=9), lambda *_: False)
        assert training.sizes[: 16 // size] == 16 // size * [size] and sum(training.sizes) == 21
        assert max(training.sizes) <= size
        found.append(training.weight.detach())
    assert not torch.equal(found[0], torch.eye(3))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-5, atol=1e-6)
    head = BlockTraining(block_head(), TargetEnds.of(tiny_model("llama", VOCAB)), 48)
    assert head.held == 48 * head.head.shape.drafts * VOCAB


@pytest.mark.parametrize("decay", [4.0, None])
@pytest.mark.parametrize("places", [LENGTH - 2, 4, 1, 0])
def test_texts_of_unequal_length_count_in_parts_as_they_do_at_once(
    target: PreTrainedModel, places: int, decay: float | None
) -> None:
    """All places are anchors, so that nothing is drawn."""
    batch = texts(target)
    batch["valid"][0, : LENGTH - places] = 0
    head = block_head().float().requires_grad_(True)
    training = BlockTraining(head, TargetEnds.of(target), LENGTH, BlockLoss(decay=decay))
    found = list[Tensor]()
    for parts in (1, 2):
        training.zero_grad()
        made = (training(**{name: one[first::parts] for name, one in batch.items()}) for first in range(parts))
        loss = step_of(training, made)
        grads = [one.grad.flatten() for one in training.parameters() if one.grad is not None]
        found.append(torch.cat([loss[None], *grads]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
