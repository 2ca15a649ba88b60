"""Drafts beside one another are exact: the law of the text is the target's, summed over all drafts of both."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from polydraft import NaiveMatch, Optimal, Race, RecursiveRejection, TopDown
from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, Given, Product, Scheme, TopK
from polydraft.trees import Chain, Draft, TokenTree, Verdict, Widths, branched, topology
from polydraft.verifiers import ImportanceWeighted, NodeVerifier

VOCAB = 4


def law(*shape: int, seed: int) -> Tensor:
    mass = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 0.01
    return mass / mass.sum(dim=-1, keepdim=True)


def drawn(widths: tuple[int, ...], tokens: list[int], rows: Tensor, listed: Tensor) -> Draft:
    """Return a draft with these tokens, whose nodes' laws are rows of their numbers on a list."""
    shape = topology(Widths(widths).shape, 1, torch.device("cpu"))
    whole = torch.tensor([[0, *tokens]])
    tree = TokenTree(whole, shape, torch.ones_like(whole).bool())
    inner = shape.inner
    atoms = (listed.unsqueeze(0) == whole[0].unsqueeze(-1)).int().argmax(dim=-1)
    atoms[0] = -1
    probs = torch.zeros(1, len(whole[0]), 1, len(listed), dtype=torch.float64)
    probs[0, :inner, 0] = rows[:inner]
    lists = listed.repeat(1, len(whole[0]), 1)
    return Draft(tree, atoms.unsqueeze(0), lists, probs, most_children=max(widths))


def text_law(draft: Draft, rule: NodeVerifier, target: Tensor) -> Tensor:
    """Return the law of the first two tokens: the verdict's, then the target's."""
    rows = torch.stack([target[node_row(draft, node)] for node in range(draft.tree.tokens.shape[1])]).unsqueeze(0)
    found = TopDown(rule).path_law(draft, rows)
    following = found.next_token(draft, rows)[0]
    result = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for node in range(draft.tree.tokens.shape[1]):
        path = path_of(draft, node)
        for token in range(VOCAB):
            share = found.end[0, node] * following[node, token]
            first = [*path, token][:2]
            if len(first) == 2:
                result[first[0], first[1]] += share
            else:
                result[first[0]] += share * target[1 + first[0]]
    return result


def path_of(draft: Draft, node: int) -> list[int]:
    parents, tokens, path = draft.tree.parents[0].tolist(), draft.tree.tokens[0].tolist(), list[int]()
    while node > 0:
        path, node = [tokens[node], *path], parents[node]
    return path


def node_row(draft: Draft, node: int) -> int:
    path = path_of(draft, node)
    return 0 if not path else 1 + path[-1]


def without(draft: Draft, first: int) -> Draft:
    """Return a draft of which the nodes from a number on are padding."""
    there = torch.arange(draft.tree.tokens.shape[1]) < first
    valid, atoms = draft.tree.valid & there, draft.atoms.where(there, -1)
    return replace(draft, tree=replace(draft.tree, valid=valid), atoms=atoms)


OF_ROWS = [RecursiveRejection(Product()), ImportanceWeighted(Product()), Race(Product()), NaiveMatch(Product())]


@pytest.mark.parametrize("rule", OF_ROWS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("there", [3, 2, 1])
def test_product_keeps_the_law(there: int, rule: NodeVerifier) -> None:
    """Of the first draft so many nodes are there, as where a row has fewer drafts than its neighbours."""
    target, one, other = law(1 + VOCAB, VOCAB, seed=1), law(4, 3, seed=2), law(4, 2, seed=3)
    lists = torch.tensor([0, 1, 2]), torch.tensor([3, 1])
    total, mass = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), 0.0
    for mine in product(range(3), repeat=2):  # two drafts at the root, from one row
        for its in product(range(2), repeat=2):  # a chain of two
            first = without(drawn((2,), [int(lists[0][atom]) for atom in mine], one, lists[0]), there)
            second = drawn((1, 1), [int(lists[1][atom]) for atom in its], other, lists[1])
            chance = float(one[0, list(mine)].prod() * other[0, its[0]] * other[1, its[1]])
            total += chance * text_law(branched(first, second, Product()).draft, rule, target)
            mass += chance
    assert abs(mass - 1) < 1e-12
    expected = target[0].unsqueeze(-1) * target[1:]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)


