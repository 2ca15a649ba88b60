"""Training heads whose passes fill several slots: what is learnt is what is drafted, and what it costs."""

from typing import Any, cast

import pytest
import torch
from doubles import tiny_model
from heads import rows_of
from test_eagle_training import ANATOMY, LENGTH, TOKENS, VOCAB, WIDTH, texts
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import Session
from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.eagle_head import Eagle3Norms
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Text, reader_of
from polydraft.training.heads.losses.eagles import ROW_LOSSES, EagleLoss, own_rows
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds
from polydraft.training.heads.losses.slot_training import (
    FalconTraining,
    ParallelTraining,
    asked_behind,
    elements,
    kept_depths,
)
from polydraft.trees import Frontier

DRAFTS = 4


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


def scattered(module: torch.nn.Module) -> None:
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            noise = 0.3 * torch.randn(value.shape, generator=stream)
            value.copy_(1 + noise if value.dim() == 1 and len(value) == WIDTH else noise)


def parallel(
    target: PreTrainedModel, rows: str = "published", share: float = 0.7, least: float = 0.2
) -> ParallelTraining:
    head = ParallelEagle(ANATOMY, (2, 1, 0), WIDTH, Eagle3Norms(joined=True), mask_id=13, layers=2, drafts=DRAFTS)
    scattered(head)
    ends = TargetEnds.of(target, TOKENS)
    return ParallelTraining(head, ends, rows, own_rows(ends), share, least)


def drafted(drafter: HeadDrafter, target: PreTrainedModel, ids: Tensor, count: int, depths: int) -> Tensor:
    """Return the draft rows behind the first tokens of texts, on the paths of the texts: "b depth v"."""
    text = Text(ids, torch.full((len(ids),), count))
    reader = reader_of(HuggingFaceModel(target), len(ids), 64, drafter.needs.layers)
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB, reader))
    state = drafter.read(state, text, reader.catch_up(text)[1])
    with torch.no_grad():
        growing, _ = drafter.network.root(state.memory, text, state.ends)
        found = list[Tensor]()
        for depth in range(depths):
            above = torch.ones(len(ids), 1, depth + 1, dtype=torch.bool)
            frontier = Frontier(range(depth, depth + 1), ids[:, count - 1 + depth, None], depth, above)
            found.append(rows_of(growing, state, frontier))
    return torch.cat(found, 1)


def test_elements_are_the_slots_that_are_drafted_from(target: PreTrainedModel) -> None:
    training, given = parallel(target, share=1.0, least=1.0).eval(), texts(target)
    kept = torch.ones(2, LENGTH - 1, DRAFTS, dtype=torch.bool)
    kept[1, ::2, 2:] = False  # rows have different counts
    anchors, depth, there = elements(kept)
    with torch.no_grad():
        made = training.logits(training.made(given["ids"], given["features"], anchors, depth, there)).softmax(-1)
    drafter = HeadDrafter(training.head, training.ends)
    for anchor in range(0, LENGTH - 1, 3):
        rows = drafted(drafter, target, given["ids"], anchor + 2, min(DRAFTS, LENGTH - 1 - anchor))
        for row in range(2):
            for one in ((anchors[row] == anchor) & there[row]).nonzero()[:, 0].tolist():
                if depth[row, one] < rows.shape[1]:
                    wanted = rows[row, depth[row, one]].float()
                    torch.testing.assert_close(made[row, one], wanted, atol=2e-5, rtol=0)


def test_depths_keep_their_shares_of_what_was_kept() -> None:
    valid = torch.ones(2, 102, dtype=torch.bool)
    valid[1, :52] = False
    asked = asked_behind(valid, 8)
    assert [int(one) for one in asked[0].sum(0)] == [100 - depth for depth in range(8)]
    torch.manual_seed(1)
    kept = kept_depths(asked, 0.7, 0.2)
    assert bool(kept[..., 0].all()) and not bool((kept[..., 1:] & ~asked[..., 1:]).any())
    assert not bool((kept[..., 1:] & ~kept[..., :-1]).any())
    for row, places in enumerate((100, 50)):
        wanted, last = list[int](), places
        for depth in range(1, 8):
            behind = int((kept[row, :, depth - 1] & asked[row, :, depth]).sum())
            last = min(int((places - depth) * max(0.7**depth, 0.2)), behind)
            wanted.append(last)
        assert [int(one) for one in kept[row, :, 1:].sum(0)] == wanted
    assert not torch.equal(kept, kept_depths(asked, 0.7, 0.2))  # drawn anew at each step
    whole = kept_depths(asked, 1.0, 1.0)
    assert torch.equal(whole[0, :, 1], asked[0, :, 1])
    anchors, depth, there = elements(kept)
    assert int(there.sum()) == int(kept.sum()) and bool(kept[0, anchors[0], depth[0]][there[0]].all())


