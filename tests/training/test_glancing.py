"""SpecDec's drafter: what the target writes of sources, the loss written again, glances, folders that draft."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from sources import encoder_decoder
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain
from polydraft.cli.train import run_train_head
from polydraft.drafters import SpecDrafter, drafter_of
from polydraft.engine import draft_for
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.options.commands.making_options import TrainHeadOptions
from polydraft.probs import Noise
from polydraft.training import HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head
from polydraft.training.heads.losses.row_losses import total_variation
from polydraft.training.heads.losses.source_training import GlancingTraining, new_filling_model
from polydraft.training.heads.shards import Shards, write_shards
from polydraft.training.heads.source_answers import NOTHING, answered, first_token

KINDS = ("t5", "marian", "bart")
VOCAB, BLOCK, MASK, START = 64, 3, 63, 3
SOURCES = [[7, 8, 9, 2], [7, 2], [50, 51, 2], [7, 8, 9, 11, 2], [20, 21, 2]]
PROMPTS = [torch.tensor(one) for one in SOURCES]
WRITING = WritingPlan(tokens=200, length=16, rows=4)


def target(kind: str = "t5") -> PreTrainedModel:
    return encoder_decoder(kind)


def texts(kind: str = "t5") -> dict[str, Tensor]:
    """Return texts of 9 tokens with padded sources; the second ends after 5, the third at once."""
    ids = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = START
    valid = torch.ones_like(ids)
    valid[:, 0] = valid[1, 5:] = valid[2, 2:] = 0
    source = torch.tensor([[7, 8, 9, 2], [7, 2, NOTHING, NOTHING], [50, 51, 2, NOTHING]])
    return {"ids": ids, "valid": valid, "source": source}


def training_of(kind: str = "t5", row_loss: Any = None) -> GlancingTraining:
    own = target(kind)
    network = new_filling_model(own, 1, MASK, BLOCK)
    return GlancingTraining(network, own, MASK, BLOCK, row_loss).eval()


# What the target writes.


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_writes_of_each_source_what_it_would_alone(kind: str) -> None:
    model = HuggingFaceModel(target(kind))
    heats, (random,) = torch.tensor([0.0, 1.0, 0.0]), Noise.from_seed(3, 1).generators
    found = answered(model, PROMPTS[:3], heats, (8, 6), (), random)
    assert found["source"].tolist() == [[*one, *[-1] * (6 - len(one))] for one in SOURCES[:3]]
    assert found["valid"].tolist() == [[0] + [1] * 7] * 3 and found["ids"][:, 0].tolist() == [START] * 3
    for row in (0, 2):
        for place in range(1, 8):
            with torch.no_grad():
                text = found["ids"][row : row + 1, :place].long()
                plain = target(kind)(input_ids=PROMPTS[row].unsqueeze(0), decoder_input_ids=text).logits[0, -1]
            assert int(found["ids"][row, place]) == int(plain.argmax())


def test_writing_stops_where_all_texts_have_ended(tmp_path: Path) -> None:
    model, heats = HuggingFaceModel(target()), torch.zeros(2)
    (random,) = Noise.from_seed(3, 1).generators
    whole = answered(model, PROMPTS[:2], heats, (12, 6), (), random)["ids"]
    ends = {*whole[:, 3].tolist()}
    cut = answered(model, PROMPTS[:2], heats, (12, 6), [*ends], random)["ids"]
    last = max(next(place for place, one in enumerate(row) if place and one in ends) for row in whole.tolist())
    assert torch.equal(cut[:, : last + 1], whole[:, : last + 1]) and not cut[:, last + 1 :].any()
    files = write_shards(model, PROMPTS, tmp_path, (), WRITING, [*ends])
    for row in [*Shards(files.learnt), *Shards(files.held_out)]:
        first = next((place for place, one in enumerate(row["ids"].tolist()) if place and one in ends), 15)
        assert row["valid"].tolist() == [0] + [1] * first + [0] * (15 - first)
        assert row["source"][row["source"] != NOTHING].tolist() in SOURCES
    nameless = encoder_decoder("t5", decoder_start_token_id=None, bos_token_id=None)
    with pytest.raises(UnsupportedModel, match="names no token that its text begins with"):
        first_token(nameless)


# The loss, by a plain pass over each source, prefix and block, without padding.


@torch.no_grad()
def rows_by_hand(training: GlancingTraining, row: int, cut: int, shown: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-laws of a text's masks, some of which show their tokens, and the target's laws there."""
    given = texts()
    ids, source = given["ids"][row], given["source"][row]
    source, padded = source[source != NOTHING].unsqueeze(0), torch.cat([ids, ids.new_zeros(BLOCK)])
    block = [int(padded[cut + place]) if place in shown else MASK for place in range(BLOCK)]
    size = cut + BLOCK
    made = training.network(
        input_ids=source,
        decoder_input_ids=torch.tensor([[*ids[:cut].tolist(), *block]]),
        decoder_attention_mask=torch.zeros(1, 1, size, size),
        use_cache=False,
    ).logits[0, cut:]
    plain = training.target[0](input_ids=source, decoder_input_ids=ids.unsqueeze(0)).logits[0].softmax(-1)
    return made.double().log_softmax(-1), plain[(cut - 1 + torch.arange(BLOCK)).clamp_max(8)]


