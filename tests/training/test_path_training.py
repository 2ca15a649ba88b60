"""The losses of XPress and LiLiCorr: their authors' sums, written a second time, and steps that lower them."""

from math import exp, log
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import IN_PLACE, block_head, rows_of
from test_block_training import FEWER, VOCAB, texts
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import HeadDrafter, Session
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Reader, Text
from polydraft.training.heads.losses.block_training import BlockLoss, BlockRows, BlockTraining, block_slots, forced
from polydraft.training.heads.losses.path_training import LATTICE_LOSSES, LatticeLoss, LatticeTraining, XPressTraining
from polydraft.training.heads.losses.row_losses import TargetEnds, lk_alpha
from polydraft.trees import Frontier

TRAININGS: dict[str, type[BlockTraining]] = {"xpress": XPressTraining, "lilicorr": LatticeTraining}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


def drafted(head: BlockHead, ends: HeadEnds, target: Any, ids: Tensor, tokens: list[int]) -> Tensor:
    """Return the rows behind a text's last token and tokens below it, by the drafter."""
    model, drafter = HuggingFaceModel(target), HeadDrafter(head, ends)
    text = Text(ids.unsqueeze(0), torch.tensor([len(ids)]))
    reader = Reader.new(model, 1, 64, drafter.needs.layers)
    state = drafter.start(text, Session(SamplingParams(), 64, model.vocab_size, reader))
    _, features = reader.catch_up(text)
    state = drafter.read(state, text, features)
    grown, _ = head.root(state.memory, text, state.ends)
    rows = list[Tensor]()
    for depth, token in enumerate([int(ids[-1]), *tokens]):
        seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
        frontier = Frontier(range(depth, depth + 1), torch.tensor([[token]]), depth, seen)
        rows.append(rows_of(grown, state, frontier)[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("few", [False, True], ids=["all tokens", "some tokens"])
def test_xpress_learns_from_text_from_its_own_rounds_and_from_the_backbone(few: bool, target: Any) -> None:
    """L(text) + .3 mean of three rounds + .6 L(backbone), L = .1 CE of the target's likeliest token + .9 TV."""
    tokens = FEWER if few else None
    head, given = block_head("xpress", rows=len(FEWER) if few else None).float(), texts(target)
    ends, anchors = TargetEnds.of(target, tokens), torch.tensor([[5, 8], [2, 9]])
    training = XPressTraining(head, ends, 2, BlockLoss(0.1, 0.9))
    ids, places = given["ids"], anchors.unsqueeze(-1) + torch.arange(3)
    before = ids.gather(1, places.flatten(1)).view(places.shape)
    with torch.no_grad():
        block = block_slots(head, ends, ids, given["features"], anchors)
        logits, _ = forced(head, block, before)
        laws = ends.laws(given["final"], given["lse"]).gather(
            1, places.flatten(1).unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        )
        laws, there = laws.view(logits.shape), torch.ones(2, 2, 3, dtype=torch.bool)
        found = float(training.cost(block, BlockRows(before, logits, laws, before, there, None)))
    named, weights = torch.arange(VOCAB) if tokens is None else tokens, [1.0, exp(-0.25), exp(-0.5)]
    base, parts = block.logits, {"text": 0.0, "rounds": 0.0, "base": 0.0}
    assert base is not None
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            law, alone = laws[row, place], base.view(logits.shape)[row, place].softmax(-1)

            def cost(rows: Tensor, law: Tensor = law) -> float:
                label = law.argmax(-1, keepdim=True)
                crossed, shared = -rows.gather(-1, label).squeeze(-1).log(), torch.minimum(rows, law).sum(-1)
                values = 0.1 * crossed + 0.9 * (1 - shared)
                return sum(float(one) * weight for one, weight in zip(values, weights, strict=True))

            def along(below: list[int], row: int = row, anchor: int = anchor) -> Tensor:
                return drafted(head, HeadEnds(tokens=tokens), target, ids[row, : anchor + 1], below)

            parts["text"] += cost(along(ids[row, anchor + 1 : anchor + 3].tolist()))
            parts["base"] += cost(alone)
            rows = alone
            for _ in range(3):
                rows = along(named[rows.argmax(-1)][:2].tolist())
                parts["rounds"] += cost(rows) / 3
    wanted = parts["text"] + 0.3 * parts["rounds"] + 0.6 * parts["base"]
    assert found == pytest.approx(wanted / (4 * sum(weights)), rel=1e-4)


INF = float("inf")
SCORES = [[1.0, 0.5, -INF, -0.5], [-INF, 2.0, 0.0, 1.0]]
"""Of two drafts, over three candidates each."""
BASE = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]
LAWS = [[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3]]


def lattice_rows(labels: list[int], there: tuple[bool, bool] = (True, True)) -> BlockRows:
    scores, laws = (torch.tensor(one, dtype=torch.float64).view(1, 1, 2, 4) for one in (SCORES, LAWS))
    known, asked = torch.tensor([[labels]]), torch.tensor([[there]])
    return BlockRows(known, scores.requires_grad_(True), laws, known, asked, None)


def of(loss: LatticeLoss, rows: BlockRows) -> float:
    return float(loss.of(torch.tensor(BASE, dtype=torch.float64).log().view(1, 1, 2, 4), rows).detach())


def dflash(labels: list[int], there: tuple[bool, bool] = (True, True)) -> float:
    weights = [one * seen for one, seen in zip((1.0, exp(-1 / 7)), there, strict=True)]
    costs = [-log(BASE[draft][label]) for draft, label in enumerate(labels)]
    return sum(w * one for w, one in zip(weights, costs, strict=True)) / max(sum(weights), 1e-6)


def among(draft: int, label: int) -> tuple[float, float, float]:
    """Return a draft's cross entropy among candidates, its hinge, and what is rejected of its law."""
    there = {place: one for place, one in enumerate(SCORES[draft]) if one > -INF}
    total = sum(exp(one) for one in there.values())
    crossed = -log(exp(there[label]) / total)
    hinge = max(0.0, 2.0 - (there[label] - max(one for place, one in there.items() if place != label)))
    known = log(LAWS[draft][label])
    rejected = sum(exp(one) / total * max(0.0, known - log(LAWS[draft][place])) for place, one in there.items())
    return crossed, hinge, rejected


def test_lilicorrs_published_losses() -> None:
    first, second = among(0, 0), among(1, 2)
    mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    plain = dflash([0, 2]) + 0.25 * mean[0] + 0.25 * mean[2]
    assert of(LATTICE_LOSSES["published"], lattice_rows([0, 2])) == pytest.approx(plain, rel=1e-9)
    margin = LatticeLoss(entropy=0.125, margin=0.125)
    wanted = dflash([0, 2]) + 0.125 * mean[0] + 0.125 * mean[1] + 0.25 * mean[2]
    assert of(margin, lattice_rows([0, 2])) == pytest.approx(wanted, rel=1e-9)
    rows = lattice_rows([0, 2])
    base = torch.tensor(BASE, dtype=torch.float64).log().view(1, 1, 2, 4)
    margin.of(base, rows).backward()
    assert rows.logits.grad is not None and bool(rows.logits.grad.isfinite().all())
    assert bool((rows.logits.grad[rows.logits == -INF] == 0).all())


def test_what_follows_a_label_that_is_no_candidate_does_not_count() -> None:
    first = among(0, 0)
    cut = dflash([0, 0]) + 0.25 * first[0] + 0.25 * first[2]
    assert of(LATTICE_LOSSES["published"], lattice_rows([0, 0])) == pytest.approx(cut, rel=1e-9)
    for labels in ([2, 1], [2, 0]):
        rows = lattice_rows(labels)
        assert of(LATTICE_LOSSES["published"], rows) == pytest.approx(dflash(labels), rel=1e-9)


def test_a_block_of_which_a_part_is_not_asked_for_teaches_its_backbone_alone() -> None:
    there = (True, False)
    assert of(LatticeLoss(), lattice_rows([0, 2], there)) == pytest.approx(dflash([0, 2], there), rel=1e-9)


def test_lilicorrs_rows_may_be_compared_with_the_targets() -> None:
    shared = [
        sum(min(exp(one) / sum(map(exp, scores)), law) for one, law in zip(scores, laws, strict=True))
        for scores, laws in zip(SCORES, LAWS, strict=True)
    ]
    second = exp(-1 / 7)
    tv = ((1 - shared[0]) + second * (1 - shared[1])) / (1 + second)
    assert of(LATTICE_LOSSES["acceptance"], lattice_rows([0, 0])) == pytest.approx(dflash([0, 0]) + tv, rel=1e-9)
    nll = -(log(shared[0]) + second * log(shared[1])) / (1 + second)
    assert of(LatticeLoss(rows=lk_alpha), lattice_rows([0, 0])) == pytest.approx(dflash([0, 0]) + nll, rel=1e-9)


@pytest.mark.parametrize("term", IN_PLACE)
def test_steps_lower_the_loss_and_reach_every_weight(term: str, target: PreTrainedModel) -> None:
    given: dict[str, Any] = texts(target)
    head = block_head(term, spread=0.1).float().train().requires_grad_(True)
    training = TRAININGS[term](head, TargetEnds.of(target), 8)
    optimiser = torch.optim.Adam(head.parameters(), 0.01)
    losses, reached = list[float](), set[str]()
    for step in range(30):
        torch.manual_seed(step % 3)
        loss = training(**given)["loss"]
        optimiser.zero_grad()
        loss.backward()
        reached |= {name for name, one in head.named_parameters() if one.grad is not None and one.grad.any()}
        assert all(bool(one.grad.isfinite().all()) for one in head.parameters() if one.grad is not None)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert reached == {name for name, _ in head.named_parameters()}
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
