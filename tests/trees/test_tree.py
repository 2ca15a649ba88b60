import torch

from polydraft.trees import Draft, TokenTree, Topology, Verdict

PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 3]])
TOKENS = torch.tensor([[9, 5, 6, 7, 8, 4], [9, 1, 2, 3, 4, 5]])


def tree(valid: list[list[bool]]) -> TokenTree:
    return TokenTree(TOKENS, Topology(PARENTS), torch.tensor(valid))


def test_children_are_the_valid_ones():
    holes = tree([[True, True, False, False, True, False], [True] * 5 + [False]])
    assert holes.children.tolist() == [
        [[1, -1], [-1, 4], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
        [[1, -1], [2, -1], [3, -1], [4, -1], [-1, -1], [-1, -1]],
    ]


def test_the_root_alone_has_no_children():
    roots = TokenTree.root_only(torch.tensor([3, 4]))
    assert roots.tokens.tolist() == [[3], [4]]
    assert roots.children.tolist() == [[[-1]], [[-1]]]
    assert roots.depth.tolist() == [[0], [0]]


def test_drafted_atoms_are_those_of_the_valid_children():
    everywhere = torch.tensor([[-1, 2, 0, 1, 2, 1], [-1, 0, 1, 2, 0, 1]])
    shortlist, probs = torch.zeros(2, 6, 3, dtype=torch.int64), torch.zeros(2, 6, 3)
    holes = tree([[True, True, True, False, True, True], [True] * 6])
    assert Draft(holes, everywhere, shortlist, probs).drafted_atoms().tolist() == [
        [[2, 0], [-1, 2], [1, -1], [-1, -1], [-1, -1], [-1, -1]],
        [[0, -1], [1, -1], [2, -1], [0, 1], [-1, -1], [-1, -1]],
    ]


def test_the_empty_draft_drafts_nothing():
    draft = Draft.nothing(torch.tensor([3, 4]))
    assert draft.drafted_atoms().tolist() == [[[-1]], [[-1]]]
    assert draft.probs.tolist() == [[[0]], [[0]]]


def test_a_verdict_emits_its_path_and_then_its_token():
    verdict = Verdict(torch.tensor([[1, 4, -1], [1, 2, 3]]), torch.tensor([2, 3]), torch.tensor([77, 88]))
    assert verdict.tokens(tree([[True] * 6] * 2)).tolist() == [[5, 8, 77, -1], [1, 2, 3, 88]]


def test_a_verdict_without_accepted_drafts_emits_one_token():
    nowhere = torch.zeros(2, 0, dtype=torch.int64)
    verdict = Verdict(nowhere, torch.tensor([0, 0]), torch.tensor([7, 8]))
    assert verdict.tokens(TokenTree.root_only(torch.tensor([3, 4]))).tolist() == [[7], [8]]
