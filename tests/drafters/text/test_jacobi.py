"""Jacobi decoding against the iteration written out, one plain pass per place."""

from functools import cache

import numpy as np
import pytest
import torch
from doubles import plain_logits, step_of, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from polydraft import Chain, HuggingFaceModel, JacobiDrafter, NaiveMatch, TopDown
from polydraft.drafters import DraftRequest, Session
from polydraft.drafters.text.guess import Guess
from polydraft.drafters.text.guess import given as drafted
from polydraft.drafters.text.jacobi import JacobiState, filled
from polydraft.engine.loop.step import LOOP
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.rows import carried, cut, put
from polydraft.schemes import Given
from polydraft.trees import Verdict

VOCAB, STEPS, LENGTH = 12, 12, 4
PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 7]]


@cache
def model() -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model("llama", VOCAB, seed=3))


def likeliest(text: list[int]) -> int:
    return int(plain_logits(model().model, text).argmax())


def iterated(prompt: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return text and guesses after each step of Jacobi's iteration behind a moving end."""
    text, guesses, found = list(prompt), list[int](), []
    for _ in range(STEPS):
        whole = [*text, *guesses]
        while len(whole) < len(text) + LENGTH:
            recent = whole[-LENGTH:]
            whole.append(recent[0])
        guesses = whole[len(text) :]
        said = [likeliest([*text, *guesses[:place]]) for place in range(LENGTH + 1)]
        kept = 0
        while kept < LENGTH and guesses[kept] == said[kept]:
            kept += 1
        text, guesses = [*text, *said[: kept + 1]], said[kept + 1 :]
        found.append((list(text), list(guesses)))
    return found


def test_it_is_jacobis_iteration_in_every_row() -> None:
    tokens = torch.zeros(len(PROMPTS), 8, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    text = Text(tokens, torch.tensor([len(prompt) for prompt in PROMPTS]))
    session, rule = Session(SamplingParams(temperature=0), 100, VOCAB), TopDown(NaiveMatch(Given()))
    loop = LOOP.begin(model(), JacobiDrafter(), rule, Chain(LENGTH), text, session)
    expected, kept = [iterated(prompt) for prompt in PROMPTS], 0
    for step in range(STEPS):
        loop, taken = LOOP.step(loop)
        kept += sum(taken.verdict.kept)
        for row, steps in enumerate(expected):
            written, guesses = steps[step]
            assert loop.text.tokens[row, : loop.text.counts[row]].tolist() == written
            assert list(LOOP.drafts(loop).guesses[row]) == guesses
    assert 0 < kept < LENGTH * STEPS * len(PROMPTS)


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    known=st.lists(st.integers(0, 5), max_size=9),
    length=st.integers(1, 7),
)
def test_new_places_take_what_stands_as_many_places_before(text: list[int], known: list[int], length: int) -> None:
    found = filled(np.array(text, np.int64), known, length).tolist()
    assert len(found) == length and found[: len(known)] == known[:length]
    whole = [*text, *found]
    for place in range(len(text) + len(known), len(whole)):
        assert whole[place] == whole[max(place - length, 0)]


def test_a_row_that_leaves_or_is_rewound_begins_again() -> None:
    state = JacobiState(((1, 2), (3,)), 9)
    assert cut(state, 1, 5).guesses == ((1, 2), ())
    assert cut(state, 0, 0).guesses == ((), (3,))
    assert put(state, 2, JacobiState(((8,),), 9)).guesses == ((1, 2), (3,), (8,))
    fresh = JacobiState(((),), 9)
    assert carried([9, cut(state, 0, 0)], fresh, 4) is not fresh and carried([9], fresh, 4) is fresh


@pytest.mark.parametrize("size", [4, 5])
def test_nothing_beyond_the_target_vocabulary_is_drafted(size: int) -> None:
    text = Text(torch.tensor([[1, 2, 4]]), torch.tensor([3]))
    drafter = JacobiDrafter()
    state = drafter.start(text, Session(SamplingParams(), 64, size))
    draft, _ = drafter.draft(state, DraftRequest(text, Given(), Chain(3), Noise.from_seed(0, 1)))
    assert draft.tree.tokens[0, 1:].tolist() == ([1, 2] if size == 4 else [1, 2, 4])


@pytest.mark.parametrize(
    ("path", "expected"),
    [((2,), (14, 15)), ((), (11, 13)), ((1,), (13,)), ((2, 4), (15,)), ((1, 3), ()), ((2, 4, 5), ())],
)
def test_in_a_tree_of_others_the_branch_below_the_last_accepted_node_counts(
    path: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Nodes 1 and 2 are below the root, 3 is below 1, 4 below 2 and 5 below 4; the target says 10 + n behind node n."""
    text = Text(torch.tensor([[1, 2, 4]]), torch.tensor([3]))
    tree = Guess(np.array([5, 6, 7, 8, 9]), np.array([-1, -1, 0, 1, 3]), np.array([0.5, 0.4, 0.3, 0.2, 0.1]))
    draft = drafted(text, [tree], Given())
    kept = Verdict(torch.tensor([[*path, *[-1] * (3 - len(path))]]), torch.tensor([len(path)]), torch.tensor([3]))
    step = step_of(text, draft, kept, vocab_size=16)
    step.scored.logits[0, range(6), range(10, 16)] = 1.0
    after = JacobiDrafter().commit(JacobiState(((1, 2),), 16), step)
    assert after.guesses == (expected,)
