"""What a row's text follows: the target's law at every node, and where the text ends.

The law at a node is what the user's logits processors make of the logits, with the node's own history, then
probabilities. A text ends by end-of-text ids, stop strings and other criteria, length and context limits.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.engine.emission import Block, Emission
from polydraft.errors import CUT, InvalidParameter, InvalidProbabilities
from polydraft.models import BUILT_IN, RowProcessor, first_sentence, fork_all
from polydraft.probs import SamplingParams, filters_in_force, to_probs, usable
from polydraft.reading import Text
from polydraft.trees import TokenTree, Verdict

Processors = tuple[RowProcessor, ...]
RULED_OUT = torch.finfo(torch.float32).min / 2
"""Scores below this are those of tokens that a processor rules out, beside others that it does not."""


@dataclass(frozen=True)
class TargetLaw:
    """How a row's target logits become the distributions that its text must follow.

    Args:
        params: temperature and filters, applied last.
        processors: applied before, in order, to every node with the tokens on its own path. Those that keep state are
            as they were after the committed text but for its last token.
        padding: left padding of the prompt as the user gave it, which processors get to see again.
        eos: end-of-text ids: what comes below one is never text.
    """

    params: SamplingParams = SamplingParams()
    processors: Processors = ()
    padding: Int[Tensor, " _"] | None = None
    eos: frozenset[int] = frozenset()

    @property
    def keeps_state(self) -> bool:
        """Whether a processor depends on earlier calls."""
        return any(one.keeps_state for one in self.processors)

    @cached_property
    def in_force(self) -> tuple[str, ...]:
        """The names of processors and filters, in the order in which they are applied."""
        filters = (f"{name}={value:g}" for name, value in filters_in_force(self.params).items())
        return (*(one.name for one in self.processors), *filters)

    def processed(
        self, scores: Float[Tensor, "n V"], tree: TokenTree, text: Text, row: int
    ) -> tuple[Float[Tensor, "n V"], dict[int, Processors]]:
        """Apply the processors to every node that has a chance, given its own history.

        Below a draft that the processors rule out nothing is ever accepted, below an end of text nothing is text, and
        they may not know what to say there: a grammar has no state after a token that it forbids. So those nodes keep
        their scores. If a processor raises at a draft, this is plain decoding's error once the text comes to the draft,
        and nobody's if it does not: the draft gets scores that are not usable. The nodes of a depth, whose histories
        are equally long, are processed together, but one by one where state is kept. Processors get single precision,
        as from Hugging Face.

        Returns:
            the scores, and the processors in the state after each node, if they keep any.
        """
        if not self.processors:
            return scores, {}
        result, after = scores.to(torch.float32, copy=True), dict[int, Processors]()
        parents, depths = tree.parents[row].tolist(), tree.depth[row]
        past = text.tokens[row, : int(text.lengths[row])]
        past = past if self.padding is None else torch.cat([self.padding.to(past.device), past])
        reached = torch.zeros_like(depths, dtype=torch.bool)
        for depth in range(int(depths.max()) + 1):
            reached |= self._reached(result, tree, row, depth, reached)
            nodes = (reached & (depths == depth)).nonzero().squeeze(-1)
            groups = nodes.split(1) if self.keeps_state else (nodes,)
            waiting = [(group, False) for group in groups if len(group)]
            while waiting:
                group, again = waiting.pop(0)
                known = after.get(parents[int(group[0])], self.processors)
                own = fork_all(known) if self.keeps_state else known
                on_path = tree.ancestors[row, group, 1:].nonzero()[:, 1].view(len(group), depth) + 1
                history = torch.cat([past.expand(len(group), -1), tree.tokens[row, on_path]], dim=-1)
                try:
                    changed = result[group]
                    for processor in own:
                        changed = processor(history, changed)
                    result[group] = changed
                except (
                    Exception
                ):  # whatever a processor raises, it concerns the text only where this comes to the draft
                    if depth == 0:
                        raise
                    if not again:  # each by itself, since one of them may be meant, or nothing lasting
                        waiting += [(one, True) for one in group.split(1)]
                    else:
                        result[group] = torch.nan
                    continue
                after.update({int(group[0]): own} if self.keeps_state else {})
        return result.to(scores.dtype), after

    def _reached(
        self, result: Float[Tensor, "n V"], tree: TokenTree, row: int, depth: int, reached: Bool[Tensor, " n"]
    ) -> Bool[Tensor, " n"]:
        """Return the nodes of a depth that are there and can become text, given those above that can."""
        here = tree.valid[row] & (tree.depth[row] == depth)
        if depth == 0:
            return here
        parents, tokens = tree.parents[row].clamp_min(0), tree.tokens[row]
        ended = torch.isin(tokens[parents], torch.tensor(sorted(self.eos), device=tokens.device)) & (parents > 0)
        above = result[parents]
        ruled_out = (above.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) <= RULED_OUT) & (above.amax(-1) > RULED_OUT)
        return here & reached[parents] & ~ended & ~ruled_out & ~above.isnan().any(-1)


@dataclass(frozen=True, eq=False)
class TargetRows:
    """The target's rows at every node of a step.

    Args:
        probs: the distributions.
        scores: the scores that they come from, before temperature and filters.
        after: per row, the processors in the state after each node, if they keep any.
        usable: at which nodes the logits are usable; None if they are at all. At the others the distribution is any:
            nobody may read it. A device is not waited for.
    """

    probs: Float[Tensor, "b n V"]
    scores: Float[Tensor, "b n V"]
    after: tuple[dict[int, Processors], ...]
    usable: Bool[Tensor, "b n"] | None = None

    @cached_property
    def softened(self) -> Float[Tensor, "b n V"]:
        """The softmax of the scores, for rules of temperature 0 alone; the likeliest token stays so under rounding."""
        soft = to_probs(usable(self.scores)[0], SamplingParams(), check=False)
        first = torch.nextafter(soft.amax(dim=-1, keepdim=True), soft.new_tensor(2.0))
        return soft.scatter(-1, self.probs.argmax(dim=-1, keepdim=True), first)

    def laws_after(self, laws: Sequence[TargetLaw], verdict: Verdict) -> tuple[TargetLaw, ...]:
        """Return the rows' laws for the next step: those that keep state, in the state after the accepted path."""
        if not any(self.after):
            return tuple(laws)
        ends = [[0, *path][length] for path, length in zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)]
        return tuple(
            replace(law, processors=states[end]) if end in states else law  # beyond an end of text there are none
            for law, states, end in zip(laws, self.after, ends, strict=True)
        )


