"""Sampled texts with every kind of head follow the target's law, by a sequential test over whole texts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import (
    IN_PLACE,
    WALKS,
    block_drafter,
    eagle_drafter,
    falcon_drafter,
    medusa_drafter,
    mtp_drafter,
    parallel_drafter,
    spire_drafter,
    term_of_masks,
    walk,
)
from torch import nn

import polydraft
from polydraft import Chain, Widths
from polydraft.conformance import LawReport, check
from polydraft.drafters import Drafter, JacobiBlockDrafter, ParallelDrafter, RiderDrafter
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams

VOCAB, NEW, WIDTH = 6, 3, 16


def lookahead() -> nn.Embedding:
    """Return embeddings of two riders, as large as those of the target's tokens."""
    torch.manual_seed(3)
    return nn.Embedding(2, WIDTH, dtype=torch.float64).requires_grad_(False)


HEADS: dict[str, Callable[[], Drafter]] = {
    **{kind: lambda kind=kind: walk(kind, vocab=VOCAB) for kind in WALKS},
    **{term: lambda term=term: block_drafter(term, vocab=VOCAB) for term in ("mixing", *IN_PLACE)},
    "EAGLE": eagle_drafter,
    "P-EAGLE": parallel_drafter,
    "Falcon": falcon_drafter,
    "Medusa": medusa_drafter,
    "MTP": mtp_drafter,
    "MTP, two modules": lambda: mtp_drafter(modules=2),
    "SPIRe": spire_drafter,
    "PARD": lambda: ParallelDrafter(HuggingFaceModel(tiny_model(vocab=VOCAB + 1, seed=4)), VOCAB),
    "PARD, path term": lambda: ParallelDrafter(
        HuggingFaceModel(tiny_model(vocab=VOCAB + 1, seed=4)), VOCAB, path=term_of_masks(VOCAB + 1)
    ),
    "guesses": lambda: JacobiBlockDrafter(HuggingFaceModel(tiny_model(vocab=VOCAB, seed=4)), 4),
    "PaSS": lambda: RiderDrafter(lookahead=lookahead()),
    "SPACE": lambda: RiderDrafter((1, 1)),
}


def found(drafter: Drafter, law: Any) -> LawReport:
    """Compare texts that a head drafts for with a law; a right engine fails with a probability of at most 1e-6."""
    target: Any = tiny_model(vocab=VOCAB)
    policy = Chain(2) if isinstance(drafter, RiderDrafter) else Widths((2, 1))

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        given: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0, "seed": seeds[0], "top_k": 0}
        ids = torch.tensor([[*one] for one in prompts])
        made: Any = polydraft.generate(target, ids, drafter=drafter, policy=policy, eos_token_id=None, **given)
        assert made.statistics.drafted > 0 and not made.statistics.fallback
        return made.sequences[:, ids.shape[1] :].tolist()

    return check(
        generate,
        law,
        [[1, 2, 4, 1]],
        new_tokens=NEW,
        batch_size=128,
        most_samples=512,
        false_alarm=1e-6,
        params=SamplingParams(),
    )


@pytest.mark.parametrize("head", HEADS)
def test_sampled_texts_have_the_targets_law(head: str) -> None:
    assert found(HEADS[head](), tiny_model(vocab=VOCAB)).passed


def test_so_many_texts_tell_another_law() -> None:
    assert not found(HEADS["EAGLE"](), tiny_model(vocab=VOCAB, seed=9)).passed
