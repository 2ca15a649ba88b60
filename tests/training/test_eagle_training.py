"""Training EAGLE's heads: the passes are what is drafted, a step lowers the loss, gradients reach everything."""

import math
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import rows_of
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import Session
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, Eagle3Norms, PairHead
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Text, reader_of
from polydraft.training.heads.losses.eagles import (
    PUBLISHED,
    ROW_LOSSES,
    Eagle1Training,
    Eagle3Training,
    EagleLoss,
    MtpTraining,
    own_rows,
    unrolled,
)
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.trees import Frontier

VOCAB, WIDTH, LENGTH, PASSES = 24, 16, 13, 4
ANATOMY = Anatomy(width=WIDTH, inner=24, heads=4, groups=2, channels=6)
TOKENS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])
HEADS = {
    "one": lambda: Eagle1Head(ANATOMY),
    "one of two layers": lambda: Eagle1Head(ANATOMY, 2, bias=False),
    "three": lambda: Eagle3Head(ANATOMY, (2, 1, 0), WIDTH),
    "three of two layers": lambda: Eagle3Head(ANATOMY, (2, 1, 0), WIDTH, layers=2),
    "three, all norms": lambda: Eagle3Head(
        ANATOMY, (2, 1, 0), WIDTH, Eagle3Norms(residual=True, output=True, joined=True, sources=True)
    ),
    "three, recycled behind the norm": lambda: Eagle3Head(ANATOMY, (2, 1, 0), WIDTH, Eagle3Norms(output=True)),
    "mtp": lambda: MtpHead.plain(ANATOMY),
    "mtp, raw states": lambda: MtpHead.plain(ANATOMY, raw=True),
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


def head_of(name: str) -> PairHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = HEADS[name]()
        with torch.no_grad():
            for value in head.parameters():
                value.copy_(1 + 0.3 * torch.randn_like(value) if value.dim() == 1 else 0.3 * torch.randn_like(value))
    return head


def texts(target: PreTrainedModel, reads: tuple[Any, ...] = (2, 1, 0)) -> dict[str, Tensor]:
    """Return two texts as shards give them; of the first, the target wrote tokens from place 4 on."""
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, :4] = 0
    features = torch.cat([found.hidden_states[layer] for layer in reads], -1)
    lse = found.logits.logsumexp(-1)
    return {"ids": ids, "valid": valid, "features": features, "final": found.hidden_states[-1], "lse": lse}


def training_of(name: str, target: PreTrainedModel, weights: EagleLoss | None = None) -> Any:
    weights = weights or EagleLoss()
    head = head_of(name)
    if isinstance(head, Eagle1Head | MtpHead):
        kind = Eagle1Training if isinstance(head, Eagle1Head) else MtpTraining
        return kind(head, TargetEnds.of(target), PASSES, weights)
    ends = TargetEnds.of(target, TOKENS)
    return Eagle3Training(head, ends, PASSES, weights, own_rows(ends))


@pytest.mark.parametrize("name", HEADS)
def test_passes_are_what_is_drafted(name: str, target: PreTrainedModel) -> None:
    """Index i of pass j is the node at depth j below the root t_{i+1}, on the path of the text's own tokens."""
    training, given = training_of(name, target).eval(), texts(target)
    head = training.head
    features = given["final"] if head.reads == ("final",) else given["features"]
    with torch.no_grad():
        made = unrolled(head, training.embedded, given["ids"], features, PASSES)
        logits = [training.logits(states) for states in made]
    drafter = HeadDrafter(head.eval(), training.ends)
    for index in range(0, LENGTH - 1 - PASSES, 3):
        text = Text(given["ids"], torch.full((2,), index + 2))
        reader = reader_of(HuggingFaceModel(target), 2, 64, drafter.needs.layers)
        state = drafter.start(text, Session(SamplingParams(), 64, VOCAB, reader))
        state = drafter.read(state, text, reader.catch_up(text)[1])
        with torch.no_grad():
            growing, _ = drafter.network.root(state.memory, text, state.ends)
            for depth in range(PASSES):
                token = given["ids"][:, index + 1 + depth].unsqueeze(-1)
                frontier = Frontier(
                    range(depth, depth + 1), token, depth, torch.ones(2, 1, depth + 1, dtype=torch.bool)
                )
                probs = rows_of(growing, state, frontier)
                wanted = logits[depth][:, index].softmax(-1)
                torch.testing.assert_close(probs[:, 0].float(), wanted, atol=2e-4, rtol=0)


