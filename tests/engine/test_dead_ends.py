"""Scores that are not usable: nobody minds them below drafts that are not kept; else the call ends as plainly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

import polydraft
from polydraft.errors import InvalidProbabilities
from polydraft.models.tiny import tiny_draft, tiny_target

NEW, DEAD = 6, 2
PROMPT = torch.tensor([[0, 1, 1]])


def without_law(target: PreTrainedModel) -> PreTrainedModel:
    """Let a model have no law behind a token."""

    def masked(model: Any, args: Any, named: dict[str, Any], out: Any) -> Any:
        scored = named["input_ids"][:, -out.logits.shape[1] :]
        out.logits.masked_fill_((scored == DEAD).unsqueeze(-1), torch.nan)
        return out

    target.register_forward_hook(masked, with_kwargs=True)
    return target


@torch.no_grad()
def spoilt(target: PreTrainedModel) -> PreTrainedModel:
    """Let a token's embedding be no numbers: keys and values in whatever slot it lies, which masks do not hide."""
    target.get_input_embeddings().weight[DEAD] = torch.nan
    return target


class Nothing:
    """Leaves no token behind one, which it makes unlikely."""

    stateless = True

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, DEAD] += self.least
        return self.behind(input_ids, scores)

    def behind(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill((input_ids[:, -1:] == DEAD), -torch.inf)


class Raising(Nothing):
    """Raises behind one."""

    def behind(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((input_ids[:, -1] == DEAD).any()):
            raise LookupError("nothing follows it")
        return scores


def call(model: Any, least: float, kind: type[Nothing] | None, **options: Any) -> polydraft.Run:
    given: dict[str, Any] = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(PROMPT), **options}
    if kind is not None:
        given["logits_processor"] = LogitsProcessorList([kind(least)])
    return polydraft.stream(model, PROMPT, **given)


def drafters(target: Any) -> list[dict[str, Any]]:
    """Return drafters that propose the token: as a certain one, from a text, and drawn."""
    return [
        {"drafter": "ngram", "prediction": [DEAD] * NEW},
        {"drafter": tiny_draft(target, 0.5), "policy": "3,2,1"},
        {"drafter": tiny_draft(target, 0.5), "policy": polydraft.BestFirst(6)},
    ]


KINDS: dict[str, tuple[Callable[[Any], Any], type[Nothing] | None]] = {
    "no law": (without_law, None),
    "no numbers": (spoilt, None),
    "nothing": (lambda target: target, Nothing),
    "raising": (lambda target: target, Raising),
}


def outcome(run: polydraft.Run) -> tuple[list[int], str]:
    """Return what was written, and how it ended."""
    try:
        run.exhaust()
    except (InvalidProbabilities, polydraft.PolydraftError, LookupError) as error:
        return run.new_tokens[0], type(error).__name__
    return run.new_tokens[0], ""


@pytest.mark.parametrize("least", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize("drafted", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_and_end_are_those_of_plain_decoding(kind: str, drafted: int, least: float) -> None:
    wrapped, processor = KINDS[kind]
    drafter, target = drafters(tiny_target(vocabulary=4))[drafted], wrapped(tiny_target(vocabulary=4))
    plain = outcome(call(target, least, processor, drafter="none", temperature=0))
    found = outcome(call(target, least, processor, temperature=0, **drafter))
    assert found == plain
    if processor is not None:
        assert least <= 0 or plain[1], plain
        assert least >= 0 or not plain[1], plain


@pytest.mark.long(1)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_texts_end_where_they_come_to_it(kind: str) -> None:
    """Some seeds come to the dead end and some do not; those that do end behind its token, and no others."""
    wrapped, processor = KINDS[kind]
    target = wrapped(tiny_target(vocabulary=4))
    ends = set[bool]()
    for seed in range(12):
        for own in drafters(tiny_target(vocabulary=4))[:2]:
            tokens, error = outcome(call(target, 0.0, processor, temperature=1.0, top_k=0, seed=seed, **own))
            assert DEAD not in tokens[:-1]
            assert bool(error) == (DEAD in tokens and len(tokens) < NEW), (tokens, error)
            assert error or len(tokens) == NEW
            ends.add(bool(error))
    assert ends == {True, False}


@pytest.mark.parametrize("kind", ["no law", "no numbers"])
def test_a_batch_loses_no_text_to_drafts(kind: str) -> None:
    """At temperature 0 as plainly; above it each seed writes what it writes alone."""
    prompts = torch.tensor([[0, 1, 1], [1, 3, 0], [3, 3, 1]])
    target = KINDS[kind][0](tiny_target(vocabulary=4))
    draft = tiny_draft(tiny_target(vocabulary=4), 0.5)
    given: dict[str, Any] = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(prompts), "policy": "3,2"}
    given["sequence_bias"] = {(DEAD,): -20.0}
    plain = polydraft.generate(target, prompts, drafter="none", temperature=0, **given)
    found = polydraft.generate(target, prompts, drafter=draft, temperature=0, **given)
    assert found.sequences.equal(plain.sequences) and not found.statistics.fallback
    done = polydraft.generate_many(
        target, list(prompts), batch_size=3, drafter=draft, temperature=1.0, seed=5, max_new_tokens=NEW, policy="3,2",
        sequence_bias={(DEAD,): -20.0},
    )  # fmt: skip
    for one in done:
        own, mask = prompts[one.name : one.name + 1], torch.ones(1, 3, dtype=torch.int64)
        alone = polydraft.generate(
            target, own, **(given | {"attention_mask": mask}), drafter=draft, temperature=1.0, seed=one.seed
        )
        assert alone.sequences[0, 3:].tolist() == list(one.tokens)


class Floor(Nothing):
    """Gives all tokens behind one the same very low score, which leaves a law all the same."""

    def behind(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill((input_ids[:, -1:] == DEAD), torch.finfo(scores.dtype).min)


@pytest.mark.parametrize("drafted", range(3))
def test_a_floor_under_all_scores_is_a_law(drafted: int) -> None:
    target = tiny_target(vocabulary=4)
    for least in (0.0, 30.0):
        plain = outcome(call(target, least, Floor, drafter="none", temperature=0))
        assert outcome(call(target, least, Floor, temperature=0, **drafters(target)[drafted])) == plain
        assert not plain[1]
    assert DEAD in plain[0]
    plain = outcome(call(target, 0.0, Floor, drafter="none", temperature=0))
    given = {"drafter": "ngram", "prediction": [0] * NEW}
    assert outcome(call(target, 0.0, Floor, temperature=0, **given)) == plain
