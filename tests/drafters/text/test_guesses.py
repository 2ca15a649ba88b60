"""Guesses: bounds, unknown tokens, merging, and the draft that is made of them."""

import numpy as np
import pytest
import torch

from polydraft.drafters.text.guess import Bounds, Guess, given, merged
from polydraft.reading import Text
from polydraft.schemes import IID, Given, Product, TopK
from polydraft.trees import BestFirst, Chain, Widths


def guess(*nodes: tuple[int, int, float]) -> Guess:
    tokens, parents, chances = zip(*nodes, strict=True)
    return Guess(np.array(tokens), np.array(parents), np.array(chances))


TREE = guess((5, -1, 0.9), (6, 0, 0.5), (7, 0, 0.6), (8, -1, 0.3), (9, 2, 0.55), (4, 3, 0.1))


def as_paths(one: Guess) -> set[tuple[int, ...]]:
    found = list[tuple[int, ...]]()
    for token, above in zip(one.tokens.tolist(), one.parents.tolist(), strict=True):
        found.append((*(found[above] if above >= 0 else ()), token))
    return set(found)


def test_the_likeliest_guesses_are_kept_within_bounds() -> None:
    assert as_paths(TREE.within(Bounds(3, 9, 9))) == {(5,), (5, 7), (5, 7, 9)}
    assert as_paths(TREE.within(Bounds(9, 1, 9))) == {(5,), (8,)}
    assert as_paths(TREE.within(Bounds(9, 9, 1))) == {(5,), (5, 7), (5, 7, 9)}
    assert as_paths(TREE.within(Bounds(0, 0, 0))) == set()
    assert as_paths(TREE.within(Bounds(9, 9, 9))) == as_paths(TREE)


def test_unknown_tokens_go_with_what_is_below_them() -> None:
    assert as_paths(TREE.within(Bounds(9, 9, 9), vocab_size=7)) == {(5,), (5, 6)}


def test_what_is_kept_of_a_policy_is_its_largest_tree() -> None:
    assert Bounds.of(Chain(4)) == Bounds(4, 4, 1)
    assert Bounds.of(Widths((3, 2))) == Bounds(9, 2, 3)
    assert Bounds.of(BestFirst(7, depth=5, children=3)) == Bounds(7, 5, 3)


def test_a_path_is_followed_as_far_as_it_goes() -> None:
    assert [TREE.followed(path) for path in ([], [5], [5, 7, 9, 1], [5, 9], [8, 4], [1])] == [0, 1, 3, 1, 2, 0]


def test_paths_share_their_beginnings() -> None:
    found = Guess.paths([np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([5])], [0.5, 0.3, 0.1])
    assert as_paths(found) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}
    assert found.chances.tolist() == pytest.approx([0.8, 0.8, 0.5, 0.3, 0.1])
    assert found.promise == pytest.approx(2.5) and found.depth == 3


def test_several_guesses_are_one_tree_and_no_child_is_likelier_than_what_is_above() -> None:
    other = guess((5, -1, 0.5), (7, 0, 0.5), (3, 1, 0.2))
    both = merged([TREE, other])
    assert as_paths(both) == as_paths(TREE) | as_paths(other)
    assert len(both) == len(as_paths(both))
    above = np.where(both.parents >= 0, both.chances[both.parents], 1.0)
    assert (both.chances <= above + 1e-12).all()
    assert both.chances[both.tokens.tolist().index(5)] == pytest.approx(0.95)


@pytest.mark.parametrize("scheme", [Given(), TopK(), Product()], ids=lambda one: one.name)
def test_every_child_is_what_the_scheme_draws_from_its_nodes_rows(scheme) -> None:
    text = Text(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1]))
    draft = given(text, [TREE, Guess.chain(np.array([4, 4]))], scheme)
    assert draft.tree.tokens[:, 0].tolist() == [2, 3] and draft.tree.valid.sum(-1).tolist() == [7, 3]
    for row in range(2):
        for node in draft.tree.valid[row].nonzero().flatten().tolist():
            children = draft.tree.children[row, node]
            atoms = draft.atoms[row, children[children >= 0]]
            if len(atoms):
                assert scheme.probability(draft.probs[row, node].unsqueeze(0), atoms.unsqueeze(0)) == 1


def test_a_chain_is_a_draw_of_any_scheme() -> None:
    draft = given(Text(torch.tensor([[1]]), torch.tensor([1])), [Guess.chain(np.array([4, 5]))], IID())
    assert draft.probs[0, :2].tolist() == [[1.0], [1.0]]
    assert draft.most_children == 1


def test_no_guess_is_the_root_alone() -> None:
    text = Text(torch.tensor([[1]]), torch.tensor([1]))
    assert given(text, [Guess.nothing()], Given()).tree.tokens.tolist() == [[1]]
    assert given(text, [Guess.nothing()], Product()).probs.dim() == 4
