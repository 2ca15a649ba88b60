"""Forms that are cut, corrected or boosted: what is left is what was active, and weights and places are as defined."""

from itertools import product
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.training.alignment.draft_losses import draft_loss
from polydraft.training.alignment.draft_training import DraftTraining
from polydraft.training.alignment.forms.boosting import BoostTraining, given_to_drafts, missed
from polydraft.training.alignment.forms.low_rank import correct, folded
from polydraft.training.alignment.forms.narrower import Sizes, narrower
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds

IDS = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(2))


def llama(**changes: int) -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    own: dict[str, Any] = {**sizes, **changes}
    return tiny_model("llama", 24, dtype=torch.float32, **own)


def layers_of(model: Any) -> list[Any]:
    return [*model.model.layers]


# --- Width -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "kept"), [(1, [1, 3]), (2, [2, 3])])
def test_heads_and_channels_that_give_nothing_go_and_the_logits_stay(groups: int, kept: list[int]) -> None:
    """Heads of two groups are silent where their values are zero; heads of one where they take the mean of all."""
    model = llama(num_key_value_heads=groups)
    sizes = Sizes.of(model)
    channels = torch.arange(sizes.heads * sizes.channels).view(sizes.heads, sizes.channels)
    left, silent = channels[kept].flatten(), channels[[one for one in range(sizes.heads) if one not in kept]].flatten()
    with torch.no_grad():
        for layer in layers_of(model):
            layer.mlp.up_proj.weight[::2] = 0
            if groups == 2:
                layer.self_attn.v_proj.weight[: sizes.channels] = 0
            else:
                layer.self_attn.q_proj.weight[left] *= 1000
                layer.self_attn.q_proj.weight[silent] = layer.self_attn.o_proj.weight[:, silent] = 0
    made = narrower(model, IDS)
    own = Sizes.of(made)
    assert (own.heads, own.inner, own.channels) == (2, 12, sizes.channels) and own.groups == 1
    assert sum(one.numel() for one in made.parameters()) < 0.75 * sum(one.numel() for one in model.parameters())
    torch.testing.assert_close(made(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    for cut, layer in zip(layers_of(made), layers_of(model), strict=True):
        assert torch.equal(cut.self_attn.q_proj.weight, layer.self_attn.q_proj.weight[left])
        assert torch.equal(cut.self_attn.o_proj.weight, layer.self_attn.o_proj.weight[:, left])
    first = layers_of(narrower(model, None))[0].self_attn.q_proj.weight
    assert torch.equal(first, layers_of(model)[0].self_attn.q_proj.weight[: 2 * sizes.channels])
    with torch.no_grad():
        layers_of(made)[0].mlp.down_proj.weight.zero_()
    assert bool(layers_of(model)[0].mlp.down_proj.weight.any())  # no weight is shared


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="cannot be cut in width: its layers are not of Llama's kind"):
        narrower(tiny_model("gpt2", 24, dtype=torch.float32), None)
    with pytest.raises(InvalidParameter, match="one head or channel a layer"):
        narrower(llama(num_attention_heads=1, num_key_value_heads=1), None)


# --- Corrections of low rank -----------------------------------------------------------------------------------------


def test_corrections_begin_as_nothing_learn_alone_and_are_folded_in() -> None:
    model = llama()
    before = model(IDS).logits.detach()
    made = correct(perturbed(model, 0.0), 2)
    torch.testing.assert_close(made(IDS).logits, before, rtol=0, atol=1e-6)
    learning = {name for name, one in made.named_parameters() if one.requires_grad}
    assert learning and all(name.endswith((".up", ".down")) for name in learning)
    assert sum(dict(made.named_parameters())[name].numel() for name in learning) < 0.5 * sum(
        one.numel() for one in model.parameters()
    )
    made(IDS).logits.square().mean().backward()
    with torch.no_grad():
        for name, one in made.named_parameters():
            if name in learning and one.grad is not None:
                one -= one.grad
    plain = folded(made)
    assert not any(parametrize.is_parametrized(one) for one in plain.modules())
    assert {*plain.state_dict()} == {*model.state_dict()} and parametrize.is_parametrized(
        layers_of(made)[0].mlp.up_proj
    )
    torch.testing.assert_close(plain(IDS).logits, made(IDS).logits, rtol=1e-4, atol=1e-5)
    assert float((plain(IDS).logits - before).detach().abs().max()) > 1e-4
    difference = (layers_of(plain)[0].mlp.up_proj.weight - layers_of(model)[0].mlp.up_proj.weight).detach()
    assert int(torch.linalg.matrix_rank(difference, atol=1e-5)) <= 2


@pytest.mark.parametrize("kind", ["gpt2", "falcon"])
def test_matrices_of_other_kinds_are_corrected_and_tables_are_not(kind: str) -> None:
    """GPT-2's matrices lie turned over, and Falcon's have a class of their own."""
    model: Any = tiny_model(kind, 24, dtype=torch.float32)
    before = model(IDS).logits.detach()
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)} | {id(model.lm_head.weight)}
    inner = [name for name, one in model.named_parameters() if one.ndim == 2 and id(one) not in tables]
    made: Any = correct(perturbed(model, 0.0), 2)
    changed = [name for name, one in made.named_modules() if parametrize.is_parametrized(one, "weight")]
    assert inner and {f"{name}.weight" for name in changed} == {*inner}
    torch.testing.assert_close(made(IDS).logits, before, rtol=0, atol=1e-6)
    with torch.no_grad():
        for name, one in made.named_parameters():
            if name.endswith(".up"):
                one.normal_()
    torch.testing.assert_close(folded(made)(IDS).logits, made(IDS).logits, rtol=1e-4, atol=1e-5)