def test_the_loss_is_the_mean_divergence_over_kept_elements(target: PreTrainedModel) -> None:
    """speculators and SpecForge: all depths together, the law over the head's tokens alone."""
    training, given = parallel(target, share=1.0, least=1.0).eval(), texts(target)
    torch.manual_seed(0)
    kept = kept_depths(asked_behind(given["valid"].bool(), DRAFTS), 1.0, 1.0)
    torch.manual_seed(0)
    costs, overlaps = list[float](), [list[float]() for _ in range(DRAFTS)]
    with torch.no_grad():
        anchors, depths, there = elements(kept)
        logs = training.logits(training.made(given["ids"], given["features"], anchors, depths, there)).log_softmax(-1)
        rows: Any = target.get_output_embeddings()
        whole = rows(given["final"])
        for row in range(2):
            for place, (anchor, depth) in enumerate(zip(anchors[row].tolist(), depths[row].tolist(), strict=True)):
                asked = anchor + depth + 2
                if bool(there[row, place]) and asked < LENGTH and given["valid"][row, asked]:
                    logits = whole[row, asked - 1]
                    costs.append(-float((logits[TOKENS].softmax(-1) * logs[row, place]).sum()))
                    shared = torch.minimum(logits.softmax(-1)[TOKENS], logs[row, place].exp())
                    overlaps[depth].append(float(shared.sum()))
        found = training(**given)
    assert float(found["loss"]) == pytest.approx(sum(costs) / len(costs), rel=1e-5)
    assert found["count"].tolist() == [len(one) for one in overlaps]
    assert found["overlap"].tolist() == pytest.approx([sum(one) / len(one) for one in overlaps], abs=1e-5)


@pytest.mark.parametrize("rows", ROW_LOSSES)
def test_steps_lower_the_loss_and_gradients_reach_everything(rows: str, target: PreTrainedModel) -> None:
    training, given = parallel(target, rows, 1.0, 1.0), texts(target)
    before = training(**given)["loss"]
    before.backward()
    for key, value in training.named_parameters():
        assert value.grad is not None and bool(value.grad.abs().sum() > 0), key
    with torch.no_grad():
        values: list[Any] = [*training.parameters()]
        size = torch.stack([value.grad.square().sum() for value in values]).sum()
        for value in values:
            value -= 1e-3 * value.grad / size.sqrt()
        assert training(**given)["loss"] < before


def test_wrong_shares_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(InvalidParameter, match=r"shares in \(0, 1\] of places, not 0 and 0.2"):
        parallel(target, share=0)


# Falcon.

FALCONS: dict[str, dict[str, Any]] = {
    "published": {},
    "recurrent": {"recurs": True, "layers": 2},
    "blocks of three": {"block": 3, "layers": 2, "bias": False},
}


def falcon(
    name: str, target: PreTrainedModel, glance: float = 0.275, noise: float = 0.2, **rows: Any
) -> FalconTraining:
    head = FalconHead(ANATOMY, **FALCONS[name])
    scattered(head)
    return FalconTraining(head, TargetEnds.of(target), 5, EagleLoss(noise=noise, **rows), glance=glance)


@pytest.mark.parametrize("name", FALCONS)
def test_blocks_are_those_that_are_drafted_from(name: str, target: PreTrainedModel) -> None:
    training, given = falcon(name, target).eval(), texts(target)
    drafter, block = HeadDrafter(training.head, training.ends), training.head.block
    seen = set[int]()
    for seed in range(3):
        torch.manual_seed(seed)
        blocks = training.drawn_blocks(LENGTH - 1)
        seen.add(int(blocks[0, 0]))
        with torch.no_grad():
            made = training.made(given["ids"], given["final"], given["final"], blocks, 2)
            rows = torch.cat([training.logits(one).softmax(-1) for one in made], 2)
        for number, pairs in enumerate(blocks.tolist()):
            depths = min(2 * block, LENGTH - 1 - pairs[-1])
            wanted = drafted(drafter, target, given["ids"], pairs[-1] + 2, depths).float()
            torch.testing.assert_close(rows[:, number, :depths], wanted, atol=2e-5, rtol=0)
    assert len(seen) > 1