@pytest.mark.parametrize("soft", [False, True], ids=["published", "acceptance"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_the_overlaps_are_the_formulas(kind: str, soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, where some masks show their tokens, and others stand behind the text's end."""
    training, given = training_of(kind, total_variation if soft else None), texts()
    cuts, shown, counts = [3, 3, 1], [[1], [], []], [9, 5, 2]
    drawn = torch.tensor([(cut - 0.5) / (count - 1) for cut, count in zip(cuts, counts, strict=True)])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: drawn)
    marks = torch.tensor([[place in own for place in range(BLOCK)] for own in shown])
    monkeypatch.setattr(training, "glanced", lambda *_: marks)
    training.training = True  # dropout stays off
    with torch.no_grad():
        found = training(**given)
    values, overlaps = list[Tensor](), [list[Tensor]() for _ in range(BLOCK)]
    for row, (cut, own) in enumerate(zip(cuts, shown, strict=True)):
        logs, laws = rows_by_hand(training, row, cut, own)
        for place in range(BLOCK):
            if place in own or cut + place >= counts[row]:
                continue
            label = given["ids"][row, cut + place]
            overlap = torch.minimum(logs[place].exp(), laws[place]).sum()
            overlaps[place].append(overlap)
            hard = -0.9 * logs[place, label] - 0.1 * logs[place].mean()
            values.append(1 - overlap if soft else hard)
    assert float(found["loss"]) == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert found["count"].tolist() == [3, 1, 1] == [len(one) for one in overlaps]
    assert found["overlap"].tolist() == pytest.approx([float(torch.stack(one).mean()) for one in overlaps], abs=1e-6)


def test_a_share_of_as_many_as_were_wrong_is_shown_and_it_falls() -> None:
    training = GlancingTraining(training_of().network, target(), MASK, 8, None)
    training.begin(10)
    asked = torch.ones(300, 8).bool()
    asked[200:, 5:] = False
    torch.manual_seed(2)
    for done, share in ((0, 0.5), (5, 0.4), (10, 0.3), (20, 0.3)):
        training.get_buffer("done").fill_(done)
        wrong = torch.arange(300) % 6
        shown = training.glanced(asked, wrong)
        assert shown.sum(-1).tolist() == [int(share * one + 1e-6) for one in wrong.tolist()]
        assert not bool((shown & ~asked).any())
        assert bool(shown[:200].any(0).all()), "any of them may be shown"


def test_only_wrong_masks_count_in_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    training, given, seen = training_of(), texts(), list[Any]()
    monkeypatch.setattr(
        training, "glanced", lambda asked, wrong: seen.append((asked, wrong)) or torch.zeros_like(asked)
    )
    training.training = True
    torch.manual_seed(4)
    training(**given)
    torch.manual_seed(4)
    cuts = 1 + (torch.rand(3) * torch.tensor([8, 4, 1])).long()
    (asked, wrong), ends = seen[0], (9, 5, 2)
    for row, cut in enumerate(cuts.tolist()):
        best = rows_by_hand(training, row, cut, [])[0].argmax(-1).tolist()
        there = [cut + place < ends[row] for place in range(BLOCK)]
        labels = [*given["ids"][row].tolist(), 0, 0, 0][cut : cut + BLOCK]
        assert asked[row].tolist() == there
        assert int(wrong[row]) == sum(ok and one != own for ok, one, own in zip(there, best, labels, strict=True))
    assert int(training.get_buffer("done")) == 1


def test_the_drafter_begins_as_the_targets_first_layers_and_the_loss_falls() -> None:
    training, given = training_of(), texts()
    own, other = training.network.state_dict(), target().state_dict()
    assert all(torch.equal(value, other[name].float()) for name, value in own.items()) and len(own) < len(other)
    assert all(value.requires_grad for value in training.parameters())
    adam, found = torch.optim.Adam(training.parameters(), 0.003), list[float]()
    training.begin(60)
    torch.manual_seed(5)
    for _ in range(60):
        adam.zero_grad()
        loss = training.train()(**given)["loss"]
        loss.backward()
        adam.step()
        found.append(float(loss.detach()))
    assert sum(found[-10:]) < 0.6 * sum(found[:10])


# Folders.


def test_a_checkpoint_has_tied_weights_once_and_they_are_tied_again() -> None:
    tied = encoder_decoder("t5", tie_word_embeddings=True)
    training = GlancingTraining(new_filling_model(tied, 1, MASK, BLOCK), tied, MASK, BLOCK, None)
    kept = training.state_dict()
    places = [value.data_ptr() for name, value in kept.items() if name != "done"]
    assert len({*places}) == len(places) < len([*training.named_parameters(remove_duplicate=False)])
    other = GlancingTraining(new_filling_model(tied, 1, MASK, BLOCK), tied, MASK, BLOCK, None)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    other.load_state_dict({name: value.clone() for name, value in kept.items()})
    assert all(map(torch.equal, training.parameters(), other.parameters()))


def plan(**changes: Any) -> HeadPlan:
    recipe = HeadRecipe(steps=4, texts=4, measure_every=4, save_every=2)
    size = {"drafts": 3, **changes.pop("size", {})}
    return HeadPlan("spec-drafter", HeadSize(**size), WRITING, recipe, name="mine", **changes)


@pytest.mark.long(3)
@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "t5")) for one in KINDS])
def test_a_drafter_is_made_read_again_and_drafts_the_targets_text(kind: str, tmp_path: Path) -> None:
    own = target(kind)
    made = make_head(own, PROMPTS, tmp_path / "work", tmp_path / "draft", plan())
    assert len(made.drafting.overlap) == 3 and made.drift is None
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["spec_drafter"] == {"block_size": 3, "mask_token_id": MASK}
    drafter = drafter_of(draft_for(tmp_path / "draft", own))
    assert isinstance(drafter, SpecDrafter) and (drafter.mask_id, drafter.block) == (MASK, 3)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 10}
    sources = torch.tensor([[7, 8, 9, 2], [50, 51, 52, 2]])
    plain: Any = polydraft.generate(own, sources, drafter="none", **greedy)
    found: Any = polydraft.generate(own, sources, drafter=drafter, policy=Chain(3), **greedy)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.drafted > 0
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A draft model of" in card and "wrote them of given sources" in card