# --- Boosting --------------------------------------------------------------------------------------------------------


def test_a_sample_is_missed_unless_all_of_it_is_drafted() -> None:
    chances = torch.tensor([[0.5, 0.2, 1.0, 0.4, 0.9]])
    torch.testing.assert_close(missed(chances, 1), 1 - chances)
    torch.testing.assert_close(missed(chances, 2), torch.tensor([[0.9, 0.9, 0.6, 0.6, 1.0]]))


def test_what_is_given_to_drafts_is_that_of_every_pair_of_drafts() -> None:
    stream = torch.Generator().manual_seed(0)
    target, *rows = torch.randn(3, 3, generator=stream, dtype=torch.float64).softmax(-1)
    found = torch.zeros(3, dtype=torch.float64)
    for drafts in product(range(3), repeat=2):
        left, reached = target, torch.tensor(1.0, dtype=torch.float64)
        for row, token in zip(rows, drafts, strict=True):
            kept = (left[token] / row[token]).clamp_max(1)
            found[token] += rows[0][drafts[0]] * rows[1][drafts[1]] * reached * kept
            reached = reached * (1 - kept)
            left = (left - row).clamp_min(0) / (left - row).clamp_min(0).sum()
    torch.testing.assert_close(given_to_drafts(target, rows), found, rtol=0, atol=1e-12)
    torch.testing.assert_close(given_to_drafts(target, rows[:1]), torch.minimum(target, rows[0]), rtol=0, atol=1e-12)


def boosting(span: int, loss: str = "fkl") -> tuple[BoostTraining, HeadBatch]:
    target = llama()
    with torch.no_grad():
        passed = target(IDS, output_hidden_states=True)
    valid = torch.ones_like(IDS)
    valid[0, :3], valid[1, 9:] = 0, 0
    final = passed.hidden_states[-1]
    members = [DraftTraining(perturbed(target, 0.2, seed), TargetEnds.of(target), draft_loss(loss)) for seed in (1, 2)]
    return BoostTraining(members, span), HeadBatch(IDS, valid, final[..., :0], final, passed.logits.logsumexp(-1))


@pytest.mark.parametrize("span", [1, 4])
def test_a_later_draft_learns_by_the_chance_that_the_earlier_one_misses(span: int) -> None:
    training, batch = boosting(span)
    first, second = training.drafts()
    asked, rows = first.places(batch, torch.ones(2))
    _, other = second.places(batch, torch.ones(2))
    counts, weights = asked.sum(-1).tolist(), list[Tensor]()
    for chance in rows.chance.detach().split(counts):
        weights += [missed(chance[None], span)[0]]
    weight = torch.cat(weights)
    wanted = rows.values.mean() + (weight * other.values).sum() / weight.sum()
    found = training(**vars(batch))
    torch.testing.assert_close(found["loss"], wanted, rtol=1e-5, atol=1e-6)
    found["loss"].backward()
    learnt = first.network.get_output_embeddings().weight.grad  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    first.zero_grad()
    first(**vars(batch))["loss"].backward()
    alone = first.network.get_output_embeddings().weight.grad  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert learnt is not None and alone is not None
    torch.testing.assert_close(learnt, alone, rtol=1e-4, atol=1e-6)  # the weights of the second teach the first nothing


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_tree_of_two_drafts_keeps_what_both_have_of_the_first_token_and_no_more_below(heat: float) -> None:
    training, batch = boosting(1)
    both, alone = training.chains(batch, heat, 3), training.drafts()[0].chains(batch, heat, 3)
    logits = [model(IDS).logits[:, :-1].detach() for model in (llama(), *(one.network for one in training.drafts()))]
    target, *drafts = (one.softmax(-1) for one in logits)
    own = IDS[:, 1:].unsqueeze(-1)
    if heat:
        kept = given_to_drafts(target, drafts).gather(-1, own) / target.gather(-1, own)
    else:
        kept = torch.stack([one.argmax(-1, keepdim=True) == own for one in drafts]).any(0)
    for row, asked in enumerate(batch.valid[:, 1:].bool()):
        first = both.ratio[row, : int(asked.sum()), 0]
        torch.testing.assert_close(first, kept[row, asked, 0].double(), rtol=1e-4, atol=1e-6)
    assert torch.equal(both.ratio[..., 1:], alone.ratio[..., 1:].clamp_max(1))
    assert float(both.overlap[..., 0].sum() - alone.overlap[..., 0].sum()) > 0.1 or not heat
