"""How a merge splits its nodes: the numbers, what they are learnt from, and that rows do not see their neighbours."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from doubles import perturbed, step_of, tiny_model

import polydraft
from polydraft.drafters import (
    Drafter,
    DraftRequest,
    MergedDrafter,
    ModelDrafter,
    NgramDrafter,
    RecyclingDrafter,
    Session,
    merge_beside,
)
from polydraft.drafters.several.merge import PRIOR_DRAFTS, RowHistory, best_split, worth_of_budgets, worth_of_levels
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, given
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.rows import put, reuse, select
from polydraft.schemes import Product, TopK
from polydraft.trees import BestFirst, Chain, Eagle2, TreePolicy, TreeShape, Verdict, Widths, branched, in_pieces

VOCAB = 20
TARGET = tiny_model("llama", VOCAB)
DRAFT = HuggingFaceModel(perturbed(TARGET, 0.05))


class Sure(TextDrafter):
    """Guesses four tokens with chances that each row's last token names."""

    name = "sure"
    chances = ((), (0.9, 0.8, 0.7, 0.6), (0.3, 0.2, 0.1, 0.05))

    def guesses(self, state: Any, text: Text, bounds: Bounds) -> tuple[list[Guess], Any]:
        own = [self.chances[token % 3] for token in text.last().tolist()]
        return [Guess(np.arange(len(one)), np.arange(len(one)) - 1, np.array(one)) for one in own], state


def test_levels_are_worth_what_is_expected_to_be_accepted_of_them() -> None:
    assert worth_of_levels(TreeShape(((1,), (1,), (1,))), 0.5) == ((1, 0.5), (2, 0.75), (3, 0.875))
    (_, first), (_, second) = worth_of_levels(TreeShape(((2,), (1, 2))), 0.5)
    assert first == pytest.approx(0.5 + 0.25)
    assert second == pytest.approx(first + 0.5 * 0.5 + 0.25 * (0.5 + 0.25))


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
def test_budgets_go_to_the_best_places(chance: float) -> None:
    """Against all places of a tree of three children, four deep, sorted: none is worth more than the one above it."""
    every = [
        chance ** len(path) * (1 - chance) ** sum(path)
        for size in range(1, 5)
        for path in product(range(3), repeat=size)
    ]
    best = np.cumsum(sorted(every, reverse=True)[:6])
    found = worth_of_budgets(6, 4, 3, chance)
    assert [size for size, _ in found] == [1, 2, 3, 4, 5, 6]
    # a path's later children are counted once each, though they may stand below either sibling
    assert all(value <= most + 1e-12 for (_, value), most in zip(found, best, strict=True))
    assert found[0][1] == pytest.approx(best[0]) and found[1][1] == pytest.approx(best[1])


@pytest.mark.parametrize(
    ("chance", "guesses", "nodes"),
    [
        (0.7, [], 5),  # nothing else to score
        (0.7, [0.6, 0.5, 0.4, 0.3, 0.2], 2),  # 0.7, 0.49 | 0.6, 0.5, 0.4, and not 0.343
        (0.7, [0.9, 0.8, 0.7, 0.6, 0.5], 1),  # one is the least
        (0.9, [0.6, 0.5, 0.4, 0.3, 0.2], 4),  # 0.9, 0.81, 0.729, 0.656 | 0.6, and not 0.59
        (0.3, [0.1, 0.05], 3),  # two guesses leave three, whatever these are worth
    ],
)
def test_places_go_to_the_likelier(chance: float, guesses: list[float], nodes: int) -> None:
    assert best_split(worth_of_levels(Chain(5).shape, chance), guesses, 5) == nodes


def splits(drafter: MergedDrafter, policy: TreePolicy, lasts: list[int], kept: list[RowHistory]) -> tuple[int, ...]:
    """Return how many nodes the other drafter gets in rows that end with some tokens."""
    text = Text(torch.tensor(lasts).unsqueeze(-1), torch.ones(len(lasts), dtype=torch.long))
    found, _ = drafter.members[0].guesses(None, text, Bounds.of(policy))
    return drafter._split(policy, Bounds.of(policy), kept, found).drafts


@pytest.mark.parametrize("policy", [Chain(5), BestFirst(5, depth=5, children=1)], ids=["fixed", "growing"])
def test_a_split_follows_guesses_and_what_was_kept_row_by_row(policy: TreePolicy) -> None:
    drafter = MergedDrafter((Sure(),), ModelDrafter(DRAFT), hope=0.7)
    new, good, bad = RowHistory(), RowHistory(36, 36), RowHistory(16, 0)
    assert splits(drafter, policy, [0, 1, 2], [new] * 3) == (5, 1, 4), "no, sure and doubtful guesses"
    assert splits(drafter, policy, [1, 1, 1], [new, good, bad]) == (1, 4, 1)
    assert splits(drafter, policy, [2, 2, 2], [new, good, bad]) == (4, 5, 1)
    assert splits(MergedDrafter((Sure(),), ModelDrafter(DRAFT), hope=0.95), policy, [1], [new]) == (4,)