def target_rows(
    laws: Sequence[TargetLaw],
    logits: Float[Tensor, "b n V"],
    tree: TokenTree,
    text: Text,
    going: Collection[int],
) -> TargetRows:
    """Return the distribution at every node, each row's by its own law; rows that have ended are not processed."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    after: tuple[dict[int, Processors], ...] = ({},) * len(laws)
    if any(law.processors for law in laws):
        rows = [
            law.processed(scores[row], tree, text, row) if row in going else (scores[row], {})
            for row, law in enumerate(laws)
        ]
        scores, after = torch.stack([row for row, _ in rows]), tuple(states for _, states in rows)
    if scores.device.type == "cpu":  # another device would have to be waited for
        with suppress(InvalidProbabilities):
            return TargetRows(_probs(laws, scores), scores, after)
    sound, fine = usable(scores)
    return TargetRows(_probs(laws, sound, check=False), scores, after, fine)


def _probs(laws: Sequence[TargetLaw], scores: Float[Tensor, "b n V"], *, check: bool = True) -> Float[Tensor, "b n V"]:
    """Return temperature and filters applied, each row's own."""
    if len({law.params for law in laws}) == 1:
        return to_probs(scores, laws[0].params, check=check)
    return torch.stack([to_probs(scores[row], law.params, check=check) for row, law in enumerate(laws)])


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
                    cut[row] = replace(one.first(place + 1), offered=one.offered, kept=one.kept, finish="stop")
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
    endings: Sequence[Ending],
    block: Block,
    counts: Sequence[int],
    chosen_by: Callable[[], Mapping[int, tuple[Tensor, Tensor]]],
) -> tuple[dict[int, Emission], Verdict]:
    """Return what rows gain where criteria see all of them together, and the verdict by which they gain it.

    Args:
        endings: where the rows end.
        block: what each would gain by itself.
        counts: the rows' tokens before the step.
        chosen_by: returns, of every row that gains tokens, the logits and the scores by which they were chosen.
    """
    together = endings[0].together
    if together is None or not block.rows:
        return block.rows, block.verdict
    scores = {row: own for row, (_, own) in chosen_by().items()} if together.scored else {}
    found = together.cut(block.rows, counts, scores)
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