@pytest.mark.parametrize("name", FALCONS)
def test_falcons_loss_is_that_of_states_and_rows(
    name: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bestpay-inc/Falcon, `train/glance.py`: v + 0.1 (0.9 soft + 0.1 hard), here with the likeliest token as drawn."""
    monkeypatch.setattr(torch, "multinomial", lambda laws, count: laws.argmax(-1, keepdim=True))
    training, given = falcon(name, target).eval(), texts(target)
    block, ends = training.head.block, cast(Any, target.get_output_embeddings())
    torch.manual_seed(4)
    blocks = training.drawn_blocks(LENGTH - 1)
    torch.manual_seed(4)
    costs, shared = list[Tensor](), [list[Tensor]() for _ in range(5)]
    with torch.no_grad():
        found = training(**given)
        made = torch.cat(training.made(given["ids"], given["final"], given["final"], blocks, 3), 2)
        for row in range(2):
            for number, pairs in enumerate(blocks.tolist()):
                for depth in range(5):
                    known = pairs[-1] + 1 + depth  # the place of the state that is foretold
                    if known + 1 >= LENGTH or not given["valid"][row, known + 1]:
                        continue
                    state, wanted = made[row, number, depth], given["final"][row, known]
                    law, logits = ends(wanted).softmax(-1), ends(state)
                    shared[depth].append(torch.minimum(law, logits.softmax(-1)).sum())
                    if depth < block:
                        away = (state - wanted).abs()
                        costs.append(torch.where(away < 1, away**2 / 2, away - 0.5).mean())
                        costs[-1] += 0.1 * 0.9 * -(law * (logits / 0.95).log_softmax(-1)).sum()
                        costs[-1] += 0.1 * 0.1 * -logits.log_softmax(-1)[law.argmax()]
    assert float(found["loss"]) == pytest.approx(float(torch.stack(costs).mean()), rel=1e-5)
    assert found["count"].tolist() == [len(one) for one in shared]
    assert found["overlap"].tolist() == pytest.approx([float(torch.stack(one).mean()) for one in shared], abs=1e-5)


@pytest.mark.parametrize("rows", ["acceptance", "lk-alpha", "lk-lambda"])
def test_falcons_rows_may_be_compared_otherwise(rows: str, target: PreTrainedModel) -> None:
    """States alone, and rows alone at the places that count."""
    given = texts(target)
    states, both, apart = (
        falcon("blocks of three", target, noise=0.0, rows=rows, **weights).eval()
        for weights in ({"entropy": 0.0}, {"entropy": 1.0}, {"states": 0.0, "entropy": 1.0})
    )
    with torch.no_grad():
        found = []
        for one in (states, both, apart):
            torch.manual_seed(4)
            found.append(float(one(**given)["loss"]))
        torch.manual_seed(4)
        blocks = apart.drawn_blocks(LENGTH - 1)
        (made,) = apart.made(given["ids"], given["final"], given["final"], blocks, 1)
        laws, _, there = apart._wanted(HeadBatch(**given), blocks)
        labels = given["ids"][:, (blocks + 4).clamp_max(LENGTH - 1)]
        costs = ROW_LOSSES[rows](apart.logits(made), laws, labels)
    assert found[1] == pytest.approx(found[0] + found[2], rel=1e-5)
    assert found[2] == pytest.approx(float(costs[there].mean()), rel=1e-5)


def test_a_share_of_blocks_begins_with_what_is_to_be_made(target: PreTrainedModel) -> None:
    training, given = falcon("blocks of three", target, glance=1.0), texts(target)
    training.head.eval()
    given["valid"][0, :6] = 0
    batch = HeadBatch(**given)
    blocks = torch.arange(9).view(3, 3)
    sizes = set[int]()
    for seed in range(20):
        torch.manual_seed(seed)
        shown = training._shown(batch, given["final"], blocks)
        assert not bool(shown[..., 2].any()) and not bool((shown[..., 1] & ~shown[..., 0]).any())
        assert not bool(shown[0, 0].any())  # the target did not write what follows
        sizes |= {*shown.sum(-1).flatten().tolist()}
    assert sizes == {0, 1, 2}
    assert not bool(falcon("blocks of three", target, glance=0.0)._shown(batch, given["final"], blocks).any())
    shown = torch.zeros(2, 3, 3, dtype=torch.bool)
    shown[1, 1, 0] = True
    with torch.no_grad():
        plain, glanced = (
            training.made(given["ids"], given["final"], given["final"], blocks, 1, one)[0] for one in (None, shown)
        )
        changed = given["ids"].clone(), given["final"].clone()
        changed[0][1, 4], changed[1][1, 3] = given["ids"][1, 7], given["final"][1, 6]
        moved = training.made(changed[0], changed[1], changed[1], blocks, 1)[0]
    other = ~shown.any(-1)
    assert torch.equal(plain[other], glanced[other])  # later blocks see the text, not what was shown
    assert not torch.allclose(plain[1, 1], glanced[1, 1], atol=1e-3)
    torch.testing.assert_close(glanced[1, 1], moved[1, 1])


@pytest.mark.parametrize("name", FALCONS)
def test_falcon_learns_by_a_step_and_gradients_reach_everything(name: str, target: PreTrainedModel) -> None:
    training, given = falcon(name, target, noise=0.0), texts(target)
    training.head.eval()  # the LSTM's dropout is not drawn again

    def loss() -> Tensor:
        torch.manual_seed(1)
        return training(**given)["loss"]

    before = loss()
    before.backward()
    for key, value in training.named_parameters():
        reached = value.grad is not None and bool(value.grad.abs().sum() > 0)
        assert reached == (training.head.recurs or "weight_hh" not in key), key
    with torch.no_grad():
        values: list[Any] = [*training.parameters()]
        size = torch.stack([value.grad.square().sum() for value in values]).sum()
        for value in values:
            value -= 1e-3 * value.grad / size.sqrt()
        assert loss() < before
    assert training(**given)["count"].tolist()[training.head.block :] == [0] * (5 - training.head.block)
