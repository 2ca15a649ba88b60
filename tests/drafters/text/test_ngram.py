"""Prompt lookup against a search written the slow and plain way."""

import numpy as np
import pytest
import torch
from doubles import step_of
from hypothesis import given
from hypothesis import strategies as st

from polydraft.drafters import NgramDrafter, Session, given_chain
from polydraft.drafters.text.index import Followed
from polydraft.drafters.text.ngram import continuations
from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given
from polydraft.trees import Chain, Verdict

texts = st.lists(st.integers(0, 3), min_size=1, max_size=25)


def slow_continuations(text: list[int], longest: int, shortest: int, most: int, matches: int) -> list[list[int]]:
    """Try every suffix from the longest down and every place from the latest back."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[len(text) - size :]
        starts = [start for start in range(len(text) - size - 1, -1, -1) if text[start : start + size] == suffix]
        if starts:
            return [text[start + size : start + size + most] for start in starts[:matches]]
    return []


def found(text: list[int], longest: int = 3, shortest: int = 1, most: int = 4) -> list[int]:
    row = np.array(text, dtype=np.int64)
    _, chains = continuations(row, Followed.begun().to(row), longest, shortest, most)
    return chains[0].tolist() if chains else []


@given(
    text=texts,
    longest=st.integers(1, 5),
    shortest=st.integers(1, 5),
    most=st.integers(1, 6),
    matches=st.integers(1, 4),
)
def test_agrees_with_the_slow_search(text: list[int], longest: int, shortest: int, most: int, matches: int) -> None:
    row = np.array(text, dtype=np.int64)
    size, chains = continuations(row, Followed.begun().to(row), longest, shortest, most, matches)
    assert [chain.tolist() for chain in chains] == slow_continuations(text, longest, shortest, most, matches)
    assert bool(size) == bool(chains) and (not size or shortest <= size <= longest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7], []),
        ([7, 8], []),
        ([7, 7], [7]),
        ([1, 2, 3, 9, 3, 5, 1, 2, 3], [9, 3, 5, 1]),  # the longest suffix wins over the more recent single token
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the most recent occurrence wins; the text ends before four tokens
        ([4, 5, 4, 5, 4], [5, 4]),  # an occurrence may overlap the suffix
        ([1, 2, 3, 4], []),
    ],
)
def test_choice_of_the_occurrence(text: list[int], expected: list[int]) -> None:
    assert found(text) == expected


def test_suffixes_shorter_than_the_shortest_do_not_count() -> None:
    text = [1, 2, 9, 3, 2]
    assert found(text, shortest=1) == [9, 3, 2]
    assert found(text, shortest=2) == []


def drafted(rows: list[list[int]], length: int, vocab: int = 10) -> list[list[int]]:
    """Draft for a batch, check the laws that the drafts claim, and return the drafts of each row."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max()) + 3), 8)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    text = Text(tokens, lengths)
    drafter = NgramDrafter()
    state = drafter.start(text, Session(SamplingParams(), 64, vocab))
    draft, state = drafter.draft(state, text, Given(), Chain(length), Noise.from_seed(0, len(rows)))
    tree = draft.tree
    assert tree.tokens[:, 0].tolist() == [row[-1] for row in rows]
    atoms = draft.drafted_atoms()
    counts = (atoms >= 0).sum(dim=-1)
    own = Given().sample(draft.probs, counts, torch.zeros_like(draft.probs), atoms.shape[-1])
    assert torch.equal(own, atoms)
    nothing = torch.full((len(rows), 0), -1)
    verdict = Verdict(nothing, torch.zeros_like(lengths), tokens[:, 0])
    assert drafter.commit(state, step_of(text, draft, verdict)) is state
    return [row[1:][valid[1:]].tolist() for row, valid in zip(tree.tokens, tree.valid, strict=True)]


def test_rows_of_a_batch_are_searched_apart() -> None:
    rows = [[1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6], [5], [4, 4, 4, 4]]
    assert drafted(rows, 4) == [[3, 1, 2], [], [], [4]]
    assert drafted(rows, 2) == [[3, 1], [], [], [4]]
    assert drafted(rows[1:3], 4) == [[], []]


def test_nothing_beyond_the_target_vocabulary_is_drafted() -> None:
    assert drafted([[1, 9, 3, 1]], 4, vocab=10) == [[9, 3, 1]]
    assert drafted([[1, 9, 3, 1]], 4, vocab=9) == [[]], "what follows a missing token is no continuation"


def test_a_given_chain_of_nothing_is_the_root_alone() -> None:
    text = Text(torch.tensor([[1, 2]]), torch.tensor([2]))
    assert given_chain(text, [np.array([], dtype=np.int64)]).tree.tokens.tolist() == [[2]]


@pytest.mark.parametrize("wrong", [(0,), (-1,), (2.5,), ("3",), (True,), (1, 2), (3, 1, 0), (3, 1, None)])
def test_numbers_that_are_none_are_refused(wrong: tuple) -> None:
    with pytest.raises(InvalidParameter, match="must be whole numbers of at least 1"):
        NgramDrafter(*wrong)
