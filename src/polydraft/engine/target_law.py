"""The target's law at every node: the user's logits processors with the node's own history, then probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Text
from polydraft.probs import SamplingParams, to_probs
from polydraft.trees import TokenTree


@runtime_checkable
class LogitsProcessor(Protocol):
    """Hugging Face's interface: changes the scores of rows, given each row's tokens so far."""

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b V"]) -> Float[Tensor, "b V"]:
        """Return the changed scores."""
        ...


@dataclass(frozen=True)
class TargetLaw:
    """How a row's target logits become the distributions that its text must follow.

    Args:
        params: temperature and filters, applied last.
        processors: applied before, in order, to every node with the tokens on its own path.
        padding: left padding of the prompt as the user gave it, which processors get to see again.
    """

    params: SamplingParams = SamplingParams()
    processors: Sequence[LogitsProcessor] = ()
    padding: Int[Tensor, " _"] | None = None

    def processed(self, scores: Float[Tensor, "n V"], tree: TokenTree, text: Text, row: int) -> Float[Tensor, "n V"]:
        """Apply the processors to the nodes of each depth together: their histories are equally long."""
        if not self.processors:
            return scores
        result = scores.clone()
        depths = tree.depth[row]
        past = text.tokens[row, : int(text.lengths[row])]
        if self.padding is not None:
            past = torch.cat([self.padding.to(past.device), past])
        for depth in range(int(depths.max()) + 1):
            nodes = (depths == depth).nonzero().squeeze(-1)
            drafts = path_tokens(tree, row, nodes, depth)
            history = torch.cat([past.expand(len(nodes), -1), drafts], dim=-1)
            changed = result[nodes]
            for processor in self.processors:
                changed = processor(history, changed)
            result[nodes] = changed
        return result


def target_rows(
    laws: Sequence[TargetLaw], logits: Float[Tensor, "b n V"], tree: TokenTree, text: Text
) -> Float[Tensor, "b n V"]:
    """Return the distribution at every node, each row's by its own law.

    Raises:
        InvalidProbabilities: logits that are NaN or infinite.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(law.processors for law in laws):
        scores = torch.stack([law.processed(scores[row], tree, text, row) for row, law in enumerate(laws)])
    settings = {law.params for law in laws}
    if len(settings) == 1:
        return to_probs(scores, laws[0].params)
    return torch.stack([to_probs(scores[row], law.params) for row, law in enumerate(laws)])


def path_tokens(tree: TokenTree, row: int, nodes: Int[Tensor, " f"], depth: int) -> Int[Tensor, "f D"]:
    """Return the drafts on the path to each node, root excluded; all nodes lie at the same depth."""
    on_path = tree.ancestors[row, nodes, 1:].nonzero()[:, 1].view(len(nodes), depth) + 1
    return tree.tokens[row, on_path]