def test_a_chance_begins_with_the_hope_and_is_learnt() -> None:
    assert RowHistory().chance(0.7) == 0.7 and RowHistory(16, 0).chance(0.5) == pytest.approx(
        PRIOR_DRAFTS * 0.5 / (PRIOR_DRAFTS + 16)
    )
    assert RowHistory(1000, 0).chance(0.5) == 0.01 and RowHistory(10**6, 10**6).chance(0.5) == 0.99


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([1, 2, 3], RowHistory(3, 2)),  # 1, then 2 behind 7, and nothing below it
        ([1, 7, 4], RowHistory(2, 2)),
        ([1, 9], RowHistory(3, 1)),  # 1, but neither 7 nor 2
        ([5], RowHistory(1, 0)),  # a guess's token alone
        ([8, 8], RowHistory(1, 0)),
    ],
)
def test_what_was_kept_is_counted_where_the_text_came_by(written: list[int], kept: RowHistory) -> None:
    """The other drafter has 1, and 7 and 2 below it; a guess has 5 and 8 behind it, and 1 and 2."""
    text = Text(torch.tensor([[0]]), torch.tensor([1]))
    own = given(text, [Guess(np.array([1, 7, 2]), np.array([-1, 0, 0]), np.ones(3))], TopK())
    beside = given(text, [Guess.paths([np.array([5, 8]), np.array([1, 2])])], TopK())
    assert RowHistory().after(branched(own, beside, TopK()), 0, written) == kept
    assert RowHistory(4, 3).after(branched(own, beside, TopK()), 0, written) == RowHistory(
        4 + kept.tried, 3 + kept.kept
    )


def test_finished_steps_move_the_split_of_their_row() -> None:
    drafter = MergedDrafter((Sure(),), ModelDrafter(DRAFT), hope=0.8)
    text = Text(torch.tensor([[3, 4, 8], [5, 6, 8]]), torch.tensor([3, 3]))
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB))
    assert state.kept == (RowHistory(), RowHistory())
    draft, state = drafter.draft(state, DraftRequest(text, TopK(), Chain(4), Noise.from_seed(0, 2)))
    (rows, both) = state.joint[0]
    assert rows == (0, 1)
    first = both.draft.tree.tokens[:, 1]  # the other drafter's first draft: kept in the first row, not in the second
    verdict = Verdict(torch.tensor([[1], [-1]]), torch.tensor([1, 0]), torch.stack([first[0], first[1] + 1]) % VOCAB)
    (piece,) = in_pieces(draft)
    after = drafter.commit(state, step_of(text, piece.draft, verdict, VOCAB))
    assert after.kept[0].kept >= 1 and after.kept[1] == RowHistory(1, 0)
    assert select(after, [1]).kept == after.kept[1:]
    assert put(after, 0, select(after, [1])).kept == (RowHistory(1, 0), RowHistory(1, 0))


POLICIES = (Chain(6), Widths((2, 2, 1)), BestFirst(8, depth=6, children=2))


@pytest.mark.long(1)
@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "widths", "best first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_of_a_batch_have_their_own_split(policy: TreePolicy, temperature: float) -> None:
    prompts = [torch.tensor(row) for row in ([3, 1, 4, 3, 1, 4], [5, 8, 5, 8, 5, 8, 5], [7, 2], [1, 1, 1, 1])]
    seen = set[tuple[int, ...]]()

    class Seeing(MergedDrafter):
        sound = True

        def _split(self, *given: Any) -> Any:
            found = super()._split(*given)
            seen.add(found.drafts)
            return found

    drafter: Drafter = Seeing((NgramDrafter(3, 1, 2), RecyclingDrafter()), ModelDrafter(DRAFT))
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 16, "drafter": drafter, "policy": policy}
    for one in polydraft.generate_many(TARGET, prompts, batch_size=3, seed=4, **options):
        ids = prompts[one.name].unsqueeze(0)
        alone = polydraft.generate(TARGET, ids, seed=one.seed, **options)
        assert one.tokens == alone.sequences[0, ids.shape[1] :].tolist() and not alone.statistics.fallback
        most = Bounds.of(policy).nodes
        assert alone.statistics.drafted <= most * alone.statistics.target_calls
    assert any(len({*one}) > 1 for one in seen), "some steps had rows with different splits"


def test_grown_trees_keep_to_the_budgets_of_their_rows() -> None:
    drafter, text = ModelDrafter(DRAFT), Text(torch.tensor([[3, 1], [5, 2], [6, 7]]), torch.tensor([2, 2, 2]))
    session = Session(SamplingParams(), 64, VOCAB)
    for policy, scheme in ((BestFirst(9, children=3), Product()), (Eagle2(3, 3, 9), TopK())):
        found, trees = [], []
        for own in (policy.with_budgets((2, 9, 5)), policy.with_budgets((9, 9, 9)), policy):
            noise = Noise.from_seed(0, 3)
            (piece,) = in_pieces(drafter.draft(drafter.start(text, session), DraftRequest(text, scheme, own, noise))[0])
            tree = piece.draft.tree
            found.append((tree.valid.sum(dim=-1) - 1).tolist())
            trees.append([sorted(tree.tokens[row][tree.valid[row]].tolist()) for row in range(3)])
        assert found == [[2, 9, 5], [9, 9, 9], [9, 9, 9]]
        assert trees[1] == trees[2] and trees[0][1] == trees[1][1]


@pytest.mark.wrong_types
def test_what_was_learnt_of_a_text_is_no_part_of_what_is_kept_of_it() -> None:
    drafter = merge_beside(ModelDrafter(DRAFT))
    text = Text(torch.tensor([[3, 1, 4, 1, 5]] * 2), torch.tensor([5, 5]))
    state = drafter.start(text, Session((SamplingParams(),) * 2, 40, VOCAB))
    learnt = replace(state, kept=(RowHistory(9, 8), RowHistory(5, 1)))
    assert reuse(learnt, state, 5).kept == state.kept == (RowHistory(), RowHistory())
