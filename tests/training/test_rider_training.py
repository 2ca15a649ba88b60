"""Training riders: PaSS's losses place by place, its gradients, SPACE's texts, and that what learnt drafts."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor, nn

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.prompts.prompt import encode
from polydraft.drafters import RiderDrafter
from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.training import MAKERS, HeadSize, WritingPlan
from polydraft.training.heads.loop import measured
from polydraft.training.heads.losses.rider_training import (
    IGNORED,
    PassTraining,
    cut_at_masks,
    drawn_cuts,
    next_labels_loss,
)
from polydraft.training.heads.losses.row_losses import TargetEnds, soft_cross_entropy
from polydraft.training.heads.shards import Shards, write_shards

VOCAB, WIDTH, LENGTH, COUNT = 24, 16, 12, 3


@cache
def target() -> Any:
    return tiny_model(vocab=VOCAB)


def batch(model: Any) -> dict[str, Tensor]:
    """Return texts that a target has read, of which it wrote the later part."""
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[:, :4] = 0
    valid[1, 9:] = 0
    final = found.hidden_states[-1].float()
    return {"ids": ids, "valid": valid, "features": final, "final": final, "lse": found.logits.logsumexp(-1).float()}


def training(row_loss: Any = None, places: int = 99) -> PassTraining:
    torch.manual_seed(3)
    return PassTraining(
        nn.Embedding(COUNT, WIDTH, dtype=torch.float64), target(), TargetEnds.of(target()), row_loss, places
    )


@pytest.mark.parametrize("soft", [False, True])
def test_losses_and_overlaps_are_those_of_each_place_by_itself(soft: bool) -> None:
    """By plain passes over each text up to a place and riders behind it."""
    own, given, model = training(soft_cross_entropy if soft else None), batch(target()), target()
    with torch.no_grad():
        found, true = own(**given), model(given["ids"]).logits.softmax(-1)
    total = 0.0
    for draft in range(COUNT):
        losses, overlaps = list[Tensor](), list[Tensor]()
        for row in range(3):
            for place in range(LENGTH - draft - 2):
                if not given["valid"][row, place + draft + 2]:
                    continue
                text = model.get_input_embeddings()(given["ids"][row, : place + 1])
                with torch.no_grad():
                    plain = model(inputs_embeds=torch.cat([text, own.lookahead.weight]).unsqueeze(0)).logits[0, -COUNT:]
                q, p = plain[draft].softmax(-1), true[row, place + draft + 1]
                label = int(given["ids"][row, place + draft + 2])
                losses.append(-(p * q.log()).sum() if soft else -q[label].log())
                overlaps.append(torch.minimum(q, p).sum())
        assert int(found["count"][draft]) == len(losses)
        assert float(found["overlap"][draft]) == pytest.approx(float(torch.stack(overlaps).mean()), abs=1e-5)
        total += float(torch.stack(losses).mean())
    assert float(found["loss"]) == pytest.approx(total, rel=1e-5)


def test_gradients_reach_the_embeddings_alone_and_are_those_of_differences() -> None:
    own = training()
    ids, places = batch(target())["ids"], torch.tensor([[0, 7], [3, 3], [11, 5]])
    weights = torch.randn(3, 2, COUNT, WIDTH, dtype=torch.float64)
    rows = Rows(own)
    assert torch.autograd.gradcheck(  # the target's norms are taken in single precision
        lambda table: (
            torch.func.functional_call(rows, {"own.lookahead.weight": table}, (ids, places)) * weights
        ).sum(),
        (own.lookahead.weight,),
        eps=1e-3,
        atol=1e-2,
        rtol=1e-2,
    )
    own(**batch(target()))["loss"].backward()
    assert own.lookahead.weight.grad is not None and float(own.lookahead.weight.grad.abs().min()) > 0
    assert all(one.grad is None and one.requires_grad for one in target().parameters())
    assert [name for name, _ in own.named_parameters()] == ["lookahead.weight"]


class Rows(nn.Module):
    def __init__(self, own: PassTraining) -> None:
        super().__init__()
        self.own = own

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.own.states(ids, places)


def test_places_are_drawn_and_those_that_nobody_may_ask_for_do_not_count() -> None:
    given = batch(target())
    few = training(places=2)(**given)
    assert 0 < int(few["count"].max()) <= 6 and bool(torch.isfinite(few["loss"]))
    none = training()(**{**given, "valid": torch.zeros_like(given["valid"])})
    assert none["count"].tolist() == [0, 0, 0] and float(none["loss"].detach()) == 0
    with pytest.raises(UnsupportedModel, match="scores chains only, so no riders"):
        PassTraining(nn.Embedding(2, 8), tiny_model("bloom", VOCAB), TargetEnds.of(target()), None, 2)


def test_texts_may_fill_the_context_of_a_target_with_learned_positions() -> None:
    """Riders that nobody asks for may lie behind it; those that count do not move."""
    given, found = batch(target()), list[dict[str, Tensor]]()
    for room in (0, COUNT):
        model: Any = tiny_model("gpt2", VOCAB, dtype=torch.float32, n_positions=LENGTH + COUNT)
        if not room:
            table = model.transformer.wpe.weight.detach()[:LENGTH]
            model.transformer.wpe = nn.Embedding.from_pretrained(table, freeze=False)
        torch.manual_seed(3)
        own = PassTraining(nn.Embedding(COUNT, WIDTH), model, TargetEnds.of(model), None, 99)
        found.append(own(**given))
    for name in ("loss", "overlap", "count"):
        torch.testing.assert_close(found[0][name], found[1][name])


def learnt(steps: int, learner: nn.Module, loss: Any, rate: float) -> list[float]:
    adam, found = torch.optim.Adam(learner.parameters(), rate), list[float]()
    for _ in range(steps):
        adam.zero_grad()
        cost = loss()
        cost.backward()
        adam.step()
        found.append(float(cost.detach()))
    return found


def test_the_loss_falls_and_what_learnt_is_what_drafts() -> None:
    own, given = training(), batch(target())
    found = learnt(25, own, lambda: own(**given)["loss"], 0.1)
    assert found[-1] < 0.9 * found[0]
    drafter = RiderDrafter(lookahead=own.lookahead.requires_grad_(False))
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    plain: Any = polydraft.generate(target(), [3, 1, 4], drafter="none", **options)
    text: Any = polydraft.generate(target(), [3, 1, 4], drafter=drafter, policy=3, **options)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted > 0


# SPACE's texts.


def test_a_text_is_cut_in_its_answer_and_masks_stand_where_tokens_stood() -> None:
    """Answers begin at token 4, and that of the first half of the texts ends before the last token."""
    masks, ids = [20, 21, 22], torch.arange(10).expand(400, -1)
    valid = torch.ones_like(ids).bool()
    valid[:, :4] = valid[:200, 9:] = False
    torch.manual_seed(2)
    drawn = drawn_cuts(valid, 3, 0.5)
    given, labels = cut_at_masks(ids, valid, drawn, masks)
    for row, (own, told, cut) in enumerate(zip(given.tolist(), labels.tolist(), drawn.tolist(), strict=True)):
        end = 9 if row < 200 else 10
        assert told[:4] == [IGNORED] * 4
        if cut < 0:
            assert own == [*range(10)] and told[4:] == [*range(4, end), *[IGNORED] * (10 - end)]
            continue
        assert own == [*range(cut), 20, 21, 22, *[22] * (7 - cut)]
        assert told[4:] == [*range(4, cut + 4), *[IGNORED] * (6 - cut)], "the last mask has nothing to foretell"
    cuts = [{*drawn[some].tolist()} for some in (slice(200), slice(200, 400))]
    assert cuts == [{-1, 4, 5}, {-1, 4, 5, 6}], "every mask has a label"
    assert 150 < int((drawn >= 0).sum()) < 250
    assert drawn_cuts(valid, 6, 1.0).tolist() == [-1] * 400, "too short an answer for six masks"


def test_the_loss_is_that_of_the_true_tokens_behind_each_mask() -> None:
    model, ids = target(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    cut = 4
    given, labels = cut_at_masks(ids, torch.arange(8).unsqueeze(0) > 2, torch.tensor([cut]), [20, 21])
    with torch.no_grad():
        theirs, found = float(model(given, labels=labels).loss), next_labels_loss(model(given).logits, labels)
        rows = model(torch.tensor([[*ids[0, :cut].tolist(), 20, 21]])).logits[0].log_softmax(-1)
    wanted = [-rows[place, ids[0, place + 1]] for place in range(2, cut + 2)]  # the last two are those of the masks
    torch.testing.assert_close(found, torch.stack(wanted).mean())
    assert float(found) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_embeddings_that_learnt_draft_better_than_random_ones(tmp_path: Path) -> None:
    """On the embedded target, by the acceptance loss: it is small, and little can be learnt by so few numbers."""
    pair = polydraft.load_pair()
    prompts = [encode(pair, one, 64)[0] for one in read_prompt_sets(("humaneval", "python"), 40)]
    writing = WritingPlan(tokens=24_000, length=128)
    written = write_shards(HuggingFaceModel(pair.target), prompts, tmp_path, (1,), writing)
    texts, held_out = Shards(written.learnt), Shards(written.held_out)
    torch.manual_seed(1)
    size = HeadSize(drafts=3, loss="acceptance")
    own = MAKERS["pass"].make(pair.target, TargetEnds.of(pair.target), (), size, None).training
    random = measured(own, held_out)

    def loss() -> Tensor:
        rows = [texts[int(one)] for one in torch.randint(len(texts), (8,))]
        return own(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})["loss"]

    learnt(50, own, loss, 0.03)
    assert measured(own, held_out).efficiency > random.efficiency + 0.005