def by_hand(training: Any, given: dict[str, Tensor]) -> tuple[list[float], list[int]]:
    """Return mean overlaps per depth, node by node."""
    head, ends, (target,) = training.head, training.ends, training.target
    features = given["final"] if head.reads == ("final",) else given["features"]
    made = unrolled(head, training.embedded, given["ids"], features, PASSES)
    tokens = torch.arange(VOCAB) if ends.tokens is None else TOKENS
    full = TargetEnds(target.embedding, training.whole)
    found, counts = [], []
    for depth, states in enumerate(made):
        values = []
        for row in range(2):
            for index in range(LENGTH - 1):
                asked = index + 2 + depth
                if asked < LENGTH and given["valid"][row, asked]:
                    law = full.output(given["final"][row, asked - 1]).softmax(-1)[tokens]
                    own = training.logits(states[row : row + 1, index : index + 1])[0, 0].softmax(-1)
                    values.append(float(torch.minimum(law, own).sum()))
        found.append(sum(values) / len(values))
        counts.append(len(values))
    return found, counts


@pytest.mark.parametrize("name", ["one", "three", "mtp"])
def test_overlaps_are_those_of_the_nodes(name: str, target: PreTrainedModel) -> None:
    training, given = training_of(name, target).eval(), texts(target)
    training.whole = target.get_output_embeddings().weight.detach()
    with torch.no_grad():
        found = training(**given)
        wanted, counts = by_hand(training, given)
    assert found["overlap"].tolist() == pytest.approx(wanted, abs=1e-5)
    assert found["count"].tolist() == counts == [(9 - max(0, depth - 2)) + (11 - depth) for depth in range(PASSES)]


def test_eagle_1_learns_states_and_rows(target: PreTrainedModel) -> None:
    training, given = training_of("one", target).eval(), texts(target)
    with torch.no_grad():
        made = unrolled(training.head, training.embedded, given["ids"], given["final"], 1)[0]
        there = torch.zeros(2, LENGTH - 1, dtype=torch.bool)
        there[0, 2:-1] = there[1, :-1] = True  # from the pair whose rows are for place 4
        away = (made - given["final"][:, 1:]).abs()
        states = torch.where(away < 1, away**2 / 2, away - 0.5).mean(-1)[there].mean()
        rows = training.target[0].rows
        laws = (given["final"][:, 1:] @ rows.T).softmax(-1)
        entropy = -(laws * (made @ rows.T).log_softmax(-1)).sum(-1)[there].mean()
        assert float(training(**given)["loss"]) == pytest.approx(float(states + 0.1 * entropy), rel=1e-5)


