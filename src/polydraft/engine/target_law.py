"""The target's law at every node: the user's logits processors with the node's own history, then probabilities."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidProbabilities
from polydraft.models import RowProcessor, fork_all
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
            waiting = [(group, False) for group in self._groups(nodes)]
            while waiting:
                group, again = waiting.pop(0)
                known = after.get(parents[int(group[0])], self.processors)
                own = fork_all(known) if self.keeps_state else known
                drafts = path_tokens(tree, row, group, depth)
                history = torch.cat([past.expand(len(group), -1), drafts], dim=-1)
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

    def _groups(self, nodes: Int[Tensor, " f"]) -> Sequence[Int[Tensor, " g"]]:
        """Return the nodes of a depth that are processed together."""
        if not len(nodes):
            return ()
        return nodes.split(1) if self.keeps_state else (nodes,)

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


def path_tokens(tree: TokenTree, row: int, nodes: Int[Tensor, " f"], depth: int) -> Int[Tensor, "f D"]:
    """Return the drafts on the path to each node, root excluded; all nodes lie at the same depth."""
    on_path = tree.ancestors[row, nodes, 1:].nonzero()[:, 1].view(len(nodes), depth) + 1
    return tree.tokens[row, on_path]