@pytest.mark.long(2)
def test_an_interrupted_run_comes_to_the_same_drafter_and_another_begins_with_it(tmp_path: Path) -> None:
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "whole", plan())
    (last,) = (tmp_path / "work").glob("spec-drafter-*/checkpoint-4")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "again", plan())
    still = HeadRecipe(steps=1, texts=4, matrix_rate=0.0, other_rate=0.0, measure_every=1, save_every=1)
    begun = HeadPlan("spec-drafter", HeadSize(), WRITING, still, start=tmp_path / "whole")
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "begun", begun)
    one, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again", "begun"))
    for other in others:
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name].float(), value.float(), atol=1e-3, rtol=1e-2)
    named = [json.loads((tmp_path / name / "config.json").read_text())["spec_drafter"] for name in ("whole", "begun")]
    assert named[0] == named[1]
    with pytest.raises(InvalidParameter, match="draft model to begin with has 2 layers, not 1; leave layers out"):
        asked = plan(start=tmp_path / "whole", size={"layers": 1})
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "never", asked)


def test_the_command_trains_for_a_folder_and_what_it_made_drafts(tmp_path: Path) -> None:
    sizes = {"vocab_size": len(tiny_tokenizer())}
    encoder_decoder("t5", **sizes).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ("a b c", "b", "c a", "a a"))
    (tmp_path / "rows.jsonl").write_text(rows)
    request = TrainHeadOptions(
        kind="spec-drafter",
        prompts=(str(tmp_path / "rows.jsonl"),),
        target=str(tmp_path / "target"),
        out=tmp_path / "draft",
        work=tmp_path / "work",
        tokens=64,
        length=16,
        steps=2,
        drafts=2,
    )
    assert run_train_head(request) == 0
    pair = polydraft.load(tmp_path / "target", tmp_path / "draft")
    assert isinstance(drafter_of(pair.draft), SpecDrafter)


# What is refused.


def test_targets_that_cannot_be_are_refused_before_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match=r"A spec-drafter is for encoder-decoders, and Llama.* has no"):
        make_head(tiny_model(vocab=24), PROMPTS, tmp_path / "work", tmp_path / "out", plan())
    with pytest.raises(InvalidParameter, match=r"medusa is for decoders, and T5.* has an encoder; .* is spec-drafter"):
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "out", HeadPlan("medusa"))
    with pytest.raises(InvalidParameter, match="has 2 layers; its drafter has no more, and not 3"):
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "out", plan(size={"layers": 3}))
    with pytest.raises(UnsupportedModel, match="reads input_features; a spec-drafter is for what reads tokens"):
        new_filling_model(encoder_decoder("whisper"), None, MASK, BLOCK)
    monkeypatch.setattr("polydraft.training.heads.losses.source_training.DEPTHS", ("depth",))
    with pytest.raises(UnsupportedModel, match="does not say how many layers its decoder has; depth would"):
        new_filling_model(target(), None, MASK, BLOCK)
    with pytest.raises(InvalidParameter, match="kind spec-drafter has no rows that can be frozen"):
        plan(size={"frozen_rows": True})
    assert not (tmp_path / "out").exists() and not (tmp_path / "work").exists()
