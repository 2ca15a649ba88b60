"""How many tokens a target call brings with a draft, measured on the target's own text without drafted decoding."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, owned_models, owned_networks
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, module_of
from polydraft.probs import SamplingParams
from polydraft.training.alignment.own_text import ChainsOfText, chains_of_text, check_chains, own_texts
from polydraft.training.alignment.text_calls import expected_calls, kept_as_block, kept_by_token

BLOCK = "as a block"
RULES = {"token by token": kept_by_token, BLOCK: kept_as_block}
"""How a chain may be verified: by speculative sampling, or by block verification."""
TOGETHER = 16
"""How many texts are written and read at a time."""


@dataclass(frozen=True, eq=False)
class DraftWorth:
    """What a draft is worth on texts of its target.

    Args:
        tokens: how many tokens the target wrote in each text.
        calls: by rule, the expected target calls of each text with chains of 1, 2, ... drafts.
        overlap: the mean of sum_x min(p, q) by draft, given the text's own tokens above it.
    """

    tokens: Float[Tensor, " m"]
    calls: dict[str, Float[Tensor, "m g"]]
    overlap: tuple[float, ...]

    @classmethod
    def of(cls, chains: ChainsOfText) -> "DraftWorth":
        """Count the calls of every length of chain."""
        lengths, found = chains.reach or range(1, chains.ratio.shape[-1] + 1), dict[str, Tensor]()
        for name, rule in RULES.items():
            kept = rule(chains.ratio)
            each = [expected_calls(kept[..., :length], chains.written) for length in lengths]
            found[name] = torch.stack(each, -1)
        return cls(chains.written.double(), found, chains.mean_overlap())

    @cached_property
    def tokens_per_call(self) -> dict[str, tuple[float, ...]]:
        """By rule, all tokens over all calls, for chains of 1, 2, ... drafts."""
        return {name: tuple((self.tokens.sum() / calls.sum(0)).tolist()) for name, calls in self.calls.items()}


def measure_draft(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Int[Tensor, " _"]],
    params: SamplingParams,
    *,
    length: int = 5,
    new_tokens: int = 64,
    ends: Collection[int] = (),
    seed: int = 0,
) -> DraftWorth:
    """Let a target write behind prompts, and return what a draft is worth on that text.

    Args:
        target: the target.
        drafter: draws from rows of its own, or of the text alone; a stack of such ones.
        prompts: their tokens.
        params: the sampling settings that are served; the figures hold for these alone.
        length: the drafts of the longest chain.
        new_tokens: the most tokens of each text.
        ends: tokens that end a text.
        seed: of the texts.

    Raises:
        InvalidParameter: there is no prompt, the drafter draws otherwise, its weights are no numbers, or the target
            has an encoder.
        UnpairedScheme: the drafter draws from no rows.
    """
    if not prompts or min(map(len, prompts)) < 1:
        raise InvalidParameter("A draft is measured on text behind prompts of at least one token; give such prompts.")
    check_chains(target, drafter, length)
    check_weights(drafter)
    parts = list[DraftWorth]()
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        texts = own_texts(target, some, params, new_tokens, ends, seed + first)
        parts.append(DraftWorth.of(chains_of_text(target, drafter, texts, params, length)))
    return joined(parts)


def check_weights(drafter: Drafter) -> None:
    """Check that a drafter's weights are finite, whose rows would be no laws.

    Raises:
        InvalidParameter: they are not.
    """
    networks = [*map(module_of, owned_models(drafter)), *owned_networks(drafter)]
    weights = (one for network in networks if network is not None for one in network.parameters())
    if not all(one.is_meta or bool(one.isfinite().all()) for one in weights):
        raise InvalidParameter("The draft's weights are no numbers: its folder is damaged.")


def joined(parts: Sequence[DraftWorth]) -> DraftWorth:
    """Return what several groups of texts say together; each group's overlaps count by its tokens."""
    tokens = torch.cat([one.tokens for one in parts])
    shares = torch.stack([one.tokens.sum() for one in parts]) / tokens.sum()
    overlap = shares @ torch.tensor([one.overlap for one in parts], dtype=shares.dtype)
    calls = {name: torch.cat([one.calls[name] for one in parts]) for name in RULES}
    return DraftWorth(tokens, calls, tuple(overlap.tolist()))
