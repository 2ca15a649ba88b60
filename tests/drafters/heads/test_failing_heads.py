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
from heads import (
    VOCAB,
    Seen,
    block_drafter,
    eagle_drafter,
    falcon_drafter,
    medusa_drafter,
    mtp_drafter,
    parallel_drafter,
    walk,
)
from torch import Tensor

import polydraft
from polydraft import BottomUp, Chain, Optimal, Widths
from polydraft.drafters import DraftRequest, HeadDrafter
from polydraft.drafters.heads.drafter import BoundEnds, HeadEnds
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.models import LanguageModel
from polydraft.schemes import IID

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8]]
HEADS: dict[str, Callable[[], Any]] = {
    "markov": lambda: block_drafter("markov"),
    "mixing": lambda: block_drafter("mixing"),
    "xpress": lambda: block_drafter("xpress"),
    "lilicorr": lambda: block_drafter("lilicorr"),
    "eagle": eagle_drafter,
    "p-eagle": parallel_drafter,
    "falcon": falcon_drafter,
    "medusa": medusa_drafter,
    "mtp": lambda: mtp_drafter(modules=2),
    "hydra++": lambda: walk("hydra++"),
    "mlp": lambda: walk("mlp"),
}
SMALL = {"heads": 2, "groups": 1, "channels": 2}


