"""Predicted outputs: where an answer stands in its prediction, before and behind differences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, WIDTH, every_head

import polydraft
from polydraft.drafters import (
    Followed,
    LookupFirst,
    NgramDrafter,
    PredictedDrafter,
    RoutedDrafter,
    SuffixDrafter,
    SuffixStore,
)
from polydraft.drafters.text.predicted import PredictionPlace, moved
from polydraft.errors import InvalidParameter

PREDICTION = np.array([10, 11, 12, 13, 14, 15, 16, 17])


def place_after(answer: list[int], prediction: np.ndarray = PREDICTION, trusted: int = 2) -> PredictionPlace:
    text = np.array([1, 2, 3, *answer])
    whole = moved(PredictionPlace(3, 3), prediction, text, trusted)
    in_steps = PredictionPlace(3, 3)
    for end in range(3, len(text) + 1):
        in_steps = moved(in_steps, prediction, text[:end], trusted)
    assert whole == in_steps, "a place follows from the text, however many tokens a step gave"
    return whole


@pytest.mark.parametrize(
    ("answer", "at", "lost"),
    [
        ([], 0, 0),
        ([10, 11], 2, 0),
        ([10, 99], 2, 1),  # until the place is found again: as many tokens were replaced as there are others
        ([10, 99, 12], 3, 2),
        ([10, 99, 12, 13], 4, 0),  # one token replaced
        ([10, 98, 99, 11, 12], 3, 0),  # two inserted
        ([10, 14, 15], 6, 0),  # three left out
        ([10, 11, 12, 13, 10, 11], 2, 0),  # back to where it was
        (list(PREDICTION), 8, 0),
        ([*PREDICTION, 5], 8, 1),  # behind the end nothing is predicted
    ],
)
def test_where_an_answer_stands(answer: list[int], at: int, lost: int) -> None:
    assert (place_after(answer).at, place_after(answer).lost) == (at, lost)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("answer", "spots"),
    [
        ([], []),
        (list(PREDICTION), range(8)),
        ([10, 11, 99, 13, 14], [0, 1, -1, 3, 4]),  # one token replaced
        ([10, 98, 99, 11, 12], [0, -1, -1, 1, 2]),  # two inserted
        ([10, 14, 15], [0, 4, 5]),  # three left out
        ([10, 99, 12, 98], [0, -1, 2, -1]),  # a single token where the place is but guessed
        ([10, 99, 12, 10, 11], [0, -1, 2, 0, 1]),  # back to where it was
        ([10, 11, 14, 11, 12], [0, 1, -1, 1, 2]),
        ([12, 11, 10], [-1, 1, -1]),
        ([1, 2, 3], [-1, -1, -1]),
        ([*PREDICTION, 5], [*range(8), -1]),
    ],
)
def test_which_tokens_of_a_prediction_an_answer_has(answer: list[int], spots: Sequence[int]) -> None:
    own = [int(token) for token in PREDICTION]
    whole, in_steps = Followed(own).on(answer), Followed(own)
    for token in answer:
        in_steps = in_steps.on([token])
    assert whole.spots == in_steps.spots == tuple(spots) and whole.place == in_steps.place
    assert whole.accepted == len({*spots} - {-1}) <= len(own)


def test_a_token_of_an_answer_is_one_of_the_prediction_at_most() -> None:
    prediction = [1, 2, 3, 4, 2, 9, 7]
    assert Followed(prediction).on([1, 2, 9, 7]).spots == (0, 1, 5, 6)  # 2 stays the first one
    generator = np.random.default_rng(0)
    for _ in range(300):
        own, answer = (generator.integers(0, 4, size).tolist() for size in generator.integers(1, 12, 2))
        found = Followed(own).on(answer)
        assert all(spot < 0 or own[spot] == token for spot, token in zip(found.spots, answer, strict=True))
        assert found.accepted <= min(len(own), len(answer)) and Followed(own).on(own).accepted == len(own)


def test_the_nearest_place_ahead_comes_first() -> None:
    prediction = np.array([1, 2, 3, 1, 2, 4, 1, 2, 5])
    assert place_after([1, 2, 3, 9, 1, 2], prediction).at == 5
    assert place_after([1, 2, 3, 1, 2, 4, 9, 9, 1, 2], prediction).at == 8


def test_prompts_do_not_count_as_answer() -> None:
    assert moved(PredictionPlace(2, 2), PREDICTION, np.array([10, 11, 12]), 2) == PredictionPlace(2, 3, 1, 1)


def test_a_text_that_is_as_predicted_takes_few_steps_and_is_the_same() -> None:
    target = tiny_model("llama", 20)
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    options = {"temperature": 0, "max_new_tokens": 48}
    plain = polydraft.generate(target, ids, drafter="none", **options)
    answers = plain.sequences[:, 3:].tolist()
    exact = polydraft.generate(target, ids, drafter=PredictedDrafter(answers), **options)
    assert torch.equal(exact.sequences, plain.sequences) and exact.statistics.block_efficiency > 10
    edited = [[*one[:9], 7, 7, *one[12:]] for one in answers]
    near = polydraft.generate(target, ids, drafter=PredictedDrafter(edited), **options)
    assert torch.equal(near.sequences, plain.sequences) and near.statistics.block_efficiency > 3
    with pytest.warns(RuntimeWarning, match="3 predictions for 2 rows"):
        polydraft.generate(target, ids, drafter=PredictedDrafter([[1], [2], [3]]), **options)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("prediction", "trusted", "told"),
    [
        ([], 2, "is empty"),
        *(([1], trusted, "trusted must be a whole number of at least 1") for trusted in (0, 1.5, "2", None)),
        *(
            (wrong, 2, "must be token ids")
            for wrong in ("text", None, 3, [-1], [1.5], [[]], [1, [2]], [1 << 40], b"ab")
        ),
    ],
)
def test_bad_predictions(prediction: Any, trusted: Any, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        PredictedDrafter(prediction, trusted)


@pytest.mark.wrong_types
def test_a_prediction_may_be_any_sequence_of_tokens() -> None:
    for given in (range(3), (0, 1, 2), np.arange(3), [np.arange(3)]):
        PredictedDrafter(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", every_head())
def test_heads_read_on_while_lookups_before_a_prediction_take_all_rows(name: str) -> None:
    target = tiny_model("llama", VOCAB, hidden_size=WIDTH)
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7] * 3])
    plain = polydraft.generate(target, prompt, drafter="none", temperature=0, max_new_tokens=60)
    output = polydraft.generate(
        target,
        prompt,
        drafter=LookupFirst(every_head()[name], 1),
        temperature=0,
        max_new_tokens=60,
        prediction=[9, 8, 7],
    )
    assert torch.equal(output.sequences, plain.sequences)
    assert output.statistics.sources["lookup"][0] > 0 and not output.statistics.fallback


def told(store: SuffixStore) -> list[list[int]]:
    """Return the texts of a store, as they were added."""
    added = list[list[int]]()
    add = store.add
    store.add = lambda tokens: (added.append([*map(int, tokens)]), add(tokens))[1]  # type: ignore[method-assign]
    return added


@pytest.mark.parametrize("predicts", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["alone", "route"])
def test_a_store_is_told_of_a_conversation_once_whether_turns_are_predicted_or_not(
    predicts: tuple[bool, bool], kind: str, tmp_path: Path
) -> None:
    store = SuffixStore(tmp_path / "store")
    added, finder = told(store), SuffixDrafter(longest=4, store=store)
    drafter = finder if kind == "alone" else RoutedDrafter((NgramDrafter(), finder))
    model, past, text = tiny_model(vocab=24), None, [3, 1, 4, 1, 5]
    for turn in predicts:
        own: dict[str, Any] = {"prediction": [5, 9, 2]} if turn else {}
        run = polydraft.stream(
            model, torch.tensor([text]), drafter=drafter, max_new_tokens=9, temperature=0.0, past=past, keep_past=True,
            eos_token_id=None, **own,
        ).exhaust()  # fmt: skip
        text, past = [*text, *run.new_tokens[0]], run.past
        whole, text = text, [*text, 7, 8]
    assert added == [whole[:14], whole[13 - 4 :]]  # as for one that was told before, all but the last token is known
