"""Heads that learn while they serve: what is counted is what is drafted, versions pass the gate, others are refused."""

import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import (
    RIDERS,
    VOCAB,
    adapter_drafter,
    block_drafter,
    block_head,
    eagle_drafter,
    falcon_drafter,
    medusa_drafter,
    mtp_drafter,
    parallel_drafter,
    spire_drafter,
    walk,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_tie_weights

from polydraft.drafters import Drafter, HeadDrafter, HeadEnds
from polydraft.drafters.learnt import learnt, states_to_learn
from polydraft.engine import as_drafter
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, load_pair
from polydraft.models.checkpoints.silence import held_back
from polydraft.models.checkpoints.weight_versions import VersionFolder, put_weights, weights_of
from polydraft.probs import SamplingParams
from polydraft.training.alignment.own_text import OwnTexts, chains_of_text, own_texts
from polydraft.training.alignment.text_calls import expected_calls, kept_as_block
from polydraft.training.heads.head_making import usual_reads
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import HeadSize
from polydraft.training.heads.shards import continued
from polydraft.training.online.lesson_buffer import TaughtText, batched
from polydraft.training.online.online_learning import KEPT, SWAPPED, LearningPlan, OnlineLearner
from polydraft.training.online.taught_drafts import KINDS, module_to_learn, taught

FEWER = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])
LENGTH = 3
HEADS: dict[str, Any] = {
    **{term: lambda term=term: block_drafter(term) for term in ("markov", "gated", "recurrent", "mixing")},
    **{term: lambda term=term: block_drafter(term) for term in ("xpress", "lilicorr")},
    "fewer tokens": lambda: HeadDrafter(block_head("mixing", rows=len(FEWER)), HeadEnds(tokens=FEWER)),
    "EAGLE-3": eagle_drafter,
    "P-EAGLE": parallel_drafter,
    "Medusa": medusa_drafter,
    "MTP": mtp_drafter,
    "SPIRe": spire_drafter,
    **{kind: lambda kind=kind: walk(kind) for kind in ("joined", "mlp", "lstm", "redrafter", "hydra", "hydra++")},
    "fewer walks": lambda: walk("mlp", tokens=FEWER),
}


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3, dtype=torch.float32)


@cache
def texts(heat: float) -> OwnTexts:
    """Return texts behind prompts of several lengths."""
    stream = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (count,), generator=stream) for count in (2, 5, 3)]
    return own_texts(HuggingFaceModel(target()), prompts, SamplingParams(temperature=heat), 7, (), 3)


def lessons_of(drafter: Drafter, heat: float) -> HeadBatch:
    """Return the same texts as a learner has them, but for rounding."""
    given, model, made = texts(heat), HuggingFaceModel(target()), list[TaughtText]()
    read = states_to_learn(drafter)
    for row, size in enumerate((given.given + given.written).tolist()):
        ids = given.tokens[row, :size]
        order = torch.arange(size).unsqueeze(0)
        mask = torch.ones(1, size, size, dtype=torch.bool).tril()
        cache = model.new_cache(1, size)
        layers = (*dict.fromkeys((*read, "final")),)
        hidden = model.forward(ids[None], order, mask, cache, torch.zeros(1).long(), hidden_layers=layers).hidden
        features = torch.cat([hidden[layer][0] for layer in read], -1) if read else None
        own = TaughtText(tuple(ids.tolist()), int(given.given[row]), heat, hidden["final"][0], 0, features)
        made.append(own)
    return batched(made)


