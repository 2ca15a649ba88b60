"""HASS: three passes and their losses, written a second time over all places of a text, as its authors do."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from doubles import tiny_model
from torch import Tensor
from torch.nn.functional import silu

from polydraft.drafters.heads.eagle_head import Eagle1Head
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import InvalidParameter
from polydraft.training import MAKERS, HeadSize
from polydraft.training.heads.losses.eagles import Eagle1Training, EagleLoss
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds

VOCAB, WIDTH, LENGTH, GIVEN = 24, 16, 12, 4
HEADS, GROUPS, CHANNELS = 4, 2, 6
WEIGHTS = EagleLoss(likeliest=0.7, noise=0.0)
PARTS = {
    "states": EagleLoss(entropy=0.0, noise=0.0),
    "rows": EagleLoss(states=0.0, noise=0.0),
    "likeliest": EagleLoss(states=0.0, entropy=0.0, likeliest=1.0, noise=0.0),
    "all": WEIGHTS,
}


@cache
def texts() -> HeadBatch:
    """Return two texts in double precision; the target wrote them behind four tokens, and one is shorter."""
    target = tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float64)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[:, :GIVEN] = valid[0, 9:] = 0
    final = found.hidden_states[-1]
    return HeadBatch(ids, valid, final, final, found.logits.logsumexp(-1))


@cache
def ends() -> TargetEnds:
    stream = torch.Generator().manual_seed(2)
    embedding, rows = (torch.randn(VOCAB, WIDTH, generator=stream, dtype=torch.float64) for _ in range(2))
    return TargetEnds(embedding, rows)


def training_of(weights: EagleLoss = WEIGHTS, learnt: int = 3) -> Eagle1Training:
    head = Eagle1Head(Anatomy(width=WIDTH, inner=24, heads=HEADS, groups=GROUPS, channels=CHANNELS)).double()
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=stream, dtype=value.dtype) + (value.dim() == 1))
    return Eagle1Training(head, ends(), 4, weights, learnt=learnt)


def turned(flat: Tensor, count: int) -> Tensor:
    """Return heads [count, n, channels] turned by their places, as complex numbers; angles are in single precision."""
    angles = torch.arange(len(flat)).float()[:, None] * 10_000.0 ** -(torch.arange(0, CHANNELS, 2).float() / CHANNELS)
    halves = flat.view(len(flat), count, 2, CHANNELS // 2)
    both = torch.complex(halves[:, :, 0], halves[:, :, 1])
    both = both * torch.complex(angles.cos().double(), angles.sin().double())[:, None]
    return torch.cat([both.real, both.imag], -1).transpose(0, 1)


def predicted(weights: Mapping[str, Tensor], embedded: Tensor, states: list[Tensor], how: str) -> Tensor:
    """Return what a pass foretells at every place, given what each pass so far read there, the true states first."""
    width, last = len(embedded), len(states) - 1
    read = [torch.cat([embedded, one], -1) @ weights["fc.weight"].T + weights["fc.bias"] for one in states]
    own = {name[9:-7]: value for name, value in weights.items() if name.startswith("layers.0.")}
    queries = turned(read[-1] @ own["self_attn.q_proj"].T, HEADS)
    keys = torch.stack([turned(one @ own["self_attn.k_proj"].T, GROUPS) for one in read])
    values = torch.stack([(one @ own["self_attn.v_proj"].T).view(width, GROUPS, CHANNELS) for one in read])
    rows = []
    for place in range(width):
        seen = torch.arange(width)
        passes = (last - (place - seen)).clamp(0, last)
        if how == "true keys":
            passes = passes.where(seen == place, 0)
        mixed = []
        for one in range(HEADS):
            group = one // (HEADS // GROUPS)
            scores = keys[passes, group, seen] @ queries[one, place] / math.sqrt(CHANNELS)
            later = seen > place
            scores = scores * ~later if how == "multiplied" else scores.masked_fill(later, -math.inf)
            mixed.append((scores.softmax(-1) * ~later) @ values[passes, seen, group])
        rows.append(torch.cat(mixed))
    middle = read[-1] + torch.stack(rows) @ own["self_attn.o_proj"].T
    normed = own["post_attention_layernorm"] * middle / (middle.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gated = silu(normed @ own["mlp.gate_proj"].T) * (normed @ own["mlp.up_proj"].T)
    return middle + gated @ own["mlp.down_proj"].T


def by_authors(training: Eagle1Training, how: str = "", passes: int = 3) -> list[Tensor]:
    """Return the loss of each pass. The head's input at the first place is true in every pass."""
    batch, own, table, output = texts(), training.weights, ends().embedding, ends().rows
    weights = dict(training.head.named_parameters())
    sums, counted = [torch.zeros((), dtype=torch.float64) for _ in range(passes)], 0
    for ids, valid, final in zip(batch.ids, batch.valid, batch.final, strict=True):
        there = valid[2:].double()  # the row at place i is for token i + 2
        counted += int(there.sum())
        states, wanted = [final[:-1]], final[1:-1]
        law = (wanted @ output.T).softmax(-1)
        best = law.topk(10).indices
        for number in range(passes):
            made = predicted(weights, table[ids[1:]], states, how)
            logs = (made[:-1] @ output.T).log_softmax(-1)
            away = (made[:-1] - wanted).abs()
            cost = own.states * torch.where(away < 1, away.square() / 2, away - 0.5).mean(-1)
            cost = cost - own.entropy * (law * logs).sum(-1)
            cost = cost - own.likeliest * (law * logs).gather(1, best).sum(-1)
            sums[number] = sums[number] + (cost * there).sum()
            following = torch.cat([final[:1], made[:-1]])
            states.append(following if how == "through" else following.detach())
    return [one / counted for one in sums]


