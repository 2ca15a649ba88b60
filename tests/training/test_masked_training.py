"""Training a draft model to fill masks: which elements there are, what each sees, and that it drafts what it learnt."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain
from polydraft.drafters import DraftRequest, ParallelDrafter, Session, drafter_of
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel, module_of
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


def training(loss: str = "published", drafts: int = DEPTHS, kind: str = "pard") -> PardTraining:
    torch.manual_seed(3)
    ends = TargetEnds.of(target())
    made = MAKERS[kind].make(target(), ends, usual_reads(2), HeadSize(drafts=drafts, loss=loss), None)
    assert isinstance(made.training, PardTraining) and isinstance(made.drafter, ParallelDrafter)
    assert made.training.mask_id == made.drafter.mask_id == VOCAB and made.training.path is made.drafter.path
    if made.drafter.path is not None:
        assert not made.drafter.path.markov_w2.weight.any(), "at first it changes nothing"
        nn.init.normal_(made.drafter.path.markov_w2.weight)
        nn.init.normal_(made.drafter.path.markov_w1.weight)
    return made.training


@torch.no_grad()
def alone(own: PardTraining, text: list[int], masks: int, above: int = 0) -> Tensor:
    """Return the logits behind a text and so many masks, of an ordinary pass; with a path term behind a token."""
    given = torch.tensor([[*text, *[own.mask_id] * masks]])
    logits = own.network(input_ids=given, use_cache=False).logits[0, -1]
    if own.path is None or not masks:
        return logits
    return logits + own.path.markov_w2.weight @ own.path.markov_w1.weight[above]


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


@pytest.mark.parametrize("kind", ["pard", "pard-path"])
def test_an_elements_row_is_that_of_its_text_and_masks_alone(kind: str) -> None:
    own, ids = training(kind=kind), batch()["ids"]
    anchors, depths = elements(LENGTH - 1, DEPTHS)
    with torch.no_grad():
        found = own.logits(ids, anchors, depths)
    for row in range(len(ids)):
        for place, (anchor, depth) in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
            text = ids[row, : anchor + depth + 1].tolist()
            expected = alone(own, text[: anchor + 1], depth, text[-1])
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


@pytest.mark.parametrize("kind", ["pard", "pard-path"])
def test_the_drafter_drafts_from_what_was_learnt(kind: str) -> None:
    own = training(kind=kind)
    drafter = ParallelDrafter(HuggingFaceModel(own.network), own.mask_id, VOCAB, path=own.path)
    ids = batch()["ids"]
    text = Text(ids, torch.full((len(ids),), 6))
    state = drafter.start(text, Session(SamplingParams(), 32, VOCAB))
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Chain(DEPTHS), Noise.from_seed(0, len(ids))))
    ids = torch.cat([ids[:, :6], draft.tree.tokens[:, 1:]], dim=1)  # as if the text went on so
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


def test_a_path_term_is_written_read_and_gone_on_with(tmp_path: Path) -> None:
    """In a file of its own, so that a program that knows no path term reads the rest, and nothing complains."""
    ends, model = TargetEnds.of(target()), HuggingFaceModel(target())
    made = MAKERS["pard-path"].make(target(), ends, usual_reads(2), HeadSize(rank=5), None)
    term = cast(ParallelDrafter, made.drafter).path
    assert term is not None
    nn.init.normal_(term.markov_w2.weight)
    made.write(tmp_path, model, "official", "")
    assert not any("markov" in name for name in load_file(tmp_path / "model.safetensors"))
    found = cast(ParallelDrafter, drafter_of(polydraft.models.load_draft(str(tmp_path), target())))
    assert found.path is not None and found.mask_id == VOCAB and found.path.rank == 5
    for name, weight in found.path.state_dict().items():
        assert torch.equal(weight, term.state_dict()[name].bfloat16().float()), name
    start = module_of(found.model)
    again = cast(ParallelDrafter, MAKERS["pard-path"].make(target(), ends, (), HeadSize(), start).drafter)
    assert again.path is not None and again.path.rank == 5
    assert torch.equal(again.path.markov_w1.weight, found.path.markov_w1.weight)
    without = cast(ParallelDrafter, MAKERS["pard"].make(target(), ends, (), HeadSize(), start).drafter)
    assert without.path is None and cast(ParallelDrafter, drafter_of(module_of(without.model))).path is None
    with pytest.raises(InvalidParameter, match="has the rank 5, not 4; leave the rank out"):
        MAKERS["pard-path"].make(target(), ends, (), HeadSize(rank=4), start)
    config = json.loads((tmp_path / "config.json").read_text())
    for rank, message in (
        (4, r"has shape \[25, 5\]"),
        ("5", "says that pard_path_rank is '5'"),
        (0, "pard_path_rank is 0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "pard_path_rank": rank}))
        with pytest.raises(CheckpointError, match=message):
            drafter_of(polydraft.models.load_draft(str(tmp_path), target()))
    tensors = load_file(tmp_path / "path_term.safetensors")
    del tensors["markov_w1.weight"]
    save_file(tensors, tmp_path / "path_term.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"markov_w1\.weight is missing"):
        drafter_of(polydraft.models.load_draft(str(tmp_path), target()))
    (tmp_path / "path_term.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"it holds no path_term\.safetensors\."):
        drafter_of(polydraft.models.load_draft(str(tmp_path), target()))


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