@pytest.mark.parametrize("heat", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("kind", HEADS)
def test_what_is_counted_is_what_is_drafted(kind: str, heat: float) -> None:
    """Chains by rows at all places are kept as those of the drafter are, which is asked for them place by place.

    Behind a draft that is never kept the drafter drafts nothing, and what rows say does not count.
    """
    drafter = HEADS[kind]()
    training, module = taught(drafter, target())
    network, ends = module.children()
    own = learnt(drafter, (network.eval(), ends), "", b"", "")
    wanted = chains_of_text(HuggingFaceModel(target()), own, texts(heat), SamplingParams(temperature=heat), LENGTH)
    found, written = training.ratios(lessons_of(drafter, heat), heat, LENGTH)
    assert written.tolist() == wanted.written.tolist()
    places = min(found.shape[1], wanted.ratio.shape[1])
    assert found[:, places:].abs().sum() == 0
    assert found.sum() > 0 or not heat  # a random head may have no likeliest token right
    inside = torch.arange(wanted.ratio.shape[1]).unsqueeze(-1) + torch.arange(LENGTH) < written.view(-1, 1, 1)
    kept, told = (kept_as_block(one[:, :places]) for one in (found, wanted.ratio.where(inside, 0.0)))
    torch.testing.assert_close(kept, told, rtol=2e-3, atol=1e-4)
    calls = [expected_calls(one, written) for one in (kept, told)]
    torch.testing.assert_close(*calls, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_learns_begins_as_it_is_and_all_that_learns_is_in_its_versions(kind: str) -> None:
    drafter = HEADS[kind]()
    training, module = taught(drafter, target())
    given = nn.ModuleList([drafter.network, drafter.ends])
    told, own = weights_of(module), weights_of(given)
    assert all(torch.equal(told[name], own[name].float()) for name in told) and {*told} == {*own}
    assert {id(one) for one in training.parameters()} == {id(one) for one in module.parameters()}
    assert all(one.requires_grad for one in module.parameters()) and training.follows
    served = module_to_learn(drafter, target())
    assert {name: one.shape for name, one in weights_of(served).items()} == {
        name: one.shape for name, one in told.items()
    }


def test_a_draft_that_is_copied_while_another_thread_loads_a_model_keeps_its_tied_weights() -> None:
    """transformers turns tying off in the whole process while it loads."""
    pair, loading = load_pair(), threading.Event()
    drafter = as_drafter(pair.draft)

    def load() -> None:
        with held_back(), no_tie_weights():
            loading.set()
            time.sleep(0.2)

    other = threading.Thread(target=load)
    other.start()
    loading.wait()
    _, network = taught(drafter, pair.target)
    other.join()
    assert weights_of(network).keys() == weights_of(pair.draft).keys()


def test_own_rows_of_an_eagle_head_are_taught() -> None:
    rows = nn.Linear(16, VOCAB, bias=False).double()
    drafter = replace(eagle_drafter(), ends=HeadEnds(lm_head=rows))
    told = weights_of(taught(drafter, target())[1])
    assert torch.equal(told["1.lm_head.weight"], rows.weight.detach().float())


def of_layer(drafter: HeadDrafter[Any], layer: int) -> HeadDrafter[Any]:
    """Let a head read the states of one layer."""
    drafter.network.reads = (layer,)
    return drafter


REFUSED: dict[str, Drafter] = {
    "another layer": of_layer(walk("mlp"), 1),
    "Falcon": falcon_drafter(),
    "DFlash": block_drafter("none"),
    "Domino": block_drafter("domino"),
    "adapter": adapter_drafter(),
    "riders": RIDERS["SPACE"](VOCAB),
    "two MTP modules": mtp_drafter(modules=2),
    "own embeddings": replace(eagle_drafter(), ends=HeadEnds(embed_tokens=nn.Embedding(VOCAB, 16).double())),
    "a scale": replace(block_drafter(), ends=HeadEnds(scale=2.0)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_heads_are_refused_by_name_with_those_that_can(kind: str) -> None:
    with pytest.raises(InvalidParameter, match=r"and for a head of the kinds .*hydra\+\+.*mixing.*, not for ") as told:
        taught(REFUSED[kind], target())
    assert all(one in str(told.value) for one in KINDS.values()) and str(told.value).count(". ") == 0


def test_sums_of_logits_are_made_in_single_precision() -> None:
    """Of a target in bfloat16 they are those of its rounded rows, with no rounding of their own."""
    stream = torch.Generator().manual_seed(2)
    every, final = torch.randn(300, 16, generator=stream).bfloat16(), torch.randn(2, 3, 16, generator=stream)
    ends = TargetEnds(every.float(), every[:5].float(), torch.arange(5), every=every)
    wanted = (20 * final.double() @ every.double().mT).logsumexp(-1)
    torch.testing.assert_close(ends.totals(20 * final).double(), wanted, rtol=1e-5, atol=1e-4)


def test_a_rounded_head_is_refused() -> None:
    drafter = block_drafter()
    drafter.network.register_buffer("weight_int8", torch.zeros(2, 2, dtype=torch.int8))
    with pytest.raises(InvalidParameter, match="are rounded: name the unrounded one by --draft"):
        taught(drafter, target())


def test_bytes_of_a_lesson_count_the_states_that_a_head_reads() -> None:
    ids, final = (1, 2, 3), torch.zeros(3, 4).bfloat16()
    plain = TaughtText(ids, 1, 1.0, final)
    read = TaughtText(ids, 1, 1.0, final, 0, torch.zeros(3, 12).bfloat16())
    assert (plain.size, read.size) == (3 * 8 + 3 * 4 * 2, 3 * 8 + 3 * 16 * 2)
    assert batched([plain]).features.shape == (1, 3, 0) and batched([read]).features.shape == (1, 3, 12)


def test_a_head_of_fewer_tokens_is_told_what_the_target_makes_of_all_of_its_own(tmp_path: Path) -> None:
    """Two texts of different lengths: the loss is that with the sums of the target's own logits, and not without."""
    drafter, lessons = HEADS["fewer tokens"](), list[TaughtText]()
    batch = lessons_of(drafter, 1.0)
    for row, size in enumerate((texts(1.0).given + texts(1.0).written).tolist()):
        ids, given = batch.ids[row, :size], int(texts(1.0).given[row])
        own = TaughtText(tuple(ids.tolist()), given, 1.0, batch.final[row, :size], 0, batch.features[row, :size])
        lessons.append(own)
    one = OnlineLearner(*taught(drafter, target()), VersionFolder(tmp_path), LearningPlan(), clock=lambda: 0.0)
    with torch.no_grad():
        total = target().get_output_embeddings()(batch.final).logsumexp(-1)  # pyright: ignore[reportOptionalCall]
        found = list[float]()
        for lse in (total, torch.zeros_like(total)):
            torch.manual_seed(0)
            found.append(float(one.training(**{**vars(batch), "heat": None, "lse": lse})["loss"]))
        torch.manual_seed(0)
        told = float(one._learnt(lessons)["loss"])
    assert told == pytest.approx(found[0], rel=1e-5) and abs(found[1] - found[0]) > 1e-3


def test_a_head_of_the_embedded_target_learns_what_it_is_taught_and_a_version_is_swapped(tmp_path: Path) -> None:
    """A new head of one layer hears texts behind prompts of one kind, and drafts them better than it did."""
    pair = load_pair()
    model, ends = HuggingFaceModel(pair.target), TargetEnds.of(pair.target)
    torch.manual_seed(3)
    reads = usual_reads(model.layers)[:1]
    head = MAKERS["mixing"].make(pair.target, ends, reads, HeadSize(layers=1, drafts=2), None)
    prompts = [torch.tensor([11, 17, place % 7]) for place in range(96)]
    stream = torch.Generator().manual_seed(5)
    made = continued(model, prompts, torch.ones(len(prompts)), 24, reads, stream)
    training, network = taught(head.drafter, pair.target)
    plan = LearningPlan(rate=3e-3, texts=4, steps=12, least=8, held_texts=8, held_tokens=100)
    learner = OnlineLearner(training, network, VersionFolder(tmp_path), plan, clock=lambda: 0.0)
    for row, ids in enumerate(made["ids"].tolist()):
        own = TaughtText(tuple(ids), 3, 1.0, made["final"][row], 0, made["features"][row])
        ring = learner.buffer.held_out if row % 4 == 0 else learner.buffer.learnt
        ring.add(replace(own, number=row))
    outcomes = list[str]()
    while SWAPPED not in outcomes and len(outcomes) < 6:
        while not learner.looks:
            learner.step()
        outcomes.append(learner.look().outcome)
    assert outcomes[-1] == SWAPPED and {*outcomes[:-1]} <= {KEPT}
    version = learner.folder.versions()[0]
    held = learner.buffer.held_out.lessons
    calls = [float(learner._calls(one, held).sum()) for one in (learner.base, learner.folder.read(version))]
    assert calls[1] < 0.99 * calls[0]
    served = module_to_learn(head.drafter, pair.target)
    put_weights(served, learner.folder.read(version))
    assert learner.folder.in_use().version == version.name
