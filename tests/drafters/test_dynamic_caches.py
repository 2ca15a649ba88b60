"""Draft models keep their keys in step when trees grow by themselves: every row is that of a plain pass."""

from functools import cache

import pytest
import torch
from doubles import plain_logits, step_of, tiny_model

from polydraft.drafters import DraftRequest, EnsembleDrafter, ModelDrafter, Session
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.reading import Text
from polydraft.schemes import Product, Scheme, TopK, WithoutReplacement
from polydraft.trees import BestFirst, Confident, Draft, Eagle2, GrowingPolicy, Merged, Verdict

VOCAB, PARAMS = 16, SamplingParams(temperature=0.8)
ROWS = [[3, 1, 4, 1, 5], [7], [2, 7, 1, 8]]


@cache
def model(seed: int) -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model("llama", VOCAB, seed=seed))


def text_of(rows: list[list[int]]) -> Text:
    tokens = torch.zeros(len(rows), 48, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def path(draft: Draft, row: int, node: int) -> list[int]:
    return (draft.tree.ancestors[row, node, 1:].nonzero().squeeze(-1) + 1).tolist()


def check_rows(draft: Draft, rows: list[list[int]], models: list[HuggingFaceModel]) -> int:
    """Compare the rows of all nodes with children to plain passes, each model's own; return how many there were."""
    busy = (draft.tree.children >= 0).any(dim=-1).nonzero().tolist()
    for row, node in busy:
        text = rows[row] + draft.tree.tokens[row, path(draft, row, node)].tolist()
        listed = draft.shortlist[row, node]
        laws = [to_probs(plain_logits(one.model, text), PARAMS)[listed] * (listed >= 0) for one in models]
        found = draft.probs[row, node]
        for law in found if found.dim() == 2 else [found]:
            nearest = min(float((law - one).abs().max()) for one in laws)
            assert nearest < 1e-10
    return len(busy)


def check_steps(drafter: ModelDrafter | EnsembleDrafter, scheme: Scheme, policy: GrowingPolicy, models: list) -> None:
    rows, noise = [list(row) for row in ROWS], Noise.from_seed(5, len(ROWS))
    text = text_of(rows)
    state = drafter.start(text, Session(PARAMS, 48 + policy.shape.size, VOCAB))
    longest = 0
    for step in range(4):
        draft, state = drafter.draft(state, DraftRequest(text, scheme, policy, noise.at(step)))
        assert check_rows(draft, rows, models) > len(rows)
        height = draft.tree.topology.height
        paths = torch.full((len(rows), height), -1)
        for row in range(len(rows)):
            last = int(draft.tree.valid[row].sum()) - 1 - row  # the deepest, the one before, ...
            kept = path(draft, row, last)
            paths[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
            rows[row] += [*draft.tree.tokens[row, kept].tolist(), (row + step) % VOCAB]
            longest = max(longest, len(kept))
        verdict = Verdict(paths, (paths >= 0).sum(dim=-1), text.last())
        state = drafter.commit(state, step_of(text, draft, verdict))
        text = text_of(rows)
    assert longest > 2


POLICIES = (BestFirst(9, depth=4, children=3, beam=3), Confident((3, 2, 1), 0.2), Confident((2, 2, 2), 0.1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("scheme", [WithoutReplacement(), TopK()], ids=lambda scheme: scheme.name)
def test_a_draft_model(scheme: Scheme, policy: GrowingPolicy) -> None:
    check_steps(ModelDrafter(model(1), VOCAB), scheme, policy, [model(1)])


@pytest.mark.parametrize("policy", [Eagle2(3, 4, 7), Eagle2(4, 3, 9)], ids=str)
def test_a_draft_model_with_pruned_trees(policy: Eagle2) -> None:
    check_steps(ModelDrafter(model(1), VOCAB), TopK(), policy, [model(1)])


@pytest.mark.parametrize("policy", [Merged((1, 1, 1)), Merged((2, 1, 1)), POLICIES[0]], ids=str)
def test_an_ensemble(policy: GrowingPolicy) -> None:
    drafter = EnsembleDrafter(((model(1), None), (model(2), None)), 2 * VOCAB)
    check_steps(drafter, Product(), policy, [model(1), model(2)])