def test_rows_with_different_numbers_of_drafts_are_what_they_are_alone() -> None:
    one, other, lists = law(4, 3, seed=2), law(4, 2, seed=3), (torch.tensor([0, 1, 2]), torch.tensor([3, 1]))
    firsts = [without(drawn((2,), [0, 2], one, lists[0]), there) for there in (3, 2, 1)]
    seconds = [without(drawn((1, 1), [3, 1], other, lists[1]), there) for there in (2, 3, 1)]
    both = [stacked(drafts) for drafts in (firsts, seconds)]
    joint = branched(*both, Product())
    assert joint.draft.tree.valid.sum(dim=-1).tolist() == [4, 4, 1] and joint.draft.tree.topology.width == 3
    target = law(1 + VOCAB, VOCAB, seed=1)
    for row, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        alone = branched(first, second, Product())
        for rule in OF_ROWS:
            found, wanted = (text_law(one, rule, target) for one in (joint.draft.of([row]), alone.draft))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    leaf = torch.tensor([[3, -1], [2, 3], [-1, -1]])
    mine, its = joint.verdicts(Verdict(leaf, torch.tensor([1, 2, 0]), torch.tensor([0, 0, 0])))
    assert (mine.kept, its.kept) == ((0, 0, 0), (1, 2, 0)), "padding of the first makes room for the second"


def stacked(drafts: list[Draft]) -> Draft:
    """Return drafts of one row and one shape as rows."""
    tree = TokenTree(
        torch.cat([one.tree.tokens for one in drafts]),
        topology(Widths((2,)).shape if drafts[0].tree.topology.width == 2 else Chain(2).shape, 3, torch.device("cpu")),
        torch.cat([one.tree.valid for one in drafts]),
    )
    return Draft(tree, *(torch.cat([getattr(one, name) for one in drafts]) for name in ("atoms", "shortlist", "probs")))


@pytest.mark.parametrize("kind", [NaiveMatch, Optimal, Race])
@pytest.mark.parametrize("scheme", [TopK(), Given()])
def test_fixed_drafts_are_merged_and_keep_the_law(scheme: Scheme, kind: type) -> None:
    """Rules for fixed drafts know from the lists which drafts there can be."""
    target, rows = law(1 + VOCAB, VOCAB, seed=4), law(7, 3, seed=5)
    lists = torch.tensor([0, 1, 2]), torch.tensor([1, 3, 0])
    first = drawn((2, 1), [1, 0, 2, 0], rows, lists[0])
    second = drawn((1, 1), [1, 3], rows, lists[1])
    flat = [Draft(**{**vars(one), "probs": one.probs[:, :, 0]}) for one in (first, second)]
    joint = branched(flat[0], flat[1], scheme)
    assert joint.draft.tree.tokens.tolist() == [[0, 1, 0, 2, 0, 3]] and joint.places.tolist() == [[0, 1, 5]]
    found = text_law(joint.draft, kind(scheme), target)
    torch.testing.assert_close(found, target[0].unsqueeze(-1) * target[1:], rtol=0, atol=1e-12)
    path, length = torch.tensor([[1, 5]]), torch.tensor([2])
    mine, its = joint.verdicts(Verdict(path, length, torch.tensor([0])))
    assert mine.path.tolist() == [[1, -1]] and mine.kept == (1,)
    assert its.path.tolist() == [[1, 2]] and its.kept == (2,)


def test_drawn_siblings_have_no_strangers_among_them() -> None:
    one = Draft.nothing(torch.tensor([0]))
    with pytest.raises(UnpairedScheme, match="not under"):
        branched(one, one, IID())
    assert branched(one, one, TopK()).draft.tree.tokens.tolist() == [[0]]
    assert Chain(1).shape.size == 2