@pytest.mark.parametrize("part", PARTS)
def test_losses_are_those_of_the_formulas(part: str) -> None:
    training = training_of(PARTS[part])
    wanted = by_authors(training)
    for learnt in (1, 2, 3):
        found = training_of(PARTS[part], learnt).learn(texts())["loss"]
        torch.testing.assert_close(found, torch.stack(wanted[:learnt]).sum(), atol=1e-10, rtol=0)
    assert not torch.allclose(wanted[1], wanted[0]) and not torch.allclose(wanted[2], wanted[1])


@pytest.mark.parametrize("trap", ["multiplied", "true keys"])
def test_keys_are_hidden_and_those_of_drafts_are_drafted(trap: str) -> None:
    """A score that is multiplied by 0 still has its part of the sum; near keys are those of drafts."""
    training = training_of()
    with torch.no_grad():
        found, other = training.learn(texts())["loss"], torch.stack(by_authors(training, trap)).sum()
    assert float((found - other).abs()) > 1e-4


@pytest.mark.parametrize("rows", ["acceptance", "lk-alpha", "lk-lambda"])
def test_rows_may_be_compared_otherwise(rows: str) -> None:
    states, both, apart = (
        float(training_of(EagleLoss(rows, **weights, noise=0.0)).learn(texts())["loss"].detach())
        for weights in ({"entropy": 0.0}, {"entropy": 1.0}, {"states": 0.0, "entropy": 1.0})
    )
    assert both == pytest.approx(states + apart, rel=1e-9)
    soft = float(training_of(EagleLoss(states=0.0, entropy=1.0, noise=0.0)).learn(texts())["loss"].detach())
    assert abs(apart - soft) > 1e-3


def test_gradients_do_not_flow_from_pass_to_pass() -> None:
    training = training_of()
    weights = [*training.head.parameters()]
    found = torch.autograd.grad(training.learn(texts())["loss"], weights)
    apart = [torch.autograd.grad(by_authors(training)[number], weights) for number in range(3)]  # three backward passes
    for value, parts in zip(found, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(value, sum(parts, torch.zeros_like(value)), atol=1e-9, rtol=0)
    through = torch.autograd.grad(torch.stack(by_authors(training, "through")).sum(), weights)
    assert max(float((one - other).abs().max()) for one, other in zip(found, through, strict=True)) > 1e-3


def test_a_law_of_few_tokens_has_them_all_among_its_likeliest() -> None:
    few = TargetEnds(ends().embedding[:6], ends().rows[:6])
    batch = replace(texts(), ids=texts().ids % 6)
    losses = [
        Eagle1Training(training_of().head, few, 3, one, learnt=3).learn(batch)["loss"]
        for one in (EagleLoss(entropy=1.0, states=0.0, noise=0.0), PARTS["likeliest"])
    ]
    torch.testing.assert_close(*losses, atol=1e-12, rtol=0)


def test_what_is_drafted_is_measured_as_deep_as_asked_and_a_step_lowers_the_loss() -> None:
    training = training_of()
    found = training.learn(texts())
    assert found["overlap"].shape == (4,) and float(found["overlap"][3]) == 0  # not learnt from
    with torch.no_grad():
        assert float(training.eval().learn(texts())["overlap"][3]) > 0
    found["loss"].backward()
    with torch.no_grad():
        for value in training.parameters():
            assert value.grad is not None and bool(value.grad.any())
            value -= 1e-4 * value.grad
        assert training.learn(texts())["loss"] < found["loss"]


def test_the_maker_learns_from_three_passes_or_as_many_as_are_drafted() -> None:
    target = tiny_model("llama", VOCAB, dtype=torch.float32)
    for drafts, loss, learnt, likeliest in ((6, "published", 3, 1.0), (2, "entropy", 2, 0.0)):
        size = HeadSize(drafts=drafts, loss=loss)
        training = MAKERS["hass"].make(target, TargetEnds.of(target), ("final",), size, None).training
        assert isinstance(training, Eagle1Training)
        assert (training.passes, training.learnt, training.weights.likeliest) == (drafts, learnt, likeliest)
    with pytest.raises(InvalidParameter, match="A head of 4 passes learns from 1 to 4 of them, not 5"):
        training_of(learnt=5)
