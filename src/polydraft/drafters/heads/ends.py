"""The two ends of a head, its own or the target's: the embeddings that it reads and the rows that it drafts from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.errors import InvalidParameter, TargetMismatch, VocabularyMismatch
from polydraft.models import LanguageModel, linear_of, module_of, weight_of
from polydraft.trees import Draft, Propose

_ROWS: WeakKeyDictionary[nn.Module, tuple[Tensor, object, nn.Linear]] = WeakKeyDictionary()
"""By target: the tokens of the head that was bound last, what both were then, and the target's rows of these tokens."""


@dataclass(frozen=True, eq=False)
class BoundEnds:
    """A head's ends, for one target.

    Args:
        embed: token ids to input embeddings.
        output: final hidden states to logits of the head's tokens.
        tokens: the head's tokens, as ids of the target; None where they are the same.
    """

    embed: Callable[[Int[Tensor, "b n"]], Float[Tensor, "b n d"]]
    output: Callable[[Float[Tensor, "b n d"]], Float[Tensor, "b n v"]]
    tokens: Int[Tensor, " v"] | None

    def named(self, propose: Propose) -> Propose:
        """Return a proposal that lists the target's token ids, given one that lists the head's."""
        if self.tokens is None:
            return propose
        tokens = self.tokens

        def renamed(frontier):
            places, probs = propose(frontier)
            return tokens[places], probs

        return renamed

    def marked(self, draft: Draft, size: int | None, vocab_size: int) -> Draft:
        """Return the draft, marked as drawn from whole rows if it was, which spares its verifier a search.

        Args:
            draft: what was grown.
            size: how many tokens of each row were listed; None for all.
            vocab_size: the target's number of tokens.
        """
        whole = size is None and self.tokens is None and draft.shortlist.shape[-1] == vocab_size
        return replace(draft, whole=True) if whole else draft


class HeadEnds(nn.Module):
    """What a head has of its own at its ends; the target's is taken for the rest.

    Args:
        embed_tokens: input embeddings; None for the target's.
        lm_head: output rows of the head's tokens; None for the target's.
        tokens: the head's tokens, as rising ids of the target; None for all of them.
        scale: what embeddings are multiplied by.
        multiplier: what logits are multiplied by.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.

    Raises:
        InvalidParameter: there are not as many output rows as tokens.
    """

    def __init__(
        self,
        embed_tokens: nn.Embedding | None = None,
        lm_head: nn.Linear | None = None,
        tokens: Int[Tensor, " v"] | None = None,
        scale: float = 1.0,
        multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.register_buffer("tokens", tokens)
        self.scale, self.multiplier, self.softcap = scale, multiplier, softcap
        if lm_head is not None and tokens is not None and lm_head.out_features != len(tokens):
            raise InvalidParameter(f"A head of {len(tokens)} tokens has {lm_head.out_features} output rows.")

    def bound(self, target: LanguageModel, width: int) -> BoundEnds:
        """Return the ends for a target.

        Args:
            target: the target.
            width: the head's hidden width.

        Raises:
            TargetMismatch: the target's embeddings have another width, and the head has none of its own.
            VocabularyMismatch: the head has tokens that the target does not have.
        """
        like = target.embedded(torch.zeros(1, 1, dtype=torch.int64, device=target.facts.device))
        self._check(target, width, like)
        tokens = self.get_buffer("tokens") if self.tokens is not None else None
        embed: Callable[[Tensor], Tensor] = target.embedded if self.embed_tokens is None else self.embed_tokens
        if self.lm_head is not None:
            output: Callable[[Tensor], Tensor] = self.lm_head
        else:
            rows = target.unembedded if tokens is None else _rows(target, tokens)
            output = lambda states: rows(states.to(like.dtype))  # noqa: E731  the target's own precision
        return BoundEnds(
            embed if self.scale == 1 else lambda ids: embed(ids) * self.scale,
            output if self.multiplier == 1 and self.softcap is None else lambda states: self._shaped(output(states)),
            tokens,
        )

    def _shaped(self, logits: Float[Tensor, "b n v"]) -> Float[Tensor, "b n v"]:
        logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _check(self, target: LanguageModel, width: int, like: Tensor) -> None:
        known = target.facts.vocab_size
        if self.embed_tokens is None:
            if like.shape[-1] != width:
                raise TargetMismatch(
                    f"The head is {width} wide and the target's embeddings {like.shape[-1]}: it was trained for "
                    "another target."
                )
        elif self.embed_tokens.num_embeddings < known:
            raise VocabularyMismatch(
                f"The head knows {self.embed_tokens.num_embeddings} tokens and the target has {known}: it "
                "was trained for another target."
            )
        most = None if self.tokens is None else int(self.get_buffer("tokens").max()) + 1
        rows = self.lm_head.out_features if self.lm_head is not None and most is None else most
        if rows is not None and rows > known:
            raise VocabularyMismatch(
                f"The head drafts {rows} tokens and the target has {known}: it was trained for another target."
            )


def _rows(target: LanguageModel, tokens: Int[Tensor, " v"]) -> nn.Linear:
    """Return the target's output rows of a head's tokens: copied once, and anew when the target's have changed."""
    module = module_of(target)
    head = None if module is None else cast(Any, module).get_output_embeddings()
    if module is None or not isinstance(head, nn.Linear):
        return linear_of(target.output_rows(tokens))
    state, known = (weight_of(head.weight), weight_of(tokens)), _ROWS.get(module)
    if known is None or known[0] is not tokens or known[1] != state:
        known = _ROWS[module] = tokens, state, linear_of(target.output_rows(tokens))
    return known[2]