@pytest.mark.parametrize("fewer", [True, False])
def test_eagle_3_learns_as_its_authors_do(fewer: bool, target: PreTrainedModel) -> None:
    """SafeAILab/EAGLE, `traineagle3/cnets.py`: the target's law over the head's tokens alone sums to 1.

    Rows at which the target's likeliest token is none of them count as 0 in the mean.
    """
    head, given = head_of("three"), texts(target)
    assert isinstance(head, Eagle3Head)
    ends = TargetEnds.of(target, TOKENS if fewer else None)
    training = Eagle3Training(head, ends, PASSES, EagleLoss(PUBLISHED), own_rows(ends))
    tokens = TOKENS.tolist() if fewer else [*range(VOCAB)]
    wanted, outside = 0.0, 0
    with torch.no_grad():
        made = unrolled(head, training.embedded, given["ids"], given["features"], PASSES)
        whole = target.get_output_embeddings()(given["final"])
        for depth, states in enumerate(made):
            logs, values = training.logits(states).log_softmax(-1), list[float]()
            for row in range(2):
                for index in range(LENGTH - 2 - depth):
                    if not given["valid"][row, index + 2 + depth]:
                        continue
                    logits = whole[row, index + 1 + depth]
                    known = int(logits.argmax()) in tokens
                    law = logits[tokens].softmax(-1)
                    values.append(-float((law * logs[row, index]).sum()) if known else 0.0)
                    outside += not known
            wanted += 0.8**depth * sum(values) / len(values)
        assert float(training(**given)["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert (outside > 0) == fewer


def test_mtp_modules_learn_as_fast_mtp_does(target: PreTrainedModel) -> None:
    """vllm-project/speculators, `models/mtp/core.py`: cross entropy of the text's tokens, weights 0.6^(k-1) normalised.

    The keys of older pairs are the first pass's, which `test_passes_are_what_is_drafted` shows.
    """
    training, given = training_of("mtp", target, EagleLoss(PUBLISHED, decay=0.6)), texts(target)
    weights = [0.6**depth for depth in range(PASSES)]
    with torch.no_grad():
        made, wanted = unrolled(training.head, training.embedded, given["ids"], given["final"], PASSES), 0.0
        for depth, states in enumerate(made):
            logs = target.get_output_embeddings()(states).log_softmax(-1)
            values = [
                -float(logs[row, index, given["ids"][row, index + 2 + depth]])
                for row in range(2)
                for index in range(LENGTH - 2 - depth)
                if given["valid"][row, index + 2 + depth]
            ]
            wanted += weights[depth] / sum(weights) * sum(values) / len(values)
        assert float(training(**given)["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_the_targets_choice_follows_from_all_of_its_rows(target: PreTrainedModel) -> None:
    with_rows = TargetEnds.of(target, TOKENS)
    without = TargetEnds(with_rows.embedding, with_rows.rows, TOKENS)
    final = texts(target)["final"].repeat(100, 1, 1)  # more states than are compared at a time
    best = target.get_output_embeddings()(final).argmax(-1)
    assert torch.equal(with_rows.likeliest_known(final), torch.isin(best, TOKENS))
    with pytest.raises(InvalidParameter, match="give every"):
        without.likeliest_known(final)


@pytest.mark.parametrize("rows", ROW_LOSSES)
def test_eagle_3_counts_later_passes_less(rows: str, target: PreTrainedModel) -> None:
    given = texts(target)
    with torch.no_grad():
        flat = [float(training_of("three", target, EagleLoss(rows, decay=rate))(**given)["loss"]) for rate in (0.0, 1)]
        mean = float(training_of("three", target, EagleLoss(rows))(**given)["loss"])
    assert all(map(math.isfinite, (*flat, mean)))
    assert flat[0] < mean < flat[1]


@pytest.mark.parametrize("rows", ROW_LOSSES)
@pytest.mark.parametrize("name", HEADS)
def test_a_step_lowers_the_loss_and_gradients_reach_everything(name: str, rows: str, target: PreTrainedModel) -> None:
    training, given = training_of(name, target, EagleLoss(rows, noise=0.0)), texts(target)
    before = training(**given)["loss"]
    before.backward()
    for key, value in training.named_parameters():
        assert value.grad is not None and bool(value.grad.abs().sum() > 0), key
    with torch.no_grad():
        size = sum(value.grad.square().sum() for value in training.parameters())
        for value in training.parameters():
            value -= 1e-3 * value.grad / size.sqrt()
        assert training(**given)["loss"] < before
    assert not any("target" in key for key in training.state_dict())


def test_noise_is_there_only_while_a_head_learns(target: PreTrainedModel) -> None:
    training, given = training_of("one", target), texts(target)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        assert training(**given)["loss"] != training(**given)["loss"]
        assert training(**given)["overlap"].shape == training(**given)["count"].shape == (PASSES,)
        training.eval()
        assert training(**given)["loss"] == training(**given)["loss"]


def test_wrong_settings_are_refused(target: PreTrainedModel) -> None:
    head, ends = head_of("three"), TargetEnds.of(target, TOKENS)
    assert isinstance(head, Eagle3Head)
    with pytest.raises(InvalidParameter, match="not 'other'"):
        EagleLoss("other")
    with pytest.raises(InvalidParameter, match="at least one pass"):
        Eagle3Training(head, ends, 0)
    with pytest.raises(InvalidParameter, match="not those that the target's rows"):
        Eagle3Training(head, ends, 2, ends=HeadEnds())
    with pytest.raises(InvalidParameter, match="not those that the target's rows"):
        Eagle3Training(head, ends, 2, ends=HeadEnds(tokens=TOKENS.flip(0)))
