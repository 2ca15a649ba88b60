"""A target that is tuned to fill in masks: its loss written again, what learns, its folder, texts and their law."""

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain
from polydraft.cli.train import in_words
from polydraft.conformance import check
from polydraft.drafters import RiderDrafter
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.probs import SamplingParams
from polydraft.training import MAKERS, HeadPlan, HeadRecipe, HeadSize, MadeHead, WritingPlan, make_head
from polydraft.training.heads.losses.rider_training import CUTS, SpaceTraining
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds, lk_alpha
from polydraft.training.heads.losses.tuned_target import AdaptedTarget, Drift
from polydraft.training.heads.new_heads import free_token
from polydraft.training.muon import Muon

VOCAB, LENGTH, COUNT, MASK = 24, 14, 3, 22
FIRST = (4, 6)
"""Where the answers begin."""
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target() -> PreTrainedModel:
    """Return a target whose output rows are its embeddings."""
    return tiny_model("llama", VOCAB, dtype=torch.float32, tie_word_embeddings=True)


def texts() -> HeadBatch:
    ids = torch.randint(20, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target()(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, : FIRST[0]] = valid[1, : FIRST[1]] = valid[1, 12:] = 0
    return HeadBatch(ids, valid, found.hidden_states[-1], found.hidden_states[-1], found.logits.logsumexp(-1))


def training_of(row_loss: Any = None, spread: float = 0.1, masks: tuple[int, ...] = (MASK,) * COUNT) -> SpaceTraining:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        adapted = AdaptedTarget(target(), masks)
        with torch.no_grad():
            for value in adapted.parameters():
                value.add_(spread * torch.randn_like(value))
    return SpaceTraining(adapted, masks, TargetEnds.of(target()), row_loss).eval()


def tuned(training: SpaceTraining) -> PreTrainedModel:
    return training.adapted.merged()


# The loss and the drafts, by plain passes of the merged model over each text up to its cut, and masks behind it.


@torch.no_grad()
def by_hand(training: SpaceTraining, cuts: Sequence[int], soft: bool) -> tuple[float, list[list[float]]]:
    """Return the mean over all tokens and masks that count, and the overlaps by mask."""
    model, batch, values = tuned(training), texts(), list[Tensor]()
    overlaps: list[list[float]] = [[] for _ in range(COUNT)]
    for row, cut in enumerate(cuts):
        ids, stop = batch.ids[row].tolist(), (LENGTH, 12)[row]
        plain, whole = (one(batch.ids[row : row + 1]).logits[0].double().softmax(-1) for one in (target(), model))
        last = stop - 1 if cut < 0 else cut + COUNT
        for place in range(FIRST[row], last + 1):
            masks = 0 if cut < 0 or place <= cut else place - cut
            given = [*ids[: place - masks], *training.tokens[:masks]]
            row_of = model(torch.tensor([given])).logits[0, -1].double()
            law, label = plain[place - 1], ids[place]
            if masks:
                overlaps[masks - 1].append(float(torch.minimum(row_of.softmax(-1), whole[place - 1]).sum()))
            own = row_of.log_softmax(-1)
            if not soft:
                values.append(-own[label])
            elif masks:
                values.append(-torch.minimum(own.exp(), law).sum().log())
            else:
                values.append(-(law * own).sum())
    return float(torch.stack(values).mean()), overlaps


@pytest.mark.parametrize("masks", [(MASK,) * COUNT, (20, 21, 22)], ids=["one mask", "masks in a row"])
@pytest.mark.parametrize("soft", [False, True], ids=["published", "lk-alpha"])
@pytest.mark.parametrize("cuts", [(4, 8), (-1, 6), (10, -1)])
def test_the_loss_and_the_overlaps_are_the_formulas(
    cuts: tuple[int, int], soft: bool, masks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens behind an answer's end do not count, whether a text is cut or not."""
    training = training_of(lk_alpha if soft else None, masks=masks)
    monkeypatch.setattr(f"{SpaceTraining.__module__}.CUTS", 1)
    monkeypatch.setattr(f"{SpaceTraining.__module__}.drawn_cuts", lambda *_: torch.tensor(cuts))
    with torch.no_grad():
        found = training(**vars(texts()))
    loss, overlaps = by_hand(training, cuts, soft)
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert found["count"].tolist() == [len(one) for one in overlaps] and sum(map(len, overlaps)) > 0
    assert found["overlap"].tolist() == pytest.approx([sum(one) / len(one) for one in overlaps], abs=1e-5)


def test_half_of_the_texts_are_cut_while_learning_and_all_held_out_ones_at_several_places() -> None:
    training, batch = training_of(), texts()
    torch.manual_seed(1)
    with torch.no_grad():
        assert training(**vars(batch))["count"].tolist() == [2 * CUTS] * COUNT
        training.train()
        drawn = [int(training(**vars(batch))["count"][0]) for _ in range(30)]
    assert {*drawn} == {0, 1, 2} and 20 < sum(drawn) < 40
    assert float(training(**vars(batch) | {"valid": torch.zeros_like(batch.valid)})["loss"].detach()) == 0


# What learns.


def test_only_adapters_and_the_masks_embeddings_learn_and_others_stay_as_they_are() -> None:
    training, before = training_of(spread=0.0), copy.deepcopy(target().state_dict())
    ids = torch.tensor([[3, MASK, 4, MASK]])
    with torch.no_grad():
        torch.testing.assert_close(training.adapted(ids)[1], target()(ids).logits, atol=1e-6, rtol=0)
    training.train()
    torch.manual_seed(2)
    for _ in range(4):
        training(**vars(texts()))["loss"].backward()
    own = training.adapted.embeddings
    assert own is not None and own.weight.shape == (1, 16) and own.weight.grad is not None
    assert bool(own.weight.grad.abs().min() > 0), "one of four texts at least was cut"
    assert {name for name, _ in training.named_parameters()} == {
        "adapted.embeddings.weight",
        *(f"adapted.adapters.{place}" for place in range(30)),
    }
    groups = Muon(training, 4e-3, 2e-3, slow=training.slow()).param_groups
    assert [(group["lr"], len(group["params"])) for group in groups] == [(4e-3, 0), (2e-3, 1), (5e-4, 30)]
    changed = training_of(spread=0.2)
    merged: Any = tuned(changed)
    table, given = merged.get_input_embeddings().weight, before["model.embed_tokens.weight"]
    others = [one for one in range(VOCAB) if one != MASK]
    assert torch.equal(table[others], given[others])
    assert changed.adapted.embeddings is not None
    assert torch.equal(table[MASK], changed.adapted.embeddings.weight[0]) and not torch.equal(table[MASK], given[MASK])
    with torch.no_grad():
        torch.testing.assert_close(changed.adapted(ids)[1], merged(ids).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())


@pytest.mark.parametrize("loss", ["published", "acceptance"])
def test_the_loss_falls_and_masks_draft_better(loss: str) -> None:
    torch.manual_seed(5)
    training = MAKERS["space"].make(target(), TargetEnds.of(target()), (), HeadSize(drafts=2, loss=loss), None).training
    adam, batch = torch.optim.Adam(training.parameters(), 0.01), vars(texts())

    def measured() -> tuple[float, float]:
        torch.manual_seed(6)
        with torch.no_grad():
            found = training.eval()(**batch)
        return float(found["loss"]), float(found["overlap"].mean())

    before = measured()
    for _ in range(40):
        adam.zero_grad()
        training.train()(**batch)["loss"].backward()
        adam.step()
    after = measured()
    assert after[0] < 0.92 * before[0]
    assert loss == "published" or after[1] > before[1]


def test_masks_are_tokens_that_nothing_else_is() -> None:
    model: Any = copy.deepcopy(target())
    model.config.pad_token_id, model.generation_config.eos_token_id = 23, [22, 21]
    assert free_token(model) == 20
    made = MAKERS["space"].make(model, TargetEnds.of(model), (), HeadSize(), None)
    assert isinstance(made.drafter, RiderDrafter) and made.drafter.masks == (20,) * 5
    model.config.spd_type, model.config.mask_token_id, model.config.mask_num = "space", 7, 2
    again = MAKERS["space"].make(model, TargetEnds.of(model), (), HeadSize(), None).drafter
    assert isinstance(again, RiderDrafter) and again.masks == (7, 7), "a tuned target goes on with its own"
    more = MAKERS["space"].make(model, TargetEnds.of(model), (), HeadSize(drafts=3), None).drafter
    assert isinstance(more, RiderDrafter) and more.masks == (7, 7, 7)
    model.config.mask_diff, model.config.mask_num = True, 3
    fewer = MAKERS["space"].make(model, TargetEnds.of(model), (), HeadSize(drafts=2), None).drafter
    assert isinstance(fewer, RiderDrafter) and fewer.masks == (7, 8)
    with pytest.raises(InvalidParameter, match=r"names one mask, or masks in a row, but these are \(7, 8, 9, 9\)"):
        MAKERS["space"].make(model, TargetEnds.of(model), (), HeadSize(drafts=4), None)


def test_targets_and_plans_that_cannot_be_are_refused(tmp_path: Path) -> None:
    chains = tiny_model("bloom", VOCAB)
    with pytest.raises(UnsupportedModel, match="scores chains only, so no riders"):
        MAKERS["space"].make(chains, TargetEnds.of(target()), (), HeadSize(), None)
    with pytest.raises(InvalidParameter, match="16 masks need 272 tokens beside each text, and the context has 128"):
        MAKERS["space"].make(target(), TargetEnds.of(target()), (), HeadSize(drafts=16), None)
    with pytest.raises(InvalidParameter, match="kind space begins with its target alone; leave start out"):
        HeadPlan("space", start=tmp_path)
    with pytest.raises(InvalidParameter, match="at most 16 drafts, but 17 are asked for"):
        HeadPlan("space", HeadSize(drafts=17))


# Folders.


@cache
def plan() -> HeadPlan:
    recipe = HeadRecipe(steps=6, texts=4, measure_every=6, save_every=3, other_rate=2e-2)
    return HeadPlan("space", HeadSize(drafts=3), WritingPlan(tokens=200, length=32, rows=4), recipe, name="mine")


def made_in(folder: Path) -> tuple[PreTrainedModel, MadeHead]:
    """Tune a target with a tokenizer, and return it with what was made."""
    tiny_model(vocab=len(tiny_tokenizer()), dtype=torch.float32).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    given = polydraft.load(folder / "target", dtype="float32").target
    return given, make_head(given, PROMPTS, folder / "work", folder / "tuned", plan())


@pytest.mark.long(3)
@pytest.mark.wrong_types
def test_a_tuned_folder_is_a_model_that_drafts_by_its_masks(tmp_path: Path) -> None:
    given, made = made_in(tmp_path)
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    mask = free_token(given)
    assert [config[name] for name in ("spd_type", "mask_token_id", "mask_num", "mask_diff")] == [
        "space",
        mask,
        3,
        False,
    ]
    with pytest.warns(UserWarning, match="is another model than"):
        pair = polydraft.load(tmp_path / "tuned", dtype="float32")
    assert isinstance(pair.draft, RiderDrafter) and pair.draft.masks == (mask,) * 3
    assert pair.target.num_parameters() > given.num_parameters() - 1
    texts_of = [dict(ids=torch.arange(3, 15), valid=torch.ones(12))]
    drift = Drift.of(given, pair.target, texts_of)  # type: ignore[arg-type]
    assert made.drift is not None and made.drift.tokens > 0
    assert drift.divergence > 0 and made.drift.divergence > 0, "it is another model"
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    plain: Any = polydraft.generate(pair.target, torch.tensor(rows), drafter="none", **greedy)
    found: Any = polydraft.generate(pair.target, torch.tensor(rows), drafter=pair.draft, **greedy)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.drafted > 0
    many = {one.name: one.tokens for one in polydraft.generate_many(pair.target, rows, drafter=pair.draft, **greedy)}
    assert many == {row: plain.sequences[row, 5:].tolist() for row in range(2)}
    said = f"KL(original || tuned) is {made.drift.divergence:.4f}"
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "exact for the tuned\nmodel only, not for mine." in card and said in card
    assert 'polydraft generate --target THIS_FOLDER "..."' in card and "No network: what the target makes" in card
    told = in_words(made)
    assert "Texts are exact for the tuned target only." in told and said in told
    assert made.as_dict()["drift"] == vars(made.drift)


@pytest.mark.long(2)
def test_an_interrupted_run_comes_to_the_same_model(tmp_path: Path) -> None:
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "whole", plan())
    (last,) = (tmp_path / "work").glob("space-*/checkpoint-6")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "again", plan())
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5, rtol=0)


def test_texts_have_the_law_of_the_tuned_target_and_not_of_the_original() -> None:
    """A right engine fails with probability 1e-6."""
    small = tiny_model("llama", 5, dtype=torch.float32)
    torch.manual_seed(7)
    adapted = AdaptedTarget(small, (3, 3))
    with torch.no_grad():
        for value in adapted.parameters():
            value.add_(0.5 * torch.randn_like(value))
    model = adapted.merged()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        given: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "seed": seeds[0], "top_k": 0}
        ids = torch.tensor([[*one] for one in prompts])
        found: Any = polydraft.generate(model, ids, drafter=RiderDrafter((3, 3)), policy=Chain(2), **given)
        return found.sequences[:, 3:].tolist()

    settings: dict[str, Any] = {"batch_size": 64, "most_samples": 256, "params": SamplingParams()}
    assert check(generate, model, [[1, 2, 4]], **settings).passed
    assert not check(generate, small, [[1, 2, 4]], **settings).passed
