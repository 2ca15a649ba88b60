"""Tuning a target with its heads: adapters, losses, what is merged and measured, folders that draft for themselves."""

import copy
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft.drafters import has_head_inside, is_head, load_head
from polydraft.drafters.heads.last_state_heads import MedusaHeads
from polydraft.errors import UnsupportedModel
from polydraft.training import MAKERS, HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds
from polydraft.training.heads.losses.tuned_target import SHARE, AdaptedTarget, Drift, TunedMedusa, divergence, untied
from polydraft.training.muon import Muon

VOCAB, LENGTH, WIDTH = 24, 14, 16
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target() -> PreTrainedModel:
    """Return a target whose output rows are its embeddings."""
    return tiny_model("llama", VOCAB, dtype=torch.float32, tie_word_embeddings=True)


def adapted(spread: float = 0.0) -> AdaptedTarget:
    """Return a target with adapters; those of some spread change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = AdaptedTarget(target())
        with torch.no_grad():
            for value in made.parameters():
                value.add_(spread * torch.randn_like(value))
    return made.eval()


def texts() -> HeadBatch:
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target()(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, :4] = valid[1, 11:] = 0
    return HeadBatch(ids, valid, found.hidden_states[-1], found.hidden_states[-1], found.logits.logsumexp(-1))


def training_of(own: AdaptedTarget, drafts: int = 3, steps: int = 8) -> TunedMedusa:
    size = HeadSize(drafts=drafts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        made = MAKERS["medusa-2"].make(target(), TargetEnds.of(target()), ("final",), size, None)
        heads = made.drafter.network  # type: ignore[attr-defined]
        with torch.no_grad():
            for value in heads.parameters():
                value.add_(0.1 * torch.randn_like(value))
    training = TunedMedusa(heads, TargetEnds.of(target()), own)
    training.begin(steps)
    return training


# Adapters.


def test_an_adapted_target_begins_as_the_target_and_only_adapters_learn() -> None:
    own, batch = adapted(), texts()
    final, logits = own(batch.ids)
    wanted = target()(batch.ids, output_hidden_states=True)
    torch.testing.assert_close(logits, wanted.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(final, wanted.hidden_states[-1], atol=1e-6, rtol=0)
    logits.square().mean().backward()
    layers = [name for name, one in target().named_modules() if isinstance(one, torch.nn.Linear)]
    assert len([*own.parameters()]) == 2 * len(layers) and "lm_head" in layers and len(layers) == 15
    assert all(value.grad is not None for value in own.parameters())
    assert all(value.grad is None for value in target().parameters())


def test_what_is_merged_is_what_was_adapted_and_the_target_stays() -> None:
    before = {name: value.clone() for name, value in target().state_dict().items()}
    own, batch = adapted(0.2), texts()
    with torch.no_grad():
        changed, found = own(batch.ids)[1], own.merged()(batch.ids)
        plain = target()(batch.ids).logits
        torch.testing.assert_close(own.output(own(batch.ids)[0]), changed, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.logits, changed, atol=1e-4, rtol=1e-4)
    assert float((changed - plain).abs().max()) > 0.1
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())
    merged: Any = own.merged()
    name = "model.layers.1.mlp.up_proj"
    one = own.hidden[2][name]
    wanted = target().state_dict()[f"{name}.weight"] + 16 / 32 * one.up.weight @ one.down.weight
    torch.testing.assert_close(merged.get_submodule(name).weight, wanted, atol=1e-6, rtol=0)
    embed, given = merged.get_input_embeddings().weight, target().state_dict()["model.embed_tokens.weight"]
    assert torch.equal(embed, given)  # the rows were these, and only the rows learn
    assert not torch.equal(embed, merged.get_output_embeddings().weight) and not merged.config.tie_word_embeddings


def test_channels_are_left_out_only_while_adapters_learn() -> None:
    own, ids = adapted(0.2), texts().ids
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        assert torch.equal(own(ids)[1], own(ids)[1])
        own.train()
        assert not torch.equal(own(ids)[1], own(ids)[1])


def test_a_target_without_plain_output_rows_is_refused() -> None:
    model = copy.deepcopy(target())
    model.set_output_embeddings(torch.nn.Sequential())
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM cannot be tuned: its output head is no plain product"):
        untied(model)


# Losses.


def divergence_by_hand(logits: Tensor, plain: Tensor, valid: Tensor) -> float:
    total, count = 0.0, 0
    for row in range(len(valid)):
        for place in range(valid.shape[1] - 1):
            if valid[row, place + 1]:
                p, q = plain[row, place].double().softmax(-1), logits[row, place].double().softmax(-1)
                total, count = total + float((p * (p / q).log()).sum()), count + 1
    return total / count


def test_the_loss_is_the_formulas_in_both_halves() -> None:
    own, batch = adapted(0.2), texts()
    training = training_of(own)
    training.train()
    own.eval()  # no channel is left out
    losses = [float(training.learn(batch)["loss"].detach()) for _ in range(8)]
    assert int(training.get_buffer("done")) == 8

    def heads_alone(final: Tensor) -> float:
        total = 0.0
        for draft in range(3):
            values = []
            for row in range(2):
                for place in range(LENGTH - draft - 2):
                    if batch.valid[row, place + draft + 2]:
                        logits = training.logits(draft, final[row, place])
                        values.append(-float(logits.log_softmax(-1)[batch.ids[row, place + draft + 2]].detach()))
            total += 0.8**draft * sum(values) / len(values)
        return total

    assert losses[:4] == pytest.approx([heads_alone(batch.final)] * 4, rel=1e-5)
    with torch.no_grad():
        final, logits = own(batch.ids)
        plain = target()(batch.ids).logits
    kept = divergence_by_hand(logits, plain, batch.valid)
    for step, found in zip(range(4, 8), losses[4:], strict=True):
        part = (step - 4) / 4
        wanted = kept + SHARE * 0.8 * math.sin(math.pi / 2 * part) * heads_alone(final)
        assert found == pytest.approx(wanted, rel=1e-4)
    assert losses[4] == pytest.approx(kept, rel=1e-4) and kept > 0.01


def test_gradients_reach_adapters_in_the_second_half_only() -> None:
    own, batch = adapted(0.1), texts()
    training = training_of(own, steps=4)
    training.train()
    heads = [*training.heads.parameters()]
    for place in range(4):
        training.zero_grad(set_to_none=True)
        training.learn(batch)["loss"].backward()
        assert all((value.grad is not None) == (place >= 2) for value in training.slow())
        assert all(value.grad is not None for value in heads)


def test_drafts_are_measured_against_the_tuned_targets_law() -> None:
    own, batch = adapted(0.2), texts()
    training = training_of(own, drafts=1).eval()
    with torch.no_grad():
        found = training.learn(batch)
        final, logits = own(batch.ids)
        values = [
            torch.minimum(logits[row, place + 1].softmax(-1), training.logits(0, final[row, place]).softmax(-1)).sum()
            for row in range(2)
            for place in range(LENGTH - 2)
            if batch.valid[row, place + 2]
        ]
    assert float(found["overlap"][0]) == pytest.approx(float(torch.stack(values).mean()), abs=1e-5)
    assert int(training.get_buffer("done")) == 0


def test_a_step_lowers_the_divergence() -> None:
    own, batch = adapted(0.2), texts()
    laws = TargetEnds.of(target()).laws(batch.final, batch.lse)
    before = divergence(own(batch.ids)[1], laws, batch.valid)
    before.backward()
    with torch.no_grad():
        for value in own.parameters():
            assert value.grad is not None
            value -= 0.1 * value.grad
        assert divergence(own(batch.ids)[1], laws, batch.valid) < before


def test_heads_learn_at_four_times_the_rate_of_adapters() -> None:
    training = training_of(adapted())
    groups = Muon(training, 4e-3, 2e-3, slow=training.slow()).param_groups
    assert [group["lr"] for group in groups] == [4e-3, 2e-3, 5e-4]
    assert [len(group["params"]) for group in groups][2] == 30
    assert sum(len(group["params"]) for group in groups) == len([*training.parameters()])
    assert len(Muon(torch.nn.Linear(2, 2), 4e-3, 2e-3).param_groups) == 2


@pytest.mark.wrong_types
def test_drift_is_the_divergence_and_the_share_of_equal_choices() -> None:
    own, batch = adapted(0.2), texts()
    tuned = own.merged()
    rows = [{"ids": batch.ids[row].int(), "valid": batch.valid[row]} for row in range(2)]
    found = Drift.of(target(), tuned, rows)  # type: ignore[arg-type]
    with torch.no_grad():
        plain, logits = target()(batch.ids).logits, tuned(batch.ids).logits
    there = batch.valid[:, 1:].bool()
    same = (plain.argmax(-1) == logits.argmax(-1))[:, :-1][there]
    assert found.divergence == pytest.approx(divergence_by_hand(logits, plain, batch.valid), rel=1e-4)
    assert (found.agreement, found.tokens) == (pytest.approx(float(same.float().mean())), int(there.sum()))
    still = Drift.of(target(), untied(target()), rows)  # type: ignore[arg-type]
    assert (still.divergence, still.agreement) == (pytest.approx(0, abs=1e-9), 1)


# Folders.


@cache
def plan() -> HeadPlan:
    recipe = HeadRecipe(steps=6, texts=4, measure_every=6, save_every=3, other_rate=2e-2)
    return HeadPlan("medusa-2", HeadSize(drafts=3), WritingPlan(tokens=200, length=32, rows=4), recipe, name="mine")


@pytest.mark.long(2)
def test_a_tuned_targets_folder_drafts_for_itself(tmp_path: Path) -> None:
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "tuned", plan())
    folder = tmp_path / "tuned"
    assert is_head(folder) and has_head_inside(folder) and made.drafting.efficiency > 1
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert tensors["medusa_head.2.1.weight"].shape == (VOCAB, WIDTH) and "lm_head.weight" in tensors
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    heads: Any = load_head(folder)
    assert isinstance(heads.network, MedusaHeads) and len(heads.network) == 3
    card = (folder / "README.md").read_text()
    assert "exact for the tuned\nmodel only, not for mine." in card and "KL(original || tuned) is 0." in card
    assert 'polydraft generate --target THIS_FOLDER "..."' in card and "bfloat16" not in card
    model = type(target()).from_pretrained(folder)
    prompt: Any = [PROMPTS[0].tolist()]
    wanted: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain: Any = polydraft.generate(model, prompt, drafter="none", **wanted)
    found: Any = polydraft.generate(model, prompt, drafter=heads, **wanted)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.drafted > 0


@pytest.mark.long(2)
def test_an_interrupted_run_comes_to_the_same_model(tmp_path: Path) -> None:
    """The checkpoint has adapters, heads, and how much of the run is done."""
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "whole", plan())
    (last,) = (tmp_path / "work").glob("medusa-2-*/checkpoint-6")
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "again", plan())
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5, rtol=0)


def test_other_folders_have_no_head_inside(tmp_path: Path) -> None:
    target().save_pretrained(tmp_path / "model")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    (tmp_path / "broken").mkdir()
    for name in (tmp_path / "model", tmp_path / "heads", tmp_path / "broken", tmp_path / "nowhere", "a/hub-name", 3):
        assert not has_head_inside(name)
    assert replace(plan(), kind="medusa").kind == "medusa" and not MAKERS["medusa"].tunes
