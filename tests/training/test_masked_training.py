"""Training a draft model to fill masks: which elements there are, what each sees, and that it drafts what it learnt."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain
from polydraft.drafters import DraftRequest, ParallelDrafter, Session, drafter_of
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID
from polydraft.training import HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head
from polydraft.training.heads.losses.masked_training import PardTraining, begun_with, elements, sees
from polydraft.training.heads.losses.row_losses import TargetEnds, lk_alpha
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import usual_reads
from polydraft.training.muon import Muon

VOCAB, LENGTH, DEPTHS = 24, 14, 4
ROWS = 101
"""How many tokens the tokenizer of these tests has."""


@cache
def target() -> PreTrainedModel:
    return tiny_model(vocab=VOCAB, dtype=torch.float64)


@cache
def batch() -> dict[str, Tensor]:
    """Return texts that a target has read, of which it wrote the later part."""
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target()(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[:, :4] = 0
    valid[1, 9:] = 0
    final = found.hidden_states[-1].float()
    return {"ids": ids, "valid": valid, "features": final, "final": final, "lse": found.logits.logsumexp(-1).float()}


def training(loss: str = "published", drafts: int = DEPTHS) -> PardTraining:
    torch.manual_seed(3)
    ends = TargetEnds.of(target())
    made = MAKERS["pard"].make(target(), ends, usual_reads(2), HeadSize(drafts=drafts, loss=loss), None)
    assert isinstance(made.training, PardTraining) and isinstance(made.drafter, ParallelDrafter)
    assert made.training.mask_id == made.drafter.mask_id == VOCAB
    return made.training


@torch.no_grad()
def alone(own: PardTraining, text: list[int], masks: int) -> Tensor:
    """Return the logits behind a text and so many masks, of an ordinary pass."""
    given = torch.tensor([[*text, *[own.mask_id] * masks]])
    return own.network(input_ids=given, use_cache=False).logits[0, -1]


def test_which_elements_are_learnt() -> None:
    """All places of the text itself; of each depth a share, each behind one of the depth before it."""
    torch.manual_seed(0)
    places, depths = 100, 8
    anchors, levels = elements(places, depths)
    pairs = set(zip(anchors.tolist(), levels.tolist(), strict=True))
    assert len(pairs) == len(anchors) and {(place, 0) for place in range(places)} <= pairs
    assert all(anchor >= 0 and anchor + depth < places for anchor, depth in pairs)
    assert all((anchor, depth - 1) in pairs for anchor, depth in pairs if depth)
    counts = [sum(level == depth for _, level in pairs) for depth in range(depths)]
    assert counts[:5] == [100, 70, 48, 34, 24] and counts[5] == 20 and 16 <= counts[7] <= counts[6] <= 20
    torch.manual_seed(0)
    assert torch.equal(elements(places, depths)[0], anchors)
    assert not torch.equal(elements(places, depths)[0], anchors), "they are drawn anew each time"


def test_what_an_element_sees() -> None:
    anchors, depths = elements(9, 3, kept=1.0)
    found = sees(anchors, depths)
    for one, own in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
        for other, seen in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
            text = seen[1] == 0 and seen[0] <= own[0]
            draft = seen[1] > 0 and seen[0] == own[0] and seen[1] <= own[1]
            assert bool(found[one, other]) == (text or draft)


def test_an_elements_row_is_that_of_its_text_and_masks_alone() -> None:
    own, ids = training(), batch()["ids"]
    anchors, depths = elements(LENGTH - 1, DEPTHS)
    with torch.no_grad():
        found = own.logits(ids, anchors, depths)
    for row in range(len(ids)):
        for place, (anchor, depth) in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
            expected = alone(own, ids[row, : anchor + 1].tolist(), depth)
            torch.testing.assert_close(found[row, place], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", ["published", "lk-alpha"])
def test_losses_and_overlaps_are_those_of_each_element_by_itself(loss: str) -> None:
    own, given = training(loss), batch()
    torch.manual_seed(7)
    found = own(**given)
    torch.manual_seed(7)
    anchors, depths = elements(LENGTH - 1, DEPTHS)
    with torch.no_grad():
        laws = target()(given["ids"]).logits.softmax(-1).float()
    losses, overlaps = list[Tensor](), [list[float]() for _ in range(DEPTHS)]
    for row in range(3):
        text = given["ids"][row].tolist()
        for anchor, depth in zip(anchors.tolist(), depths.tolist(), strict=True):
            place = anchor + depth
            if not given["valid"][row, place + 1]:
                continue
            logits, law = alone(own, text[: anchor + 1], depth)[:VOCAB], laws[row, place]
            overlaps[depth].append(float(torch.minimum(logits.softmax(-1), law).sum()))
            losses.append(-logits.log_softmax(-1)[text[place + 1]] if loss == "published" else lk_alpha(logits, law))
    assert found["count"].tolist() == [len(one) for one in overlaps] and min(map(len, overlaps)) > 0
    assert float(found["loss"].detach()) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
    means = torch.tensor([sum(one) / len(one) for one in overlaps])
    torch.testing.assert_close(found["overlap"], means, atol=1e-4, rtol=1e-4)


def test_the_drafter_drafts_from_what_was_learnt() -> None:
    own = training()
    drafter = ParallelDrafter(HuggingFaceModel(own.network), own.mask_id, VOCAB)
    ids = batch()["ids"]
    text = Text(ids, torch.full((len(ids),), 6))
    state = drafter.start(text, Session(SamplingParams(), 32, VOCAB))
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Chain(DEPTHS), Noise.from_seed(0, len(ids))))
    with torch.no_grad():
        learnt = own.logits(ids, *one_draft(6))[:, 5:, :VOCAB].softmax(-1)
    rows = torch.zeros(len(ids), DEPTHS, VOCAB).scatter(
        -1, draft.shortlist[:, :DEPTHS], draft.probs[:, :DEPTHS].float()
    )
    torch.testing.assert_close(rows, learnt, atol=1e-5, rtol=1e-4)


def one_draft(length: int) -> tuple[Tensor, Tensor]:
    """Return a text, and the masks of one draft behind it."""
    masks = torch.arange(1, DEPTHS)
    return (
        torch.cat([torch.arange(length), torch.full_like(masks, length - 1)]),
        torch.cat([torch.zeros(length, dtype=torch.int64), masks]),
    )


def test_the_loss_falls() -> None:
    own, given = training(), batch()
    steps, losses = Muon(own, 1e-2, 1e-2), list[float]()
    for _ in range(30):
        found = own(**given)
        losses.append(float(found["loss"].detach()))
        found["loss"].backward()
        steps.step()
        steps.zero_grad()
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_tied_rows_are_saved_once_and_learn_as_one() -> None:
    model = tiny_model(vocab=VOCAB, dtype=torch.float32, tie_word_embeddings=True)
    made = MAKERS["pard"].make(model, TargetEnds.of(model), usual_reads(2), HeadSize(), None)
    names = {*made.training.state_dict()}
    assert "network.model.embed_tokens.weight" in names and "network.lm_head.weight" not in names
    before = {name: value.clone() for name, value in made.training.state_dict().items()}
    fresh = MAKERS["pard"].make(model, TargetEnds.of(model), usual_reads(2), HeadSize(), None).training
    fresh.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
    assert fresh.network.lm_head.weight is fresh.network.model.embed_tokens.weight


@pytest.mark.parametrize(("vocab", "mask", "size"), [(ROWS, ROWS, ROWS + 1), (ROWS + 3, ROWS, ROWS + 3)])
def test_any_draft_model_may_be_begun_with(vocab: int, mask: int, size: int) -> None:
    """Its mask is the first token that the target has not; it is added where the model has no row for it."""
    given = tiny_model(vocab=vocab, seed=2)
    made = begun_with(given, ROWS, None)
    own = drafter_of(made)
    assert isinstance(own, ParallelDrafter) and own.mask_id == mask and own.model.facts.vocab_size == size
    weights = made.state_dict()
    for name, weight in given.state_dict().items():
        assert torch.equal(weights[name][: len(weight)], weight.float()), name
    again = drafter_of(begun_with(made, ROWS, 2))
    assert isinstance(again, ParallelDrafter) and again.mask_id == mask, "one that has a mask keeps it"
    with pytest.raises(InvalidParameter, match="has 2 layers, not 3; leave layers out"):
        begun_with(given, ROWS, 3)
    given.config.update({"mask_token_id": 3})  # as of a model that was tuned for masks of its own
    made = begun_with(given, ROWS, None)
    assert drafter_of(made).mask_id == mask and made.config.mask_token_id is None, "no other mask is read"  # type: ignore[attr-defined]


def test_a_folder_is_trained_from_another_and_drafts_beside_its_target(tmp_path: Path) -> None:
    tiny_model(vocab=ROWS, dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_model(vocab=ROWS, dtype=torch.float32, seed=2).save_pretrained(tmp_path / "start")
    for name in ("target", "start"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    model = polydraft.load(tmp_path / "target").target
    prompts = [torch.tensor(one) for one in ([3, 1, 4], [9, 2], [6, 5, 3, 5])]
    recipe = HeadRecipe(steps=2, texts=2, measure_every=5, save_every=5, matrix_rate=0.0, other_rate=0.0)
    writing = WritingPlan(tokens=64, length=16, rows=2)
    plan = HeadPlan("pard", HeadSize(drafts=3), writing, recipe, start=tmp_path / "start")
    made = make_head(model, prompts, tmp_path / "work", tmp_path / "made", plan)
    assert len(made.drafting.overlap) == 3
    pair = polydraft.load(tmp_path / "target", tmp_path / "made", dtype="float32")
    assert drafter_of(pair.draft).name == "pard"
    kept = tiny_model(vocab=ROWS, dtype=torch.float32, seed=2).state_dict()
    for name, weight in kept.items():  # the rates are 0
        assert torch.equal(pair.draft.state_dict()[name][: len(weight)], weight.bfloat16().float()), name
    found = polydraft.generate(pair.target, prompts[0][None], drafter=pair.draft, policy=Chain(3), max_new_tokens=6)
    assert "pard" in found.statistics.sources
    with pytest.raises(CheckpointError, match="There is no model folder"):
        make_head(model, prompts, tmp_path / "w", tmp_path / "o", replace(plan, start=tmp_path / "nowhere"))