class Failing(HeadEnds):
    """Ends whose logits are NaN in one row from some call on, or that raise an error there.

    Args:
        after: how many calls go well.
        row: whose logits fail.
        raises: raise an error instead, as long as rows are asked together.
        always: raise it for that row alone as well.
    """

    def __init__(self, after: int, row: int = 1, *, raises: bool = False, always: bool = False) -> None:
        super().__init__()
        self.left, self.row, self.raises, self.always = after, row, raises, always
        self.bad: Tensor | None = None

    def bound(self, target: LanguageModel, width: int, dtype: torch.dtype) -> BoundEnds:
        whole = super().bound(target, width, dtype)
        return replace(whole, output=self.over(whole.output))

    def over(self, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what makes rows of states, and fails so."""

        def output(states: Tensor) -> Tensor:
            self.left -= 1
            together = len(states) > self.row
            if self.left < 0 and self.always and self.bad is None:
                self.bad = states[self.row]
            if self.left >= 0 or not (together or self.meets(states)):
                return rows(states)
            if self.raises:
                raise ArithmeticError("a row of this batch went wrong")
            logits = rows(states).clone()
            logits[self.row] = torch.nan
            return logits

        return output

    def meets(self, states: Tensor) -> bool:
        """Tell whether the row that fails is asked for alone."""
        return self.bad is not None and self.bad.shape == states[0].shape and torch.allclose(states[0], self.bad)


def made(name: str) -> Any:
    """Return a head, every time the same."""
    torch.manual_seed(2)
    return HEADS[name]()


def failing(name: str, ends: Failing) -> Any:
    """Return a head with such ends, or whose own rows fail as they do."""
    head = replace(made(name), ends=ends)
    if isinstance(head.network, WalkedHead):
        rows = head.network.rows
        head.network.rows = lambda states, depth, output: ends.over(lambda one: rows(one, depth, output))(states)
    return head


def batch() -> tuple[Tensor, Tensor]:
    padded, mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = torch.tensor(tokens), 1
    return padded, mask


@pytest.mark.long(6)
@pytest.mark.parametrize("policy", [Chain(3), Widths((2, 1)), polydraft.BestFirst(6)], ids=repr)
@pytest.mark.parametrize("raises", [False, True], ids=["not a number", "error"])
@pytest.mark.parametrize("after", [0, 1, 7, 8])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_texts_stay_what_they_are(name: str, after: int, raises: bool, policy: Any) -> None:
    """Rows in which it fails go on without drafts; `after` ends growth before the first draft or below it."""
    target, (prompts, mask) = tiny_model(vocab=VOCAB), batch()
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "temperature": 0.0}
    wanted = polydraft.generate(target, prompts, drafter="none", **given).sequences
    head = failing(name, Failing(after, raises=raises))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = polydraft.generate(target, prompts, drafter=head, policy=policy, **given)
    assert torch.equal(found.sequences, wanted)
    assert re.match("ArithmeticError" if raises else "InvalidProbabilities", found.statistics.fallback)
    assert len([one for one in said if "decoded without drafts" in str(one.message)]) == 1


FAILURES: dict[str, tuple[dict[str, bool], bool]] = {
    "not a number": ({}, False),
    "error": ({"raises": True, "always": True}, False),
    "error of rows together": ({"raises": True}, True),
}


@pytest.mark.long(6)
@pytest.mark.parametrize("policy", [Chain(3), Widths((2, 1)), polydraft.BestFirst(6)], ids=repr)
@pytest.mark.parametrize(("settings", "mended"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("name", HEADS)
def test_only_the_row_that_fails_loses_its_drafts(
    name: str, settings: dict[str, bool], mended: bool, policy: Any
) -> None:
    """After an error each row is asked alone in the same step; the others have the drafts of a head that is well."""
    target, (prompts, mask) = tiny_model(vocab=VOCAB), batch()
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "temperature": 0.0, "policy": policy}

    def drafted(head: Any) -> list[int]:
        counts = [0, 0, 0]
        for block in polydraft.stream(target, prompts, drafter=head, **given):
            for row, gained in block.rows.items():
                counts[row] += gained.drafted
        return counts

    well = drafted(made(name))
    with pytest.warns(RuntimeWarning, match="rows in which it fails are decoded without drafts"):
        found = drafted(failing(name, Failing(0, **settings)))
    assert min(well) > 0 and found == [well[0], well[1] if mended else 0, well[2]]


@pytest.mark.long(2)
@pytest.mark.parametrize("name", HEADS)
def test_texts_that_join_later_are_drafted_for_again(name: str) -> None:
    """The head fails for the first two texts of a running batch, and is well when the others come."""
    target, well, ends, before = tiny_model(vocab=VOCAB), HEADS[name](), Failing(4, raises=True), 0
    prompts = {place: torch.tensor(row) for place, row in enumerate([*ROWS, [5, 5, 5], [9, 2], [4, 4, 1, 3]])}
    given: dict[str, Any] = {"max_new_tokens": 15, "temperature": 0.0, "eos_token_id": None, "policy": Chain(3)}
    many = polydraft.generate_many(target, prompts, batch_size=2, drafter=failing(name, ends), **given)
    found = dict[Any, Any]()
    with pytest.warns(RuntimeWarning, match="a row of this batch went wrong"):
        for one in many:
            found[one.name] = one
            ends.row = 99  # what was wrong is over
    for place, prompt in prompts.items():
        wanted = polydraft.generate(target, prompt.unsqueeze(0), drafter=well, **given).sequences[0, len(prompt) :]
        assert found[place].tokens == wanted.tolist()
    assert ends.left < before  # it was asked again


@pytest.mark.long(1)
@pytest.mark.filterwarnings("ignore:.*decoded without drafts")
@pytest.mark.parametrize("raises", [False, True], ids=["not a number", "error"])
@pytest.mark.parametrize(
    ("after", "widths"), [(0, (1, 2)), *(pytest.param(after, (2, 1), marks=pytest.mark.slow) for after in range(3))]
)
def test_the_law_of_both_texts_is_the_targets(after: int, widths: tuple[int, ...], raises: bool) -> None:
    """Summed over all drafts and verdicts of two texts, of which one makes the head fail at some depth."""
    target, prompts, ends = Seen(2), [[1, 0, 1], [0, 1, 1]], Failing(after, raises=raises)

    class Again(HeadDrafter[Any]):
        sound = True

        def draft(self, state: Any, request: DraftRequest) -> Any:
            ends.left = after
            return super().draft(state, request)

    head = Again(block_drafter("mixing", vocab=2, width=4, block=3, anatomy=SMALL).network, ends)
    law, failures = law_of(target, head, BottomUp(Optimal(IID())), Widths(widths), prompts, 2, steps=1)
    assert distance(law, target.texts(prompts[0], 2)) < 1e-12
    assert bool(failures) == (after < 2)
