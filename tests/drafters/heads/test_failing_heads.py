"""Heads that fail in mid-text, in a batch where only one row gives them a reason: no text is lost, and none changes."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import distance, law_of
from doubles import tiny_model
from heads import VOCAB, Seen, block_drafter, eagle_drafter
from torch import Tensor

import polydraft
from polydraft import BottomUp, Chain, Optimal, Widths
from polydraft.drafters import BlockDrafter
from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.models import LanguageModel
from polydraft.schemes import IID

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8]]
HEADS: dict[str, Callable[[], Any]] = {
    "markov": lambda: block_drafter("markov"),
    "mixing": lambda: block_drafter("mixing"),
    "eagle": eagle_drafter,
}


SMALL = {"heads": 2, "groups": 1, "channels": 2}


class Failing(HeadEnds):
    """Ends whose logits are NaN in one row from some call on, or that raise an error there.

    Args:
        after: how many calls go well.
        row: whose logits fail.
        raises: raise an error instead.
    """

    def __init__(self, after: int, row: int = 1, *, raises: bool = False) -> None:
        super().__init__()
        self.left, self.row, self.raises = after, row, raises

    def bound(self, target: LanguageModel, width: int) -> BoundEnds:
        whole = super().bound(target, width)

        def output(states: Tensor) -> Tensor:
            self.left -= 1
            if self.left >= 0 or len(states) <= self.row:
                return whole.output(states)
            if self.raises:
                raise ArithmeticError("a row of this batch went wrong")
            logits = whole.output(states).clone()
            logits[self.row] = torch.nan
            return logits

        return replace(whole, output=output)


def batch() -> tuple[Tensor, Tensor]:
    padded, mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = torch.tensor(tokens), 1
    return padded, mask


@pytest.mark.parametrize("policy", [Chain(3), Widths((2, 1)), polydraft.BestFirst(6)], ids=repr)
@pytest.mark.parametrize("raises", [False, True], ids=["not a number", "error"])
@pytest.mark.parametrize("after", [0, 1, 7, 8])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_texts_stay_what_they_are(name: str, after: int, raises: bool, policy: Any) -> None:
    """Rows go on without drafts, all of them after an error; `after` ends growth before the first draft or below it."""
    target, (prompts, mask) = tiny_model(vocab=VOCAB), batch()
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "temperature": 0.0}
    wanted = polydraft.generate(target, prompts, drafter="none", **given).sequences
    head = replace(HEADS[name](), ends=Failing(after, raises=raises))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = polydraft.generate(target, prompts, drafter=head, policy=policy, **given)
    assert torch.equal(found.sequences, wanted)
    assert re.match("ArithmeticError" if raises else "InvalidProbabilities", found.statistics.fallback)
    assert len([one for one in said if "decoded without drafts" in str(one.message)]) == 1


@pytest.mark.parametrize("policy", [Chain(3), Widths((2, 1)), polydraft.BestFirst(6)], ids=repr)
@pytest.mark.parametrize("name", HEADS)
def test_only_the_row_whose_rows_are_no_laws_loses_its_drafts(name: str, policy: Any) -> None:
    target, (prompts, mask) = tiny_model(vocab=VOCAB), batch()
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "temperature": 0.0, "policy": policy}
    drafted = [0, 0, 0]
    with pytest.warns(RuntimeWarning, match="rows in which it fails are decoded without drafts"):
        run = polydraft.stream(target, prompts, drafter=replace(HEADS[name](), ends=Failing(0)), **given)
        for block in run:
            for row, gained in block.rows.items():
                drafted[row] += gained.drafted
    assert drafted[1] == 0 and min(drafted[0], drafted[2]) > 0


@pytest.mark.parametrize("name", HEADS)
def test_texts_that_join_later_are_drafted_for_again(name: str) -> None:
    """The head fails for the first two texts of a running batch, and is well when the others come."""
    target, (head, well) = tiny_model(vocab=VOCAB), (HEADS[name](), HEADS[name]())
    ends, before = Failing(4, raises=True), 0
    prompts = {place: torch.tensor(row) for place, row in enumerate([*ROWS, [5, 5, 5], [9, 2], [4, 4, 1, 3]])}
    given: dict[str, Any] = {"max_new_tokens": 15, "temperature": 0.0, "eos_token_id": None, "policy": Chain(3)}
    many = polydraft.generate_many(target, prompts, batch_size=2, drafter=replace(head, ends=ends), **given)
    found = dict[Any, Any]()
    with pytest.warns(RuntimeWarning, match="a row of this batch went wrong"):
        for one in many:
            found[one.name] = one
            ends.row = 99  # what was wrong is over
    for place, prompt in prompts.items():
        wanted = polydraft.generate(target, prompt.unsqueeze(0), drafter=well, **given).sequences[0, len(prompt) :]
        assert found[place].tokens == wanted.tolist()
    assert ends.left < before  # it was asked again


@pytest.mark.filterwarnings("ignore:.*decoded without drafts")
@pytest.mark.parametrize("raises", [False, True], ids=["not a number", "error"])
@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_law_of_both_texts_is_the_targets(after: int, raises: bool) -> None:
    """Summed over all drafts and verdicts of two texts, of which one makes the head fail at some depth."""
    target, prompts, ends = Seen(2), [[1, 0, 1], [0, 1, 1]], Failing(after, raises=raises)

    class Again(BlockDrafter):
        sound = True

        def draft(self, state: Any, text: Any, scheme: Any, policy: Any, noise: Any) -> Any:
            ends.left = after
            return super().draft(state, text, scheme, policy, noise)

    head = Again(block_drafter("mixing", vocab=2, width=4, block=3, anatomy=SMALL).head, ends)
    law, failures = law_of(target, head, BottomUp(Optimal(IID())), Widths((2, 1)), prompts, 2, steps=1)
    assert distance(law, target.texts(prompts[0], 2)) < 1e-12
    assert bool(failures) == (after < 2)
