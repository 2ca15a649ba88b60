"""Where a text ends: end-of-text ids, stop strings and other criteria, length and context limits."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.engine.emission import Block, Emission
from polydraft.errors import CUT, InvalidParameter
from polydraft.models import BUILT_IN, first_sentence
from polydraft.trees import TokenTree, Verdict

Scores = tuple[Float[Tensor, "b V"], ...]


@runtime_checkable
class StoppingCriterion(Protocol):
    """Hugging Face's interface: tells for every row whether it ends with its last token."""

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Any) -> Bool[Tensor, "b"] | bool:
        """Return True for rows that end here."""
        ...


class JointCriteria:
    """Criteria that see all rows of a batch, called as Hugging Face's `generate` calls them.

    That is once for every place of the text, in order, with all rows up to there: prompts as the user gave them, and
    the padding id where a row is over. All criteria are asked, whatever the others say. So rows go on in step: each
    gains as many tokens as the row that gains fewest, and draws anew what it had beyond.

    Why the law stays: by a lossless rule a text that goes on after its step is the target's, so given a row's first j
    tokens and that j or more came, the next token has the target's law, whether it came or is drawn later. What the
    other rows gain is drawn from other numbers, so it does not matter which of both it is.

    A place that is asked about again, by a step that is taken again after an interrupt, has the answers of before.

    Args:
        criteria: the criteria.
        prompts: the prompts as the user gave them.
        lengths: the prompts' tokens without padding.
        pad: the padding id.
        scored: whether criteria get the scores of all places so far, zeros in rows that were over.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriterion],
        prompts: Int[Tensor, "b t"],
        lengths: Sequence[int],
        pad: int,
        *,
        scored: bool = False,
    ) -> None:
        self.criteria = tuple(criteria)
        self._history, self._begin, self._lengths = prompts, prompts.shape[1], tuple(lengths)
        self._pad, self.scored = pad, scored
        self._answers: list[list[list[bool]]] = []  # by place, by criterion, by row
        self._scores: Scores = ()

    def cut(
        self, gains: Mapping[int, Emission], counts: Sequence[int], scores: Mapping[int, Float[Tensor, "_ V"]]
    ) -> dict[int, Emission]:
        """Return what each row gains: as much as all others, or up to where it ends.

        Args:
            gains: what each unfinished row would gain by itself.
            counts: the rows' tokens before the step.
            scores: the scores by which these tokens were chosen; none if nobody asked for them.
        """
        least = min((len(one.tokens) for one in gains.values() if not one.finish), default=None)
        cut = {row: one if least is None else one.first(least) for row, one in gains.items()}
        row = next(iter(cut))
        place, written = 0, counts[row] - self._lengths[row]
        while any(place < len(one.tokens) for one in cut.values()):
            going = {row: one for row, one in cut.items() if place < len(one.tokens)}
            ends = self._ends(written + place, going, place, scores)
            for row, one in going.items():
                if ends[row] and not (one.finish == "eos" and place + 1 == len(one.tokens)):
                    tokens = one.tokens[: place + 1]
                    cut[row] = replace(one, tokens=tokens, accepted=min(one.accepted, place + 1), finish="stop")
            place += 1
        return cut

    def _ends(
        self, at: int, going: Mapping[int, Emission], place: int, scores: Mapping[int, Float[Tensor, "_ V"]]
    ) -> list[bool]:
        """Return which rows end at a place of the text by any criterion."""
        rows, like = range(len(self._lengths)), self._history
        new = like.new_tensor([going[row].tokens[place] if row in going else self._pad for row in rows])
        if len(self._answers) <= at or not torch.equal(self._history[:, self._begin + at], new):
            self._history = torch.cat([self._history[:, : self._begin + at], new.unsqueeze(-1)], dim=-1)
            self._answers[at:] = [[]]
            if self.scored:
                nothing = torch.zeros_like(next(iter(scores.values()))[0])
                told = [scores[row][place] if row in going else nothing for row in rows]
                self._scores = (*self._scores[:at], torch.stack(told).float())
        found, text = self._answers[at], self._history[:, : self._begin + at + 1]
        known = self._scores[: at + 1] if self.scored else None
        for criterion in self.criteria[len(found) :]:
            found.append(answered(criterion, text.clone(), known))
        return [any(own) for own in zip(*found, strict=True)]


@dataclass(frozen=True)
class Ending:
    """Where a row ends.

    Args:
        max_length: the largest number of tokens, prompt included.
        cut_by_context: whether the model's context set this limit, not the user.
        eos: end-of-text ids; the id itself is emitted.
        criteria: asked after every token, with the row alone.
        padding: left padding of the prompt as the user gave it, which criteria get to see again.
        together: what is asked for all rows of the batch together, which all of them have; None for nothing.
    """

    max_length: int
    cut_by_context: bool = False
    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriterion] = ()
    padding: Int[Tensor, " _"] | None = None
    together: JointCriteria | None = None

    def cut(self, past: Int[Tensor, " t"], emitted: list[int], kept: int, drafted: int, deeper: bool) -> Emission:
        """Return what the row gains of the emitted tokens: everything up to the first end.

        Args:
            past: the row's tokens before these.
            emitted: accepted drafts and the next token.
            kept: how many of them are drafts.
            drafted: drafts in the row's tree.
            deeper: whether the last accepted node had drafts of its own.
        """
        room = self.max_length - len(past)
        if self.is_last(len(past)):
            drafted, deeper = 0, False
        finish, count = "", min(len(emitted), room)
        for place, token in enumerate(emitted[:count]):
            finish = self._ends(past, emitted[: place + 1], token)
            if finish:
                count = place + 1
                break
        if not finish and count == room:
            finish = "context" if self.cut_by_context else "length"
        return Emission(tuple(emitted[:count]), min(kept, count), drafted, kept + deeper, kept, finish)

    def is_last(self, length: int) -> bool:
        """Tell whether a row of so many tokens has room for one more: a draft could then not become text."""
        return self.max_length - length == 1

    def _ends(self, past: Int[Tensor, " t"], emitted: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        if not self.criteria:
            return ""
        new = torch.tensor(emitted, device=past.device)
        before = () if self.padding is None else (self.padding.to(past.device),)
        history = torch.cat([*before, past, new]).unsqueeze(0)
        return "stop" if any(answered(criterion, history, None)[0] for criterion in self.criteria) else ""


def warn_of_context(context: int) -> None:
    """Say that a text is shorter than was asked for."""
    warnings.warn(
        f"{CUT} of {context} tokens, prompt included; ask for fewer new tokens or shorten the prompt.",
        UserWarning,
        stacklevel=5,  # the caller of `generate`
    )


def in_step(
    endings: Sequence[Ending], block: Block, counts: Sequence[int], scores: Callable[[], Mapping[int, Tensor]]
) -> tuple[dict[int, Emission], Verdict]:
    """Return what rows gain where criteria see all of them together, and the verdict by which they gain it.

    Args:
        endings: where the rows end.
        block: what each would gain by itself.
        counts: the rows' tokens before the step.
        scores: returns, of every row that gains tokens, the scores by which they were chosen.
    """
    together = endings[0].together
    if together is None or not block.rows:
        return block.rows, block.verdict
    found = together.cut(block.rows, counts, scores() if together.scored else {})
    fewer = {row: len(one.tokens) for row, one in found.items() if not one.finish}
    return found, shortened(block.verdict, block.tree, fewer)


def shortened(verdict: Verdict, tree: TokenTree, counts: Mapping[int, int]) -> Verdict:
    """Return the verdict that gives some rows so many tokens or fewer: the last of them is the next token then.

    Args:
        verdict: what was kept of the trees.
        tree: the trees.
        counts: the tokens, the next one among them, by row.
    """
    fewer = {row: count for row, count in counts.items() if count <= verdict.kept[row]}
    if not fewer:
        return verdict
    path, length, following = verdict.path.clone(), verdict.length.clone(), verdict.next_token.clone()
    for row, count in fewer.items():
        following[row] = tree.tokens[row, path[row, count - 1]]
        length[row], path[row, count - 1 :] = count - 1, -1
    return Verdict(path, length, following)


def answered(criterion: StoppingCriterion, history: Int[Tensor, "b t"], scores: Scores | None) -> list[bool]:
    """Return what a criterion says of each row; a plain bool is said of all.

    Raises:
        InvalidParameter: it says something else, or fails by an error of Python's own kinds; others pass through.
    """
    name = getattr(criterion, "__name__", None) or type(criterion).__name__
    try:
        answer: object = criterion(history, scores)
    except BUILT_IN as error:
        hint = "; if it reads scores, ask for them by output_scores=True" if scores is None else ""
        raise InvalidParameter(f"The stopping criterion {name} failed: {first_sentence(error)}{hint}.") from error
    said = _said(answer, len(history))
    if said is not None:
        return said
    what = f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r}"
    raise InvalidParameter(
        f"The stopping criterion {name} must return True or False for each row, here {len(history)}, but returned "
        f"{what}."
    )


def _said(answer: object, rows: int) -> list[bool] | None:
    """Return an answer by row: a bool, a list, or a tensor with one value or one for each row; None for others."""
    if isinstance(answer, bool | np.bool_):
        return [bool(answer)] * rows
    if isinstance(answer, Tensor) and not (answer.is_floating_point() or answer.is_complex()):
        if answer.numel() == 1:
            return [bool(answer)] * rows
        return list(map(bool, answer.flatten().tolist())) if tuple(answer.shape) in ((rows,), (rows, 1)) else None
    if isinstance(answer, list | tuple):
        listed = cast(Sequence[object], answer)
        if len(listed) == rows and all(isinstance(one, bool | np.bool_) for one in listed):
            return list(map(bool, listed))
    return None
